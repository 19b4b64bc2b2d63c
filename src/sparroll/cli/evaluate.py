"""`sparroll evaluate`: how often a model is right, dense and sparse side by side. Goes on where it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparroll import files, records
from sparroll.cli import common, evaluate_text, measuring
from sparroll.engines.make import check_available
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.errors import UserError
from sparroll.progress import Progress

if TYPE_CHECKING:
    from sparroll.compression import Compression
    from sparroll.engines.base import Engine
    from sparroll.engines.scoring import Scorer
    from sparroll.evaluate.log import SampleLog
    from sparroll.evaluate.settings import EvalTask, EvaluationSettings, Policy
    from sparroll.schedule import Schedule
    from sparroll.tasks.reward_function import FunctionJudge


ContestDay = Annotated[
    datetime | None,
    typer.Option(
        formats=["%Y-%m-%d"], help="Only problems of contests from, or before, this day; where a set has dates."
    ),
]


def evaluate(
    model: Annotated[
        str | None, typer.Option("--model", help="tiny-reasoner, a folder, or a name on the Hugging Face hub.")
    ] = None,
    task_names: Annotated[
        str | None,
        typer.Option("--tasks", help="Separated by commas: name, name:level, set:split, or a file of problems."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the results; created if missing.")] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Responses per problem: the k of mean@k.")] = 16,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Preset or file; dense without it.")] = None,
    budget: Annotated[int | None, typer.Option("--budget", min=1, help="A fixed KV budget in tokens instead.")] = None,
    compression: common.CompressionKind = None,
    compression_set: common.CompressionSet = None,
    adapter: common.Adapter = None,
    also_dense: Annotated[
        bool, typer.Option("--also-dense", help="Dense too, with the same seeds: the pair, and the dense ceiling.")
    ] = False,
    level: common.Level = 3,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Most problems of a task. Default: all of a finite set, 64 of an endless one."
        ),
    ] = None,
    problem_seed: Annotated[
        int, typer.Option("--problem-seed", min=0, help="Which problems an endless task makes.")
    ] = 0,
    max_new_tokens: measuring.MaxNewTokens = 1024,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 is greedy, with --samples 1.")] = 1.0,
    chat: common.Chat = False,
    thinking: common.Thinking = None,
    prompt_template: common.PromptTemplate = None,
    mirror: common.Mirror = None,
    contest_from: ContestDay = None,
    contest_before: ContestDay = None,
    allow_unsafe_sandbox: Annotated[
        bool, typer.Option("--allow-unsafe-sandbox", help="Run programs without a boundary where no sandbox works.")
    ] = False,
    reward: Annotated[
        str | None,
        typer.Option(
            "--reward", help="module:function that judges instead of the tasks, from 0 to 1; see docs/rewards.md."
        ),
    ] = None,
    reward_set: Annotated[
        list[str] | None,
        typer.Option("--reward-set", help="A setting of that function, e.g. target_tokens=200; repeatable."),
    ] = None,
    no_tail: Annotated[
        bool, typer.Option("--no-tail", help="Leave out the acceptance, which needs a dense forward of each response.")
    ] = False,
    bin_tokens: measuring.BinTokens = 2000,
    max_batch: measuring.MaxBatch = 64,
    seed: common.Seed = 0,
    engine: common.Engine = "hf",
    device: common.Device = None,
    dtype: common.Dtype = None,
    force_schedule: common.ForceSchedule = False,
    comparison: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help="Two finished folders: the second minus the first; samples nothing."),
    ] = None,
    json_output: common.Json = False,
) -> None:
    """mean@k, pass@k and majority@k with intervals over problems, lengths, speed, and the acceptance tail."""
    if comparison is not None:
        if model is not None or task_names is not None:
            raise UserError("--compare samples nothing, so it takes no --model and no --tasks")
        return _compare(comparison, out, json_output)
    if model is None or task_names is None or out is None:
        raise UserError("evaluate needs --model, --tasks and --out", "or --compare RUN1 RUN2")
    if thinking is not None and not chat:
        raise UserError("--thinking and --no-thinking need --chat")
    from sparroll.evaluate import parquet
    from sparroll.evaluate.settings import EvaluationSettings, read_tasks
    from sparroll.tasks.data.settings import DataSettings

    check_available(engine)
    parquet.check_installed()
    data = DataSettings(
        mirror=None if mirror is None else str(mirror),
        prompt_template=prompt_template,
        contest_from=contest_from and contest_from.date(),
        contest_before=contest_before and contest_before.date(),
        allow_unsafe_sandbox=allow_unsafe_sandbox,
    )
    chosen = common.load_schedule(schedule, budget, model, force_schedule)
    _check_adapter(adapter, chosen, model)
    evicting = common.load_compression(compression, compression_set or [], chosen, engine)
    judge = common.load_judge(reward, reward_set or [])
    wanted = Wanted(
        model=model,
        asked=read_tasks(task_names, level, count, problem_seed, data, judge),
        judge=judge,
        policies=_policies(chosen, evicting, adapter, also_dense),
        settings=EvaluationSettings(
            samples, max_new_tokens, temperature, seed, tail=not no_tail, bin_tokens=bin_tokens
        ),
        problem_seed=problem_seed,
        window=(data.contest_from, data.contest_before),
        chat=chat,
        thinking=thinking,
        adapter=adapter,
        engine=engine,
        device=device,
        dtype=dtype,
        max_batch=max_batch,
    )
    common.output_folder(out)
    config = _config(wanted)
    _same_as_before(out, config)
    return _evaluate(wanted, out, config, json_output)


@dataclass(frozen=True)
class Wanted:
    """What was asked for on the command line, checked."""

    model: str
    asked: list[EvalTask]
    judge: FunctionJudge | None
    """That of each task, where the tasks' own verdicts are not asked for."""
    policies: list[Policy]
    settings: EvaluationSettings
    problem_seed: int
    window: tuple[date | None, date | None]
    """First contest day, and the one after the last."""
    chat: bool
    thinking: bool | None
    adapter: Path | None
    engine: str
    device: str | None
    dtype: str | None
    max_batch: int


