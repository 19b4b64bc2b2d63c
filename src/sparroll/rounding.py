"""How measured tails are rounded for readers: downwards, so that a tail just under its target never looks as if it met
it."""

from __future__ import annotations

import math


def rounded_down(value: float | None) -> str:
    """The value with three decimals, rounded down; "-" if there is no value.

    >>> rounded_down(0.8599), rounded_down(0.86)
    ('0.859', '0.860')
    """
    # 0.29 * 1000 is 289.99999999999994 in binary. The small addend keeps such values from losing a thousandth.
    return "-" if value is None else f"{math.floor(value * 1000 + 1e-9) / 1000:.3f}"


def with_interval(value: float, low: float, high: float) -> str:
    """A tail with its interval; all three figures are rounded down.

    >>> with_interval(0.8659, 0.861, 0.8714)
    '0.865 [0.861, 0.871]'
    """
    return f"{rounded_down(value)} [{rounded_down(low)}, {rounded_down(high)}]"
