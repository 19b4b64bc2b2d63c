"""The choice of the largest budgets among many units, and of scores too many of which are alike: by two bounds, between
which the k-th largest score must lie.

Some scores, spread over all units, are held and searched for two numbers: one that surely more than k scores reach, and
one above which surely fewer lie. A pass over all scores counts how many lie above and between, and lists those between.
Only among them the search goes on; another pass writes. Where the numbers deceive, as they may where the spread meets a
period of the scores, they give way to others, and where too many lie between, rounds over all scores bring them closer.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from sparroll.attention.decode.choice.triton_listing import list_units, ordered_scores, page_of
from sparroll.attention.decode.choice.triton_threshold import (
    LARGEST,
    LEAST,
    below,
    ends,
    fifths,
    narrowed,
    ordered_bits,
    rank_in_sample,
    reaching,
    searched,
)

ROWS = tl.constexpr(4)
"""Scores that a thread holds at a time, in fours."""
_SURE = tl.constexpr(3.5)
"""Standard deviations of the rank among the scores that are held. A bound that is wrong costs a pass, and so does one
too far away."""


@triton.jit
@no_type_check
def choose_between_bounds(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    QUADS: tl.constexpr,
    ROOM: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    PAGES_APART: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write the `wanted` best, at least one and not all. `listed_row` has ROOM places. PAGES_APART: after all units, which
    takes fewer registers."""
    CHUNK: tl.constexpr = 4 * ROWS * QUADS
    low, high = _bounds(scores_row, units, wanted, CHUNK)
    threshold, above, equal = _threshold_between(
        scores_row, listed_row, units, wanted, low, high, QUADS, ROOM, LOADED, COMPILED
    )  # fmt: skip
    last = units
    if above + equal > wanted:
        last = _last_of_equals(scores_row, units, threshold, wanted - above, CHUNK, LOADED)
    inside = tl.arange(0, ROWS)[:, None] * (4 * QUADS) + tl.arange(0, 4 * QUADS)[None, :]
    count = tl.zeros([], tl.int32)
    for start in range(0, units, CHUNK):
        unit = start + inside
        ordered = ordered_scores(scores_row, unit, units, LOADED)
        chosen = (ordered > threshold) | ((ordered == threshold) & (unit <= last))
        count = list_units(
            ids_row, unit, chosen, count, ROWS, QUADS, LARGEST, COMPILED,
            pages_row, table_row, UNITS_PER_BLOCK, WITH_PAGES and not PAGES_APART,
        )  # fmt: skip
    if WITH_PAGES and PAGES_APART:
        # What other threads wrote must have arrived.
        tl.debug_barrier()
        for start in range(0, wanted, 4 * QUADS):
            each = start + tl.arange(0, 4 * QUADS)
            unit = tl.load(ids_row + each, mask=each < wanted, other=0)
            page = page_of(table_row, unit, each < wanted, UNITS_PER_BLOCK, COMPILED)
            tl.store(pages_row + each, page, mask=each < wanted)


@triton.jit
@no_type_check
def _bounds(scores_row, units, wanted, LANES: tl.constexpr):
    """Two numbers that the `wanted`-th largest score lies between, as far as a part of the scores can tell."""
    lane = tl.arange(0, LANES).to(tl.uint32)
    unit = lane * (units >> 3).to(tl.uint32) // (LANES // 8)
    held = ordered_scores(scores_row, tl.where(units > LANES, unit.to(tl.int32), tl.arange(0, LANES)), units, 1)
    least, finite = ends(held)
    there = tl.minimum(units, LANES)
    rank, deviation = rank_in_sample(units, wanted, there)
    tolerance = (0.5 * deviation).to(tl.int32)
    low = tl.full([], LEAST + 1, tl.int32)
    high = tl.full([], LARGEST, tl.int32)
    for end in range(2):
        at_least = (rank + _SURE * deviation).to(tl.int32)
        at_most = at_least + tolerance
        if end == 1:
            at_most = (rank - _SURE * deviation).to(tl.int32)
            at_least = tl.maximum(at_most - tolerance, 1)
        if (at_most >= 1) & (at_least < there):
            first, second, third, fourth = below(finite, least)
            number = searched(
                held, least, there, LARGEST, first, second, third, fourth, at_least, at_most, False
            )  # fmt: skip
            if end == 0:
                low = number
            else:
                high = number
    return low, high


