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
BEFORE = tuple(f"decode-step-batch-1-{kind}fine-qwen3-1.7b-h200" for kind in ("", "busy-host-", "sixteen-cores-"))
"""Of an H200, one engine after the other."""
IN_BUDGET = "decode-step-within-budget-fine-qwen3-1.7b-{}"
IN_BUDGET_BEFORE = ("h100", "h200", "separate-h100", "separate-h200", "separate-later-h200")
"""One engine after the other."""


def more_than_dense(record: str) -> dict[tuple[int, int], float]:
    """By (batch, context), what a sparse step takes more than a dense one, in %."""
    return {cell: 100 * (sparse / dense - 1) for cell, (dense, sparse) in pairs(decode_cells(record)).items()}


def one_request() -> Figures:
    """What a step with one request takes more than a dense one, in %."""
    found, on_h200 = (more_than_dense(BY_TURNS.format(gpu)) for gpu in ("h100", "h200"))
    blocks = [cell["seconds"] for cell in results(BY_TURNS.format("h200"), "decode-step")]
    before = [more_than_dense(record)[1, 16_384] for record in BEFORE]
    pages = more_than_dense("decode-step-qwen3-1.7b-h200")
    short = [pages[1, context] for context in (1024, 4096)]
    return {
        **{f"at_{context}": up(found[1, context], 1) for context in (1024, 4096, 16_384)},
        "less": down(-found[1, 32_768], 1),
        **{f"h200_{context}": up(on_h200[1, context], 1) for context in (1024, 4096, 16_384)},
        "h200_less": down(-on_h200[1, 32_768], 1),
        "h200_apart": up(max(100 * (max(times) / min(times) - 1) for times in blocks)),
        "before_least": up(min(before), 1),
        "before_most": up(max(before), 1),
        "least": up(min(short), 1),
        "most": up(max(short), 1),
    }


def _profile(name: str) -> dict[str, Any]:
    found: dict[str, Any] = results(name, "profile-step")
    return found


def one_request_profiled() -> Figures:
    """Where the time of a sparse layer goes with one request, in us, and what dense attention takes."""
    found = _profile("profile-qwen3-1.7b-1x16384-h100")
    sparse, layers = found["sparse"]["groups_ms"], found["sparse_layers"]
    return {
        **{name: up(1e3 * sparse[name] / layers, 1) for name in ("scores", "choice", "gather")},
        "dense": down(1e3 * found["dense"]["groups_ms"]["attention, FA3"] / found["layers"], 1),
        "layers": str(layers),
    }


def one_request_in_short_steps() -> Figures:
    """A step with one request where short steps are dense, beside the dense engine's in two records, in ms."""
    name = "decode-step-batch-1-short-fine-qwen3-1.7b-h200"
    config = records.read(RESULTS / f"{name}.json", "decode-step")["config"]
    found, earlier = (pairs(decode_cells(each)) for each in (name, BEFORE[0]))
    short = {length: found[1, length] for length in (1024, 4096, 16_384)}
    dense = {length: earlier[1, length][0] for length in short}
    return {
        "tokens": str(config["short_step_tokens"]),
        "beside": up(max(100 * (short[length][0] / dense[length] - 1) for length in short)),
        **{f"took_{length}": up(took, 2) for length, (_, took) in short.items()},
        **{f"dense_{length}": up(took, 2) for length, took in dense.items()},
    }


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
    return {
        "meet": str(sum(each <= 100 * OVERHEAD_GOAL for each in whole)),
        "cells": str(len(whole)),
        **{f"short_{context}": up(more[1, context], 1) for _, context in short},
        "short_least": down(min(apart[cell] for cell in short)),
        "short_most": up(max(apart[cell] for cell in short)),
        "sparse": down(-more[1, 32_768], 1),
        "blocks": str(max(len(of) for of in pairs.values())),
        "fewer_blocks": str(min(len(of) for of in pairs.values())),
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
        "By turns on an H100 a step of Qwen3-1.7B with one request takes {at_1024} % more than dense at 1,024 tokens, "
        "{at_4096} % more at 4,096 and {at_16384} % more at 16,384, and {less} % less at 32,768": one_request,
        "By turns on an H200 it takes {h200_1024}, {h200_4096} and {h200_16384} % more and {h200_less} % less": one_request,
        "there blocks of one engine lie up to {h200_apart} % apart": one_request,
        "for each of the {layers} sparse layers the scores take {scores} us, the choice {choice} and the attention "
        "{gather}, where dense attention takes {dense} us a layer": one_request_profiled,
        "they have {before_least} to {before_most} % at 16,384 tokens.": one_request,
        "`page_mean` costs {least} to {most} % more at the two short lengths on an H200.": one_request,
        "With `short_step_tokens = {tokens}` the steps of the three shorter lengths are dense on purpose, and one request "
        "takes {took_1024}, {took_4096} and {took_16384} ms there": one_request_in_short_steps,
        "The dense engine took {dense_1024}, {dense_4096} and {dense_16384} ms in the earlier record; beside them, in the "
        "later one, it was slower by up to {beside} %": one_request_in_short_steps,
        "such steps take {short_1024}, {short_4096} and {short_16384} % more than dense ones, {short_least} to {short_most} "
        "us (": whole_steps_by_turns,
        "medians over {fewer_blocks} to {blocks} pairs of blocks that followed each other": whole_steps_by_turns,
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
