"""`sparroll calibrate`: from a model and prompts to a schedule file that meets the target."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparroll import records
from sparroll.cli import common
from sparroll.cli.common import MEASURING, OUTPUT, READING, option
from sparroll.engines.make import check_names
from sparroll.errors import UserError
from sparroll.progress import Progress, quiet_transformers, say
from sparroll.rounding import rounded_down
from sparroll.tasks.prompt_file import read_prompts

if TYPE_CHECKING:
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
    from sparroll.calibrate.measure import MeasureSettings
    from sparroll.calibrate.open_study import open_study, published_selector, study_table
    from sparroll.calibrate.prospects import check_request
    from sparroll.calibrate.run import calibrate as run
    from sparroll.calibrate.sweep import PUBLISHED_PAGES
    from sparroll.report import write_report
    from sparroll.schedule import Schedule

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
    entries = read_prompts(prompts_file, task, level, count, seed)
    check_request(target, len(entries), samples, max_new_tokens)
    largest = Schedule.fixed(max(*budgets, chosen.least_budget_tokens), chosen, dense)
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
                model=model,
                made_by=records.made_by(common.as_typed(command)),
                name=name,
                on_progress=bars.bar("calibrate"),
            )
    config = study_table(model, entries, chat, settings, engine, dtype=dtype, budgets=budgets, target=target)
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
    return [*lines, "", *(f"- {note}" for note in found.notes)]
