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