@triton.jit
@no_type_check
def _threshold_between(
    scores_row,
    listed_row,
    units,
    wanted,
    low,
    high,
    QUADS: tl.constexpr,
    ROOM: tl.constexpr,
    LOADED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """The `wanted`-th largest score, or a number that exactly `wanted` reach; how many lie above it, and on it."""
    CHUNK: tl.constexpr = 4 * ROWS * QUADS
    inside = tl.arange(0, ROWS)[:, None] * (4 * QUADS) + tl.arange(0, 4 * QUADS)[None, :]
    above = tl.zeros([], tl.int32)
    between = tl.zeros([], tl.int32)
    settled = 0
    while settled == 0:
        above = tl.zeros([], tl.int32)
        between = tl.zeros([], tl.int32)
        # What was listed before has been written.
        tl.debug_barrier()
        for start in range(0, units, CHUNK):
            ordered = ordered_scores(scores_row, start + inside, units, LOADED)
            higher = ordered > high
            above += tl.sum(tl.reshape(higher.to(tl.int32), [CHUNK]), axis=0)
            between = list_units(
                listed_row, start + inside, (ordered >= low) & ~higher, between, ROWS, QUADS, ROOM, COMPILED
            )
        apart = 8 * (high.to(tl.int64) - low + 1)
        if above >= wanted:
            low = high + 1
            high = tl.minimum(high + apart, LARGEST).to(tl.int32)
        elif above + between < wanted:
            high = low - 1
            low = tl.maximum(low - apart, LEAST + 1).to(tl.int32)
        elif (between <= ROOM) | (low == high):
            settled = 1
        else:
            low, high = _closer(
                scores_row, units, low, above + between, high, above, wanted, CHUNK, ROOM, LOADED
            )  # fmt: skip
    equal = between
    if low < high:
        # What other threads listed must have arrived.
        tl.debug_barrier()
        lane = tl.arange(0, ROOM)
        unit = tl.load(listed_row + lane, mask=lane < between, other=0)
        score = tl.load(scores_row + unit, mask=lane < between, other=0.0)
        ordered = tl.where(lane < between, ordered_bits(score), LEAST)
        left = wanted - above
        first, second, third, fourth = fifths(low, high)
        low = searched(ordered, low, between, high, first, second, third, fourth, left, left, True)
        above += tl.sum((ordered > low).to(tl.int32), axis=0)
        equal = tl.sum((ordered == low).to(tl.int32), axis=0)
    return low, above, equal


@triton.jit
@no_type_check
def _closer(
    scores_row,
    units,
    low,
    low_reach,
    high,
    high_reach,
    wanted,
    CHUNK: tl.constexpr,
    ROOM: tl.constexpr,
    LOADED: tl.constexpr,
):
    """The ends of a search among all scores once no more lie between than there is room for, or once they meet."""
    while (low < high) & (low_reach - high_reach > ROOM):
        first, second, third, fourth = fifths(low, high)
        firsts = tl.zeros([], tl.int32)
        seconds = tl.zeros([], tl.int32)
        thirds = tl.zeros([], tl.int32)
        fourths = tl.zeros([], tl.int32)
        for start in range(0, units, CHUNK):
            ordered = ordered_scores(scores_row, start + tl.arange(0, CHUNK), units, LOADED)
            lower, upper = reaching(ordered, first, second, third, fourth)
            firsts += lower & 0xFFFF
            seconds += lower >> 16 & 0xFFFF
            thirds += upper & 0xFFFF
            fourths += upper >> 16 & 0xFFFF
        low, low_reach, high, high_reach = narrowed(
            low, low_reach, high, high_reach, first, second, third, fourth, firsts, seconds, thirds, fourths, wanted
        )
    return low, high


@triton.jit
@no_type_check
def _last_of_equals(scores_row, units, threshold, wanted_equals, CHUNK: tl.constexpr, LOADED: tl.constexpr):
    """The last of the first `wanted_equals` units whose scores equal the threshold; -1 where none is wanted."""
    last = tl.full([], -1, tl.int32)
    before = tl.zeros([], tl.int32)
    for start in range(0, units, CHUNK):
        unit = start + tl.arange(0, CHUNK)
        equal = (ordered_scores(scores_row, unit, units, LOADED) == threshold).to(tl.int32)
        count = tl.sum(equal, axis=0)
        if (before < wanted_equals) & (before + count >= wanted_equals):
            so_far = before + tl.cumsum(equal, axis=0)
            last = tl.max(tl.where((equal != 0) & (so_far <= wanted_equals), unit, -1), axis=0)
        before += count
    return last
