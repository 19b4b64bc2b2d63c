r"""Gold answers as text, from the types in which data sets keep them. Judges no answers.

Numbers keep every digit that they have: integers of any size, and a float as the shortest decimal that it may stand
for. A float that is no short decimal, such as 1/3, becomes `\approx 0.333333333333333`, because it never was exact.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

FLOAT_DIGITS = 15
"""So many digits of a float can be trusted."""
MAX_DIGITS = 1000
"""An integer with more digits is no answer."""

_WHOLE = re.compile(r"[-+]?\d+\.0*")
_MISSING = {"nan", "null", "<na>"}


def gold_text(value: Any) -> str | None:
    """A gold answer as text; None for what no answer can be compared with: None, NaN, infinities, empty text, truth
    values, lists and other containers.

    >>> gold_text(142.0), gold_text(2**70), gold_text(float("nan"))
    ('142', '1180591620717411303424', None)
    """
    if isinstance(value, str):
        text = value.strip()
        if not text or text.casefold() in _MISSING:
            return None
        return text.partition(".")[0] if _WHOLE.fullmatch(text) else text
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return None
    if isinstance(value, Integral):
        number = int(value)
        return str(number) if number.bit_length() <= MAX_DIGITS * 3 else None
    if isinstance(value, Decimal):
        return _decimal(value) if value.is_finite() else None
    if isinstance(value, Fraction):
        return gold_text(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
    if isinstance(value, Real):
        # The text of a 32-bit float has its own digits, not those of the double next to it.
        return _float(float(value) if type(value).__name__ in ("float", "float64") else float(str(value)))
    return None


def _float(value: float) -> str | None:
    if not math.isfinite(value):
        return None
    if value.is_integer():
        return str(int(Decimal(repr(float(value)))))
    text = f"{value:.{FLOAT_DIGITS}g}"
    exact = len(Decimal(text).normalize().as_tuple().digits) < FLOAT_DIGITS
    return _decimal(Decimal(text)) if exact else rf"\approx {_decimal(Decimal(text))}"


def _decimal(value: Decimal) -> str | None:
    if abs(value.adjusted()) > MAX_DIGITS // 2:
        return None
    return gold_text(f"{value:f}")
