"""Another kernel for the choice of units, to be timed beside the present one (choice_sweep.py). No engine uses it.

It does what triton_top_k.py does, in the same steps, with less waiting:

1. All scores are loaded once and stay in registers, where they fit. (The present kernel reads them twice, in parts.)
2. Lanes keep the largest of some scores each, and a number is searched for that enough lanes reach. Each round compares
   with four numbers, counts them in two words of 32 bits, which a warp adds up in one instruction, and begins an octave
   or two below the largest *finite* score: units that are always read are +inf, which says nothing about the others.
3. The candidates are listed by one scan of counts per thread, several rows to a word, each with its score beside it.
4. Among the candidates the search goes on. As soon as one unit too many reaches its lower end, or one too few lies above
   its upper end, the unit in question decides, however close its neighbours are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_threshold import LEAST, ordered_bits
from sparroll.attention.decode.triton_top_k import _choose_from_all, _ordered
from sparroll.attention.selectors.base import Selector

_INFINITY = tl.constexpr(0x7F800000)
"""Ordered bits of +inf; those of NaN lie above."""
_LARGEST = tl.constexpr(0x7FFFFFFF)
STAGES = ("load", "first search", "list", "second search", "all")
"""A launch can end after any of them, to be timed. Only after the last one are the units written."""


@dataclass(frozen=True)
class Layout:
    """How a program is laid out. It changes the speed and never the result."""

    warps: int = 8
    rows: int = 8
    """Scores that a thread holds at a time, in fours; a power of two."""
    lane_rows: int = 1
    """Lanes of step 2 that a thread holds, in fours; a power of two, at most `rows`."""
    candidates: int = 1024
    """Room for candidates; where all units fit in, they are the candidates. A power of two."""
    packed: bool = True
    """Whether step 3 counts four rows in a word of 64 bits, or scans all rows one after the other."""
    joined: bool = True
    """Whether the two words of a round's counts are added up side by side, so that threads wait for each other once."""

    @property
    def chunk(self) -> int:
        return 128 * self.warps * self.rows

    @property
    def lanes(self) -> int:
        return 128 * self.warps * self.lane_rows


