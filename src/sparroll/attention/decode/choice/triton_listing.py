"""How kernels write chosen units into lists: where each one goes, and stores that hand nothing from thread to thread.
These are jit helpers."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from sparroll.attention.decode.choice.triton_threshold import LEAST, ordered_bits


@triton.jit
@no_type_check
def places_in_order(listed, before, ROWS: tl.constexpr, QUADS: tl.constexpr):
    """Where each unit of [ROWS, QUADS, 4] goes that is listed (1, not 0), behind `before` others, and how many are
    listed then. ROWS is a multiple of 4, and there are fewer than 2 ** 16 units.

    A thread counts the units of each of its fours, and one scan over threads adds up four rows at a time.
    """
    of_quad = tl.sum(listed, axis=2)
    # Four rows to a word, in fields of 16 bits.
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
    begins = tl.reshape(((begins[:, None, :] >> field[None, :, None]) & 0xFFFF).to(tl.int32), [ROWS, QUADS])
    return before + begins[:, :, None] + tl.cumsum(listed, axis=2) - listed, before + count.to(tl.int32)


@triton.jit
@no_type_check
def list_units(
    ids_row,
    unit,
    listed,
    before,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
    ROOM: tl.constexpr,
    COMPILED: tl.constexpr,
    pages_row=None,
    table_row=None,
    UNITS_PER_BLOCK: tl.constexpr = 1,
    WITH_PAGES: tl.constexpr = False,
):
    """Append the units of [ROWS, 4 * QUADS] that are listed, in ascending order, behind `before` others, and with pages
    where each lies; how many there are then. There may be more than there is room for."""
    listed = tl.reshape(listed.to(tl.int32), [ROWS, QUADS, 4])
    unit = tl.reshape(unit, [ROWS, QUADS, 4])
    place, count = places_in_order(listed, before, ROWS, QUADS)
    fits = (listed != 0) & (place < ROOM)
    put(ids_row, place, unit, fits, COMPILED)
    if WITH_PAGES:
        put(pages_row, place, page_of(table_row, unit, fits, UNITS_PER_BLOCK, COMPILED), fits, COMPILED)
    return count


@triton.jit
@no_type_check
def places_of_best(ordered, threshold, wanted):
    """Where lanes above the threshold go, and of those equal to it the first, up to `wanted` in all; which they are."""
    above = (ordered > threshold).to(tl.int32)
    equal = (ordered == threshold).to(tl.int32)
    # One scan counts both: units above in the lower half of each word, equal ones in the upper half.
    counted = tl.cumsum(above + (equal << 16), axis=0)
    wanted_equals = wanted - tl.sum(above, axis=0)
    above_so_far = counted & 0xFFFF
    equal_so_far = counted >> 16
    chosen = (above != 0) | ((equal != 0) & (equal_so_far <= wanted_equals))
    return above_so_far + tl.minimum(equal_so_far, wanted_equals) - 1, chosen


@triton.jit
@no_type_check
def put(row, place, number, mask, COMPILED: tl.constexpr):
    """row[place] = number where the mask is set. `tl.store` would hand pointers and numbers from thread to thread
    first, to bring neighbours in memory together where there are none."""
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
def page_of(table_row, unit, mask, UNITS_PER_BLOCK: tl.constexpr, COMPILED: tl.constexpr):
    """The place of each unit in the cache, from a table of int32; any number where the mask is not set. As `put`, it
    hands nothing over, where `tl.load` might."""
    if COMPILED:
        block = tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b64 at; setp.ne.b32 p, $3, 0; mad.wide.s32 at, $2, 4, $1; mov.b32 $0, 0;"
            " @p ld.global.b32 $0, [at]; }",
            "=r,l,r,r",
            [table_row.to(tl.int64), unit // UNITS_PER_BLOCK, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=mask, other=0)
    return block * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK


@triton.jit
@no_type_check
def scores_of(scores_row, unit, units, LOADED: tl.constexpr, wanted=True):
    """Scores of units; any numbers of those that do not exist or are not wanted. Threads load LOADED neighbours at a time,
    all of which are wanted or none: a mask that might cut them apart would make a load of each, and ptxas lets such loads
    wait for each other."""
    loaded = wanted & (unit // LOADED < (units + LOADED - 1) // LOADED)
    return tl.load(scores_row + unit, mask=loaded, other=0.0)


@triton.jit
@no_type_check
def ordered_scores(scores_row, unit, units, LOADED: tl.constexpr, wanted=True):
    """Ordered bits of `scores_of`; LEAST, which no score has, of units that do not exist or are not wanted."""
    score = scores_of(scores_row, unit, units, LOADED, wanted)
    return tl.where(wanted & (unit < units), ordered_bits(score), LEAST)
