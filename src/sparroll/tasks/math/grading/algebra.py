r"""Expressions and equations: parsed by the grammar of math-verify, compared exactly.

Numbers are compared as rationals, or by 40 digits and more where they are irrational; a decimal is the number that it
says, never an approximation of another one. Expressions with variables are compared at points and then by math-verify.
Numbers too large to be written are compared by form. Nothing here knows units, lists or words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex
from math_verify import verify
from sympy import Basic, Expr, Float, I, Integer, Rational, Symbol

from sparroll.tasks.math.grading.magnitude import MAX_DIGITS, attempted, log10_size, prime_powers, too_large
from sparroll.tasks.math.grading.splitting import depth, environment, split, without_doubles

DIGITS = 40
MAX_CIS = 4
MAX_DETERMINANT = 5
MAX_CONJUGATED = 8
"""Imaginary units below one bar."""
MAX_BARS = 12
MAX_DEPTH = 40
"""The parser needs too long for deeper groups."""

_NORMAL = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
_NUMBER = re.compile(r"([+-]?)\s*(\d+(?:\.\d*)?|\.\d+)")
_FRACTION = re.compile(r"([+-]?)\s*(?:\\frac\s*\{\s*([+-]?\s*\d+)\s*\}\s*\{\s*([+-]?\s*\d+)\s*\}|(\d+)\s*/\s*(\d+))")
_SHORT_FRACTION = re.compile(r"\\(?:frac|binom)\s*\d\s+\d")
_NUMBERS_IN_A_ROW = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")
_BARRED = re.compile(r"\\(?:overline|bar)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_COMPLEX_NUMBER = re.compile(r"(?:\\(?:frac|sqrt)(?![A-Za-z])|[\s\d.+\-*/^(){}i])*")
_CIS = re.compile(r"\\cis\s*(\(?)")
_SAMPLES = (
    ("37/23", "11/7", "29/13", "53/31", "19/17", "41/29", "67/43", "73/47"),
    ("5/3", "13/19", "43/17", "7/5", "31/11", "23/37", "47/41", "3/7"),
    ("-17/11", "19/5", "-5/13", "29/7", "-3/2", "13/3", "-7/9", "11/8"),
    ("23/29", "-31/19", "17/7", "-11/5", "8/3", "-13/11", "5/9", "-2/7"),
    ("-3/11", "-7/5", "-19/23", "-5/2", "-13/7", "-1/3", "-9/4", "-6/5"),
)


class Unreadable(ValueError):
    """A text that math-verify's grammar does not parse."""


def exact_number(latex: str) -> Fraction | None:
    """The value of a plain number or fraction of numbers, without a parser; None for anything else."""
    text = latex.strip()
    if (found := _NUMBER.fullmatch(text)) is not None:
        if len(found[2]) > MAX_DIGITS:
            return None
        value = Fraction(found[2])
        return -value if found[1] == "-" else value
    if (found := _FRACTION.fullmatch(text)) is not None:
        top = int((found[2] or found[4]).replace(" ", ""))
        bottom = int((found[3] or found[5]).replace(" ", ""))
        if bottom == 0:
            return None
        return Fraction(-top if found[1] == "-" else top, bottom)
    return None


def progression(items: Sequence[str]) -> tuple[Fraction, Fraction, int] | None:
    r"""First member, step and count of `1, 2, \ldots, 10`, if the members before the dots are equally far apart and
    reach those behind them; otherwise None."""
    place = items.index(r"\ldots") if items.count(r"\ldots") == 1 else 0
    values = [exact_number(item) for item in items if item != r"\ldots"]
    known = [value for value in values if value is not None]
    if place < 2 or place == len(items) - 1 or len(known) < len(values) or known[0] == known[1]:
        return None
    first, step = known[0], known[1] - known[0]
    count = (known[-1] - first) / step + 1
    if count.denominator != 1 or count < len(known):
        return None
    behind = len(known) - place
    places = [*range(place), *range(int(count) - behind, int(count))]
    return (first, step, int(count)) if known == [first + n * step for n in places] else None


