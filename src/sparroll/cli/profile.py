"""`sparroll profile`: how far given budgets and schedules are from dense, by context length."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from sparroll import records
from sparroll.cli.shared import common, named, options
from sparroll.cli.shared.options import READING, option
from sparroll.engines.make import check_names
from sparroll.errors import UserError
from sparroll.progress import Progress, quiet_transformers
from sparroll.rounding import percent_up
from sparroll.tasks.prompt_file import read_prompts

if TYPE_CHECKING:
    from sparroll.calibrate.profile import Entry


def profile(
    command: typer.Context,
    model: options.Model,
    out: options.Out,
    budget: Annotated[
        list[int] | None, option(READING, "--budget", help="A fixed KV budget in tokens; repeatable.")
    ] = None,
    schedule: Annotated[
        list[str] | None, option(READING, "--schedule", help="A preset or schedule file; repeatable.")
    ] = None,
    check_window: options.CheckWindow = None,
    check_floor: options.CheckFloor = None,
    prompts_file: options.Prompts = None,
    task: options.Task = None,
    level: options.Level = 3,
    count: options.Count = 16,
    chat: options.Chat = False,
    samples: options.Samples = 4,
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
    max_batch: options.MeasuredBatch = None,
    seed: options.Seed = 0,
    engine: options.Engine = "hf",
    device: options.Device = None,
    dtype: options.Dtype = None,
    force_schedule: options.ForceSchedule = False,
    json_output: options.Json = False,
) -> None:
    """Measure the tail of the acceptance for each budget and schedule, with the dense ceiling beside them."""
    from sparroll.calibrate.measure import MeasureSettings, check_measurable, check_percentiles
    from sparroll.calibrate.open_study import open_study, selector_from, study_table
    from sparroll.calibrate.profile import profile as measure
    from sparroll.report import write_report
    from sparroll.schedule import Schedule

    common.refuse_idle_prompt_options(command, prompts_file, task)
    common.refuse_idle(command, not schedule, "without --schedule", "force_schedule")
    common.refuse_idle(
        command, not budget, "without --budget: a schedule's file names its selector and its dense layers",
        "selector", "page_tokens", "first_tokens", "recent_tokens", "dense_layers",
    )  # fmt: skip
    check_names(engine, model, device, dtype)
    common.hold_folder(command, out)
    settings = MeasureSettings(
        max_new_tokens=max_new_tokens, mode=mode, samples=samples, temperature=temperature,  # type: ignore[arg-type]
        estimator=estimator, bin_tokens=bin_tokens, seed=seed,
    )  # fmt: skip
    chosen = selector_from(selector, common.typed(command, "page_tokens", page_tokens), first_tokens, recent_tokens)
    dense = named.layer_numbers(dense_layers)
    asked = [Schedule.load(name, model=model, force=force_schedule) for name in schedule or []]
    asked = [*(Schedule.fixed(tokens, chosen, dense) for tokens in budget or []), *asked]
    if not asked:
        raise UserError(
            "there is nothing to profile", "give --budget 512, --schedule qwen3-1.7b-0.86, or several of them"
        )
    asked = [named.with_check(each, check_window, check_floor) or each for each in asked]
    check_percentiles(settings)
    for each in asked:
        check_measurable(each, settings)
    common.say_caveats(*asked)
    entries = read_prompts(prompts_file, task, level, count, seed)
    common.say_prompts_left_out(command, prompts_file, len(entries))
    quiet_transformers()
    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps what is measured; run the same command to continue"),
        Progress(json_output) as bars,
    ):
        study = open_study(
            model, entries, chat, settings, asked,
            engine=engine, device=device, dtype=dtype, max_batch=max_batch,
        )  # fmt: skip
        with study:
            found = measure(study, asked, out=out / "measured", on_progress=bars.bar("profile"))
    config = study_table(model, entries, chat, settings, engine, dtype=dtype, schedules=[each.name for each in asked])
    seconds = time.perf_counter() - started
    record = out / "profile.json"
    written = records.write_unless_same(
        record, "profile", found.table(), config=config, seed=seed, wall_seconds=seconds
    )
    page = write_report(out)
    if json_output:
        common.print_json(found.table())
    else:
        for entry in (found.ceiling, *found.entries):
            print("\n".join(_lines(entry)), end="\n\n")
    common.wrote(record, page, quiet=json_output, kept=() if written else (record,))


def _lines(entry: Entry) -> list[str]:
    measurement = entry.measurement
    tail = measurement.tail()
    lines = [
        f"{measurement.name}: reads {percent_up(measurement.kv_read_share)} of the cache",
        str(tail),
        *tail.beside(),
        *filter(None, [entry.too_little]),
    ]
    if measurement.checked is not None:
        lines.append(f"checks: {measurement.checked}")
    overall = entry.fits[0]
    if overall.beta is None:
        return [*lines, f"no Beta fit: {overall.why_not}"]
    beta = overall.beta
    return [
        *lines,
        f"Beta below 0.999: a {beta.a:.3f}, b {beta.b:.3f}, share above {beta.weight:.3f}, KS {beta.ks:.3f}",
    ]