def _evaluate(wanted: Wanted, out: Path, config: dict[str, Any], json_output: bool) -> None:
    from sparroll.evaluate.log import SampleLog
    from sparroll.evaluate.parquet import write_parquet
    from sparroll.evaluate.summary import summarise
    from sparroll.report import collect, render

    started = time.perf_counter()
    with (
        common.interruptible(f"{out} keeps what is finished; the same command goes on"),
        Progress(json_output) as bars,
        SampleLog(out / "samples.jsonl") as log,
    ):
        if not _complete(log, wanted):
            _sample(wanted, log, bars.bar("problems"))
        results = summarise(log, wanted.asked, wanted.policies, wanted.settings)
        table = write_parquet(log, out / "samples.parquet")
    path = records.write(
        out / "evaluation.json", "evaluation", results, config=config, seed=wanted.settings.seed,
        wall_seconds=time.perf_counter() - started,
    )  # fmt: skip
    page = files.write_text(out / "report.html", render(collect(out)))
    if json_output:
        common.print_json(results)
    else:
        print("\n".join(evaluate_text.summary(results)))
    common.wrote(table, path, page, quiet=json_output)


def _sample(wanted: Wanted, log: SampleLog, on_progress: Any) -> None:
    from sparroll.evaluate.run import run

    engine, scorer = _engine(wanted)
    bring_adapter = None
    if (folder := wanted.adapter) is not None:
        from sparroll.engines.adapter import load_adapter

        bring_adapter = partial(load_adapter, engine, wanted.model, folder)
    # What runs async functions is closed with whatever they hold open.
    with engine, contextlib.closing(wanted.judge.calls) if wanted.judge else contextlib.nullcontext():
        run(
            engine,
            scorer,
            wanted.asked,
            wanted.policies,
            wanted.settings,
            log,
            PromptEncoder(engine.tokenizer, wanted.chat, wanted.thinking),
            on_progress,
            bring_adapter,
        )


