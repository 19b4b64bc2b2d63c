"""How kernels find the k-th best of the scores that one program holds in registers: by bisection over their ordered
bits, without a sort. These are jit helpers; the callers say how many scores they want, and use the threshold."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LEAST = tl.constexpr(-0x80000000)
"""Value of a lane without a score. It is below every number, including -inf."""


@triton.jit
@no_type_check
def ordered_bits(score):
    """Signed integers in the order of the fp32 scores they came from; NaN is the largest, as in reference.py."""
    # Both zeros are one score, and so are NaNs of any sign and payload.
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(score != score, 0x7FFFFFFF, bits)


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
def threshold_within(ordered, least, highest, wanted, enough, FAR: tl.constexpr):
    """A number that at least `wanted`, and at most `enough`, of `ordered` reach; the `wanted`-th largest where there is
    none. At least `wanted` of them reach `least`, none lies above `highest`, and `wanted` is at least 1.

    It compares with three numbers a round, because where a thread holds few lanes the sum over all threads is what takes
    the time. FAR: `least` may be far away.
    """
    low = least.to(tl.int64)
    high = highest.to(tl.int64)
    reach = tl.full([], 0x1FFFFF, tl.int32)
    if FAR:
        # The best are seldom further than an octave or two (of 2 ** 23 numbers) below the highest.
        first = tl.maximum(high - (1 << 26), low)
        second = tl.maximum(high - (1 << 24), low)
        third = tl.maximum(high - (1 << 22), low)
        reaching = tl.sum(reaching_quarters(ordered, first, second, third), axis=0)
        low, high, reach = narrowed(low, high, reach, first, second, third, reaching, wanted)
    while (low < high) & (reach > enough):
        first, second, third = quarters(low, high)
        reaching = tl.sum(reaching_quarters(ordered, first, second, third), axis=0)
        low, high, reach = narrowed(low, high, reach, first, second, third, reaching, wanted)
    return low.to(tl.int32)


@triton.jit
@no_type_check
def quarters(low, high):
    """Three numbers above low and up to high, in order; equal ones where there are fewer. All int64."""
    apart = high - low
    return low + ((apart + 3) >> 2), low + ((2 * apart + 3) >> 2), low + ((3 * apart + 3) >> 2)


@triton.jit
@no_type_check
def reaching_quarters(ordered, first, second, third):
    """Which of the three each number reaches, in three fields of 21 bits, whose sums are counts."""
    reached = (ordered >= first.to(tl.int32)).to(tl.int64)
    reached += (ordered >= second.to(tl.int32)).to(tl.int64) << 21
    return reached + ((ordered >= third.to(tl.int32)).to(tl.int64) << 42)


@triton.jit
@no_type_check
def narrowed(low, high, reach, first, second, third, reaching, wanted):
    """The ends after a round, and how many reach the lower one; `reach` before it is known is too many. The ends meet or
    cross once exactly `wanted` reach one of the three, which then is `low`."""
    for field in tl.static_range(3):
        middle = first if field == 0 else (second if field == 1 else third)
        count = ((reaching >> (21 * field)) & 0x1FFFFF).to(tl.int32)
        low = tl.where(count >= wanted, tl.maximum(low, middle), low)
        reach = tl.where(count >= wanted, tl.minimum(reach, count), reach)
        high = tl.where(count > wanted, high, tl.minimum(high, tl.where(count == wanted, middle, middle - 1)))
    return low, high, reach