@lru_cache(maxsize=4096)
def parse(latex: str, keeps_case: bool = False) -> Basic:
    """The expression, with decimals as exact rationals and i as the imaginary unit. Raises Unreadable."""
    value = exact_number(latex)
    if value is not None:
        return Rational(value.numerator, value.denominator)
    if not latex.strip():
        raise Unreadable(latex)
    text = _with_cis(without_doubles(latex))
    if (
        depth(text) > MAX_DEPTH
        or text.count("|") > MAX_BARS
        or _NUMBERS_IN_A_ROW.search(_SHORT_FRACTION.sub(" ", text))
    ):
        raise Unreadable(latex)
    if (table := environment(text)) is not None and table[0] == "vmatrix":
        return _determinant(latex, table[1], keeps_case)
    if r"\ldots" in text and (found_terms := progression(split(text, ("+",)))) is not None:
        first, step, count = found_terms
        total = count * first + step * count * (count - 1) / 2
        return Rational(total.numerator, total.denominator)
    if r"\overline" in text or r"\bar" in text:
        text = _BARRED.sub(_conjugate, text)
    text = re.sub(r"(?<![A-Za-z\\])\\ldots(?![A-Za-z])", " ", text) if text.count(r"\ldots") == 0 else text
    text = re.sub(r'"([A-Za-z])"', r"\1", text)
    text = re.sub(r'"([^"]*)"', r"\\text{\1}", text)
    text = re.sub(r"(?<=[A-Za-z)\]}])\s*'+", "", text) if "(" not in text else text.replace("'", "")
    text = normalize_latex(text, _NORMAL)
    try:
        found = latex2sympy(
            text,
            is_real=True,
            convert_degrees=True,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=not keeps_case),
        )
    except RecursionError:
        raise Unreadable(latex) from None
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable(latex) from error
    if not isinstance(found, Basic) and not isinstance(found, sympy.MatrixBase):
        raise Unreadable(latex)
    return _exact(found)


def _conjugate(found: re.Match[str]) -> str:
    """A number below a bar with -i for i, which is its conjugate as it has no functions; names below bars stay."""
    if not 0 < found[1].count("i") <= MAX_CONJUGATED or not _COMPLEX_NUMBER.fullmatch(found[1]):
        return found.group()
    return "(" + found[1].replace("i", "(-i)") + ")"


def _determinant(latex: str, cells: list[list[str]], keeps_case: bool) -> Basic:
    """The value of a table between bars."""
    if len(cells) > MAX_DETERMINANT or any(len(row) != len(cells) for row in cells):
        raise Unreadable(latex)
    entries = [[parse(cell, keeps_case) for cell in row] for row in cells]
    if not all(isinstance(entry, Expr) and not too_large(entry) for row in entries for entry in row):
        raise Unreadable(latex)
    found: Basic = sympy.Matrix(entries).det(method="berkowitz")
    return found


def _with_cis(latex: str) -> str:
    r"""`r\cis\theta` and `r\angle\theta` as `r(\cos\theta + i\sin\theta)`."""
    text = re.sub(r"(?<=[\d}\s])\\angle\s*", r"\\cis ", latex)
    if len(_CIS.findall(text)) > MAX_CIS:
        raise Unreadable(latex)
    while (found := _CIS.search(text)) is not None:
        if found[1]:
            depth, end = 1, found.end()
            while end < len(text) and depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            inner = text[found.end() : end - 1]
        else:
            inner, end = text[found.end() :], len(text)
        text = rf"{text[: found.start()]}(\cos({inner})+i\sin({inner})){text[end:]}"
    return text


def _exact(found: Any) -> Any:
    floats = found.atoms(Float)
    changes: dict[Basic, Basic] = {number: Rational(str(number)) for number in floats}
    bound = {limit[0] for one in found.atoms(sympy.Sum, sympy.Product) for limit in one.limits}
    for symbol in found.atoms(Symbol):
        if symbol.name == "i" and symbol not in bound:
            changes[symbol] = I
    # UnevaluatedExpr is how percent signs are parsed; 50% is a half here.
    for one in found.atoms(sympy.UnevaluatedExpr):
        changes[one] = one.args[0]
    try:
        return found.xreplace(changes) if changes else found
    except MemoryError:
        raise
    except Exception as error:
        raise Unreadable("a function without a value") from error


