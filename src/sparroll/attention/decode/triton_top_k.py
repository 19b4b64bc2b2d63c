"""The k best units of each (request, head), in ascending order: a selection, not a sort, of any number of units.

One program does it for one head. Where it can hold all scores, it looks for the k-th largest by search over their ordered
bits, and writes the units above it and, of those equal to it, the lowest. Of more scores it makes candidates first, and
looks at all of them only twice:

1. The scores are dealt to a row of lanes, and each lane keeps its largest. At least k scores reach the k-th largest of
   these, because k lanes do. With some times more lanes than k, hardly more than k do.
2. The units that reach it are listed, in ascending order. They are the candidates, among which the search goes on.

Where more candidates were found than there is room for, as among equal scores, the search looks at all scores each time:
slower, and just as exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_threshold import (
    LEAST,
    narrowed,
    ordered_bits,
    quarters,
    reaching_quarters,
    threshold_within,
)
from sparroll.attention.selectors.base import Selector

_WIDEST_FILL = 1024
_SCORES_PER_WARP = 256
_MOST_SCORES_PER_WARP = 1024


@dataclass(frozen=True)
class ChoiceLayout:
    """How a program is laid out. It changes the speed and never the result."""

    warps: int = 8
    held: int = 2048
    """Up to so many units there is a lane for each score; a power of two, as the other three."""
    chunk: int = 4096
    """Most scores that it holds at a time where there are more."""
    lanes: int = 2048
    """Of step 1 and of the search, and the room for candidates; `chunk` where these are less than twice the units
    wanted."""
    chunk_of_all: int = 2048
    """Scores that it holds at a time while it writes, and where there is no room for the candidates."""


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
    layout: ChoiceLayout | None = None,
) -> None:
    """See paged.choose_units. `layout` is for measurements."""
    requests, heads, units = scores_RHU.shape
    most = unit_ids_RHN.shape[2]
    if requests == 0:
        return
    layout = layout or ChoiceLayout()
    all_units = max(256, triton.next_power_of_2(units))
    chunk, lanes = (all_units, all_units) if all_units <= layout.held else (layout.chunk, layout.lanes)
    aligned = not any(stride % 4 for stride in scores_RHU.stride()[:2]) and scores_RHU.data_ptr() % 16 == 0
    # Inside a CUDA graph this belongs to the graph, and all layers share it.
    candidates = torch.empty(requests, heads, chunk, dtype=torch.int32, device=scores_RHU.device)
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    block_table = unit_ids_RHN if block_table_RM is None else block_table_RM
    _choose[(heads, requests)](
        scores_RHU,
        context_tokens_R,
        kv_budget_tokens_R,
        unit_ids_RHN,
        pages,
        block_table,
        candidates,
        *scores_RHU.stride()[:2],
        *unit_ids_RHN.stride()[:2],
        *pages.stride()[:2],
        block_table.stride(0),
        most,
        UNIT=selector.unit_tokens,
        UNITS_PER_BLOCK=units_per_block,
        CHUNK=chunk,
        LANES=lanes,
        HELD=all_units <= layout.held,
        CHUNK_OF_ALL=min(layout.chunk_of_all, chunk),
        # Rows that begin at whole 16 bytes also have room up to the next ones.
        LOADED=4 if aligned else 1,
        FILL=min(max(32, triton.next_power_of_2(most)), _WIDEST_FILL),
        WITH_PAGES=pages_RHN is not None,
        FILL_REST=fill_rest,
        num_warps=max(min(max(4, chunk // _SCORES_PER_WARP), layout.warps), chunk // _MOST_SCORES_PER_WARP),
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
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    HELD: tl.constexpr,
    CHUNK_OF_ALL: tl.constexpr,
    LOADED: tl.constexpr,
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
    elif wanted > 0:
        if HELD:
            unit = tl.arange(0, LANES)
            ordered = _ordered(scores_row, unit, units, LOADED)
            least = tl.min(tl.where(unit < units, ordered, 0x7FFFFFFF), axis=0)
            threshold = threshold_within(ordered, least, tl.max(ordered, axis=0), wanted, wanted, FAR=True)
            wanted_equals = wanted - tl.sum((ordered > threshold).to(tl.int32), axis=0)
            # In parts, because a place for every score would take more registers than the search.
            _write_all(
                scores_row, ids_row, pages_row, table_row, units, threshold, wanted_equals, UNITS_PER_BLOCK,
                CHUNK_OF_ALL, LOADED, WITH_PAGES,
            )  # fmt: skip
        else:
            listed_row = candidates + (request * tl.num_programs(0) + head) * CHUNK
            _choose_of_many(
                scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, LANES, CHUNK,
                CHUNK_OF_ALL, LOADED, WITH_PAGES,
            )  # fmt: skip

    if FILL_REST:
        nothing = tl.full([FILL], -1, tl.int32)
        for start in range(wanted, most, FILL):
            spare = start + fill
            tl.store(ids_row + spare, nothing, mask=spare < most)
            if WITH_PAGES:
                tl.store(pages_row + spare, nothing, mask=spare < most)


@triton.jit
@no_type_check
def _choose_of_many(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNK_OF_ALL: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Write the `wanted` best, at least one and not all."""
    fits = 0
    reached = tl.full([], LEAST + 1, tl.int32)
    highest = tl.full([], 0x7FFFFFFF, tl.int32)
    if (units <= LANES) | (2 * wanted <= LANES):
        fits, reached, highest = _choose_candidates(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, LANES, CHUNK,
            LOADED, WITH_PAGES,
        )  # fmt: skip
    # The first condition is known when the kernel is compiled, and then what follows is left out.
    elif CHUNK > LANES:  # noqa: SIM102
        if wanted <= CHUNK:
            fits, reached, highest = _choose_candidates(
                scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, CHUNK, CHUNK,
                LOADED, WITH_PAGES,
            )  # fmt: skip
    if fits == 0:
        _choose_from_all(
            scores_row, ids_row, pages_row, table_row, units, wanted, reached, highest, UNITS_PER_BLOCK,
            CHUNK_OF_ALL, LOADED, WITH_PAGES,
        )  # fmt: skip


