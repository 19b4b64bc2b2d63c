"""`sparroll calibrate`: from a model and prompts to a schedule file that meets the target."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparroll import records
from sparroll.cli import common
from sparroll.cli.common import MEASURING, OUTPUT, READING, option
from sparroll.control.impossible_limit import STATISTIC, ImpossibleLimit
from sparroll.draft_check import DraftCheck
from sparroll.engines.make import check_names
from sparroll.errors import UserError, nearest
from sparroll.layer_groups import budgets_in_words
from sparroll.progress import Progress, quiet_transformers, say
from sparroll.rounding import percent_up, rounded_down, rounded_up
from sparroll.tasks.prompt_file import read_prompts

if TYPE_CHECKING:
    from sparroll.calibrate.allocation.wanted import Point, Tradeoff
    from sparroll.calibrate.choice import CheckChoice
    from sparroll.calibrate.run import Calibration


def calibrate(
    command: typer.Context,
    model: common.Model,
    out: common.Out,
    target: Annotated[
        float, option(MEASURING, "--target", min=0, max=1, help="The tail must be at least this at every length.")
    ] = 0.86,
    statistic: Annotated[
        str,
        option(
            MEASURING,
            "--statistic",
            help="What every length is to hold: acceptance (its tail is at least --target), or impossible_share (at most "
            "--at-most of the sampled tokens are more than --nats off).",
        ),
    ] = "acceptance",
    nats: Annotated[
        int, option(MEASURING, "--nats", help="How far off a sampled token is impossible: 2, 5, 10 or 20 nats.")
    ] = 10,
    at_most: Annotated[
        float | None,
        option(
            MEASURING,
            "--at-most",
            min=0,
            max=1,
            help="The largest share of impossible tokens at any length, for --statistic impossible_share. It takes 5 / "
            "share tokens at each length.",
        ),
    ] = None,
    budget: Annotated[
        list[int] | None,
        option(READING, "--budget", help="A budget of the grid, in tokens; repeatable. Default: the published grid."),
    ] = None,
    check_windows: Annotated[
        str | None,
        option(
            READING,
            "--check-windows",
            help="Verify rollouts, with windows of these many tokens, e.g. 32,64,128: window, floor and budgets are "
            f"chosen together. Default: no check, or {DraftCheck.window_tokens} with --check-floors.",
        ),
    ] = None,
    check_floors: Annotated[
        str | None,
        option(
            READING,
            "--check-floors",
            help=f"Floors to choose among, e.g. 0.01,0.1. Default: no check, or {DraftCheck.floor} with --check-windows.",
        ),
    ] = None,
    check_over_2_nats: Annotated[
        float | None,
        option(
            MEASURING,
            "--check-over-2-nats",
            min=0,
            max=1,
            help="At most this share of the tokens of any length may be more than 2 nats off; needs a check. Default: not "
            "held.",
        ),
    ] = None,
    objective: Annotated[
        str,
        option(
            MEASURING,
            "--objective",
            help="What is to be small: time (the cheapest budgets at the target), or as far as a step's time allows: kl, "
            "far_mass (probability of tokens far off) or tail (1 - tail).",
        ),
    ] = "time",
    step_time_share: Annotated[
        float | None,
        option(
            MEASURING,
            "--step-time-share",
            min=0,
            max=1,
            help="A decode step may take this share of a dense one's time.",
        ),
    ] = None,
    at_time_of: Annotated[
        str | None,
        option(MEASURING, "--at-time-of", help="A decode step may take as long as under this preset or schedule file."),
    ] = None,
    kl_at_most: Annotated[
        float | None,
        option(
            MEASURING,
            "--kl-at-most",
            min=0,
            help="The mean KL at any length may be at most this; with a check, of what is kept. Default: not held.",
        ),
    ] = None,
    far_mass_at_most: Annotated[
        float | None,
        option(
            MEASURING,
            "--far-mass-at-most",
            min=0,
            max=1,
            help="At most this probability, added up over the top-k lists, may be on tokens far off at any length. Default: "
            "not held.",
        ),
    ] = None,
    far_mass_nats: Annotated[
        int,
        option(
            MEASURING, "--far-mass-nats", help="How far off the tokens of --far-mass-at-most are: 2, 5, 10 or 20 nats."
        ),
    ] = 20,
    gpu: Annotated[
        str,
        option(
            MEASURING,
            "--gpu",
            help="Where times are predicted, to compare checks, selectors and budgets: A100, H100, H200, B200, MI300X or a "
            "JSON profile.",
        ),
    ] = "H200",
    prompts_file: common.Prompts = None,
    task: common.Task = None,
    level: common.Level = 3,
    count: common.Count = 64,
    chat: common.Chat = False,
    samples: common.Samples = 8,
    max_new_tokens: common.MaxNewTokens = 1024,
    temperature: common.Temperature = 1.0,
    mode: common.Mode = "faithful",
    estimator: common.Estimator = "top_k_lower",
    bin_tokens: common.BinTokens = 2000,
    selector: common.SelectorKind = "page_mean",
    page_tokens: common.PageTokens = 16,
    first_tokens: common.FirstTokens = None,
    recent_tokens: common.RecentTokens = None,
    dense_layers: common.DenseLayers = "0,1",
    also_selector: Annotated[
        list[str] | None,
        option(
            READING,
            "--also-selector",
            help="Sweep this selector, too, and take the best, e.g. quantized_mean,page_tokens=4,bits=2; repeatable.",
        ),
    ] = None,
    layer_groups: Annotated[
        str | None,
        option(
            READING,
            "--layer-groups",
            help="Budgets of their own for groups of layers, e.g. 2-14/15-27; needs an objective other than time.",
        ),
    ] = None,
    verify_rounds: Annotated[
        int,
        option(
            MEASURING, "--verify-rounds", min=0, help="At most this many rounds check the fitted schedule; 0: none."
        ),
    ] = 4,
    name: Annotated[str, option(OUTPUT, "--name", help="The schedule file is OUT/NAME.toml.")] = "schedule",
    max_batch: common.MaxBatch = 64,
    seed: common.Seed = 0,
    engine: common.Engine = "hf",
    device: common.Device = None,
    dtype: common.Dtype = None,
    json_output: common.Json = False,
) -> None:
    """Sweep a grid of budgets, choose the schedule that meets the target, and verify it. Resumes if interrupted."""
    from sparroll.calibrate.allocation.wanted import Wanted, check_limit
    from sparroll.calibrate.bounds import BlindSpots
    from sparroll.calibrate.measure import MeasureSettings, check_measurable
    from sparroll.calibrate.open_study import open_study, published_selector, selector_from, study_table
    from sparroll.calibrate.prospects import check_request
    from sparroll.calibrate.run import calibrate as run
    from sparroll.calibrate.sweep import PUBLISHED_PAGES
    from sparroll.calibrate.target import check_sampled, plain_target
    from sparroll.plan.hardware import find_hardware
    from sparroll.report import write_report
    from sparroll.schedule import Schedule

    common.refuse_idle_prompt_options(command, prompts_file, task)
    aim = target_of(command, statistic, target, nats, at_most)
    unchecked = check_windows is None and check_floors is None
    plain = unchecked and objective == "time" and not also_selector
    common.refuse_idle(
        command, plain, "where no times are compared: neither of checks nor of selectors nor of budgets", "gpu"
    )
    far = far_mass_at_most is not None or objective == "far_mass"
    common.refuse_idle(command, not far, "without --far-mass-at-most or --objective far_mass", "far_mass_nats")
    check_names(engine, model, device, dtype)
    if not name or name != Path(name).name or name.startswith(".") or name.endswith(".toml"):
        raise UserError(
            f"--name is the name of a file in --out, without its ending .toml, got {name!r}",
            f"for example --name {Path(name).name.strip('.').removesuffix('.toml') or 'schedule'}",
        )
    common.hold_folder(command, out)
    settings = MeasureSettings(
        max_new_tokens=max_new_tokens, mode=mode, samples=samples, temperature=temperature,  # type: ignore[arg-type]
        estimator=estimator, bin_tokens=bin_tokens, seed=seed,
    )  # fmt: skip
    budgets = budget or [pages * 16 for pages in PUBLISHED_PAGES]
    chosen = published_selector(selector, page_tokens, first_tokens, recent_tokens)
    dense = common.layer_numbers(dense_layers)
    checks = checks_of(check_windows, check_floors)
    if check_over_2_nats is not None and not checks:
        raise UserError(
            "--check-over-2-nats bounds what a check leaves, and there is none",
            "add --check-windows 32,64,128, or leave it out",
        )
    bounds = BlindSpots(check_over_2_nats, kl_at_most, far_mass_at_most, far_mass_nats)
    others, groups = [selector_from(each) for each in also_selector or []], groups_of(layer_groups)
    limits = (step_time_share is not None) + (at_time_of is not None)
    wanted = Wanted(objective, aim, bounds)  # type: ignore[arg-type]
    check_limit(wanted, limits, bool(checks), groups, estimator, 1 + len(others))
    check_sampled(aim, settings)
    slower = None if at_time_of is None else Schedule.load(at_time_of)
    hardware = find_hardware(gpu)
    entries = read_prompts(prompts_file, task, level, count, seed)
    check_request(aim, len(entries), samples, max_new_tokens)
    tried = [Schedule.fixed(max(*budgets, each.least_budget_tokens), each, dense) for each in (chosen, *others)]
    largest = tried[0]
    if checks:
        longest = max(check.window_tokens for check in checks)
        largest = largest.checked(longest, checks[0].floor)
        check_measurable(largest, settings)
        tried[0] = largest
    elif groups:
        tried = [dataclasses.replace(each, layer_groups=groups) for each in tried]
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
        with study.engine:
            found = run(
                study,
                out=out,
                budgets=budgets,
                target=aim,
                selector=chosen,
                also_selectors=others,
                dense_layers=dense,
                layer_groups=groups,
                objective=objective,  # type: ignore[arg-type]
                step_time_share=step_time_share,
                at_time_of=slower,
                verify_rounds=verify_rounds,
                checks=checks,
                hardware=hardware,
                bounds=bounds,
                model=model,
                made_by=records.made_by(common.as_typed(command)),
                name=name,
                on_progress=bars.bar("calibrate"),
            )
    config = study_table(model, entries, chat, settings, engine, dtype=dtype, budgets=budgets)
    config |= {"target": plain_target(aim)}
    config |= bounds.table()
    if checks:
        config |= {"checks": [check.table() for check in checks], "over_2_nats_at_most": check_over_2_nats, "gpu": gpu}
    if not plain:
        config |= {
            "objective": objective,
            "step_time_share": step_time_share,
            "at_time_of": at_time_of,
            "also_selectors": [each.table() for each in others],
            "layer_groups": [list(group) for group in groups],
            "gpu": gpu,
        }
    seconds = time.perf_counter() - started
    record = records.write(
        out / "calibration.json", "calibration", found.table(), config=config, seed=seed, wall_seconds=seconds
    )
    page = write_report(out)
    if json_output:
        common.print_json(found.table())
    else:
        print("\n".join(text(found)))
    if found.verification is not None and not found.verification.met:
        what = "tail is under the target" if statistic == "acceptance" else "share is over the limit"
        say(f"warning: the verified {what} at {', '.join(found.verification.missed)}")
    common.wrote(record, page, found.path, quiet=json_output)


def text(found: Calibration) -> list[str]:
    """A line per bin with its budget, its tail and the dense ceiling, then the notes."""
    keys = ("q05", "q05_low", "dense_ceiling_q05")
    heads = ("tail", "low", "dense ceiling")
    said: Callable[[float | None], str] = rounded_down
    if ImpossibleLimit.of_target(found.schedule.target) is not None:
        keys = ("impossible_share", "impossible_share_high", "dense_impossible_share")
        heads, said = ("share", "high", "dense rollouts"), _share
    lines = [f"{'from context':>12}{'KV budget':>11}{heads[0]:>8}{heads[1]:>8}{heads[2]:>15}"]
    for row in found.rows():
        cells = "".join(f"{said(row[key]):>{width}}" for key, width in zip(keys, (8, 8, 15), strict=True))
        lines.append(f"{row['from_context_tokens']:>12,}{budgets_in_words(row['kv_budget_tokens']):>11}{cells}")
    lines += checked_text(found, found.choice) if found.choice else ()
    lines += traded_text(found.tradeoff) if found.tradeoff else ()
    lines += ["", f"{found.generated_tokens:,} tokens were generated for this"]
    return [*lines, *(f"- {note}" for note in found.notes)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def target_of(
    command: typer.Context, statistic: str, target: float, nats: int, at_most: float | None
) -> float | ImpossibleLimit:
    """What the options ask every length to hold. Raises UserError for options of the other statistic."""
    if statistic not in ("acceptance", STATISTIC):
        raise UserError(f"unknown --statistic {statistic!r}", nearest(statistic, ["acceptance", STATISTIC]))
    if statistic == "acceptance":
        common.refuse_idle(command, True, f"without --statistic {STATISTIC}", "nats", "at_most")
        return target
    common.refuse_idle(command, True, f"with --statistic {STATISTIC}", "target")
    if at_most is None:
        raise UserError(f"--statistic {STATISTIC} needs --at-most", "for example --nats 10 --at-most 1e-4")
    return ImpossibleLimit(nats, at_most)


def traded_text(tradeoff: Tradeoff) -> list[str]:
    """The chosen point and its rivals of every selector: the best allocation in no more time."""
    lines = ["", f"{'selector':<28}{'of a dense step':>16}{'KL':>10}{'over 20 nats':>14}{'worst tail':>12}"]
    rivals: dict[str, Point] = {}
    for point in tradeoff.points:
        if point.how == "allocated" and point.step_seconds <= tradeoff.point.step_seconds * 1.001:
            rivals[point.selector] = point
    others = [point for selector, point in rivals.items() if selector != tradeoff.point.selector]
    verified = [tradeoff.verified] if tradeoff.verified else []
    for point in (tradeoff.point, *verified, *others):
        name = point.selector if point.how == "allocated" else f"{point.selector}, {point.how}"
        lines.append(
            f"{name:<28}{percent_up(point.step_time_share, 1):>16}{rounded_up(point.kl, 5):>10}"
            f"{point.over(20):>14.1e}{rounded_down(point.worst_tail):>12}"
        )
    return [*lines, tradeoff.said()]


def checked_text(found: Calibration, choice: CheckChoice) -> list[str]:
    """The fastest candidates, and what the checks did in the last round of the verification."""
    lines = ["", f"{'window':>12}{'floor':>11}{'from budget':>13}{'drafted/kept':>14}{'ms a token':>12}"]
    for each in choice.candidates[:5]:
        lines.append(
            f"{each.check.window_tokens:>12,}{each.check.floor:>11g}{each.least_budget_tokens:>13,}"
            f"{rounded_up(each.drafted_per_kept, 3):>14}{rounded_up(1e3 * each.token_seconds, 3):>12}"
        )
    lines.append(f"{len(choice.candidates)} schedules meet the target; times are predicted for {choice.hardware}")
    measured = found.verification.measurement.checked if found.verification else None
    return [*lines, f"checks in the last round: {measured}"] if measured else lines


def checks_of(windows: str | None, floors: str | None) -> list[DraftCheck]:
    """Every window with every floor; none if neither is given."""
    if windows is None and floors is None:
        return []
    sizes = _numbers("--check-windows", windows, int) if windows else [DraftCheck.window_tokens]
    shares = _numbers("--check-floors", floors, float) if floors else [DraftCheck.floor]
    return [DraftCheck(int(size), share) for size in sorted(set(sizes)) for share in sorted(set(shares))]


def groups_of(text: str | None) -> tuple[tuple[int, ...], ...]:
    """The layers of each group in "2-14/15-27"; none if nothing is given."""
    if text is None:
        return ()
    groups = []
    for part in text.split("/"):
        layers: set[int] = set()
        for piece in part.split(","):
            first, _, last = piece.strip().partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                raise UserError(f"--layer-groups takes layers, got {text!r}", "for example 2-14/15-27, or 2,3/4-27")
            layers.update(range(int(first), int(last or first) + 1))
        groups.append(tuple(sorted(layers)))
    if len(groups) < 2:
        raise UserError(
            f"--layer-groups takes two groups or more, got {text!r}", "separate them with a slash: 2-14/15-27"
        )
    return tuple(groups)


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example = "32,64,128" if kind is int else "0.01,0.1"
        raise UserError(f"{name} takes numbers, got {text!r}", f"for example {example}") from None
