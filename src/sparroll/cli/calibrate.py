"""`sparroll calibrate`: from a model and prompts to a schedule file that meets the target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sparroll import records
from sparroll.calibrate.defaults import MOST_BUDGETS, PROMPTS, SAMPLES, VERIFY_ROUNDS
from sparroll.cli.calibration import own_options
from sparroll.cli.calibration.printed import text
from sparroll.cli.shared import common, named, options
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.engines.make import check_names
from sparroll.progress import Progress, quiet_transformers, say
from sparroll.tasks.prompt_file import read_prompts

if TYPE_CHECKING:
    from sparroll.calibrate.run import Calibration
    from sparroll.calibrate.verify import Verification
    from sparroll.schedule import Schedule


def calibrate(
    command: typer.Context,
    model: options.Model,
    out: options.Out,
    target: own_options.Target = None,
    statistic: own_options.Statistic = "acceptance",
    nats: own_options.Nats = 10,
    at_most: own_options.AtMost = None,
    budget: own_options.Budget = None,
    most_budgets: own_options.MostBudgets = None,
    check_windows: own_options.CheckWindows = None,
    check_floors: own_options.CheckFloors = None,
    check_over_2_nats: own_options.CheckOver2Nats = None,
    objective: own_options.Objective = "time",
    step_time_share: own_options.StepTimeShare = None,
    at_time_of: own_options.AtTimeOf = None,
    kl_at_most: own_options.KlAtMost = None,
    far_mass_at_most: own_options.FarMassAtMost = None,
    far_mass_nats: own_options.FarMassNats = 20,
    gpu: own_options.Gpu = "H200",
    prompts_file: options.Prompts = None,
    task: options.Task = None,
    level: options.Level = 3,
    count: options.Count = PROMPTS,
    chat: options.Chat = False,
    samples: options.Samples = SAMPLES,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: options.Temperature = 1.0,
    mode: options.Mode = "faithful",
    estimator: options.Estimator = "top_k_lower",
    bin_tokens: options.BinTokens = 2000,
    selector: options.SelectorKind = "page_mean",
    page_tokens: options.PageTokens = 16,
    first_tokens: options.FirstTokens = None,
    recent_tokens: options.RecentTokens = None,
    dense_layers: options.DenseLayers = "0,1",
    also_selector: own_options.AlsoSelector = None,
    layer_groups: own_options.LayerGroups = None,
    group_times: own_options.GroupTimes = None,
    verify_rounds: own_options.VerifyRounds = VERIFY_ROUNDS,
    verify_bound: own_options.VerifyBound = "low",
    evaluation: own_options.OneEvaluation = None,
    name: own_options.Name = "schedule",
    max_batch: options.MeasuredBatch = None,
    seed: options.Seed = 0,
    engine: options.Engine = "hf",
    device: options.Device = None,
    dtype: options.Dtype = None,
    json_output: options.Json = False,
) -> None:
    """Sweep a grid of budgets, choose the schedule that meets the target, and verify it. Resumes if interrupted."""
    from sparroll.calibrate.allocation.wanted import Wanted
    from sparroll.calibrate.bounds import BlindSpots
    from sparroll.calibrate.effort.coarse_to_fine import runnable
    from sparroll.calibrate.effort.cost_ahead import Evaluation
    from sparroll.calibrate.measure import MeasureSettings
    from sparroll.calibrate.open_study import open_study, selector_from, study_table
    from sparroll.calibrate.prospects import check_request
    from sparroll.calibrate.run import calibrate as run
    from sparroll.calibrate.run import check_compared
    from sparroll.calibrate.store import holds_measurements
    from sparroll.calibrate.sweep import PUBLISHED_PAGES
    from sparroll.cli.calibration import asked
    from sparroll.plan.hardware import find_hardware
    from sparroll.schedule import Schedule

    # What the options mean.
    common.refuse_idle_prompt_options(command, prompts_file, task)
    aim = asked.target_of(command, statistic, target, nats, at_most)
    unchecked = check_windows is None and check_floors is None
    plain = unchecked and objective == "time" and not also_selector
    common.refuse_idle(
        command, plain, "where no times are compared: neither of checks nor of selectors nor of budgets", "gpu"
    )
    far = far_mass_at_most is not None or objective == "far_mass"
    common.refuse_idle(command, not far, "without --far-mass-at-most or --objective far_mass", "far_mass_nats")
    common.refuse_idle(command, verify_rounds == 0, "with --verify-rounds 0", "verify_bound")
    bound = asked.bound_of(verify_bound)
    check_names(engine, model, device, dtype)
    asked.check_file_name(name)
    common.hold_folder(command, out)
    settings = MeasureSettings(
        max_new_tokens=max_new_tokens, mode=mode, samples=samples, temperature=temperature,  # type: ignore[arg-type]
        estimator=estimator, bin_tokens=bin_tokens, seed=seed,
    )  # fmt: skip
    groups = asked.groups_of(layer_groups)
    proportions = asked.proportions_of(groups, group_times)
    candidates = asked.Candidates(
        budgets=budget or [pages * 16 for pages in PUBLISHED_PAGES],
        selector=selector_from(
            selector, common.typed(command, "page_tokens", page_tokens), first_tokens, recent_tokens
        ),
        dense_layers=named.layer_numbers(dense_layers),
        checks=asked.checks_of(check_windows, check_floors),
        also_selectors=[selector_from(each) for each in also_selector or []],
        layer_groups=() if proportions else groups,
        proportions=proportions,
        most_budgets=most_budgets or (None if budget else MOST_BUDGETS),
    )
    asked.check_bounded(check_over_2_nats, candidates.checks)
    bounds = BlindSpots(check_over_2_nats, kl_at_most, far_mass_at_most, far_mass_nats)
    wanted = Wanted.of(objective, aim, bounds, bool(candidates.checks))  # type: ignore[arg-type]
    goal = asked.Goal(wanted, step_time_share, at_time_of, gpu)
    goal.check(candidates, settings)
    slower = None if at_time_of is None else Schedule.load(at_time_of)
    if slower is not None:
        check_compared(slower)
    common.say_caveats(slower)
    hardware, compared = find_hardware(gpu), Evaluation.parse(evaluation, max_new_tokens)
    entries = read_prompts(prompts_file, task, level, count, seed)
    common.say_prompts_left_out(command, prompts_file, len(entries))
    check_request(wanted.target, len(entries), samples, max_new_tokens)
    tried = candidates.schedules(settings, out)

    # What is measured and chosen.
    quiet_transformers()
    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps every measured budget; run the same command to continue"),
        Progress(json_output) as bars,
    ):
        study = open_study(
            model, entries, chat, settings, tried,
            engine=engine, device=device, dtype=dtype, max_batch=max_batch,
        )  # fmt: skip
        cost = candidates.cost(
            settings, len(entries), len(runnable(study, candidates.budgets)[0]), verify_rounds, compared
        )
        say(str(cost))
        if holds_measurements(out):
            say(f"what {out} holds of that from before is not sampled again")
        if cost.is_dear:
            say(cost.warning, alarm=True)
        with study:
            found = run(
                study,
                out=out,
                budgets=candidates.budgets,
                target=wanted.target,
                selector=candidates.selector,
                also_selectors=candidates.also_selectors,
                dense_layers=candidates.dense_layers,
                layer_groups=candidates.layer_groups,
                proportions=candidates.proportions,
                most_budgets=candidates.most_budgets,
                objective=objective,  # type: ignore[arg-type]
                step_time_share=step_time_share,
                at_time_of=slower,
                verify_rounds=verify_rounds,
                bound=bound,
                checks=candidates.checks,
                hardware=hardware,
                bounds=wanted.bounds,
                model=model,
                made_by=records.made_by(common.as_typed(command)),
                name=name,
                on_progress=bars.bar("calibrate"),
            )

    # What is written and printed.
    config = study_table(model, entries, chat, settings, engine, dtype=dtype, budgets=candidates.budgets)
    config |= goal.table(candidates) | {"most_budgets": candidates.most_budgets, "cost_ahead": cost.table()}
    _write(found, out, config, seed, time.perf_counter() - started, json_output)


def _missed(verification: Verification, schedule: Schedule) -> str:
    limited, of_value = ImpossibleLimit.of_target(schedule.target) is not None, verification.bound == "value"
    if limited:
        return f"the {'' if of_value else 'upper bound of the '}verified share is over the limit"
    return (
        f"the {'' if of_value else 'lower bound of the '}verified tail is under the target, or another bound is broken"
    )


def _write(
    found: Calibration, out: Path, config: dict[str, Any], seed: int, wall_seconds: float, json_output: bool
) -> None:
    """Write the record and the page, and print the result, with a warning where the verification missed the target."""
    from sparroll.report import write_report

    record = out / "calibration.json"
    written = records.write_unless_same(
        record, "calibration", found.table(), config=config, seed=seed, wall_seconds=wall_seconds
    )
    page = write_report(out)
    if json_output:
        common.print_json(records.read(record)["results"])
    else:
        print("\n".join(text(found)))
    verified = found.verification
    if verified is not None and not verified.met:
        missed = f"at {', '.join(verified.missed)} {_missed(verified, found.schedule)}"
        say(f"warning: {missed if verified.missed else verified.notes[-1]}")
    kept = [path for path, new in ((record, written), (found.path, found.written)) if not new]
    common.wrote(record, page, found.path, quiet=json_output, kept=kept)