def choose_units(
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor,
    block_table_RM: Tensor,
    units_per_block: int,
    layout: Layout,
    stage: str = STAGES[-1],
) -> None:
    """See paged.choose_units, with `fill_rest`. Budgets of more than `lanes` / 2 or `candidates` / 2 units are chosen
    from all scores each time, slowly."""
    requests, heads, units = scores_RHU.shape
    most = unit_ids_RHN.shape[2]
    listed = torch.empty(requests, heads, layout.candidates, dtype=torch.int32, device=scores_RHU.device)
    aligned = not any(stride % 4 for stride in scores_RHU.stride()[:2]) and scores_RHU.data_ptr() % 16 == 0
    _choose_quickly[(heads, requests)](
        scores_RHU,
        context_tokens_R,
        kv_budget_tokens_R,
        unit_ids_RHN,
        pages_RHN,
        block_table_RM,
        listed,
        *scores_RHU.stride()[:2],
        *unit_ids_RHN.stride()[:2],
        *pages_RHN.stride()[:2],
        block_table_RM.stride(0),
        most,
        **constants(layout, units, selector.unit_tokens, units_per_block, aligned, stage, scores_RHU.is_cuda),
        num_warps=layout.warps,
        # So that two programs fit on a multiprocessor.
        maxnreg=min(1024 // layout.warps, 248),
        **overlapping(scores_RHU),
    )


def constants(
    layout: Layout,
    units: int,
    unit_tokens: int,
    units_per_block: int,
    aligned: bool,
    stage: str = STAGES[-1],
    compiled: bool = True,
) -> dict[str, int]:
    """What a kernel is compiled for."""
    return {
        "UNIT": unit_tokens, "UNITS_PER_BLOCK": units_per_block, "ROWS": layout.rows, "LANE_ROWS": layout.lane_rows,
        "QUADS": 32 * layout.warps, "CANDIDATES": layout.candidates, "PACKED": layout.packed, "JOINED": layout.joined,
        "DIRECT": units <= layout.candidates, "HELD": units <= layout.chunk, "LOADED": 4 if aligned else 1,
        "CHUNK_OF_ALL": 2048, "FILL": 32 * layout.warps, "STAGE": STAGES.index(stage),
        "COMPILED": compiled,
    }  # fmt: skip


@triton.jit
@no_type_check
def _choose_quickly(
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
    QUADS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PACKED: tl.constexpr,
    DIRECT: tl.constexpr,
    HELD: tl.constexpr,
    LOADED: tl.constexpr,
    CHUNK_OF_ALL: tl.constexpr,
    FILL: tl.constexpr,
    STAGE: tl.constexpr,
    COMPILED: tl.constexpr,
    JOINED: tl.constexpr,
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
            its_block = tl.load(table_row + each // UNITS_PER_BLOCK, mask=each < wanted, other=0).to(tl.int32)
            tl.store(pages_row + each, its_block * UNITS_PER_BLOCK + each % UNITS_PER_BLOCK, mask=each < wanted)
    elif wanted > 0:
        if DIRECT:
            _choose_from_held(
                scores_row, ids_row, pages_row, table_row, units, wanted, UNITS_PER_BLOCK, CANDIDATES, LOADED, STAGE,
                COMPILED, JOINED,
            )  # fmt: skip
        else:
            listed_row = candidates + (request * tl.num_programs(0) + head) * CANDIDATES
            fits = 0
            # Otherwise there would be no number that enough lanes reach and few enough scores.
            if (2 * wanted <= 4 * QUADS * LANE_ROWS) & (2 * wanted <= CANDIDATES):
                fits = _choose_from_listed(
                    scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, ROWS,
                    LANE_ROWS, QUADS, CANDIDATES, PACKED, HELD, LOADED, STAGE, COMPILED,
                    JOINED,
                )  # fmt: skip
            if fits == 0:
                least = tl.full([], LEAST + 1, tl.int32)
                _choose_from_all(
                    scores_row, ids_row, pages_row, table_row, units, wanted, least, tl.full([], _LARGEST, tl.int32),
                    UNITS_PER_BLOCK, CHUNK_OF_ALL, LOADED, True,
                )  # fmt: skip

    nothing = tl.full([FILL], -1, tl.int32)
    for start in range(wanted, most, FILL):
        spare = start + fill
        tl.store(ids_row + spare, nothing, mask=spare < most)
        tl.store(pages_row + spare, nothing, mask=spare < most)


@triton.jit
@no_type_check
def _choose_from_held(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    STAGE: tl.constexpr,
    COMPILED: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Write the `wanted` best of units that all have a lane."""
    unit = tl.arange(0, LANES)
    ordered = _ordered(scores_row, unit, units, LOADED)
    if STAGE <= 2:
        tl.store(ids_row, tl.max(ordered, axis=0))
    else:
        low, low_reach, high, high_reach, _ = _begun(ordered, units, wanted, JOINED)
        threshold = _exact(ordered, low, low_reach, high, high_reach, wanted, JOINED)
        if STAGE == 3:
            tl.store(ids_row, threshold)
        else:
            place, chosen = _places(ordered, threshold, wanted)
            _put(ids_row, place, unit, chosen, COMPILED)
            block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=chosen, other=0).to(tl.int32)
            _put(pages_row, place, block * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK, chosen, COMPILED)


@triton.jit
@no_type_check
def _choose_from_listed(
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
    QUADS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PACKED: tl.constexpr,
    HELD: tl.constexpr,
    LOADED: tl.constexpr,
    STAGE: tl.constexpr,
    COMPILED: tl.constexpr,
    JOINED: tl.constexpr,
):
    """Write the `wanted` best, fewer than half of the lanes; nothing where the candidates do not fit. Whether they do."""
    CHUNK: tl.constexpr = ROWS * QUADS * 4
    LANES: tl.constexpr = LANE_ROWS * QUADS * 4
    inside = tl.arange(0, ROWS)[:, None] * (QUADS * 4) + tl.arange(0, QUADS * 4)[None, :]
    ordered = _ordered(scores_row, inside, units, LOADED)
    best = _largest_of(ordered, LANE_ROWS, ROWS, QUADS)
    if not HELD:
        for start in range(CHUNK, units, CHUNK):
            best = tl.maximum(
                best,
                _largest_of(_ordered(scores_row, start + inside, units, LOADED), LANE_ROWS, ROWS, QUADS),
            )
    fits = 1
    if STAGE == 0:
        tl.store(ids_row, tl.max(best, axis=0))
    else:
        enough = tl.maximum(wanted + wanted // 4, CANDIDATES // 4)
        low, low_reach, high, high_reach, finite = _begun(best, tl.minimum(units, LANES), wanted, JOINED)
        while (low < high) & (low_reach > enough):
            low, low_reach, high, high_reach = _round(best, low, low_reach, high, high_reach, wanted, JOINED)
        if STAGE == 1:
            tl.store(ids_row, low.to(tl.int32))
        else:
            reached = low.to(tl.int32)
            if HELD:
                count = _list(listed_row, inside, ordered, reached, 0, ROWS, QUADS, CANDIDATES, PACKED, COMPILED)
            else:
                count = tl.zeros([], tl.int32)
                for start in range(0, units, CHUNK):
                    part = _ordered(scores_row, start + inside, units, LOADED)
                    count = _list(
                        listed_row, start + inside, part, reached, count, ROWS, QUADS, CANDIDATES, PACKED, COMPILED
                    )
            fits = (count <= CANDIDATES).to(tl.int32)
            if count <= CANDIDATES:
                # What other threads listed must have arrived.
                tl.debug_barrier()
                lane = tl.arange(0, CANDIDATES)
                unit = tl.load(listed_row + lane, mask=lane < count, other=0)
                score = tl.load(scores_row + unit, mask=lane < count, other=0.0)
                its = tl.where(lane < count, ordered_bits(score), LEAST)
                # It arrives while the search goes on.
                block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=lane < count, other=0).to(tl.int32)
                page = block * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK
                if STAGE == 2:
                    tl.store(ids_row + lane, its, mask=(lane < wanted))
                    tl.store(pages_row + lane, page, mask=(lane < wanted))
                else:
                    low, low_reach, high, high_reach = _begun_among(its, low, count, finite, wanted, JOINED)
                    threshold = _exact(its, low, low_reach, high, high_reach, wanted, JOINED)
                    if STAGE == 3:
                        tl.store(ids_row + lane, threshold + page, mask=(lane < wanted))
                    else:
                        place, chosen = _places(its, threshold, wanted)
                        _put(ids_row, place, unit, chosen, COMPILED)
                        _put(pages_row, place, page, chosen, COMPILED)
    return fits


@triton.jit
@no_type_check
def _largest_of(ordered, LANE_ROWS: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr):
    """The largest of every ROWS / LANE_ROWS scores, none of which are neighbours."""
    split = tl.reshape(ordered, [ROWS // LANE_ROWS, LANE_ROWS, QUADS * 4])
    return tl.reshape(tl.max(split, axis=0), [LANE_ROWS * QUADS * 4])


@triton.jit
@no_type_check
def _begun(ordered, existing, wanted, JOINED: tl.constexpr):
    """The ends of a search among lanes, `existing` of which are not LEAST, after a first round; how many reach the lower
    one, and how many lie above the higher one; the largest finite number. `wanted` is at most `existing`."""
    finite_lanes = tl.where(ordered < _INFINITY, ordered, LEAST)
    # Turned over, the smallest is the largest.
    turned = tl.where(ordered == LEAST, LEAST, ~ordered)
    if JOINED:
        finite, least = tl.split(tl.max(tl.join(finite_lanes, turned), axis=0))
    else:
        finite, least = tl.max(finite_lanes, axis=0), tl.max(turned, axis=0)
    finite = finite.to(tl.int64)
    low = (~least).to(tl.int64)
    # The best are seldom further than an octave or two (of 2 ** 23 numbers) below the largest.
    first = tl.maximum(finite - (1 << 24), low)
    second = tl.maximum(finite - (1 << 23), low)
    third = tl.maximum(finite - (1 << 22), low)
    fourth = tl.maximum(tl.full([], _INFINITY, tl.int64), low)
    low, low_reach, high, high_reach = _narrowed(
        ordered, low, existing, tl.full([], _LARGEST, tl.int64), tl.zeros([], tl.int32), first, second, third, fourth,
        wanted, JOINED,
    )  # fmt: skip
    # No number lies between.
    return low, low_reach, tl.where(high < _INFINITY, tl.minimum(high, finite), high), high_reach, finite


@triton.jit
@no_type_check
def _begun_among(ordered, low, count, finite, wanted, JOINED: tl.constexpr):
    """The same among candidates, `count` numbers that reach `low`: most of them by little."""
    apart = tl.maximum(finite - low, 0)
    first = low + (apart >> 4)
    second = low + (apart >> 3)
    third = low + (apart >> 2)
    fourth = tl.maximum(tl.full([], _INFINITY, tl.int64), low)
    low, low_reach, high, high_reach = _narrowed(
        ordered, low, count, tl.full([], _LARGEST, tl.int64), tl.zeros([], tl.int32), first, second, third, fourth,
        wanted, JOINED,
    )  # fmt: skip
    return low, low_reach, tl.where(high < _INFINITY, tl.minimum(high, finite), high), high_reach


@triton.jit
@no_type_check
def _exact(ordered, low, low_reach, high, high_reach, wanted, JOINED: tl.constexpr):
    """A number that at least `wanted` reach, and above which no more than `wanted` lie."""
    while (low < high) & (low_reach > wanted + 1) & (high_reach < wanted - 1):
        low, low_reach, high, high_reach = _round(ordered, low, low_reach, high, high_reach, wanted, JOINED)
    threshold = low.to(tl.int32)
    if (low < high) & (low_reach > wanted):
        # One too many: the smallest that reaches the lower end. One too few: the largest up to the higher end.
        if low_reach == wanted + 1:
            threshold = tl.min(tl.where(ordered >= low.to(tl.int32), ordered, 0x7FFFFFFF), axis=0)
        else:
            threshold = tl.max(tl.where(ordered <= high.to(tl.int32), ordered, LEAST), axis=0)
    return threshold


@triton.jit
@no_type_check
def _round(ordered, low, low_reach, high, high_reach, wanted, JOINED: tl.constexpr):
    """One round, which divides what lies between the ends by five."""
    apart = high - low
    first = low + ((apart * 51 + 255) >> 8)
    second = low + ((apart * 102 + 255) >> 8)
    third = low + ((apart * 154 + 255) >> 8)
    fourth = low + ((apart * 205 + 255) >> 8)
    return _narrowed(ordered, low, low_reach, high, high_reach, first, second, third, fourth, wanted, JOINED)


@triton.jit
@no_type_check
def _narrowed(ordered, low, low_reach, high, high_reach, first, second, third, fourth, wanted, JOINED: tl.constexpr):
    """The ends after a comparison with four numbers, none below `low`, in order. At least `wanted` reach `low`, and fewer
    lie above `high`. The numbers are int64, since differences may not fit into 32 bits."""
    reached = (ordered >= first.to(tl.int32)).to(tl.int32)
    reached += (ordered >= second.to(tl.int32)).to(tl.int32) << 16
    further = (ordered >= third.to(tl.int32)).to(tl.int32)
    further += (ordered >= fourth.to(tl.int32)).to(tl.int32) << 16
    if JOINED:
        lower, upper = tl.split(tl.sum(tl.join(reached, further), axis=0))
    else:
        lower, upper = tl.sum(reached, axis=0), tl.sum(further, axis=0)
    for each in tl.static_range(4):
        number = first if each == 0 else (second if each == 1 else (third if each == 2 else fourth))
        count = ((lower if each < 2 else upper) >> (16 * (each % 2))) & 0xFFFF
        low = tl.where(count >= wanted, number, low)
        low_reach = tl.where(count >= wanted, count, low_reach)
    for back in tl.static_range(4):
        number = fourth if back == 0 else (third if back == 1 else (second if back == 2 else first))
        count = ((upper if back < 2 else lower) >> (16 * ((3 - back) % 2))) & 0xFFFF
        below = (count < wanted) & (number <= high)
        high = tl.where(below, number - 1, high)
        high_reach = tl.where(below, count, high_reach)
    return low, low_reach, high, high_reach


@triton.jit
@no_type_check
def _list(
    listed_row,
    unit,
    ordered,
    reached,
    before,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PACKED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Append the units whose scores reach a number, in ascending order; how many are listed then. There may be more than
    there is room for."""
    reaches = tl.reshape((ordered >= reached).to(tl.int32), [ROWS, QUADS, 4])
    of_quad = tl.sum(reaches, axis=2)
    if PACKED:
        # Four rows to a word, in fields of 16 bits: all rows together have fewer than 2 ** 16.
        field = 16 * tl.arange(0, 4).to(tl.int64)
        words = tl.sum(tl.reshape(of_quad, [ROWS // 4, 4, QUADS]).to(tl.int64) << field[None, :, None], axis=1)
        begins = tl.cumsum(words, axis=1) - words
        of_word = tl.sum(words, axis=1)
        word = tl.arange(0, ROWS // 4)
        count = tl.zeros([], tl.int64)
        for each in tl.static_range(ROWS // 4):
            its = tl.sum(tl.where(word == each, of_word, 0), axis=0)
            # In each field, what the fields before it hold together, and what the words before it do.
            earlier = its * 0x0001000100010000 + count * 0x0001000100010001
            begins += tl.where(word == each, earlier, 0)[:, None]
            count += (its * 0x0001000100010001) >> 48 & 0xFFFF
        count = count.to(tl.int32)
        begins = tl.reshape(((begins[:, None, :] >> field[None, :, None]) & 0xFFFF).to(tl.int32), [ROWS, QUADS])
    else:
        flat = tl.reshape(of_quad, [ROWS * QUADS])
        begins = tl.reshape(tl.cumsum(flat, axis=0) - flat, [ROWS, QUADS])
        count = tl.sum(flat, axis=0)
    place = before + begins[:, :, None] + tl.cumsum(reaches, axis=2) - reaches
    _put(listed_row, place, tl.reshape(unit, [ROWS, QUADS, 4]), (reaches != 0) & (place < CANDIDATES), COMPILED)
    return before + count


@triton.jit
@no_type_check
def _put(row, place, number, mask, COMPILED: tl.constexpr):
    """row[place] = number where the mask is set. `tl.store` would hand pointers and numbers from thread to thread first, to
    bring neighbours in memory together where there are none."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 at; setp.ne.b32 p, $4, 0; mad.wide.s32 at, $2, 4, $1;"
            " @p st.global.b32 [at], $3; mov.b32 $0, 0; }",
            "=r,l,r,r,r",
            [row.to(tl.int64), place, number, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(row + place, number, mask=mask)


@triton.jit
@no_type_check
def _places(ordered, threshold, wanted):
    """Where the units above the threshold go, and of those equal to it the first ones, up to `wanted`; which they are."""
    above = (ordered > threshold).to(tl.int32)
    equal = (ordered == threshold).to(tl.int32)
    # One scan counts both: units above in the lower half of each word, equal ones in the upper half.
    counted = tl.cumsum(above + (equal << 16), axis=0)
    wanted_equals = wanted - tl.sum(above, axis=0)
    above_so_far = counted & 0xFFFF
    equal_so_far = counted >> 16
    chosen = (above != 0) | ((equal != 0) & (equal_so_far <= wanted_equals))
    return above_so_far + tl.minimum(equal_so_far, wanted_equals) - 1, chosen