def coefficients(latex: str, names: list[str]) -> list[str] | None:
    """The coefficients of a linear combination of symbols, as LaTeX; None if the text is none."""
    try:
        found = parse(latex)
    except Unreadable:
        return None
    if not isinstance(found, Expr) or too_large(found):
        return None
    symbols = [Symbol(name, real=True) for name in names]
    expanded = sympy.expand(found.doit())
    if expanded.as_independent(*symbols, as_Add=True)[0] != 0:
        return None
    return [sympy.latex(expanded.coeff(symbol)) for symbol in symbols]


def both_cases(*texts: str) -> bool:
    """Whether some letter stands as a capital and as a small one in one text, so that they are two variables."""
    for text in texts:
        letters = set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+|\"[^\"]*\"", " ", text)))
        if any(letter.islower() and letter.upper() in letters for letter in letters):
            return True
    return False


def equal(gold_latex: str, answer_latex: str) -> bool:
    """Whether two expressions are the same number or the same function of their variables. Raises Unreadable if the
    gold one is; an answer that cannot be read is not equal."""
    one, other = exact_number(gold_latex), exact_number(answer_latex)
    if one is not None and other is not None:
        return one == other
    case = both_cases(gold_latex, answer_latex)
    gold = parse(gold_latex, case)
    try:
        answer = parse(answer_latex, case)
    except Unreadable:
        return False
    return same(gold, answer)


def same(gold: Any, answer: Any) -> bool:
    """Whether two parsed expressions are equal."""
    if isinstance(gold, Rational) and isinstance(answer, Rational):
        return bool(gold == answer)
    if isinstance(gold, sympy.MatrixBase) or isinstance(answer, sympy.MatrixBase):
        return _same_matrices(gold, answer)
    if _infinite(gold) or _infinite(answer):
        return bool(_infinite(gold) == _infinite(answer)) and _infinite(gold) != 0
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        if isinstance(gold, Expr) != isinstance(answer, Expr):
            return False
        return bool(gold == answer) or _verified(gold, answer)
    if too_large(gold) or too_large(answer):
        return bool(gold == answer) or _same_large(gold, answer)
    if gold == answer:
        return True
    if not gold.free_symbols and not answer.free_symbols:
        found = _same_numbers(gold, answer)
        return _verified(gold, answer) if found is None else found
    found = _same_functions(gold, answer)
    return _verified(gold, answer) if found is None else found


def _infinite(expr: Any) -> int:
    if expr == sympy.oo:
        return 1
    return -1 if expr == -sympy.oo or (isinstance(expr, sympy.Mul) and set(expr.args) == {sympy.oo, Integer(-1)}) else 0


def _same_matrices(gold: Any, answer: Any) -> bool:
    if too_large(gold) or too_large(answer):
        return bool(gold == answer)
    gold, answer = (one.doit() if hasattr(one, "doit") else one for one in (gold, answer))
    if not (isinstance(gold, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase)) or gold.shape != answer.shape:
        return False
    return all(same(one, other) for one, other in zip(gold.flat(), answer.flat(), strict=True))


def _same_large(gold: Expr, answer: Expr) -> bool:
    """Whether two numbers too large to be written are products of the same powers of primes."""
    one, other = prime_powers(gold), prime_powers(answer)
    return one is not None and other is not None and one == other


def unsolved(sides: tuple[str, str]) -> bool:
    r"""Whether an equation is one that still has to be solved for its only variable, such as `2x = 7` and
    `x^2 - 5x + 6 = 0`. `x^2 = 4` and `\sin x = 1` say what a power and a function are."""
    try:
        left, right = parse(sides[0]), parse(sides[1])
    except Unreadable:
        return False
    if not isinstance(left, Expr) or not isinstance(right, Expr):
        return False
    if not left.free_symbols:
        left, right = right, left
    if len(left.free_symbols) != 1 or too_large(left):
        return False
    (variable,) = left.free_symbols
    if not left.is_polynomial(variable):
        return bool(right == 0 and left.is_Add)
    polynomial = sympy.Poly(left, variable)
    return left != variable and (polynomial.degree() == 1 or len(polynomial.terms()) > 1)


