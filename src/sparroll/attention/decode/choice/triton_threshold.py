"""How kernels find the k-th best of the scores that one program holds in registers: by search over their ordered bits,
without a sort. These are jit helpers; the callers say how many scores they want, and use the threshold."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LEAST = tl.constexpr(-0x80000000)
"""Value of a lane without a score. It is below every number, including -inf."""
LARGEST = tl.constexpr(0x7FFFFFFF)
"""Ordered bits of NaN."""
INFINITY = tl.constexpr(0x7F800000)
"""Ordered bits of +inf."""


@triton.jit
@no_type_check
def ordered_bits(score):
    """Signed integers in the order of the fp32 scores they came from; NaN is the largest, as in reference.py."""
    # Both zeros are one score, and so are NaNs of any sign and payload.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return tl.where(score != score, 0x7FFFFFFF, bits)


@triton.jit
@no_type_check
def rank_in_sample(units, wanted, held):
    """Which place the `wanted`-th of so many units can be expected to have among `held` of them, and about how far it may
    lie from there: the standard deviation where these are drawn without putting back, and a place more."""
    share = wanted.to(tl.float32) / units.to(tl.float32)
    rank = share * held
    return rank, tl.sqrt(rank * (1.0 - share) * (1.0 - held / units.to(tl.float32))) + 1.0


@triton.jit
@no_type_check
def best_threshold(ordered, exists, wanted):
    """The `wanted`-th largest of `ordered`, or a number that exactly `wanted` of them reach; the largest where none is
    wanted. Lanes that do not exist are LEAST, and `wanted` is no more than those that do."""
    low = tl.min(tl.where(exists, ordered, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(ordered, axis=0).to(tl.int64)
    # At least `wanted` scores are >= low, and the wanted-th largest is <= high; both ends meet in it, or in any
    # threshold that exactly `wanted` scores reach.
    while low < high:
        middle = (low + high + 1) >> 1
        reaching = tl.sum((ordered >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(reaching >= wanted, middle, low)
        high = tl.where(reaching > wanted, high, tl.where(reaching == wanted, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
@no_type_check
def ends(ordered):
    """The least of some lanes and their largest *finite* number, LEAST where there is none: units that are always read
    are +inf, which says nothing about the others. Lanes that are LEAST do not count, and there is another."""
    finite = tl.where(ordered < INFINITY, ordered, LEAST)
    # Turned over, the smallest is the largest.
    turned = tl.where(ordered == LEAST, LEAST, ~ordered)
    finite, least = tl.split(tl.max(tl.join(finite, turned), axis=0))
    return ~least, finite


@triton.jit
@no_type_check
def below(finite, low):
    """Four numbers to begin a search with: the best are seldom further than an octave or two (of 2 ** 23 numbers) below
    the largest finite one."""
    return (
        tl.maximum(_less(finite, 1 << 24), low),
        tl.maximum(_less(finite, 1 << 23), low),
        tl.maximum(_less(finite, 1 << 22), low),
        tl.maximum(finite + 1, low),
    )


@triton.jit
@no_type_check
def closely_above(low, finite):
    """Four numbers to begin a search among candidates with: most of them reach `low` by little."""
    apart = tl.maximum(finite, low).to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    return _more(low, apart >> 4), _more(low, apart >> 3), _more(low, apart >> 2), tl.maximum(finite + 1, low)


@triton.jit
@no_type_check
def fifths(low, high):
    """Four numbers above low and up to high, in order, where high is above low. Their distances may need 32 bits."""
    apart = high.to(tl.uint32, bitcast=True) - low.to(tl.uint32, bitcast=True)
    fifth = apart // 5 + 1
    return (
        _more(low, tl.minimum(fifth, apart)),
        _more(low, tl.minimum(2 * fifth, apart)),
        _more(low, tl.minimum(3 * fifth, apart)),
        _more(low, tl.minimum(4 * fifth, apart)),
    )


@triton.jit
@no_type_check
def _more(number, by):
    return (number.to(tl.uint32, bitcast=True) + by).to(tl.int32, bitcast=True)


@triton.jit
@no_type_check
def _less(number, by: tl.constexpr):
    """No less than LEAST."""
    return tl.maximum(number, LEAST + by) - by


@triton.jit
@no_type_check
def searched(ordered, low, low_reach, high, first, second, third, fourth, wanted, enough, EXACT: tl.constexpr):
    """A number that at least `wanted` lanes reach, and no more than `enough`; the `wanted`-th largest where there is
    none. EXACT: no more than `wanted` lie above it, too.

    `low_reach` lanes, at least `wanted`, reach `low`, and fewer than `wanted`, at least 1, lie above `high`. The first
    round compares with the four numbers, none below `low`, in order; each further one divides what lies between the
    ends by five. EXACT: as soon as one lane too many reaches the lower end, or one too few lies above the higher one,
    the number in question decides, however close its neighbours are.
    """
    high_reach = tl.zeros([], tl.int32)
    # Variables of the loop, not constants.
    high = high_reach + high
    low_reach = high_reach + low_reach
    going = 1
    while going != 0:
        lower, upper = reaching(ordered, first, second, third, fourth)
        low, low_reach, high, high_reach = narrowed(
            low, low_reach, high, high_reach, first, second, third, fourth, lower & 0xFFFF, lower >> 16 & 0xFFFF,
            upper & 0xFFFF, upper >> 16 & 0xFFFF, wanted,
        )  # fmt: skip
        first, second, third, fourth = fifths(low, high)
        more = (low < high) & (low_reach > enough)
        if EXACT:
            more = more & (low_reach > wanted + 1) & (high_reach < wanted - 1)
        going = more.to(tl.int32)
    if EXACT:
        one_more = low_reach == wanted + 1
        if (low < high) & (one_more | ((low_reach > wanted) & (high_reach == wanted - 1))):
            # The smallest that reaches the lower end, or the largest up to the higher end.
            those = tl.where(one_more, ordered >= low, ordered <= high)
            decides = tl.max(tl.where(those, tl.where(one_more, ~ordered, ordered), LEAST), axis=0)
            low = tl.where(one_more, ~decides, decides)
    return low


@triton.jit
@no_type_check
def reaching(ordered, first, second, third, fourth):
    """How many reach each of four numbers, in the halves of two words: fewer than 2 ** 16. The words are added up side
    by side, so that threads wait for each other once."""
    reached = (ordered >= first).to(tl.int32) + ((ordered >= second).to(tl.int32) << 16)
    further = (ordered >= third).to(tl.int32) + ((ordered >= fourth).to(tl.int32) << 16)
    return tl.split(tl.sum(tl.join(reached, further), axis=0))


@triton.jit
@no_type_check
def narrowed(
    low, low_reach, high, high_reach, first, second, third, fourth, firsts, seconds, thirds, fourths, wanted
):  # fmt: skip
    """The ends after a comparison with four numbers, none below `low`, in order; `firsts` and so on reach them."""
    for each in tl.static_range(4):
        number = first if each == 0 else (second if each == 1 else (third if each == 2 else fourth))
        count = firsts if each == 0 else (seconds if each == 1 else (thirds if each == 2 else fourths))
        low = tl.where(count >= wanted, number, low)
        low_reach = tl.where(count >= wanted, count, low_reach)
    for back in tl.static_range(4):
        number = fourth if back == 0 else (third if back == 1 else (second if back == 2 else first))
        count = fourths if back == 0 else (thirds if back == 1 else (seconds if back == 2 else firsts))
        below = (count < wanted) & (number <= high)
        high = tl.where(below, number - 1, high)
        high_reach = tl.where(below, count, high_reach)
    return low, low_reach, high, high_reach
