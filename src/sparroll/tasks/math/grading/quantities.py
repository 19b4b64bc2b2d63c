"""Whether two single values are equal: numbers and expressions with units, currencies, percent signs, bases.

A unit that only one side has is not held against it, because problems ask in a unit and answers often leave it out.
Where both have one, dimensions must agree and the values are converted. Lists and sets are in shapes.py.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import product

import sympy

from sparroll.tasks.math.grading import algebra, units
from sparroll.tasks.math.grading.numbers import number_of_words
from sparroll.tasks.math.grading.splitting import words_in
from sparroll.tasks.math.grading.unit_table import Unit
from sparroll.tasks.math.grading.units import Term

_WORDS_OF_BASES = dict(
    zip(
        words_in("two three four five six seven eight nine ten eleven twelve sixteen"), (*range(2, 13), 16), strict=True
    )
)
_BASE_WORDS = {**_WORDS_OF_BASES, "binary": 2, "octal": 8, "decimal": 10, "hexadecimal": 16, "hex": 16}
_NUMERAL = r"\(?\s*([0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\s*\)?"
_SUBSCRIPT = re.compile(rf"(-?)\s*{_NUMERAL}\s*_\s*\{{?\s*\(?\s*(?:base\s*)?(\d+|[a-z]+)\s*\)?\s*\}}?")
_SPELLED = re.compile(rf"(-?)\s*{_NUMERAL}\s*,?\s*\(?\s*(?:in\s+)?(?:base[\s-]*)(\d+|[a-z]+)\s*\)?")
_NAMED_BASE = re.compile(rf"(-?)\s*{_NUMERAL}\s*\(?\s*(?:in\s+)?(binary|octal|hexadecimal|hex)\s*\)?")
_PREFIXED = re.compile(r"(-?)0([xXbBoO])([0-9A-Fa-f]+)")
_GENERIC = frozenset(
    words_in(
        "way possibilitie possibility arrangement combination outcome solution time people person unit thing "
        "total value number answer different in total distinct possible integer element object item case "
        "choice option pair of them point permutation"
    )
)


def based(text: str) -> tuple[str, int, Fraction] | None:
    """The digits, base and value of a numeral whose base is said; None for anything else."""
    bare = re.sub(r"\{\s*([0-9A-Za-z.]+)\s*\}\s*(?=_)", r"\1", text.replace('"', " ")).strip()
    prefixed = _PREFIXED.fullmatch(bare)
    if prefixed and (prefixed[2] in "xX" or len(prefixed[3]) > 1):
        sign, numeral, base_name = prefixed[1], prefixed[3], {"x": "16", "b": "2", "o": "8"}[prefixed[2].lower()]
    else:
        found = _SUBSCRIPT.fullmatch(bare) or _SPELLED.fullmatch(bare) or _NAMED_BASE.fullmatch(bare)
        if found is None:
            return None
        sign, numeral, base_name = found[1], found[2], found[3]
    base = int(base_name) if base_name.isdigit() and len(base_name) < 3 else _BASE_WORDS.get(base_name, 0)
    numeral = numeral.upper()
    if not 2 <= base <= 36 or not (re.search(r"\d", numeral) or len(numeral) > 1):
        return None
    whole, _, rest = numeral.partition(".")
    try:
        value = Fraction(int(whole, base)) + (Fraction(int(rest, base), base ** len(rest)) if rest else 0)
    except ValueError:
        return None
    return sign + (numeral.lstrip("0") or "0"), base, -value if sign else value


def same_value(gold: str, answer: str) -> bool:
    """Whether an answer is the gold value. Raises algebra.Unreadable if the gold one is not an expression."""
    gold_base, answer_base = based(gold), based(answer)
    if gold_base or answer_base:
        return _same_in_bases(gold, answer, gold_base, answer_base)
    gold_terms = units.quantity(gold, glued_letters=False)
    numeric = units.is_numeric(gold) or gold_terms is not None
    answer_terms = units.quantity(answer, glued_letters=numeric)
    if gold_terms is None and answer_terms is None:
        return algebra.equal(gold, answer)
    # Where the gold 3m/s has variables, those of 3 m/s may be the same ones.
    if not numeric and algebra.equal(gold, answer):
        return True
    gold_terms = gold_terms or [Term(gold, ())]
    answer_terms = answer_terms or [Term(answer, ())]
    if not _nouns_agree(gold_terms, answer_terms):
        return False
    return _same_quantities(gold_terms, answer_terms)


def _same_in_bases(
    gold: str, answer: str, gold_base: tuple[str, int, Fraction] | None, answer_base: tuple[str, int, Fraction] | None
) -> bool:
    """A gold answer in a base asks for that base; the base itself may be left out, as with units."""
    if gold_base and answer_base:
        return gold_base[1:] == answer_base[1:]
    if gold_base:
        bare = re.sub(r"[\s()\"]", "", answer).upper()
        return ((bare.lstrip("0") or "0") == gold_base[0] and gold_base[1] != 10) or (
            gold_base[1] == 10 and algebra.equal(str(gold_base[2]), answer)
        )
    assert answer_base is not None
    return algebra.equal(gold, str(answer_base[2]))


def _nouns_agree(gold: list[Term], answer: list[Term]) -> bool:
    one = frozenset().union(*(term.nouns for term in gold)) - _GENERIC
    other = frozenset().union(*(term.nouns for term in answer)) - _GENERIC
    if one and other:
        return bool(one & other)
    if one and any(term.units for term in answer):
        return False
    return not (other and any(term.units for term in gold) and not any(term.units for term in answer))


def _same_quantities(gold: list[Term], answer: list[Term]) -> bool:
    gold_units, answer_units = units.aligned(gold), units.aligned(answer)
    if gold_units and answer_units:
        return any(_same_with_units(gold, one, answer, other) for one, other in product(gold_units, answer_units))
    if gold_units:
        return any(_same_without(answer[0].value, gold, chain, gold_first=False) for chain in gold_units)
    if answer_units:
        return any(_same_without(gold[0].value, answer, chain, gold_first=True) for chain in answer_units)
    return len(gold) == len(answer) == 1 and algebra.equal(gold[0].value, answer[0].value)


def _same_with_units(gold: list[Term], gold_chain: list[Unit], answer: list[Term], answer_chain: list[Unit]) -> bool:
    one, other = gold_chain[0], answer_chain[0]
    kinds = {base for base, _ in one.dimension}, {base for base, _ in other.dimension}
    if len(gold) == len(answer) == 1 and one == other:
        return algebra.equal(gold[0].value, answer[0].value)
    if {"any"} in kinds and one.dimension != other.dimension:
        plain = [tuple(n for _, n in unit.dimension) for unit in (one, other)]
        return plain[0] == plain[1] and len(gold) == len(answer) == 1 and algebra.equal(gold[0].value, answer[0].value)
    ratio: sympy.Expr = sympy.Integer(1)
    if kinds == ({"angle"}, {"radian"}):
        ratio = 180 / sympy.pi
    elif kinds == ({"radian"}, {"angle"}):
        ratio = sympy.pi / 180
    elif one.dimension != other.dimension:
        return False
    return _same_sums(_total(gold, gold_chain), _total(answer, answer_chain), ratio)


def _same_sums(gold: sympy.Expr, answer: sympy.Expr | None, ratio: sympy.Expr = sympy.Integer(1)) -> bool:
    if answer is None:
        return False
    return algebra.same(gold, answer if ratio == 1 else sympy.Mul(answer, ratio, evaluate=False))


def _total(terms: list[Term], chain: list[Unit]) -> sympy.Expr:
    parts = []
    negative = terms[0].value.lstrip().startswith("-") and len(terms) > 1
    for place, (term, unit) in enumerate(zip(terms, chain, strict=True)):
        value = algebra.parse(term.value)
        if not isinstance(value, sympy.Expr):
            raise algebra.Unreadable(term.value)
        factor = sympy.Rational(unit.factor.numerator, unit.factor.denominator)
        offset = sympy.Rational(unit.offset.numerator, unit.offset.denominator)
        if offset:
            value = sympy.Add(value, offset, evaluate=False)
        parts.append(-value * factor if negative and place else _times(value, factor))
    return parts[0] if len(parts) == 1 else sympy.Add(*parts)


def _times(value: sympy.Expr, factor: sympy.Expr) -> sympy.Expr:
    if factor == 1:
        return value
    return value * factor if value.is_Rational else sympy.Mul(value, factor, evaluate=False)


def _same_without(plain: str, terms: list[Term], chain: list[Unit], gold_first: bool) -> bool:
    """Whether a plain value is a quantity in one of the units that are used in it."""

    def equal(quantity: str) -> bool:
        return algebra.equal(plain, quantity) if gold_first else algebra.equal(quantity, plain)

    kind = {base for base, _ in chain[0].dimension}
    if len(terms) == 1:
        if equal(terms[0].value):
            # A plain answer up to 1 is a share: 0.75 is 75%, not 0.75%.
            share = algebra.exact_number(plain) if gold_first and kind == {"percent"} else None
            return share is None or abs(share) > 1 or share == 0
        if kind == {"percent"}:
            return equal(rf"\frac{{1}}{{100}}({terms[0].value})")
        # An angle without the sign of degrees is in radians where pi is in it.
        return (
            kind == {"angle"}
            and (r"\pi" in plain or r"\arc" in plain)
            and equal(rf"\frac{{\pi}}{{180}}({terms[0].value})")
        )
    value = algebra.parse(plain)
    total = _total(terms, chain)
    if kind == {"angle"} and (r"\pi" in plain or r"\arc" in plain):
        return algebra.same(value, sympy.Mul(total, sympy.pi / 180, evaluate=False))
    return any(
        algebra.same(value, total / sympy.Rational(unit.factor.numerator, unit.factor.denominator)) for unit in chain
    )


def words_as_number(text: str) -> str | None:
    """Number words as LaTeX; None if the words say no number."""
    value = number_of_words(text.replace('"', " "))
    if value is None:
        return None
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
