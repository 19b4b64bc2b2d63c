"""The k best units of each (request, head), in ascending order: a selection, not a sort. One program holds all scores
of its head in registers, finds the k-th largest by bisection over their ordered bits, and writes what lies above it
and, of the units equal to it, the lowest."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_threshold import LEAST, best_threshold, ordered_bits
from sparroll.attention.selectors.base import Selector

_WIDEST_FILL = 1024
_SCORES_PER_WARP = 256


def choose_units(
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor | None,
    block_table_RM: Tensor | None,
    units_per_block: int,
    fill_rest: bool = True,
    warps: int | None = None,
) -> None:
    """See paged.choose_units. `warps` is for measurements."""
    requests, heads, units = scores_RHU.shape
    most = unit_ids_RHN.shape[2]
    if requests == 0:
        return
    lanes = max(256, triton.next_power_of_2(units))
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    block_table = unit_ids_RHN if block_table_RM is None else block_table_RM
    _choose[(heads, requests)](
        scores_RHU,
        context_tokens_R,
        kv_budget_tokens_R,
        unit_ids_RHN,
        pages,
        block_table,
        *scores_RHU.stride()[:2],
        *unit_ids_RHN.stride()[:2],
        *pages.stride()[:2],
        block_table.stride(0),
        most,
        UNIT=selector.unit_tokens,
        UNITS_PER_BLOCK=units_per_block,
        LANES=lanes,
        FILL=min(max(32, triton.next_power_of_2(most)), _WIDEST_FILL),
        WITH_PAGES=pages_RHN is not None,
        FILL_REST=fill_rest,
        num_warps=warps or min(max(4, lanes // _SCORES_PER_WARP), 8),
        **overlapping(scores_RHU),
    )


@triton.jit
@no_type_check
def _choose(
    scores,
    context_tokens,
    kv_budget_tokens,
    unit_ids,
    pages,
    block_table,
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
    LANES: tl.constexpr,
    FILL: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    FILL_REST: tl.constexpr,
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
    fill = tl.arange(0, FILL)

    if wanted == units:
        for start in range(0, wanted, FILL):
            each = start + fill
            tl.store(ids_row + each, each, mask=each < wanted)
            if WITH_PAGES:
                its_block = tl.load(table_row + each // UNITS_PER_BLOCK, mask=each < wanted, other=0).to(tl.int32)
                tl.store(pages_row + each, its_block * UNITS_PER_BLOCK + each % UNITS_PER_BLOCK, mask=each < wanted)
    else:
        # Short contexts need not pay for the longest one.
        if units <= LANES // 8:
            _select(scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, LANES // 8, WITH_PAGES)
        elif units <= LANES // 2:
            _select(scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, LANES // 2, WITH_PAGES)
        else:
            _select(scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, LANES, WITH_PAGES)

    if FILL_REST:
        nothing = tl.full([FILL], -1, tl.int32)
        for start in range(wanted, most, FILL):
            spare = start + fill
            tl.store(ids_row + spare, nothing, mask=spare < most)
            if WITH_PAGES:
                tl.store(pages_row + spare, nothing, mask=spare < most)


@triton.jit
@no_type_check
def _select(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """The `wanted` best of fewer than or exactly LANES units."""
    unit = tl.arange(0, LANES)
    exists = unit < units
    score = tl.load(scores_row + unit, mask=exists, other=float("-inf"))
    ordered = tl.where(exists, ordered_bits(score), LEAST)
    threshold = best_threshold(ordered, exists, wanted)
    above = (ordered > threshold).to(tl.int32)
    equal = ((ordered == threshold) & exists).to(tl.int32)
    wanted_equals = wanted - tl.sum(above, axis=0)
    # One scan counts both: units above in the lower half of each word, equal ones in the upper half.
    counted = tl.cumsum(above + (equal << 16), axis=0)
    above_so_far = counted & 0xFFFF
    equal_so_far = counted >> 16
    chosen = (above != 0) | ((equal != 0) & (equal_so_far <= wanted_equals))
    place = above_so_far + tl.minimum(equal_so_far, wanted_equals) - 1
    tl.store(ids_row + place, unit, mask=chosen)
    if WITH_PAGES:
        block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=chosen, other=0).to(tl.int32)
        tl.store(pages_row + place, block * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK, mask=chosen)
