"""Figures in sentences about decode steps in which sparse mode has little or nothing to gain: one request, and contexts
within the budget. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from claim_words import Claims, Figures, down, up
from record_tables import RESULTS, results
from render_speed import OVERHEAD_GOAL, decode_cells, pairs

from sparroll import records

BY_TURNS = "decode-step-batch-1-in-turns-fine-qwen3-1.7b-{}"
IN_BUDGET = "decode-step-within-budget-fine-qwen3-1.7b-{}"
IN_BUDGET_BEFORE = ("h100", "h200", "separate-h100", "separate-h200", "separate-later-h200")
"""One engine after the other."""


def more_than_dense(record: str) -> dict[tuple[int, int], float]:
    """By (batch, context), what a sparse step takes more than a dense one, in %."""
    return {cell: 100 * (sparse / dense - 1) for cell, (dense, sparse) in pairs(decode_cells(record)).items()}


def one_request() -> Figures:
    """What a step with one request takes more than a dense one, in %."""
    said: dict[str, str] = {}
    for gpu in ("h200", "h100"):
        found = more_than_dense(BY_TURNS.format(gpu))
        said |= {f"{gpu}_{context}": up(found[1, context], 1) for context in (1024, 4096, 16_384)}
        said[f"{gpu}_less"] = down(-found[1, 32_768], 1)
    return said


def _profile(name: str) -> dict[str, Any]:
    found: dict[str, Any] = results(name, "profile-step")
    return found


def whole_steps_by_turns() -> Figures:
    """Steps that read everything, within the budget or because they are short, beside dense ones: medians over the pairs
    of blocks that followed each other, in % and in us."""
    blocks: dict[tuple[int, int], dict[str, list[float]]] = {}
    for cell in results("decode-step-whole-steps-in-turns-fine-qwen3-1.7b-h200", "decode-step"):
        blocks.setdefault((cell["batch"], cell["context_tokens"]), {})[cell["engine"]] = cell["seconds"]
    pairs = {cell: list(zip(of["triton"], of["dense"], strict=True)) for cell, of in blocks.items()}
    more = {cell: 100 * (median(ours / dense for ours, dense in of) - 1) for cell, of in pairs.items()}
    apart = {cell: 1e6 * median(ours - dense for ours, dense in of) for cell, of in pairs.items()}
    short, within = ([(1, 1024), (1, 4096), (1, 16_384)], [(batch, 194) for batch in (1, 8, 32, 64)])
    whole = [more[cell] for cell in (*short, *within)]
    config = records.read(RESULTS / "decode-step-whole-steps-in-turns-fine-qwen3-1.7b-h200.json", "decode-step")[
        "config"
    ]
    return {
        "tokens": str(config["short_step_tokens"]),
        "meet": str(sum(each <= 100 * OVERHEAD_GOAL for each in whole)),
        "cells": str(len(whole)),
        **{f"short_{context}": up(more[1, context], 1) for _, context in short},
        "sparse": down(-more[1, 32_768], 1),
        **{f"within_{batch}": up(more[batch, 194], 1) for batch, _ in within},
        "within_least": down(min(apart[cell] for cell in within)),
        "within_most": up(max(apart[cell] for cell in within)),
    }


def in_budget() -> Figures:
    """What steps take more than dense ones in contexts that a schedule of small units reads whole, in %: by turns, and in
    the records in which one engine was measured after the other."""
    record = IN_BUDGET.format("in-turns-h100")
    found = list(more_than_dense(record).values())
    before = [more for each in IN_BUDGET_BEFORE for more in more_than_dense(IN_BUDGET.format(each)).values()]
    undisturbed = pairs(decode_cells(record, fastest_quarter)).values()
    blocks = results(record, "decode-step")[0]["seconds"]
    meet = sum(more <= 100 * OVERHEAD_GOAL for more in found)
    assert 0 < meet < len(found), "the page says that some cells meet the goal and others do not"
    return {
        "least": up(min(found), 1),
        "most": up(max(found), 1),
        "meet": str(meet),
        "cells": str(len(found)),
        "blocks": str(len(blocks)),
        "undisturbed": up(100 * max(sparse / dense - 1 for dense, sparse in undisturbed), 1),
        "before_least": up(min(before), 1),
        "before_most": up(max(before), 1),
    }


def fastest_quarter(seconds: Sequence[float]) -> float:
    """The mean of the fastest quarter of some times: those that the host disturbed least."""
    return mean(sorted(seconds)[: len(seconds) // 4])


def in_budget_profiled() -> Figures:
    """Milliseconds of the kernels of a step, and of whole steps, in which the GPU waits for the host as well."""
    found = _profile("profile-qwen3-1.7b-64x194-h100")
    whole = [1e3 * seconds for seconds in found["sparse"]["wall_seconds"]]
    return {
        "sparse": up(found["sparse"]["kernel_ms"], 2),
        "dense": down(found["dense"]["kernel_ms"], 2),
        "index": up(found["sparse"]["groups_ms"]["index update"], 2),
        "fastest": up(min(whole), 1),
        "slowest": up(max(whole), 1),
    }


PAGES: Mapping[str, Claims] = {
    "docs/results.md": {
        "On an H200 a step of Qwen3-1.7B with one request takes {h200_1024} % more than dense at 1,024 tokens, {h200_4096} "
        "% more at 4,096 and {h200_16384} % more at 16,384, and {h200_less} % less at 32,768.": one_request,
        "On an H100 it takes {h100_1024}, {h100_4096} and {h100_16384} % more and {h100_less} % less": one_request,
        "With `short_step_tokens = {tokens}` the steps of the three shorter lengths are dense on purpose. By turns, on an "
        "H200 with nothing beside it, such steps take {short_1024}, {short_4096} and {short_16384} % more than dense ones": (
            whole_steps_by_turns
        ),
        "At 32,768 tokens, where the step stays sparse, one request takes {sparse} % less there": whole_steps_by_turns,
        "1, 8, 32 and 64 requests of 194 tokens take {within_1}, {within_8}, {within_32} and {within_64} % more than dense "
        "ones, {within_least} to {within_most} us. With the short steps {meet} of {cells} cells are within": (
            whole_steps_by_turns
        ),
        "**They take {least} to {most} % more than dense ones, and {meet} of {cells} cells meet the goal.** Those are the "
        "medians of {blocks} blocks in each cell": in_budget,
        "In the fastest quarter of the blocks they take {undisturbed} % more at most": in_budget,
        "the kernels of a sparse step take {sparse} ms and those of a dense one {dense}; {index} ms of that update the "
        "index. Blocks of whole steps took {fastest} to {slowest} ms": in_budget_profiled,
        "have medians from {before_least} to {before_most} % over dense": in_budget,
    },
}
