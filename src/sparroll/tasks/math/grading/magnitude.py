"""How large a number is, without computing it: what would take all day is found here and never started."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import sympy
from sympy import Basic, Rational

T = TypeVar("T")

MAX_DIGITS = 20_000
"""Numbers with more digits are not written out."""


MAX_TERMS = 20_000
"""Sums and products of more terms are not computed."""


def attempted(call: Callable[[], T], otherwise: T) -> T:
    """The result of a call of sympy, which raises whatever it likes on strange input; `otherwise` if it does. Memory
    that has run out is no answer, so it goes on to the worker."""
    try:
        return call()
    except MemoryError:
        raise
    except Exception:
        return otherwise


def log10_size(expr: Basic) -> float:
    """About the decimal logarithm of how large a number is, or infinity for one beyond all writing. Computes nothing
    large."""
    if isinstance(expr, Rational):
        top = abs(int(expr.p))
        return max(
            len(str(top)) if top.bit_length() < 60_000 else top.bit_length() * 0.30103,
            len(str(expr.q)) if int(expr.q).bit_length() < 60_000 else expr.q.bit_length() * 0.30103,
        )
    if not expr.args:
        return 1.0
    sizes = [log10_size(arg) for arg in expr.args]
    if isinstance(expr, (sympy.Pow, sympy.exp)):
        base, exponent = (
            (sizes[0], sizes[1]) if isinstance(expr, sympy.Pow) and len(sizes) == 2 else (0.4343, sizes[-1])
        )
        if exponent > 15:
            return math.inf
        power = expr.args[-1]
        value = _estimate(power)
        return (base if base > 0.5 else 0.5) * (abs(value) if value is not None else 10**exponent)
    if isinstance(expr, (sympy.factorial, sympy.gamma)):
        if sizes[0] > 12:
            return math.inf
        value = _estimate(expr.args[0])
        return 1.0 if value is None or value < 2 else value * math.log10(value)
    if isinstance(expr, sympy.binomial):
        return math.inf if max(sizes) > 6 else min(10 ** sizes[0], 10 ** sizes[1]) * max(sizes)
    return sum(sizes) if isinstance(expr, sympy.Mul) else max(sizes) + 1


def _estimate(expr: Basic) -> float | None:
    if isinstance(expr, Rational):
        return abs(float(expr)) if max(abs(int(expr.p)).bit_length(), int(expr.q).bit_length()) < 1000 else None
    if log10_size(expr) > 200:
        return None
    return attempted(lambda: abs(float(expr.evalf(15))), None)


def too_large(expr: Any) -> bool:
    """Whether computing an expression could take all day: towers of powers, long sums, large matrices' powers."""
    for part in sympy.preorder_traversal(expr):
        if isinstance(part, (sympy.Sum, sympy.Product)):
            for limit in part.limits:
                if len(limit) == 3 and not limit[1].free_symbols and not limit[2].free_symbols:
                    ends = [_estimate(end) for end in limit[1:] if end.is_finite]
                    if any(end is None or end > MAX_TERMS for end in ends):
                        return True
        elif isinstance(part, (sympy.MatPow,)):
            exponent = _estimate(part.args[1])
            if exponent is None or exponent > 1000:
                return True
        elif isinstance(part, (sympy.Pow, sympy.exp, sympy.factorial, sympy.binomial, sympy.gamma)):
            if log10_size(part) > 10 * MAX_DIGITS:
                return True
        elif isinstance(part, sympy.Mod) and any(log10_size(arg) > MAX_DIGITS for arg in part.args):
            return True
    return False


def prime_powers(expr: Basic) -> dict[int, Rational] | None:
    """Exponents of the primes of a positive number that is made of products and powers; None for any other."""
    if isinstance(expr, Rational):
        if expr <= 0 or max(int(expr.p), int(expr.q)) > 10**12:
            return None
        return {int(prime): Rational(n) for prime, n in sympy.factorrat(expr).items()}
    parts: list[tuple[dict[int, Rational] | None, Rational]] = []
    if isinstance(expr, sympy.Mul):
        parts = [(prime_powers(arg), Rational(1)) for arg in expr.args]
    elif isinstance(expr, sympy.Pow) and log10_size(expr.exp) < 1000 and not expr.exp.free_symbols:
        exponent = expr.exp.doit()
        if isinstance(exponent, Rational):
            parts = [(prime_powers(expr.base), exponent)]
    if not parts:
        return None
    found: dict[int, Rational] = {}
    for powers, times in parts:
        if powers is None:
            return None
        for prime, n in powers.items():
            found[prime] = found.get(prime, Rational(0)) + n * times
    return {prime: n for prime, n in found.items() if n != 0}
