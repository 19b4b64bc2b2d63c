"""How figures are rounded for readers: towards the miss. What should be high is rounded down and what should be low is
rounded up, so that a figure just short of its target never looks as if it met it."""

from __future__ import annotations

import math
from collections.abc import Callable

_SLACK = 1e-9
"""In units of the last decimal: 0.29 * 1000 is 289.99999999999994 in binary, and must not lose a thousandth."""


def rounded_down(value: float | None, decimals: int = 3, sign: bool = False) -> str:
    """The value rounded down, with a plus sign if `sign` is set; "-" if there is no value. For what should be high:
    tails, accuracies, speed-ups.

    >>> rounded_down(0.8599), rounded_down(0.86), rounded_down(2.3288, 2), rounded_down(-0.0281, sign=True)
    ('0.859', '0.860', '2.32', '-0.029')
    """
    return _text(value, decimals, sign, lambda scaled: math.floor(scaled + _SLACK))


def rounded_up(value: float | None, decimals: int = 3, sign: bool = False) -> str:
    """The value rounded up, like `rounded_down`. For what should be low: costs, errors, divergences.

    >>> rounded_up(0.0291), rounded_up(0.029), rounded_up(141.51, 1)
    ('0.030', '0.029', '141.6')
    """
    return _text(value, decimals, sign, lambda scaled: math.ceil(scaled - _SLACK))


def percent_down(share: float, decimals: int = 0) -> str:
    """A share that should be high, in percent.

    >>> percent_down(0.8993), percent_down(0.9)
    ('89%', '90%')
    """
    return rounded_down(100 * share, decimals) + "%"


def percent_up(share: float, decimals: int = 0) -> str:
    """A share that should be low, in percent.

    >>> percent_up(0.391), percent_up(0.39)
    ('40%', '39%')
    """
    return rounded_up(100 * share, decimals) + "%"


def digits_up(value: float, digits: int = 2) -> str:
    """A figure of any size that should be low, rounded up to so many significant digits.

    >>> digits_up(0.0302), digits_up(0.03), digits_up(9.11), digits_up(0.0)
    ('0.031', '0.03', '9.2', '0')
    """
    if value == 0:
        return "0"
    step = 10.0 ** (math.floor(math.log10(abs(value))) + 1 - digits)
    return f"{math.ceil(value / step - _SLACK) * step:.{digits}g}"


def with_interval(value: float, low: float, high: float) -> str:
    """A tail with its interval; all three figures are rounded down.

    >>> with_interval(0.8659, 0.861, 0.8714)
    '0.865 [0.861, 0.871]'
    """
    return f"{rounded_down(value)} [{rounded_down(low)}, {rounded_down(high)}]"


def _text(value: float | None, decimals: int, sign: bool, towards: Callable[[float], int]) -> str:
    if value is None:
        return "-"
    figure = towards(value * 10**decimals) / 10**decimals
    return f"{figure:+.{decimals}f}" if sign else f"{figure:.{decimals}f}"