@triton.jit
@no_type_check
def _choose_candidates(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Write the `wanted` best, at least one, not all and no more than lanes; nothing where the candidates do not fit.
    Whether they do, what at least `wanted` scores reach, and the highest score."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], LEAST, tl.int32)
    for start in range(0, units, CHUNK):
        unit = start + tl.arange(0, CHUNK // LANES)[:, None] * LANES + lane[None, :]
        best = tl.maximum(best, tl.max(_ordered(scores_row, unit, units, LOADED), axis=0))
    least = tl.min(tl.where(lane < units, best, 0x7FFFFFFF), axis=0)
    highest = tl.max(best, axis=0)
    # With a lane for each unit, the k-th largest of the lanes is that of the scores. Otherwise any number will do that
    # enough lanes reach, and not so many more that there is no room for their units.
    enough = tl.where((units > LANES) & (4 * wanted <= LANES), wanted + wanted // 2, wanted)
    reached = threshold_within(best, least, highest, wanted, enough, FAR=True)
    count = tl.zeros([], tl.int32)
    unit = lane
    ordered = best
    threshold = reached
    if units > LANES:
        for start in range(0, units, CHUNK):
            each = start + tl.arange(0, CHUNK)
            reaches = (_ordered(scores_row, each, units, LOADED) >= reached).to(tl.int32)
            place = count + tl.cumsum(reaches, axis=0) - 1
            tl.store(listed_row + place, each, mask=(reaches != 0) & (place < LANES))
            count += tl.sum(reaches, axis=0)
        if count <= LANES:
            # What other threads listed must have arrived.
            tl.debug_barrier()
            listed = lane < count
            unit = tl.load(listed_row + lane, mask=listed, other=0)
            score = tl.load(scores_row + unit, mask=listed, other=0.0)
            ordered = tl.where(listed, ordered_bits(score), LEAST)
            threshold = threshold_within(ordered, reached, highest, wanted, wanted, FAR=False)
    if count <= LANES:
        wanted_equals = wanted - tl.sum((ordered > threshold).to(tl.int32), axis=0)
        _write(
            ids_row, pages_row, table_row, unit, ordered, threshold, wanted_equals, 0, 0, UNITS_PER_BLOCK, WITH_PAGES
        )
    return (count <= LANES).to(tl.int32), reached, highest


@triton.jit
@no_type_check
def _choose_from_all(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    units,
    wanted,
    reached,
    highest,
    UNITS_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Write the `wanted` best, whose threshold lies between two numbers: at least `wanted` scores reach the lower one,
    and none lies above the higher one."""
    low = reached.to(tl.int64)
    high = highest.to(tl.int64)
    # As threshold_within does.
    reach = tl.full([], 0x1FFFFF, tl.int32)
    while low < high:
        first, second, third = quarters(low, high)
        reaching = tl.zeros([], tl.int64)
        for start in range(0, units, CHUNK):
            ordered = _ordered(scores_row, start + tl.arange(0, CHUNK), units, LOADED)
            reaching += tl.sum(reaching_quarters(ordered, first, second, third), axis=0)
        low, high, reach = narrowed(low, high, reach, first, second, third, reaching, wanted)
    threshold = low.to(tl.int32)
    above = tl.zeros([], tl.int32)
    for start in range(0, units, CHUNK):
        ordered = _ordered(scores_row, start + tl.arange(0, CHUNK), units, LOADED)
        above += tl.sum((ordered > threshold).to(tl.int32), axis=0)
    _write_all(
        scores_row, ids_row, pages_row, table_row, units, threshold, wanted - above, UNITS_PER_BLOCK, CHUNK, LOADED,
        WITH_PAGES,
    )  # fmt: skip


@triton.jit
@no_type_check
def _write_all(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    units,
    threshold,
    wanted_equals,
    UNITS_PER_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Write the units above the threshold, and of those equal to it as many as are wanted, looking at CHUNK at a time."""
    above = tl.zeros([], tl.int32)
    equal = tl.zeros([], tl.int32)
    for start in range(0, units, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        ordered = _ordered(scores_row, unit, units, LOADED)
        _write(
            ids_row, pages_row, table_row, unit, ordered, threshold, wanted_equals, above, equal, UNITS_PER_BLOCK,
            WITH_PAGES,
        )  # fmt: skip
        above += tl.sum((ordered > threshold).to(tl.int32), axis=0)
        equal += tl.sum((ordered == threshold).to(tl.int32), axis=0)


@triton.jit
@no_type_check
def _ordered(scores_row, unit, units, LOADED: tl.constexpr):
    """Ordered bits of scores; LEAST, which no score has, of units that do not exist. A thread loads LOADED at a time."""
    score = tl.load(scores_row + unit, mask=unit // LOADED < (units + LOADED - 1) // LOADED, other=0.0)
    return tl.where(unit < units, ordered_bits(score), LEAST)


@triton.jit
@no_type_check
def _write(
    ids_row,
    pages_row,
    table_row,
    unit,
    ordered,
    threshold,
    wanted_equals,
    above_before,
    equal_before,
    UNITS_PER_BLOCK: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Ascending units into the list: those above the threshold, and of those equal to it as many as are wanted."""
    above = (ordered > threshold).to(tl.int32)
    equal = (ordered == threshold).to(tl.int32)
    # One scan counts both: units above in the lower half of each word, equal ones in the upper half.
    counted = tl.cumsum(above + (equal << 16), axis=0)
    above_so_far = above_before + (counted & 0xFFFF)
    equal_so_far = equal_before + (counted >> 16)
    chosen = (above != 0) | ((equal != 0) & (equal_so_far <= wanted_equals))
    place = above_so_far + tl.minimum(equal_so_far, wanted_equals) - 1
    tl.store(ids_row + place, unit, mask=chosen)
    if WITH_PAGES:
        block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=chosen, other=0).to(tl.int32)
        tl.store(pages_row + place, block * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK, mask=chosen)
