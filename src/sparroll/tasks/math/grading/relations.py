r"""Equations, chains of inequalities, approximations, ratios and congruences between single values: how they are read,
and whether two of them agree. Works on cleaned text; what a value is made of is in shapes.py."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from sparroll.tasks.math.grading import algebra, magnitude, units
from sparroll.tasks.math.grading.algebra import Unreadable
from sparroll.tasks.math.grading.quantities import same_value
from sparroll.tasks.math.grading.splitting import split

_NAME = (
    r"(?:(?:m\s*)?\\(?:angle|triangle|measuredangle)\s*)?"
    r"(?:\\frac\{d[^{}]*\}\{d[^{}]*\}|\\?[A-Za-z]+'*|\\(?:overline|vec|hat|bar|overrightarrow|mathbf"
    r"|tilde)\s*\{?\s*[A-Za-z]+\s*\}?|\"[^\"]*\")"
    r"(?:_\{?[\w,+\s-]+\}?)?(?:\^\{?[\w*-]+\}?)?'*(?:\s*\(\s*[^()=]*\s*\))?"
)


NAMED = re.compile(rf"^\s*(\|?{_NAME}\|?)\s*(?:=|\\equiv(?![A-Za-z]))\s*(.+)$", re.DOTALL)


_ONLY_NAME = re.compile(rf"^\s*\|?{_NAME}\|?\s*$")


_APPROX = re.compile(r"\\approx(?![A-Za-z])|\\sim(?![A-Za-z])|\\doteq(?![A-Za-z])")


def plain_name(text: str) -> str:
    return re.sub(r"[\s{}\"]", "", text)


@dataclass(frozen=True)
class Statement:
    """An equation or a value: the name before the sign of equality, the values, and whether they are approximate."""

    name: str | None
    values: tuple[str, ...]
    sides: tuple[str, str] | None
    approximate: bool


def statement(text: str) -> Statement:
    approximate = False
    found = list(_APPROX.finditer(text))
    if found:
        left = text[: found[0].start()].strip(" =")
        if not left or (_ONLY_NAME.match(left) and algebra.exact_number(left) is None and not units.is_numeric(left)):
            approximate = True
            text = (left + " = " if left else "") + text[found[-1].end() :]
        else:
            text = left
    parts = split(text, ("=", r"\equiv", r"\to", r"\rightarrow", r"\longrightarrow"))
    if len(parts) == 1 or any(not part for part in parts):
        return Statement(None, (text,), None, approximate)
    first_is_name = _ONLY_NAME.match(parts[0]) and not units.is_numeric(parts[0])
    last_is_name = _ONLY_NAME.match(parts[-1]) and not units.is_numeric(parts[-1])
    sides = (parts[0], parts[-1]) if len(parts) == 2 else None
    if first_is_name and parts[0].strip() not in ("e", "i", r"\pi"):
        return Statement(plain_name(parts[0]), tuple(parts[1:]), sides, approximate)
    if last_is_name and parts[-1].strip() not in ("e", "i", r"\pi") and len(parts) == 2:
        return Statement(plain_name(parts[-1]), (parts[0],), sides, approximate)
    return Statement(None, tuple(parts), sides, approximate)


def with_variable_of(gold: Statement, answer: Statement) -> Statement:
    """f(t) = 2t in the variable of f(x)."""
    one, other = (re.fullmatch(r"([A-Za-z]\w*)\(([a-z])\)", relation.name or "") for relation in (gold, answer))
    if one is None or other is None or one[1] != other[1] or one[2] == other[2] or one[2] in "".join(answer.values):
        return answer
    renamed = [re.sub(rf"(?<![A-Za-z\\]){other[2]}(?![A-Za-z])", one[2], value) for value in answer.values]
    return Statement(
        gold.name, tuple(renamed), (f"{one[1]}({one[2]})", renamed[-1]) if answer.sides else None, answer.approximate
    )


_ORDER = re.compile(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<|>")


def same_chains(gold: str, answer: str) -> bool | None:
    """The verdict on chains such as `a < b < c`, read from the small end; None if one side is no such chain."""
    chains = []
    for text in (gold, answer):
        signs = _ORDER.findall(text)
        sides = [side.strip() for side in _ORDER.split(text)]
        if not signs or "=" in text or not all(sides):
            return None
        if set(signs) <= {">", r"\ge"}:
            signs = [{">": "<", r"\ge": r"\le"}[sign] for sign in signs][::-1]
            sides = sides[::-1]
        elif not set(signs) <= {"<", r"\le"}:
            return None
        chains.append((signs, sides))
    (one_signs, one), (other_signs, other) = chains
    if one_signs != other_signs:
        return False
    if len(one) == 2:
        return algebra.same_inequality((one[0], one[1]), (other[0], other[1]))
    return all(same_value(a, b) for a, b in zip(one, other, strict=True))


def function_name(name: str) -> str:
    """f(x) and y name the same thing."""
    low = name if len(name) > 1 and name.isalpha() else name.casefold()
    return "y" if low in ("f(x)", "y(x)") else low


def variables(*texts: str) -> bool:
    return any(
        re.search(r"(?<![\\A-Za-z\"])[A-Za-z](?![A-Za-z])", re.sub(r"\\[A-Za-z]+|\"[^\"]*\"", " ", text))
        for text in texts
    )


def consistent(relation: Statement) -> bool:
    """Whether the values of a chain such as `x = 2 + 3 = 5` are all equal."""
    values = relation.values
    if len(values) < 2:
        return True
    for one, other in zip(values[:-1], values[1:], strict=True):
        # A = \pi r^2 = 5 and AB = BC = 5 say what the first name stands for.
        if re.search("[A-Zabcdf-hj-z]", re.sub(r'\\[A-Za-z]+|"[^"]*"', " ", one)):
            continue
        try:
            if not same_value(one, other):
                return False
        except Unreadable:
            continue
    return True


def rounds_to(gold: str, answer: str) -> bool:
    """Whether an answer is an approximate gold value, or rounds to it at its digits."""
    if same_value(gold, answer):
        return True
    terms, answer_terms = units.quantity(gold, False), units.quantity(answer, True)
    text = terms[0].value if terms else gold
    value = algebra.exact_number(text)
    digits = re.search(r"\.(\d+)", text)
    if value is None or (
        terms and answer_terms and terms[0].units and answer_terms[0].units and terms[0].units != answer_terms[0].units
    ):
        return False

    def number() -> Fraction | None:
        found = algebra.parse(answer_terms[0].value if answer_terms else answer)
        return None if magnitude.too_large(found) or found.free_symbols else Fraction(str(found.evalf(50)))

    near = magnitude.attempted(number, None)
    if near is None:
        return False
    places = len(digits[1]) if digits else 0
    return abs(near - value) <= Fraction(1, 2 * 10**places)


_CONGRUENCE = re.compile(
    r"^(?:(.+?)\s*\\equiv(?![A-Za-z]))?\s*(-?\s*\d+)\s*\(?\s*\\(?:pmod|mod|bmod)(?![A-Za-z])\s*\{?\s*(\d+)\s*\}?\s*\)?$"
)


def congruence(text: str) -> tuple[str, int, int] | None:
    r"""Subject, residue and modulus of `n \equiv 1 \pmod{4}`; the subject may be missing."""
    found = _CONGRUENCE.match(text)
    if found is None or (found[1] is None and r"\pmod" not in text) or int(found[3]) == 0:
        return None
    return plain_name(found[1] or ""), int(found[2].replace(" ", "")), int(found[3])


def same_classes(gold: tuple[str, int, int] | None, answer: tuple[str, int, int] | None) -> bool:
    if gold is None or answer is None:
        return False
    alike = not gold[0] or not answer[0] or gold[0] == answer[0]
    return alike and gold[2] == answer[2] and (gold[1] - answer[1]) % gold[2] == 0


RATIO = re.compile(r"^[^:]+(?::[^:]+)+$")


def same_ratio(gold: str, answer: str) -> bool | None:
    """Ratios are equal where they are proportional. None if one side is no ratio of numbers."""
    one, other = ([algebra.exact_number(part) for part in text.split(":")] for text in (gold, answer))
    if None in one or None in other or max(len(one), len(other)) < 2:
        return None
    numbers = [[value for value in side if value is not None] for side in (one, other)]
    for side, opposite in (numbers, numbers[::-1]):
        if len(side) == 1 and len(opposite) == 2:
            return opposite[1] != 0 and side[0] == opposite[0] / opposite[1]
    if len(numbers[0]) != len(numbers[1]):
        return False
    return all(
        a * d == b * c
        for (a, c), (b, d) in zip(zip(*numbers, strict=True), list(zip(*numbers, strict=True))[1:], strict=False)
    )