def _value(expr: Expr, precision: int) -> Expr | None:
    found = attempted(lambda: expr.evalf(precision, maxn=max(4 * precision, 400)), None)
    if found is None or found.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo) or found.free_symbols:
        return None
    real, imaginary = found.as_real_imag()
    return found if real.is_number and imaginary.is_number and real.is_comparable is not False else None


def _parts(value: Expr) -> list[Any] | None:
    found = []
    for part in value.as_real_imag():
        if part.is_zero or (isinstance(part, Float) and part._prec < 10):
            found.append(Integer(0))
        elif isinstance(part, (Float, Rational)):
            found.append(part)
        else:
            return None
    return found


def _same_numbers(gold: Expr, answer: Expr, least: int = DIGITS) -> bool | None:
    """Whether two numbers agree in all digits that are computed; None if they cannot be computed."""
    size = max(log10_size(gold), log10_size(answer))
    precision = least if size < least / 2 else int(min(size, MAX_DIGITS)) + least
    one, other = _value(gold, precision), _value(answer, precision)
    if one is None or other is None:
        return None
    one_parts, other_parts = _parts(one), _parts(other)
    if one_parts is None or other_parts is None:
        return None
    scale = max(abs(part) for part in (*one_parts, *other_parts))
    if scale == 0:
        return True
    tolerance = Float(10, precision) ** (8 - precision)
    close = all(abs(a - b) <= scale * tolerance for a, b in zip(one_parts, other_parts, strict=True))
    if not close or (one_parts[1] == 0 and other_parts[1] == 0):
        return bool(close)
    return True


def _same_functions(gold: Expr, answer: Expr) -> bool | None:
    """Whether two functions agree at every point where both have a real value; None if there are too few points."""
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    if len(names) > len(_SAMPLES[0]) or gold.has(sympy.Integral, sympy.Derivative, sympy.core.function.AppliedUndef):
        return None
    agreed, complex_agreed = 0, 0
    counted = _counted(gold) | _counted(answer)
    for number, sample in enumerate(_SAMPLES, 2):
        point = {
            symbol: Integer(number) if symbol in counted else Rational(sample[names.index(symbol.name)])
            for symbol in gold.free_symbols | answer.free_symbols
        }
        values: list[Expr | None] = []
        for expr in (gold, answer):
            placed = expr.xreplace(point)
            if too_large(placed):
                values.append(None)
            else:
                values.append(_value(placed.doit() if counted else placed, 30))
        if values[0] is None or values[1] is None:
            continue
        one, other = (_parts(value) for value in values)
        if one is None or other is None:
            continue
        scale = max(abs(part) for part in (*one, *other))
        near = scale == 0 or all(abs(a - b) <= scale * Float("1e-20") for a, b in zip(one, other, strict=True))
        if one[1] == 0 and other[1] == 0:
            if near:
                agreed += 1
            elif all(_real_throughout(expr, point) for expr in (gold, answer)):
                return False
        elif gold.has(I) or answer.has(I):
            if not near:
                return False
            agreed += 1
        else:
            complex_agreed += near
    return True if agreed >= 2 else True if agreed and complex_agreed else None


def _counted(expr: Expr) -> set[Any]:
    """The variables in the limits of sums and products, which stand for whole numbers."""
    return {
        symbol
        for one in expr.atoms(sympy.Sum, sympy.Product)
        for _, *ends in one.limits
        for end in ends
        for symbol in end.free_symbols
    }


def _real_throughout(expr: Expr, point: dict[Any, Rational]) -> bool:
    """Whether every root and logarithm in an expression is real at a point, so that the function is defined there."""
    for part in sympy.preorder_traversal(expr):
        inner = None
        if isinstance(part, sympy.Pow) and isinstance(part.exp, Rational) and part.exp.q % 2 == 0:
            inner = part.base
        elif isinstance(part, sympy.log):
            inner = part.args[0]
        if inner is not None and not too_large(placed := inner.xreplace(point)):
            value = _value(placed, 15)
            if value is not None and not (value.is_real and value >= 0):
                return False
    return True


