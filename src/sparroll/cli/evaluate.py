"""`sparroll evaluate`: how often a model is right, dense and sparse side by side. Continues where it was
interrupted."""

from __future__ import annotations

import math
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from sparroll import records
from sparroll.cli.shared import common, named, options
from sparroll.cli.shared.options import MEASURING, MODEL, OUTPUT, PROMPTS, SAMPLING, option
from sparroll.engines.make import check_names
from sparroll.errors import UserError
from sparroll.evaluate import text
from sparroll.progress import Progress, quiet_transformers, say
from sparroll.types import LARGEST_SEED, MOST_SAMPLES

ContestDay = Annotated[
    datetime | None,
    option(
        PROMPTS,
        formats=["%Y-%m-%d"],
        help="Only problems of contests from (or before) this day; for sets that have dates.",
    ),
]


def evaluate(
    command: typer.Context,
    model: Annotated[
        str | None, option(MODEL, "--model", help="tiny-reasoner, a folder, or a name on the Hugging Face hub.")
    ] = None,
    task_names: Annotated[
        str | None,
        option(
            PROMPTS,
            "--tasks",
            help="One or more, separated by commas: name, name:level, set:split, or a file of problems.",
        ),
    ] = None,
    out: Annotated[Path | None, option(OUTPUT, "--out", help="Folder for the results; created if missing.")] = None,
    samples: Annotated[
        int, option(SAMPLING, "--samples", min=1, max=MOST_SAMPLES, help="Responses per problem: the k of mean@k.")
    ] = 16,
    schedule: options.OneSchedule = None,
    budget: options.OneBudget = None,
    check_window: options.CheckWindow = None,
    check_floor: options.CheckFloor = None,
    compression: options.CompressionKind = None,
    compression_set: options.CompressionSet = None,
    adapter: options.Adapter = None,
    also_dense: Annotated[
        bool,
        option(
            MEASURING, "--also-dense", help="Evaluate dense responses too, with the same seeds, for paired differences."
        ),
    ] = False,
    level: options.Level = 3,
    count: Annotated[
        int | None,
        option(
            PROMPTS,
            "--count",
            min=1,
            help="At most this many problems per task. Default: all of a finite set, 64 of an endless one.",
        ),
    ] = None,
    problem_seed: Annotated[
        int,
        option(
            PROMPTS, "--problem-seed", min=0, max=LARGEST_SEED, help="Seed of the problems that an endless task makes."
        ),
    ] = 0,
    max_new_tokens: options.MaxNewTokens = 1024,
    temperature: Annotated[
        float, option(SAMPLING, "--temperature", min=0, help="0 is greedy, and needs --samples 1.")
    ] = 1.0,
    top_p: options.TopP = 1.0,
    chat: options.Chat = False,
    thinking: options.Thinking = None,
    prompt_template: options.PromptTemplate = None,
    mirror: options.Mirror = None,
    contest_from: ContestDay = None,
    contest_before: ContestDay = None,
    test_seconds: Annotated[
        float | None,
        option(
            MEASURING, "--test-seconds", help="Time for each test of a program; default: what the set's grader allows."
        ),
    ] = None,
    test_memory_gib: Annotated[
        float | None,
        option(MEASURING, "--test-memory-gib", help="Memory for each test; default: what the set's grader allows."),
    ] = None,
    allow_unsafe_sandbox: Annotated[
        bool,
        option(
            MEASURING, "--allow-unsafe-sandbox", help="Run programs without a sandbox if none works on this machine."
        ),
    ] = False,
    reward: Annotated[
        str | None,
        option(
            MEASURING,
            "--reward",
            help="module:function that judges responses instead of the tasks, from 0 to 1; see docs/rewards.md.",
        ),
    ] = None,
    reward_set: Annotated[
        list[str] | None,
        option(MEASURING, "--reward-set", help="A setting of that function, e.g. target_tokens=200; repeatable."),
    ] = None,
    no_tail: Annotated[
        bool,
        option(
            MEASURING,
            "--no-tail",
            help="Leave out the acceptance, which needs a dense forward pass over each response.",
        ),
    ] = False,
    bin_tokens: options.BinTokens = 2000,
    max_batch: options.MaxBatch = 64,
    seed: options.Seed = 0,
    engine: options.Engine = "hf",
    device: options.Device = None,
    dtype: options.Dtype = None,
    force_schedule: options.ForceSchedule = False,
    comparison: Annotated[
        tuple[Path, Path] | None,
        option(OUTPUT, "--compare", help="Compare two finished folders, the second minus the first; samples nothing."),
    ] = None,
    json_output: options.Json = False,
) -> None:
    """Measure mean@k, pass@k and majority@k with intervals over problems, response lengths, speed, and the tail."""
    if comparison is not None:
        if model is not None or task_names is not None:
            raise UserError("--compare samples nothing, so it takes no --model and no --tasks")
        others = [each.name for each in command.command.params if each.name not in ("comparison", "out", "json_output")]
        common.refuse_idle(command, True, "with --compare, which samples nothing", *filter(None, others))
        _compare(comparison, out, json_output)
        return
    if model is None or task_names is None or out is None:
        raise UserError("evaluate needs --model, --tasks and --out", "or --compare RUN1 RUN2")
    if thinking is not None and not chat:
        raise UserError("--thinking and --no-thinking need --chat")
    dense = schedule is None and budget is None and compression is None
    common.refuse_idle(command, dense, "without --schedule, --budget or --compression: all is dense", "also_dense")
    common.refuse_idle(command, schedule is None, "without --schedule", "force_schedule")
    common.refuse_idle(
        command, reward is not None, "with --reward, whose function judges instead of the tasks",
        "test_seconds", "test_memory_gib", "allow_unsafe_sandbox",
    )  # fmt: skip
    common.refuse_idle(command, no_tail, "with --no-tail", "bin_tokens")
    from sparroll.evaluate import parquet
    from sparroll.evaluate.compare import RECORD
    from sparroll.evaluate.evaluation import SAMPLE_LOG, SAMPLES
    from sparroll.evaluate.evaluation import evaluate as run
    from sparroll.evaluate.request import EvaluationRequest, check_adapter, policies
    from sparroll.evaluate.settings import EvaluationSettings, read_tasks
    from sparroll.report import write_report
    from sparroll.tasks.data.settings import DataSettings
    from sparroll.tasks.data.task import DataTask

    check_names(engine, model, device, dtype)
    parquet.check_installed()
    for name, value in (("--test-seconds", test_seconds), ("--test-memory-gib", test_memory_gib)):
        if value is not None and not 0 < value < math.inf:
            raise UserError(
                f"{name} must be above 0 and finite, got {value}", "leave it out for what the set's grader allows"
            )
    data = DataSettings(
        mirror=None if mirror is None else str(mirror),
        prompt_template=prompt_template,
        contest_from=contest_from and contest_from.date(),
        contest_before=contest_before and contest_before.date(),
        test_seconds=test_seconds,
        test_memory_gib=test_memory_gib,
        allow_unsafe_sandbox=allow_unsafe_sandbox,
    )
    chosen = named.with_check(named.load_schedule(schedule, budget, model, force_schedule), check_window, check_floor)
    common.say_caveats(chosen)
    check_adapter(adapter, chosen, model)
    evicting = named.load_compression(compression, compression_set or [], chosen, engine)
    judge = named.load_judge(reward, reward_set or [])
    request = EvaluationRequest(
        model=model,
        tasks=read_tasks(task_names, level, count, problem_seed, data, judge),
        policies=policies(chosen, evicting, adapter, also_dense),
        settings=EvaluationSettings(
            samples, max_new_tokens, temperature, top_p, seed, tail=not no_tail, bin_tokens=bin_tokens
        ),
        judge=judge,
        problem_seed=problem_seed,
        contest_window=(data.contest_from, data.contest_before),
        chat=chat,
        thinking=thinking,
        adapter=adapter,
        engine=engine,
        device=device,
        dtype=dtype,
        max_batch=max_batch,
    )
    rows_alone = all(isinstance(each.task, DataTask) for each in request.tasks)
    common.refuse_idle(command, rows_alone, "with tasks that are sets or files of rows", "level", "problem_seed")
    common.hold_folder(command, out)
    for each in request.tasks:
        if isinstance(each.task, DataTask) and (left_out := each.task.left_out()):
            say(left_out, alarm=True)
    quiet_transformers()
    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps what is finished; run the same command to continue", out / SAMPLE_LOG),
        Progress(json_output) as bars,
    ):
        results = run(request, out, bars.bar("evaluate"))
    path = out / RECORD
    written = records.write_unless_same(
        path, "evaluation", results, config=request.table(), seed=seed, wall_seconds=time.perf_counter() - started
    )
    page = write_report(out)
    if json_output:
        common.print_json(results)
    else:
        print("\n".join(text.summary(results)))
    # Without the log, a finished evaluation has been read again.
    sampled = [out / SAMPLES] if (out / SAMPLE_LOG).exists() else []
    common.wrote(*sampled, path, page, quiet=json_output, kept=() if written else (path,))


def _compare(folders: tuple[Path, Path], out: Path | None, json_output: bool) -> None:
    from sparroll.evaluate.compare import compare

    result = compare(*folders)
    if out is not None:
        common.output_folder(out)
        path = records.write(out / "comparison.json", "comparison", result)
        common.wrote(path, quiet=json_output)
    if json_output:
        common.print_json(result)
        return
    print("\n".join(text.comparison(result)))