def _check_adapter(adapter: Path | None, schedule: Schedule | None, model: str) -> None:
    """Raise UserError before anything is loaded where it could not be used."""
    if adapter is None:
        return
    if schedule is None:
        raise UserError("--adapter is for sparse responses", "add --schedule or --budget")
    from sparroll.engines.adapter import check_base

    check_base(adapter, model)


def _policies(
    schedule: Schedule | None, compression: Compression | None, adapter: Path | None, also_dense: bool
) -> list[Policy]:
    from sparroll.evaluate.settings import DENSE, Policy

    if schedule is None and compression is None:
        return [DENSE]
    digest = None
    if adapter is not None:
        from sparroll.engines.adapter import weights_digest

        digest = weights_digest(adapter)
    chosen = Policy("sparse" if schedule is not None else "evicted", schedule, compression, digest)
    return [DENSE, chosen] if also_dense else [chosen]


def _engine(wanted: Wanted) -> tuple[Engine, Scorer | None]:
    """The engine, and a scorer of the model's weights where the tail is asked for. With an adapter the scorer has weights of
    its own, since the engine's will not stay the model's."""
    from sparroll.engines.scoring import Scorer

    share = 0.5 if wanted.settings.tail else 0.85
    capacity = wanted.policies[-1].schedule
    engine = common.load_engine(
        wanted.engine, wanted.model, None, wanted.device, wanted.max_batch, capacity,
        gpu_memory_share=share, dtype=wanted.dtype,
    )  # fmt: skip
    if not wanted.settings.tail:
        return engine, None
    where: dict[str, Any] = {"device": wanted.device, "dtype": common.torch_dtype(wanted.dtype)}
    return engine, Scorer(wanted.model, **where) if wanted.adapter else Scorer.beside(engine, **where)


def _complete(log: SampleLog, wanted: Wanted) -> bool:
    """Whether nothing is left to sample, so that no model need be loaded."""
    groups = sum(line["kind"] == "group" for line in log.lines())
    return bool(groups == len(wanted.policies) * sum(len(task.problems) for task in wanted.asked))


def _config(wanted: Wanted) -> dict[str, Any]:
    """Everything that the samples depend on."""
    from sparroll.evaluate.settings import problem_digest
    from sparroll.evaluate.weights import fingerprint
    from sparroll.tasks.data.task import DataTask

    # A problem's digest is of text and answer; what a program must pass is in neither.
    rows = {each.label: each.task.fingerprint() for each in wanted.asked if isinstance(each.task, DataTask)}
    return {
        "model": wanted.model,
        "weights": fingerprint(wanted.model),
        "tasks": {task.label: task.level for task in wanted.asked},
        "problems": {task.label: [problem_digest(prompt) for prompt in task.problems] for task in wanted.asked},
        "rows": rows or None,
        "policies": {policy.name: policy.table() for policy in wanted.policies},
        **dataclasses.asdict(wanted.settings),
        "chat": wanted.chat,
        "thinking": wanted.thinking,
        "engine": wanted.engine,
        "dtype": wanted.dtype,
        "problem_seed": wanted.problem_seed,
        "contest_window": [day and day.isoformat() for day in wanted.window] if any(wanted.window) else None,
        "reward": wanted.judge.function.table() if wanted.judge else None,
    }


def _same_as_before(out: Path, config: dict[str, Any]) -> None:
    """Keep what was asked; refuse to go on with samples that were asked for differently."""
    asked = out / "config.json"
    config = json.loads(json.dumps(records.plain(config)))
    if not asked.exists():
        files.write_json(asked, config)
        return
    before = json.loads(asked.read_text(encoding="utf-8"))
    changed = sorted(name for name in before.keys() | config.keys() if before.get(name) != config.get(name))
    if changed:
        raise UserError(
            f"{out} holds samples that were asked for with other {', '.join(changed)}",
            "choose another folder with --out",
        )


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
    print("\n".join(evaluate_text.comparison(result)))
