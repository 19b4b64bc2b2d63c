"""Time of one decode step in vLLM, dense (stock FlashAttention 3) against sparse, over batch and context. One GPU.

    python benchmarks/decode_step.py --model qwen3-1.7b --out benchmarks/results/decode-step-qwen3-1.7b-h200.json
    python benchmarks/decode_step.py --model qwen3-1.7b --within-budget \\
        --out benchmarks/results/decode-step-within-budget-qwen3-1.7b-h200.json

The engines run one after the other in one process with the same settings. With --separate each has a process, and with
--in-turns they take turns in theirs, block by block, so that a slow spell of the host is the same for all (see
engines_in_turns.py). A time is the mean over --steps steps in a row, measured --repeats times (see vllm_engines.py). Cells
of at most --short tokens, where sparse differs from dense by a few percent at most, are measured in three rounds: before,
among and after the others, so that what drifts shows between the rounds. Cells that an engine's cache does not hold are in
the record with the reason.

--within-budget takes contexts that the schedule reads whole from the first to the last step of a measurement: half of
the longest such context, and the longest. There sparse mode has nothing to gain, so what it takes more is its overhead.

--cells takes single cells in place of all contexts with all batches.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import engines_in_turns
import vllm_engines
from engines_in_turns import GPU_SHARE, LEAD_STEPS, EngineApart
from vllm_engines import STEPS_TO_START, WARM_STEPS, DoesNotFit, Engine

from sparroll import records
from sparroll.schedule import Schedule

BATCHES = [1, 8, 32, 64]
CONTEXTS = [1024, 4096, 8192, 16384, 32768]
ENGINES: dict[str, str | None] = {"dense": None, "triton": "triton", "fa3_pages": "fa3_pages"}
Cell = dict[str, Any]


def contexts_within_budget(schedule: Schedule, measured_tokens: int) -> list[int]:
    """Half of the longest context that the schedule reads whole, and the longest that stays whole while a request decodes
    what is measured."""
    whole = 1
    while all(group.read_tokens(whole + 1) == whole + 1 for group in schedule.groups):
        whole += 1
    if whole <= 2 * measured_tokens:
        raise SystemExit(
            f"the schedule reads contexts up to {whole} whole, and measuring decodes {measured_tokens} tokens"
        )
    return [whole // 2, whole - measured_tokens]


def rounds(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(context, batch) in the order in which they are measured; short contexts come three times."""
    cells = options.cells or [(context, batch) for context in options.contexts for batch in options.batches]
    short = [cell for cell in cells if cell[0] <= options.short]
    long = [cell for cell in cells if cell[0] > options.short]
    middle = len(long) // 2
    return short + long[:middle] + short + long[middle:] + short


def most_requests(options: argparse.Namespace) -> int:
    return max(batch for _, batch in rounds(options))


def cell_of(text: str) -> tuple[int, int]:
    """(context, batch) of "8x1024", which is 8 requests of 1,024 tokens."""
    batch, context = map(int, text.split("x"))
    return context, batch


def asked_of(options: argparse.Namespace, name: str) -> dict[str, Any] | None:
    """What the plugin is asked for; None for stock vLLM."""
    attention = ENGINES[name]
    if attention is None:
        return None
    return {"schedule": options.schedule, "attention": attention, "short_step_tokens": options.short_step_tokens}


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One engine, every cell."""
    cells: dict[tuple[int, int], Cell] = {}
    settings = {"max_num_seqs": most_requests(options)}
    engine = Engine(options.model, Path(options.folder), asked_of(options, name), **settings)
    with engine:
        for context, batch in rounds(options):
            cell = cells.setdefault((context, batch), {"engine": name, "batch": batch, "context_tokens": context})
            try:
                seconds = engine.step_seconds([context] * batch, options.steps, options.repeats)
            except DoesNotFit as error:
                cell["skipped"] = str(error)
                continue
            cell.setdefault("seconds", []).extend(seconds)
        about = engine.settings() | {"capacity_tokens": engine.capacity_tokens}
    return {"cells": list(cells.values()), "engine": about | {"left_over_gib": engine.left_over_bytes / 2**30}}


def measure_one_by_one(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What `measure` gives for each engine."""
    began, found = time.perf_counter(), {}
    for name in options.engines:
        found[name] = vllm_engines.own_process(measure, options, name) if options.separate else measure(options, name)
        print(f"{name} measured after {time.perf_counter() - began:.0f} s", flush=True)
    return found


