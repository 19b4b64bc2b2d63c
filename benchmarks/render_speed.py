"""The tables of rollouts, steps and kernels in vLLM, from their records. Measures nothing; render.py writes them.

Ours are rounded up and the dense ones, which they are held against, down.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from record_tables import RESULTS, results, table, times

from sparroll.rounding import percent_down, rounded_down, rounded_up

SIZES = ("1.7b", "4b", "8b", "14b")
REQUEST_SETS = ("drained", "steady")
PAPER_SPEEDUP = {"1.7b": 2.21, "4b": 2.41, "8b": 2.06, "14b": 1.49}
"""Rollouts with the 0.86 presets on an H200 (Sparrow, arXiv 2606.08446)."""
STEADY_GOAL = {"1.7b": 2.8, "4b": 2.8, "8b": 2.6, "14b": 1.95}
"""Speed-ups that were asked for with the steady request sets."""
OVERHEAD_GOAL = 0.03
"""Most that a sparse step may take more than a dense one where the schedule reads the whole context."""
NOT_YET = "Not measured yet."


def rollout_records() -> list[tuple[str, str, dict[str, Any]]]:
    """(size, request set, results) of what was measured."""
    return [
        (size, request_set, results(f"rollout-qwen3-{size}-{request_set}-h200", "rollout"))
        for size in SIZES
        for request_set in REQUEST_SETS
        if (RESULTS / f"rollout-qwen3-{size}-{request_set}-h200.json").exists()
    ]


def rollouts() -> str:
    """Sparse against stock vLLM, a line per model and request set that was measured."""
    rows = []
    for size, request_set, found in rollout_records():
        drained = request_set == "drained"
        rows.append(
            [
                f"Qwen3-{size.upper()}",
                request_set,
                f"{math.ceil(found['dense_tokens_per_second']):,}",
                f"{math.floor(found['sparse_tokens_per_second']):,}",
                times(found["speedup"]),
                rounded_up(found["attainable_speedup"], 2) + "x",
                percent_down(found["attainable_share"]),
                rounded_up(found["attainable_speedup_fit"], 2) + "x",
                percent_down(found["attainable_share_fit"]),
                times(PAPER_SPEEDUP[size]) if drained else "",
                "" if drained else times(STEADY_GOAL[size]),
            ]
        )
    head = ["model", "requests", "dense, tokens/s", "sparse", "speed-up", "attainable", "share of it"]
    return table([*head, "attainable, fitted", "share of it", "paper", "goal"], rows)


def whole_runs() -> str:
    """Whole runs of the drained set beside what windows of the same requests say."""
    rows = []
    for size, request_set, found in rollout_records():
        if request_set != "drained":
            continue
        shorter = found.get("whole_run")
        for engine in ("dense", "sparse"):
            if shorter is not None:
                of = shorter[engine]
                rows.append(
                    _whole(size, engine, shorter["scale"], of["tokens"], of["seconds"], of["estimated_seconds"])
                )
        for engine, name in (("dense", "dense"), ("sparse", found["sparse_engine"])):
            path = f"whole-run-qwen3-{size}-{name}-h200"
            if (RESULTS / f"{path}.json").exists():
                whole = results(path, "whole-run")
                estimated = whole["tokens"] / found[f"{engine}_tokens_per_second"]
                rows.append(_whole(size, engine, 1.0, whole["tokens"], whole["seconds"], estimated))
    return table(["model", "engine", "lengths", "tokens", "run, s", "windows say, s", "error"], rows)


def _whole(size: str, engine: str, scale: float, tokens: int, seconds: float, estimated: float) -> list[str]:
    lengths = "full" if scale == 1 else f"1/{1 / scale:g}"
    error = 100 * (estimated / seconds - 1)
    # Away from 0: an error is no smaller than it reads.
    shown = rounded_down(error, 1, sign=True) if error < 0 else rounded_up(error, 1, sign=True)
    figures = [rounded_up(seconds, 1), rounded_up(estimated, 1), f"{shown}%"]
    return [f"Qwen3-{size.upper()}", engine, lengths, f"{tokens:,}", *figures]


def decode_cells(name: str = "decode-step-qwen3-1.7b-h200") -> dict[tuple[int, int, str], float]:
    """(batch, context, engine) -> milliseconds of a step, where it was measured."""
    return {
        (cell["batch"], cell["context_tokens"], cell["engine"]): 1e3 * statistics.median(cell["seconds"])
        for cell in results(name, "decode-step")
        if "seconds" in cell
    }


def pairs(cells: dict[tuple[int, int, str], float]) -> dict[tuple[int, int], tuple[float, float]]:
    """(batch, context) -> milliseconds of a dense and of a sparse step, where both were measured."""
    found = {}
    for batch, context in sorted({key[:2] for key in cells}):
        dense, sparse = (cells.get((batch, context, engine)) for engine in ("dense", "triton"))
        if dense is not None and sparse is not None:
            found[batch, context] = (dense, sparse)
    return found


def decode_steps() -> str:
    """Milliseconds of one decode step in vLLM, dense / sparse."""
    cells = decode_cells()
    found, contexts = pairs(cells), sorted({context for _, context, _ in cells})
    rows = []
    for batch in sorted({batch for batch, _, _ in cells}):
        row = [str(batch)]
        for context in contexts:
            took = found.get((batch, context))
            row.append("" if took is None else f"{rounded_down(took[0], 2)} / {rounded_up(took[1], 2)}")
        rows.append(row)
    return table(["batch", *(f"{context:,}" for context in contexts)], rows)


def short_steps() -> str:
    """The shortest context of the decode steps: it lies above its budget, and there is little to gain."""
    found = pairs(decode_cells())
    shortest = min(context for _, context in found)
    rows = [[str(batch), *_compared(*took)] for (batch, context), took in found.items() if context == shortest]
    return table([f"batch, {shortest:,} tokens each", "dense, ms", "sparse, ms", "difference"], rows)


def within_budget() -> str:
    """Contexts that the schedule reads whole: what sparse mode costs where it has nothing to gain."""
    rows = []
    for size in SIZES:
        name = f"decode-step-within-budget-qwen3-{size}-h200"
        if not (RESULTS / f"{name}.json").exists():
            continue
        for (batch, context), took in pairs(decode_cells(name)).items():
            holds = "yes" if took[1] <= (1 + OVERHEAD_GOAL) * took[0] else "no"
            rows.append([f"Qwen3-{size.upper()}", f"{context:,}", str(batch), *_compared(*took), holds])
    if not rows:
        return NOT_YET
    goal = percent_down(OVERHEAD_GOAL)
    return table(["model", "tokens each", "batch", "dense, ms", "sparse, ms", "difference", f"within {goal}"], rows)


def _compared(dense_ms: float, sparse_ms: float) -> list[str]:
    difference = rounded_up(100 * (sparse_ms / dense_ms - 1), 1, sign=True)
    return [rounded_down(dense_ms), rounded_up(sparse_ms), f"{difference}%"]


def kernels() -> str:
    """Microseconds of each kernel beside the time that its bytes take at copy bandwidth."""
    rows = []
    for row in results("kernels-h200", "kernels")["rows"]:
        if row["context_tokens"] not in ("30000", "93 mixed"):
            continue
        budget = row.get("kv_budget_tokens")
        requests = "32 of 30,000 tokens" if row["context_tokens"] == "30000" else "93 of mixed lengths"
        took = [rounded_up(row["graph_us"], 1), rounded_down(row["floor_us"], 1)]
        rows.append([requests, row["kernel"], str(budget or ""), *took])
    return table(["requests", "kernel", "KV budget", "time, us", "floor, us"], rows)