def _verified(gold: Any, answer: Any) -> bool:
    """math-verify's own verdict, for what has no value at points."""
    if too_large(gold) or too_large(answer):
        return False
    return bool(verify(gold, answer, float_rounding=30, numeric_precision=30, timeout_seconds=None))


def same_equation(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Whether two equations, each a left and a right side, have the same solutions because one is a multiple of the
    other. Raises Unreadable if the gold one is."""
    texts = (*gold, *answer)
    case = both_cases(*texts)
    gold_sides = [parse(side, case) for side in gold]
    try:
        answer_sides = [parse(side, case) for side in answer]
    except Unreadable:
        return False
    if not all(isinstance(side, Expr) for side in (*gold_sides, *answer_sides)):
        return all(same(a, b) for a, b in zip(gold_sides, answer_sides, strict=True))
    one = sympy.Add(gold_sides[0], -gold_sides[1], evaluate=False)
    other = sympy.Add(answer_sides[0], -answer_sides[1], evaluate=False)
    if too_large(one) or too_large(other):
        return all(same(a, b) for a, b in zip(gold_sides, answer_sides, strict=True))
    if {s.name for s in one.free_symbols} != {s.name for s in other.free_symbols}:
        return False
    names = sorted(symbol.name for symbol in one.free_symbols)
    if len(names) > len(_SAMPLES[0]):
        return False
    ratios = []
    for sample in _SAMPLES:
        point = {symbol: Rational(sample[names.index(symbol.name)]) for symbol in one.free_symbols | other.free_symbols}
        a, b = _value(one.xreplace(point), 30), _value(other.xreplace(point), 30)
        if a is None or b is None or abs(b) < Float("1e-20") or abs(a) < Float("1e-20"):
            continue
        ratios.append(a / b)
    if len(ratios) >= 3:
        if all(abs(ratio - ratios[0]) <= abs(ratios[0]) * Float("1e-18") for ratio in ratios):
            return True
        eq = [sympy.Eq(*sides, evaluate=False) for sides in (gold_sides, answer_sides)]
        return len(names) <= 2 and _solved_alike(eq[0], eq[1])
    return all(same(a, b) for a, b in zip(gold_sides, answer_sides, strict=True)) or all(
        same(a, b) for a, b in zip(gold_sides, reversed(answer_sides), strict=True)
    )


def same_inequality(gold: tuple[str, str], answer: tuple[str, str]) -> bool:
    """Whether `left < right` says the same of both pairs: the differences agree up to a positive factor."""
    case = both_cases(*gold, *answer)
    one, other = ([parse(side, case) for side in sides] for sides in (gold, answer))
    if not all(isinstance(side, Expr) for side in (*one, *other)):
        return False
    ratios = []
    names = sorted({symbol.name for side in (*one, *other) for symbol in side.free_symbols})
    if not names or len(names) > len(_SAMPLES[0]):
        return False
    for sample in _SAMPLES:
        values = []
        for left, right in (one, other):
            difference = sympy.Add(left, -right, evaluate=False)
            point = {symbol: Rational(sample[names.index(symbol.name)]) for symbol in difference.free_symbols}
            placed = difference.xreplace(point)
            values.append(None if too_large(placed) else _value(placed, 30))
        if values[0] is None or values[1] is None or abs(values[1]) < Float("1e-20"):
            continue
        ratios.append(values[0] / values[1])
    positive = all(ratio.is_real and ratio > 0 for ratio in ratios)
    return len(ratios) >= 3 and positive and all(abs(ratio / ratios[0] - 1) < Float("1e-18") for ratio in ratios)


def _solved_alike(gold: Basic, answer: Basic) -> bool:
    """Whether rational equations have equal solutions for one of their variables, where that is quick to find out."""
    one, other = attempted(lambda: _solved_top(gold), None), attempted(lambda: _solved_top(answer), None)
    return one is not None and other is not None and bool(one == other)


def _solved_top(equation: Any) -> sympy.Poly | None:
    """The polynomial whose roots solve the equation, None for one of a high degree."""
    top = sympy.fraction(sympy.together(equation.lhs - equation.rhs))[0]
    poly = sympy.Poly(sympy.expand(top), *sorted(equation.free_symbols, key=str))
    return None if poly.total_degree() > 6 else poly.primitive()[1].monic()