def measure_in_turns(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The same, cell by cell."""
    found: dict[str, dict[tuple[int, int], Cell]] = {name: {} for name in options.engines}
    settings = {"max_num_seqs": most_requests(options), "gpu_memory_utilization": GPU_SHARE / len(options.engines)}
    engines: dict[str, EngineApart] = {}
    with ExitStack() as stack:
        for name in options.engines:
            engine = EngineApart(options.model, Path(options.folder), asked_of(options, name), **settings)
            engines[name] = stack.enter_context(engine)
        for context, batch in rounds(options):
            cells = {
                name: of.setdefault((context, batch), {"engine": name, "batch": batch, "context_tokens": context})
                for name, of in found.items()
            }
            try:
                seconds = engines_in_turns.step_seconds(engines, [context] * batch, options.steps, options.repeats)
            except DoesNotFit as error:
                for cell in cells.values():
                    cell["skipped"] = str(error)
                continue
            for name, cell in cells.items():
                cell.setdefault("seconds", []).extend(seconds[name])
    return {name: {"cells": list(found[name].values()), "engine": engines[name].about} for name in options.engines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    parser.add_argument("--engines", nargs="+", default=["dense", "triton"], choices=list(ENGINES))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    cells = parser.add_mutually_exclusive_group()
    cells.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    cells.add_argument(
        "--within-budget", action="store_true", help="contexts that the schedule reads whole, in place of --contexts"
    )
    cells.add_argument(
        "--cells", nargs="+", type=cell_of, metavar="BATCHxCONTEXT", help="in place of --batches and --contexts"
    )
    parser.add_argument(
        "--short-step-tokens", type=int, default=0, help="what the sparse engines get (see docs/vllm.md)"
    )
    parser.add_argument("--short", type=int, default=1024, help="contexts up to this are measured in three rounds")
    parser.add_argument("--steps", type=int, default=16, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=3, help="how often they are timed in each cell and round")
    apart = parser.add_mutually_exclusive_group()
    apart.add_argument("--separate", action="store_true", help="each engine in a process of its own")
    apart.add_argument("--in-turns", action="store_true", help="the same, and they take turns, block by block")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    options = parser.parse_args()
    if options.cells and options.batches != BATCHES:
        parser.error("--cells says how many requests each cell has: leave out --batches")
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, Path(options.folder))
    if options.within_budget:
        decoded = STEPS_TO_START + 2 + WARM_STEPS + options.steps * options.repeats
        if options.in_turns:
            decoded += LEAD_STEPS * options.repeats
        options.contexts = contexts_within_budget(Schedule.load(options.schedule), decoded)
    began = time.perf_counter()
    found = measure_in_turns(options) if options.in_turns else measure_one_by_one(options)
    measured = [each for of in found.values() for each in of["cells"]]
    engines = {name: of["engine"] for name, of in found.items()}
    table(measured)
    if options.out:
        schedule = Schedule.load(options.schedule)
        idle = {"batches", "contexts"} if options.cells else {"cells"}
        config = {key: value for key, value in vars(options).items() if key not in {"out", "folder", *idle}} | {
            "schedule": schedule.name,
            "schedule_table": schedule.inline(),
            "engine": engines,
        }
        records.write(options.out, "decode-step", measured, config=config, wall_seconds=time.perf_counter() - began)


def table(cells: list[Cell]) -> None:
    found = {(c["engine"], c["batch"], c["context_tokens"]): c for c in cells}
    for batch, context in sorted({key[1:] for key in found}):
        shown = []
        for engine in ENGINES:
            cell = found.get((engine, batch, context), {})
            if "seconds" in cell:
                best, median, worst = (1e3 * f(cell["seconds"]) for f in (min, vllm_engines.median, max))
                shown.append(f"{engine} {median:.3f} ({best:.3f}-{worst:.3f}) ms")
            elif cell:
                shown.append(f"{engine} skipped: {cell['skipped']}")
        print(f"batch {batch:3} context {context:6}: {'  '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
