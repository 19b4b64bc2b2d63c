"""The choice among many units of which some hundred or thousand are wanted, for batches in which every multiprocessor makes
several choices at a time: with few registers and little work for each score.

A sample of the scores says which number somewhat more than k scores reach. One pass lists the units that reach it, and the
search goes on among them. Where the sample deceives, as it may where scores have a period, a lower number is taken.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from sparroll.attention.decode.choice.triton_large_choice import choose_between_bounds
from sparroll.attention.decode.choice.triton_listing import (
    choose_listed,
    list_units,
    ordered_scores,
    scores_of,
)
from sparroll.attention.decode.choice.triton_threshold import LARGEST, LEAST, below, ends, ordered_bits, searched

ROWS = tl.constexpr(4)
"""Scores that a thread holds at a time while it lists, in fours."""
_SURE = tl.constexpr(4.5)
"""Standard deviations of the rank in a sample of single scores. That is generous, because the sample holds fours of
neighbours, and these are often alike."""
_TRIES = tl.constexpr(3)


@triton.jit
@no_type_check
def choose_by_sample(
    scores_row,
    ids_row,
    pages_row,
    table_row,
    listed_row,
    units,
    wanted,
    UNITS_PER_BLOCK: tl.constexpr,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Write the `wanted` best of more than LANES units, at least one and not all. `listed_row` has 2 * LANES places."""
    count, low, finite = _candidates(scores_row, listed_row, units, wanted, QUADS, LANES, LOADED, COMPILED)
    # What other threads listed must have arrived.
    tl.debug_barrier()
    if count <= LANES // 4:
        choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            LANES // 4, WITH_PAGES, True, COMPILED,
        )  # fmt: skip
    elif count <= LANES // 2:
        choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            LANES // 2, WITH_PAGES, True, COMPILED,
        )  # fmt: skip
    elif count <= LANES:
        choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            LANES, WITH_PAGES, False, COMPILED,
        )  # fmt: skip
    elif count <= 2 * LANES:
        choose_listed(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, count, low, finite, UNITS_PER_BLOCK,
            2 * LANES, WITH_PAGES, False, COMPILED,
        )  # fmt: skip
    else:
        choose_between_bounds(
            scores_row, ids_row, pages_row, table_row, listed_row, units, wanted, UNITS_PER_BLOCK, QUADS, LANES, LOADED,
            WITH_PAGES, True, COMPILED,
        )  # fmt: skip


@triton.jit
@no_type_check
def _candidates(
    scores_row,
    listed_row,
    units,
    wanted,
    QUADS: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """List units in ascending order, the `wanted` best among them. How many there are, more than 2 * LANES where there is no
    room; a number that their scores reach; the largest finite one of the sample."""
    SAMPLE: tl.constexpr = LANES // 4
    quad = tl.arange(0, SAMPLE // 4) * (units // 4) // (SAMPLE // 4)
    unit = 4 * quad[:, None] + tl.arange(0, 4)[None, :]
    held = tl.reshape(ordered_scores(scores_row, unit, units, LOADED), [SAMPLE])
    least, finite = ends(held)
    share = wanted.to(tl.float32) / units.to(tl.float32)
    rank = share * SAMPLE
    # Of a part, drawn without putting back.
    deviation = tl.sqrt(rank * (1.0 - share) * (1.0 - SAMPLE / units.to(tl.float32))) + 1.0
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
    CHUNK: tl.constexpr = 4 * ROWS * QUADS
    inside = tl.arange(0, ROWS)[:, None] * (4 * QUADS) + tl.arange(0, 4 * QUADS)[None, :]
    count = tl.zeros([], tl.int32)
    score = scores_of(scores_row, inside, units, LOADED)
    for start in range(0, units, CHUNK):
        unit = start + inside
        # One iteration early, so that they arrive while these are listed.
        following = scores_of(scores_row, unit + CHUNK, units, LOADED)
        ordered = tl.where(unit < units, ordered_bits(score), LEAST)
        count = list_units(
            listed_row, listed_row, listed_row, unit, ordered >= low, count, ROWS, QUADS, ROOM, 1, False, COMPILED
        )
        score = following
    return count
