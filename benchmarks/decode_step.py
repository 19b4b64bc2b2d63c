"""Time of one decode step in vLLM, dense (stock FlashAttention 3) against sparse, over batch and context. One GPU.

    python benchmarks/decode_step.py --model qwen3-1.7b --out benchmarks/results/decode-step-qwen3-1.7b-h200.json
    python benchmarks/decode_step.py --model qwen3-1.7b --within-budget \\
        --out benchmarks/results/decode-step-within-budget-qwen3-1.7b-h200.json

The engines run one after the other in one process with the same settings (--separate: a process each). A time is the mean
over --steps steps in a row, measured --repeats times (see vllm_engines.py). Cells of at most --short tokens, where sparse
differs from dense by a few percent at most, are measured in three rounds: before, among and after the others, so that what
drifts shows between the rounds. Cells that an engine's cache does not hold are in the record with the reason.

--within-budget takes contexts that the schedule reads whole from the first to the last step of a measurement: half of
the longest such context, and the longest. There sparse mode has nothing to gain, so what it takes more is its overhead.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import vllm_engines
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
    cells = [(context, batch) for context in options.contexts for batch in options.batches]
    short = [cell for cell in cells if cell[0] <= options.short]
    long = [cell for cell in cells if cell[0] > options.short]
    middle = len(long) // 2
    return short + long[:middle] + short + long[middle:] + short


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """One engine, every cell."""
    attention = ENGINES[name]
    asked: dict[str, Any] | None = None
    if attention is not None:
        asked = {"schedule": options.schedule, "attention": attention, "short_step_tokens": options.short_step_tokens}
    cells: dict[tuple[int, int], Cell] = {}
    engine = Engine(options.model, Path(options.folder), asked, max_num_seqs=max(options.batches))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    parser.add_argument("--engines", nargs="+", default=["dense", "triton"], choices=list(ENGINES))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument(
        "--within-budget", action="store_true", help="contexts that the schedule reads whole, in place of --contexts"
    )
    parser.add_argument(
        "--short-step-tokens", type=int, default=0, help="what the sparse engines get (see docs/vllm.md)"
    )
    parser.add_argument("--short", type=int, default=1024, help="contexts up to this are measured in three rounds")
    parser.add_argument("--steps", type=int, default=16, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=3, help="how often they are timed in each cell and round")
    parser.add_argument("--separate", action="store_true", help="each engine in a process of its own")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    options = parser.parse_args()
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, Path(options.folder))
    if options.within_budget:
        decoded = STEPS_TO_START + 2 + WARM_STEPS + options.steps * options.repeats
        options.contexts = contexts_within_budget(Schedule.load(options.schedule), decoded)
    began, cells, engines = time.perf_counter(), [], {}
    for name in options.engines:
        found = vllm_engines.own_process(measure, options, name) if options.separate else measure(options, name)
        cells += found["cells"]
        engines[name] = found["engine"]
        print(f"{name} measured after {time.perf_counter() - began:.0f} s", flush=True)
    table(cells)
    if options.out:
        schedule = Schedule.load(options.schedule)
        config = {key: value for key, value in vars(options).items() if key not in ("out", "folder")} | {
            "schedule": schedule.name,
            "schedule_table": schedule.inline(),
            "engine": engines,
        }
        records.write(options.out, "decode-step", cells, config=config, wall_seconds=time.perf_counter() - began)


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
