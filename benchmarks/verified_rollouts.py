"""Tokens per second of verified rollouts in vLLM beside those of unverified sparse ones and of stock dense attention. One
GPU, one process.

    python benchmarks/verified_rollouts.py --model qwen3-1.7b --out benchmarks/results/verified-rollouts-qwen3-1.7b-h200.json
    python benchmarks/verified_rollouts.py --model qwen3-1.7b --schedules 128 512 qwen3-1.7b-0.86 --windows 16 64
    python benchmarks/verified_rollouts.py --model qwen3-1.7b --sets drained steady --windows 64 --schedules 128 \\
        --beside qwen3-1.7b-0.86

A moment is a batch with its contexts: --batch requests of each of --contexts, or --moments of each of rollout.py's sets
(half as many of the steady one, in as much cache as --capacity-tokens says). What the moments of a set say about its whole
run comes last in the record (`moments` says how many they are), interpolated between them as rollout.py does.

All three engines get the same settings, one after the other; stock dense and unverified sparse ones run as users get them
(V2 runner, asynchronous scheduling), the verified one as it must (V1 runner). A decode step of the first two is timed as in
decode_step.py. The verified engine is timed over whole windows: its drafts, their check and the host's work between them;
its tokens are those that stand. With --profile the record also says where the time of its windows goes, by groups of
kernels as in profile_step.py, apart for drafts and check (a GPU only), once for each moment: with the first kept share.

With random weights the dense policy would take back nearly every draft. So the verdicts are forced: a draft is kept with
the probability --kept-shares, whatever the two policies say, after the rule was computed as always. The record says so
(`kept_share_forced`). What is taken back by the rule itself is measured where models are trained, not here.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fine_schedule
import profile_step
import request_sets
import vllm_engines
from forced_verdicts import verdicts_forced
from vllm_engines import STEPS_TO_START, Engine

from sparroll import records
from sparroll.attention.selectors import PageMean
from sparroll.schedule import Schedule, Step

V2_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
WARM_WINDOWS = PROFILED_WINDOWS = 2
SHOWN = [
    "set",
    "engine",
    "schedule",
    "batch",
    "context_tokens",
    "window_tokens",
    "kept_share_forced",
    "check_share",
    "cut_share",
    "of_dense",
    "of_unverified",
]
RUN = ("engine", "schedule", "window_tokens", "floor", "kept_share_forced")
"""What the cells of one run share over the moments of its set."""
Cell = dict[str, Any]
Moment = dict[str, Any]
"""`set` ("batch" where none was asked for), `step` of the run, and `contexts`."""


@contextmanager
def v1_runner() -> Iterator[None]:
    before = os.environ.get(V2_VARIABLE)
    os.environ[V2_VARIABLE] = "0"
    try:
        yield
    finally:
        os.environ.pop(V2_VARIABLE)
        if before is not None:
            os.environ[V2_VARIABLE] = before


def schedule_named(name: str, model: str, folder: Path) -> Schedule:
    """A preset or a file; a number of tokens that every context may read: 128, or 128@4x4 for units of 4 tokens in 4 bits;
    or 512+128@4x4 where layers 0 and 1 may read 512 of them and none is dense."""
    tokens, _, units = name.partition("@")
    budget, plus, others = tokens.partition("+")
    if not budget.isdigit():
        return Schedule.load(vllm_engines.schedule_of(model, name, folder))
    selector = fine_schedule.units(units) if units else PageMean()
    if plus:
        layers = int(vllm_engines.QWEN3[model]["num_hidden_layers"])
        steps = (Step(0, (int(budget), int(others))),)
        groups, called = ((0, 1), tuple(range(2, layers))), "-".join(["wide", others, *([units] if units else [])])
        return Schedule(steps, selector, dense_layers=(), layer_groups=groups, name=called)
    dense_layers = (0,) if model == vllm_engines.TINY else (0, 1)
    return replace(Schedule.fixed(int(budget), selector, dense_layers), name=f"fixed-{name.replace('@', '-')}")


def step_cells(options: argparse.Namespace, name: str, schedule: Schedule | None) -> tuple[list[Cell], dict[str, Any]]:
    """An engine that checks nothing."""
    folder = Path(options.folder)
    asked = None if schedule is None else {"schedule": str(schedule.save(folder / f"{schedule.name}.toml"))}
    cells: list[Cell] = []
    with Engine(options.model, folder, asked, **engine_settings(options)) as engine:
        for moment in options.measured:
            seconds = engine.step_seconds(moment["contexts"], options.steps, options.repeats)
            per_second = len(moment["contexts"]) / vllm_engines.median(seconds)
            cells.append(
                {
                    "engine": name,
                    "schedule": schedule.name if schedule else None,
                    **about_moment(moment),
                    "step_seconds": seconds,
                    "tokens_per_second": per_second,
                }
            )
            show(cells[-1])
        about = engine.settings()
    return cells, about


def window_cells(options: argparse.Namespace, schedule: Schedule) -> tuple[list[Cell], dict[str, Any]]:
    """The verified engine, with each window length and share of kept drafts."""
    folder = Path(options.folder)
    checked = schedule.checked(max(options.windows), options.floor)
    asked = {"schedule": str(checked.save(folder / f"{checked.name}.toml"))}
    cells: list[Cell] = []
    with v1_runner(), Engine(options.model, folder, asked, **engine_settings(options)) as engine:
        for moment in options.measured:
            for window in options.windows:
                # So that a window shorter than the longest has a token behind its drafts, too.
                shorter = schedule.checked(window, options.floor)
                engine.llm.collective_rpc("sparroll_set_schedule", args=(shorter.table(), shorter.name, True))
                for number, share in enumerate(options.kept_shares):
                    profiled = options.profile and not number
                    with verdicts_forced(share):
                        timed = window_seconds(engine, moment["contexts"], window, options, profiled)
                    cells.append(
                        {
                            "engine": "verified",
                            "schedule": schedule.name,
                            **about_moment(moment),
                            "window_tokens": window,
                            "floor": options.floor,
                            "kept_share_forced": share,
                            **timed,
                        }
                    )
                    show(cells[-1])
        about = engine.settings()
    return cells, about


def window_seconds(
    engine: Engine, contexts: list[int], window: int, options: argparse.Namespace, profiled: bool
) -> dict[str, Any]:
    """Exactly these requests, window after window."""
    scheduler, vllm = engine._scheduler, engine.llm.llm_engine
    runner = vllm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    most = (_windows_before_profiles(options) + (3 + PROFILED_WINDOWS) * profiled + 2) * window
    engine.check_fits(contexts, most)
    scheduler.window_tokens = window
    names = [engine._add(number, context, most) for number, context in enumerate(contexts)]
    profiles, beside = [], []

    def windows(number: int) -> None:
        for _ in range(number):
            vllm.step()

    try:
        for _ in range(STEPS_TO_START):
            vllm.step()
            if len(scheduler.running) == len(names) and all(each.num_output_tokens for each in scheduler.running):
                break
        else:
            raise RuntimeError(f"{len(scheduler.running)} of {len(names)} requests started")
        windows(WARM_WINDOWS)
        runner.window_counters = type(runner.window_counters)()
        seconds, tokens = [], []
        for _ in range(options.repeats):
            before, began = sum(each.num_tokens for each in scheduler.running), time.perf_counter()
            windows(options.timed_windows)
            seconds.append(time.perf_counter() - began)
            tokens.append(sum(each.num_tokens for each in scheduler.running) - before)
        counted = runner.window_counters
        if profiled:
            # What is profiled is not among what was timed.
            runner.window_counters = type(counted)()
            # The profiler's own start is slow once. What no kernel takes is a window without it, before and behind.
            profile_step.profiled(windows, 1)
            beside.append(_seconds_of(windows))
            profiles = [profile_step.profiled(windows, 1) for _ in range(PROFILED_WINDOWS)]
            beside.append(_seconds_of(windows))
    finally:
        vllm.abort_request(names)
        windows(3)
    per_second = [made / took for made, took in zip(tokens, seconds, strict=True)]
    per_window = vllm_engines.median(seconds) / options.timed_windows
    found = {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": vllm_engines.median(per_second),
        "seconds_per_window": per_window,
        "check_share": counted.check_seconds / sum(seconds),
        "cut_share": counted.checks.cut_share,
        "drafted_per_kept": counted.checks.drafted_per_kept,
    }
    if profiles:
        found["profile"] = profile_step.summed_windows(profiles, window - 1, sum(beside) / len(beside))
    return found


def _seconds_of(windows: Callable[[int], None]) -> float:
    """Of one window. It ends with its check, whose verdicts the host has read."""
    began = time.perf_counter()
    windows(1)
    return time.perf_counter() - began


def _windows_before_profiles(options: argparse.Namespace) -> int:
    """Warm and timed windows of a moment. Profiled ones follow them and are not counted, so that --profile leaves the
    moments of a set as they are."""
    return WARM_WINDOWS + options.timed_windows * options.repeats


def about_moment(moment: Moment) -> Cell:
    contexts = moment["contexts"]
    about = {"set": moment["set"], "step": moment["step"]}
    return about | {"batch": len(contexts), "context_tokens": sum(contexts)}


def moments(options: argparse.Namespace) -> list[Moment]:
    """The batches that are measured."""
    if not options.sets:
        return [{"set": "batch", "step": 0, "contexts": [each] * options.batch} for each in options.contexts]
    found: dict[str, request_sets.Windows] = {}
    if "drained" in options.sets:
        found["drained"] = request_sets.drained_windows(options.moments, scale=options.shrink)
    if "steady" in options.sets:
        slack = 32 + max(
            options.steps * options.repeats,
            (_windows_before_profiles(options) + 2) * max(options.windows),
        )
        held = options.capacity_tokens, options.max_seqs
        found["steady"] = request_sets.steady_windows(max(2, options.moments // 2), *held, slack, options.shrink)
    return [
        {"set": name, "step": each["step"], "contexts": [int(context) for context in each["contexts"]]}
        for name, rows in found.items()
        for each in rows
    ]


def whole_runs(cells: list[Cell], scale: float = 1.0) -> list[Cell]:
    """Tokens per second of the whole run that the moments of a set stand for, of each engine as it was asked."""
    runs: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell["set"] != "batch":
            runs.setdefault((cell["set"], *(cell.get(key) for key in RUN)), []).append(cell)
    found = []
    for (name, *about), of in runs.items():
        windows = [{"step": cell["step"], "contexts": [0] * cell["batch"]} for cell in of]
        per_step = [cell["batch"] / cell["tokens_per_second"] for cell in of]
        seconds, tokens = request_sets.run_seconds(windows, per_step, name, scale)
        asked = {key: value for key, value in zip(RUN, about, strict=True) if value is not None}
        found.append({"set": name, "moments": len(of), **asked, "tokens_per_second": tokens / seconds})
    rates = {(run["set"], run["engine"], run.get("schedule")): run["tokens_per_second"] for run in found}
    for run in found:
        for key, engine, schedule in (("of_dense", "dense", None), ("of_unverified", "sparse", run.get("schedule"))):
            if engine != run["engine"] and (run["set"], engine, schedule) in rates:
                run[key] = run["tokens_per_second"] / rates[run["set"], engine, schedule]
    return found


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The same for all engines. A step has room for everybody's longest window, and every batch a graph: vLLM captures
    multiples of 16 up to this number of requests."""
    most = -(-max(len(moment["contexts"]) for moment in options.measured) // 16) * 16
    settings = {"max_num_seqs": most, "max_num_batched_tokens": max(8192, most * max(options.windows))}
    return settings | ({"max_model_len": options.max_model_len} if options.max_model_len else {})


def show(cell: Cell) -> None:
    about = "  ".join(f"{key} {cell[key]}" for key in SHOWN if cell.get(key) is not None)
    print(f"{about}: {cell['tokens_per_second']:.0f} tokens/s", flush=True)


def about(options: argparse.Namespace, beside: list[Schedule], schedules: list[Schedule]) -> dict[str, Any]:
    """What a record says of the call: schedules by name, and what each of them reads. Where files lay is not in it."""
    asked = {key: value for key, value in vars(options).items() if key not in ("out", "folder")}
    asked |= {"beside": [each.name for each in beside], "schedules": [each.name for each in schedules]}
    return asked | {"schedule_tables": {each.name: each.inline() for each in [*beside, *schedules]}}


def main() -> None:
    options = arguments()
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    beside, schedules = (
        [schedule_named(name, options.model, Path(options.folder)) for name in names]
        for names in (options.beside, options.schedules)
    )
    asked = about(options, beside, schedules)
    options.measured = moments(options)
    began, cells, engines = time.perf_counter(), [], {}

    def record() -> None:
        """After each engine, so that a call that is cut leaves what it measured."""
        if options.out:
            records.write(
                options.out,
                "verified-rollouts",
                cells + whole_runs(cells, options.shrink),
                config=asked | {"engine": engines, "verdicts": "forced by kept_share_forced, not the rule's"},
                wall_seconds=time.perf_counter() - began,
            )

    if not options.without_dense:
        cells, engines["dense"] = step_cells(options, "dense", None)
        record()
    for schedule in [*beside, *schedules]:
        sparse: list[Cell] = []
        if schedule in beside or not options.without_unverified:
            sparse, engines[f"sparse {schedule.name}"] = step_cells(options, "sparse", schedule)
            cells += sparse
            record()
        if schedule in beside:
            continue
        verified, engines[f"verified {schedule.name}"] = window_cells(options, schedule)
        rate = {(cell["set"], cell["step"], cell["context_tokens"]): cell["tokens_per_second"] for cell in sparse}
        for cell in verified if sparse else ():
            cell["of_unverified"] = cell["tokens_per_second"] / rate[cell["set"], cell["step"], cell["context_tokens"]]
        cells += verified
        record()
    for found in whole_runs(cells, options.shrink) or [cell for cell in cells if "of_unverified" in cell]:
        show(found)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument(
        "--schedules", nargs="+", help="presets, files, or budgets: 128, 128@4x4, 512+128@4x4; default: the 0.86 preset"
    )
    parser.add_argument("--beside", nargs="+", default=[], help="further ones, which run without a check only")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--contexts", nargs="+", type=int, default=[30_000])
    parser.add_argument("--sets", nargs="+", choices=["drained", "steady"], help="in place of --batch and --contexts")
    parser.add_argument("--moments", type=int, default=8, help="of the drained set; half as many of the steady one")
    parser.add_argument("--max-model-len", type=int, help="default 40,960")
    parser.add_argument("--capacity-tokens", type=int, default=1_050_000, help="of the cache, for the steady set")
    parser.add_argument("--max-seqs", type=int, default=128, help="of the steady set")
    parser.add_argument("--windows", nargs="+", type=int, default=[16, 32, 64, 128], help="tokens of a window")
    parser.add_argument("--kept-shares", nargs="+", type=float, default=[1.0, 0.9998, 0.998], help="of drafts, forced")
    parser.add_argument("--floor", type=float, default=0.01, help="of the rule, which is computed and not obeyed")
    parser.add_argument("--timed-windows", type=int, default=3, help="windows that are timed as one")
    parser.add_argument("--steps", type=int, default=32, help="decode steps of the other engines that are timed as one")
    parser.add_argument("--repeats", type=int, default=3, help="how often they are timed")
    parser.add_argument("--without-dense", action="store_true", help="leave stock dense attention out")
    parser.add_argument(
        "--without-unverified", action="store_true", help="leave the same schedules without a check out"
    )
    parser.add_argument("--profile", action="store_true", help="of the verified engine's windows, by groups of kernels")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where configs and schedules go")
    parser.add_argument("--shrink", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profile and not vllm_engines.on_gpu():
        parser.error("--profile needs a GPU: a profile is divided by its kernels")
    if not options.schedules:
        options.schedules = [vllm_engines.schedule_of(options.model, None, Path(options.folder))]
    return options


if __name__ == "__main__":
    main()
