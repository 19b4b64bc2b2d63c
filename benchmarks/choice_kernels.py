"""Other kernels for the choice of units, to be timed beside the engines' own (choice_sweep.py). No engine uses them.

All make candidates, as triton_top_k.py does where it can hold all scores, and differ in how:

- `floats`: scores stay as they are loaded. Compared as floats, "not below" is true for NaN and alike for both zeros, so
  only the candidates are turned into ordered bits. By a count of instructions that spares one in eight.
- `warps_own`: each warp owns neighbouring units. Then one scan inside of warps counts four rows in one word of 32 bits, and
  warps exchange one number each, where the engines' kernel scans words of 64 bits over all threads.
- `pairs`: each candidate is listed with its score, by one store of 8 bytes, so that nothing is gathered afterwards.

None of them splits a row among programs. 256 rows are 256 programs, two on a multiprocessor, all at a time, and what
their time follows is the number of instructions: twice as many programs would have as many, and a merge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.choice.triton_listing import (
    ordered_scores,
    page_of,
    places_in_order,
    places_of_best,
    put,
)
from sparroll.attention.decode.choice.triton_threshold import (
    INFINITY,
    LARGEST,
    LEAST,
    below,
    closely_above,
    ends,
    ordered_bits,
    searched,
)
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.selectors.base import Selector

STAGES = ("load", "first search", "list", "second search", "all")
"""A launch can end after any of them, to be timed. Only after the last one are the units written."""


@dataclass(frozen=True)
class Variant:
    """How a program works and is laid out. It changes the speed and never the result."""

    rows: int = 8
    """Scores that a thread holds, in fours; a power of two, 4 or more."""
    lane_rows: int = 1
    """Lanes of the first search that a thread holds, in fours; a power of two, at most `rows`."""
    room: int = 1024
    """For candidates, a power of two."""
    floats: bool = True
    warps_own: bool = True
    pairs: bool = True
    warps: int = 8

    @property
    def most_units(self) -> int:
        return 128 * self.warps * self.rows

    @property
    def most_wanted(self) -> int:
        return min(64 * self.warps * self.lane_rows, self.room // 2)

    def constants(self, unit_tokens: int, units_per_block: int, stage: str = STAGES[-1]) -> dict[str, int]:
        """What the kernel is compiled for."""
        return {
            "UNIT": unit_tokens, "UNITS_PER_BLOCK": units_per_block, "ROWS": self.rows, "LANE_ROWS": self.lane_rows,
            "WARPS": self.warps, "ROOM": self.room, "FLOATS": self.floats, "WARPS_OWN": self.warps_own,
            "PAIRS": self.pairs, "STAGE": STAGES.index(stage),
        }  # fmt: skip


def choose_units(
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor,
    block_table_RM: Tensor,
    units_per_block: int,
    variant: Variant,
    stage: str = STAGES[-1],
) -> None:
    """See paged.choose_units, with pages, for rows that begin at whole 16 bytes. The rest of the lists is not filled.
    Lists are left as they are where more candidates are found than there is room for, and where the choice reaches down
    to -inf or more scores are NaN than are wanted."""
    requests, heads, units = scores_RHU.shape
    wanted = unit_ids_RHN.shape[2]
    assert units <= variant.most_units and wanted <= variant.most_wanted, f"{units} -> {wanted} is too much"
    assert not any(stride % 4 for stride in scores_RHU.stride()[:2]), "rows must begin at whole 16 bytes"
    _choose_variant[(heads, requests)](
        scores_RHU,
        context_tokens_R,
        kv_budget_tokens_R,
        unit_ids_RHN,
        pages_RHN,
        block_table_RM,
        torch.empty(requests, heads, 2 * variant.room + 8, dtype=torch.int32, device=scores_RHU.device),
        *scores_RHU.stride()[:2],
        *unit_ids_RHN.stride()[:2],
        *pages_RHN.stride()[:2],
        block_table_RM.stride(0),
        wanted,
        COMPILED=scores_RHU.is_cuda,
        num_warps=variant.warps,
        maxnreg=128,
        **variant.constants(selector.unit_tokens, units_per_block, stage),
        **overlapping(scores_RHU),
    )


@triton.jit
@no_type_check
def _choose_variant(
    scores,
    context_tokens,
    kv_budget_tokens,
    unit_ids,
    pages,
    block_table,
    candidates,
    scores_per_request,
    scores_per_head,
    ids_per_request,
    ids_per_head,
    pages_per_request,
    pages_per_head,
    table_per_request,
    most,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    ROOM: tl.constexpr,
    FLOATS: tl.constexpr,
    WARPS_OWN: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGE: tl.constexpr,
    COMPILED: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    context = tl.load(context_tokens + request).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request).to(tl.int32)
    units = (context + UNIT - 1) // UNIT
    wanted = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most)
    scores_row = scores + request * scores_per_request + head * scores_per_head
    ids_row = unit_ids + request * ids_per_request + head * ids_per_head
    pages_row = pages + request * pages_per_request + head * pages_per_head
    table_row = block_table + request * table_per_request
    listed_row = candidates + (request * tl.num_programs(0) + head) * (2 * ROOM + 8)
    if wanted == units:
        for start in range(0, wanted, 32 * WARPS):
            each = start + tl.arange(0, 32 * WARPS)
            tl.store(ids_row + each, each, mask=each < wanted)
            page = page_of(table_row, each, each < wanted, UNITS_PER_BLOCK, COMPILED)
            tl.store(pages_row + each, page, mask=each < wanted)
    elif wanted > 0:
        _choose_from_candidates(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, ROWS, LANE_ROWS,
            WARPS, ROOM, FLOATS, WARPS_OWN, PAIRS, STAGE, COMPILED,
        )  # fmt: skip


@triton.jit
@no_type_check
def _choose_from_candidates(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    ROOM: tl.constexpr,
    FLOATS: tl.constexpr,
    WARPS_OWN: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write the `wanted` best; nothing where more candidates are found than there is room for."""
    LANES: tl.constexpr = 128 * LANE_ROWS * WARPS
    row, warp, inside = tl.arange(0, ROWS), tl.arange(0, WARPS), tl.arange(0, 128)
    unit = inside[None, None, :]
    if WARPS_OWN:
        unit += 128 * row[:, None, None] + (128 * ROWS) * warp[None, :, None]
    else:
        unit += (128 * WARPS) * row[:, None, None] + 128 * warp[None, :, None]
    if FLOATS:
        held = tl.load(scores_row + unit, mask=unit // 4 < (units + 3) // 4, other=0.0)
        held = tl.where(unit < units, held, float("-inf"))
    else:
        held = ordered_scores(scores_row, unit, units, 4)
    best = tl.reduce(
        tl.reshape(held, [ROWS // LANE_ROWS, LANE_ROWS, 128 * WARPS]), 0, _larger if FLOATS else _larger_bits
    )
    best = tl.reshape(best, [LANES])
    if FLOATS:
        best = ordered_bits(best)
    if STAGE == 0:
        tl.store(ids_row, tl.max(best, axis=0))
    else:
        least, finite = ends(best)
        first, second, third, fourth = below(finite, least)
        enough = tl.maximum(wanted + wanted // 4, ROOM // 8)
        low = searched(best, least, LANES, LARGEST, first, second, third, fourth, wanted, enough, False)
        if STAGE == 1:
            tl.store(ids_row, low)
        # What does not exist is held as -inf, which reaches -inf; and all numbers would seem to reach one that is NaN.
        elif (low <= INFINITY) & (low > ~INFINITY):
            count = _list(
                listed_row, unit, held, low, ROWS, WARPS, ROOM, FLOATS, WARPS_OWN, PAIRS, COMPILED
            )  # fmt: skip
            if count <= ROOM:
                # What other threads listed must have arrived.
                tl.debug_barrier()
                _choose_listed(
                    scores_row, ids_row, pages_row, table_row, listed_row, wanted, count, low, finite, UNITS_PER_BLOCK,
                    ROOM, FLOATS, PAIRS, STAGE, COMPILED,
                )  # fmt: skip


@triton.jit
@no_type_check
def _list(
    listed_row,
    unit,
    held,
    low,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    ROOM: tl.constexpr,
    FLOATS: tl.constexpr,
    WARPS_OWN: tl.constexpr,
    PAIRS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """List the units whose scores reach a number, in ascending order; how many there are."""
    if FLOATS:
        bits = tl.where(low < 0, low ^ 0x7FFFFFFF, low)
        reaches = ~(held < bits.to(tl.float32, bitcast=True))
    else:
        reaches = held >= low
    if WARPS_OWN:
        listed = tl.reshape(reaches.to(tl.int32), [ROWS, WARPS, 32, 4])
        begins, count = _begins_by_warps(listed, ROWS, WARPS)
        # The four places behind the room are nobody's.
        place = tl.minimum(begins, ROOM)[:, :, :, None] + tl.cumsum(listed, axis=3) - listed
        fits = tl.reshape(listed, [ROWS, WARPS, 128]) != 0
    else:
        listed = tl.reshape(reaches.to(tl.int32), [ROWS, 32 * WARPS, 4])
        place, count = places_in_order(listed, 0, ROWS, 32 * WARPS)
        fits = tl.reshape((listed != 0) & (place < ROOM), [ROWS, WARPS, 128])
    place = tl.reshape(place, [ROWS, WARPS, 128])
    if PAIRS:
        bits = held.to(tl.int32, bitcast=True) if FLOATS else held
        _put_pair(listed_row, place, unit, bits, fits, COMPILED)
    else:
        put(listed_row, place, unit, fits, COMPILED)
    return count


@triton.jit
@no_type_check
def _choose_listed(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    wanted,
    count,
    low,
    finite,
    UNITS_PER_BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    FLOATS: tl.constexpr,
    PAIRS: tl.constexpr,
    STAGE: tl.constexpr,
    COMPILED: tl.constexpr,
):
    lane = tl.arange(0, ROOM)
    listed = lane < count
    if PAIRS:
        pair = tl.load(listed_row.to(tl.pointer_type(tl.int64)) + lane, mask=listed, other=0)
        unit, bits = pair.to(tl.int32), (pair >> 32).to(tl.int32)
        ordered = ordered_bits(bits.to(tl.float32, bitcast=True)) if FLOATS else bits
    else:
        unit = tl.load(listed_row + lane, mask=listed, other=0)
        ordered = ordered_bits(tl.load(scores_row + unit, mask=listed, other=0.0))
    ordered = tl.where(listed, ordered, LEAST)
    # It arrives while the search goes on.
    page = page_of(table_row, unit, listed, UNITS_PER_BLOCK, COMPILED)
    if STAGE == 2:
        tl.store(ids_row + lane, ordered, mask=lane < wanted)
        tl.store(pages_row + lane, page, mask=lane < wanted)
    else:
        first, second, third, fourth = closely_above(low, finite)
        threshold = searched(ordered, low, count, LARGEST, first, second, third, fourth, wanted, wanted, True)
        if STAGE == 3:
            tl.store(ids_row + lane, threshold + page, mask=lane < wanted)
        else:
            place, chosen = places_of_best(ordered, threshold, wanted)
            put(ids_row, place, unit, chosen, COMPILED)
            put(pages_row, place, page, chosen, COMPILED)


@triton.jit
@no_type_check
def _larger(one, other):
    """NaN is the largest."""
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
@no_type_check
def _larger_bits(one, other):
    return tl.maximum(one, other)


@triton.jit
@no_type_check
def _begins_by_warps(listed, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """How many units of [ROWS, WARPS, 32, 4] are listed (1, not 0) before each four, and how many are. Those of a warp
    stand together: by warp, row, lane."""
    of_quad = tl.sum(listed, axis=3)
    # Four rows to a word, in fields of 8 bits: a warp has 128 units in a row.
    field = 8 * tl.arange(0, 4)
    words = tl.sum(tl.reshape(of_quad, [ROWS // 4, 4, WARPS, 32]) << field[None, :, None, None], axis=1)
    begins = tl.cumsum(words, axis=2) - words
    of_word = tl.sum(words, axis=2)
    of_row = tl.reshape((of_word[:, None, :] >> field[None, :, None]) & 255, [ROWS, WARPS])
    of_warp = tl.sum(of_row, axis=0)
    so_far = tl.cumsum(of_warp, axis=0)
    row_begins = tl.cumsum(of_row, axis=0) - of_row + (so_far - of_warp)[None, :]
    begins = tl.reshape((begins[:, None, :, :] >> field[None, :, None, None]) & 255, [ROWS, WARPS, 32])
    return begins + row_begins[:, :, None], tl.max(so_far, axis=0)


@triton.jit
@no_type_check
def _put_pair(row, place, first, second, mask, COMPILED: tl.constexpr):
    """Two numbers of 32 bits at each place where the mask is set, as `put`."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 at; setp.ne.b32 p, $5, 0; mad.wide.s32 at, $2, 8, $1;"
            " @p st.global.v2.b32 [at], {$3, $4}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r",
            [row.to(tl.int64), place, first, second, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(row + 2 * place, first, mask=mask)
        tl.store(row + 2 * place + 1, second, mask=mask)
