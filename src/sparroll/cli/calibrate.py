"""`sparroll calibrate`: from a model and prompts to a schedule file that meets the target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparroll import records
from sparroll.cli import common
from sparroll.cli.common import MEASURING, OUTPUT, READING, option
from sparroll.draft_check import DraftCheck
from sparroll.engines.make import check_names
from sparroll.errors import UserError
from sparroll.progress import Progress, quiet_transformers, say
from sparroll.rounding import rounded_down, rounded_up
from sparroll.tasks.prompt_file import read_prompts

if TYPE_CHECKING:
    from sparroll.calibrate.choice import CheckChoice
    from sparroll.calibrate.run import Calibration


def calibrate(
    command: typer.Context,
    model: common.Model,
    out: common.Out,
    target: Annotated[
        float, option(MEASURING, "--target", min=0, max=1, help="The tail must be at least this at every length.")
    ] = 0.86,
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
    gpu: Annotated[
        str,
        option(
            MEASURING,
            "--gpu",
            help="Where the chosen check is predicted to be the fastest: A100, H100, H200, B200, MI300X or a JSON profile.",
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
    """Sweep a grid of budgets, fit the cheapest schedule that meets the target, and verify it. Resumes if
    interrupted."""
    from sparroll.calibrate.bounds import BlindSpots
    from sparroll.calibrate.measure import MeasureSettings, check_measurable
    from sparroll.calibrate.open_study import open_study, published_selector, study_table
    from sparroll.calibrate.prospects import check_request
    from sparroll.calibrate.run import calibrate as run
    from sparroll.calibrate.sweep import PUBLISHED_PAGES
    from sparroll.plan.hardware import find_hardware
    from sparroll.report import write_report
    from sparroll.schedule import Schedule

    common.refuse_idle_prompt_options(command, prompts_file, task)
    unchecked = check_windows is None and check_floors is None
    common.refuse_idle(command, unchecked, "without --check-windows or --check-floors: it only times checks", "gpu")
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
    hardware = find_hardware(gpu)
    entries = read_prompts(prompts_file, task, level, count, seed)
    check_request(target, len(entries), samples, max_new_tokens)
    largest = Schedule.fixed(max(*budgets, chosen.least_budget_tokens), chosen, dense)
    if checks:
        longest = max(check.window_tokens for check in checks)
        largest = largest.checked(longest, checks[0].floor)
        check_measurable(largest, settings)
    quiet_transformers()
    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps every measured budget; run the same command to continue"),
        Progress(json_output) as bars,
    ):
        study = open_study(
            model, entries, chat, settings, [largest],
            engine=engine, device=device, dtype=dtype, max_batch=max_batch,
        )  # fmt: skip
        with study.engine:
            found = run(
                study,
                out=out,
                budgets=budgets,
                target=target,
                selector=chosen,
                dense_layers=dense,
                verify_rounds=verify_rounds,
                checks=checks,
                hardware=hardware,
                bounds=BlindSpots(check_over_2_nats),
                model=model,
                made_by=records.made_by(common.as_typed(command)),
                name=name,
                on_progress=bars.bar("calibrate"),
            )
    config = study_table(model, entries, chat, settings, engine, dtype=dtype, budgets=budgets, target=target)
    if checks:
        asked = {"checks": [check.table() for check in checks], "over_2_nats_at_most": check_over_2_nats, "gpu": gpu}
        config |= asked
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
        say(f"warning: the verified tail is under the target at {', '.join(found.verification.missed)}")
    common.wrote(record, page, found.path, quiet=json_output)


def text(found: Calibration) -> list[str]:
    """A line per bin with its budget, its tail and the dense ceiling, then the notes."""
    lines = [f"{'from context':>12}{'KV budget':>11}{'tail':>8}{'low':>8}{'dense ceiling':>15}"]
    for row in found.rows():
        cells = "".join(
            f"{rounded_down(row[key]):>{width}}"
            for key, width in (("q05", 8), ("q05_low", 8), ("dense_ceiling_q05", 15))
        )
        lines.append(f"{row['from_context_tokens']:>12,}{row['kv_budget_tokens']:>11,}{cells}")
    return [*lines, *(checked_text(found, found.choice) if found.choice else ()), "", *(f"- {n}" for n in found.notes)]


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


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example = "32,64,128" if kind is int else "0.01,0.1"
        raise UserError(f"{name} takes numbers, got {text!r}", f"for example {example}") from None
