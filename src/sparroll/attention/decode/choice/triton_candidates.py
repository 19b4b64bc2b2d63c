"""Candidates, of more units than there are lanes: listed in ascending order, and the `wanted` best are among them. Lanes or
peaks say which number enough scores reach, or a sample of the scores does. triton_top_k.py says when each is made.

A sample takes few registers and little work for each score. So it is for batches in which every multiprocessor makes
several choices at a time, and for what peaks and lanes do not suit. One pass lists the units that reach its number. Where
it deceives, as it may where scores have a period, a lower number is taken. These are jit helpers.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from sparroll.attention.decode.choice.triton_large_choice import ROWS as LISTED_ROWS
from sparroll.attention.decode.choice.triton_listing import list_units, ordered_scores, put, scores_of
from sparroll.attention.decode.choice.triton_threshold import (
    LARGEST,
    LEAST,
    below,
    ends,
    ordered_bits,
    rank_in_sample,
    searched,
)
from sparroll.attention.decode.workspace import PEAK_UNITS

PEAK = tl.constexpr(PEAK_UNITS)
_PEAK_ROWS = tl.constexpr(4)
"""Scores that a thread holds at a time where there are peaks, in fours."""
_SURE = tl.constexpr(4.5)
"""Standard deviations of the rank in a sample of single scores. That is generous, because the sample holds fours of
neighbours, and these are often alike."""
_TRIES = tl.constexpr(3)


@triton.jit
@no_type_check
def candidates_of_all(
    scores_row,
    listed_row,
    units,
    wanted,
    ROWS: tl.constexpr,
    LANE_ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    ROOM: tl.constexpr,
    HELD: tl.constexpr,
    LOADED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """List at least `wanted` units in ascending order, the best among them. How many there are, which may be more than
    there is room for; a number that their scores reach; the largest finite one that was seen. HELD: all scores are held
    at a time."""
    CHUNK: tl.constexpr = 4 * ROWS * QUADS
    LANES: tl.constexpr = 4 * LANE_ROWS * QUADS
    inside = tl.arange(0, ROWS)[:, None] * (4 * QUADS) + tl.arange(0, 4 * QUADS)[None, :]
    ordered = ordered_scores(scores_row, inside, units, LOADED)
    best = _largest_of(ordered, LANE_ROWS, ROWS, QUADS)
    if not HELD:
        for start in range(CHUNK, units, CHUNK):
            part = ordered_scores(scores_row, start + inside, units, LOADED)
            best = tl.maximum(best, _largest_of(part, LANE_ROWS, ROWS, QUADS))
    # Any number will do that enough lanes reach, and not so many more that there is no room for their units.
    enough = tl.maximum(wanted + wanted // 4, LANES // 8)
    least, finite = ends(best)
    first, second, third, fourth = below(finite, least)
    low = searched(
        best, least, tl.minimum(units, LANES), LARGEST, first, second, third, fourth, wanted, enough, False
    )  # fmt: skip
    count = tl.zeros([], tl.int32)
    if HELD:
        count = list_units(listed_row, inside, ordered >= low, count, ROWS, QUADS, ROOM, COMPILED)
    else:
        for start in range(0, units, CHUNK):
            part = ordered_scores(scores_row, start + inside, units, LOADED)
            count = list_units(listed_row, start + inside, part >= low, count, ROWS, QUADS, ROOM, COMPILED)
    return count, low, finite


@triton.jit
@no_type_check
def candidates_under_peaks(
    scores_row,
    peaks_row,
    listed_row,
    units,
    wanted,
    QUADS: tl.constexpr,
    ROOM: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """As `candidates_of_all`, with a lane for each peak. `listed_row` has ROOM places for candidates, and behind them as
    many for peaks."""
    lane = tl.arange(0, LANES)
    peaks = (units + PEAK - 1) // PEAK
    best = tl.load(peaks_row + lane, mask=lane < peaks, other=LEAST)
    least, finite = ends(best)
    first, second, third, fourth = below(finite, least)
    low = searched(best, least, peaks, LARGEST, first, second, third, fourth, wanted, wanted + wanted // 4, False)
    reached = (best >= low).to(tl.int32)
    place = tl.cumsum(reached, axis=0) - reached
    high = tl.sum(reached, axis=0)
    high_row = listed_row + ROOM
    put(high_row, place, lane, (reached != 0) & (place < ROOM), COMPILED)
    count = tl.full([], ROOM + 1, tl.int32)
    if high <= ROOM:
        count = tl.zeros([], tl.int32)
        # What other threads listed must have arrived.
        tl.debug_barrier()
        TOGETHER: tl.constexpr = 4 * _PEAK_ROWS * QUADS // PEAK
        for start in range(0, high, TOGETHER):
            each = start + tl.arange(0, TOGETHER)
            peak = tl.load(high_row + each, mask=each < high, other=0)
            unit = peak[:, None] * PEAK + tl.arange(0, PEAK)[None, :]
            listed = ordered_scores(scores_row, unit, units, LOADED, (each < high)[:, None]) >= low
            count = list_units(
                listed_row, tl.reshape(unit, [_PEAK_ROWS, 4 * QUADS]), tl.reshape(listed, [_PEAK_ROWS, 4 * QUADS]), count,
                _PEAK_ROWS, QUADS, ROOM, COMPILED,
            )  # fmt: skip
    return count, low, finite


@triton.jit
@no_type_check
def _largest_of(ordered, LANE_ROWS: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr):
    """The largest of every ROWS / LANE_ROWS scores, none of which are neighbours."""
    split = tl.reshape(ordered, [ROWS // LANE_ROWS, LANE_ROWS, 4 * QUADS])
    return tl.reshape(tl.max(split, axis=0), [4 * LANE_ROWS * QUADS])


@triton.jit
@no_type_check
def candidates_by_sample(
    scores_row,
    listed_row,
    units,
    wanted,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """List units in ascending order, of more than LANES the `wanted` best among them: at least one and not all.
    `listed_row` has 2 * LANES places. How many there are, more where there is no room; a number that their scores reach; the
    largest finite one of the sample."""
    SAMPLE: tl.constexpr = LANES // 4
    quad = tl.arange(0, SAMPLE // 4) * (units // 4) // (SAMPLE // 4)
    unit = 4 * quad[:, None] + tl.arange(0, 4)[None, :]
    held = tl.reshape(ordered_scores(scores_row, unit, units, LOADED), [SAMPLE])
    least, finite = ends(held)
    rank, deviation = rank_in_sample(units, wanted, SAMPLE)
    at_least = tl.minimum((rank + _SURE * deviation).to(tl.int32), SAMPLE)
    tolerance = (0.5 * deviation).to(tl.int32)
    low = least
    count = tl.zeros([], tl.int32)
    # Where there is no room for as many as the sample asks for, nothing is listed.
    expected = at_least.to(tl.float32) * (units.to(tl.float32) / SAMPLE)
    tries = tl.where(expected > 2 * LANES, _TRIES, 0)
    while (count < wanted) & (tries < _TRIES):
        # The end of a list that was begun anew must have been written.
        tl.debug_barrier()
        first, second, third, fourth = below(finite, least)
        low = searched(
            held, least, SAMPLE, LARGEST, first, second, third, fourth, at_least, at_least + tolerance, False
        )  # fmt: skip
        count = _list_reaching(scores_row, listed_row, units, low, QUADS, 2 * LANES, LOADED, COMPILED)
        tries = tl.where(at_least == SAMPLE, _TRIES, tries + 1)
        at_least = tl.minimum(2 * at_least, SAMPLE)
    return tl.where(count < wanted, 2 * LANES + 1, count), low, finite


@triton.jit
@no_type_check
def _list_reaching(
    scores_row,
    listed_row,
    units,
    low,
    QUADS: tl.constexpr,
    ROOM: tl.constexpr,
    LOADED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """List the units whose scores reach `low`, as far as there is room; how many they are."""
    CHUNK: tl.constexpr = 4 * LISTED_ROWS * QUADS
    inside = tl.arange(0, LISTED_ROWS)[:, None] * (4 * QUADS) + tl.arange(0, 4 * QUADS)[None, :]
    count = tl.zeros([], tl.int32)
    score = scores_of(scores_row, inside, units, LOADED)
    for start in range(0, units, CHUNK):
        unit = start + inside
        # One iteration early, so that they arrive while these are listed.
        following = scores_of(scores_row, unit + CHUNK, units, LOADED)
        ordered = tl.where(unit < units, ordered_bits(score), LEAST)
        count = list_units(listed_row, unit, ordered >= low, count, LISTED_ROWS, QUADS, ROOM, COMPILED)
        score = following
    return count
