r"""Quantities: a value with a unit, or several that add up (`2 hours 30 minutes`). A unit has a dimension and a factor
to the base unit, so that 5 cm is 0.05 m and no second. Works on the text of typography.clean; compares nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparroll.tasks.math.grading.unit_table import UNITS, Unit

MAX_PIECES = 120
"""A longer text is no quantity."""


@dataclass(frozen=True)
class Term:
    """One value of a quantity: its LaTeX, and what its unit may be. No unit at all is the empty tuple."""

    value: str
    units: tuple[Unit, ...]
    nouns: frozenset[str] = frozenset()
    """Words behind the value that are no known unit."""


CURRENCY_SIGNS = (r"\$", r"\euro", r"\pounds", r"\yen", r"\rupee")
_AREA, _VOLUME = ("square", "sq", "sq."), ("cubic", "cu", "cu.")
_AS_VARIABLES = frozenset({"A", "B", "C", "F", "K", "N", "V", "W", "L", "u", "l", "t", "d"})
"""Single letters that are units only where they are upright, because they are variables more often."""

_PIECE = re.compile(
    r"\\\$|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\.\d+|[A-Za-z]+\.?(?![A-Za-z])|[A-Za-z]+|''|\^\s*\{\s*[+-]?\s*\d+\s*\}"
    r"|\^\s*-?\d|\^\s*\\circ|\s+|[\u3400-\u9fff]+|."
)


@dataclass(frozen=True)
class Piece:
    """A word, number, command or sign of an answer."""

    text: str
    upright: bool
    start: int
    end: int
    after_space: bool

    @property
    def is_word(self) -> bool:
        return self.text[0].isalpha()


def pieces(text: str) -> list[Piece]:
    """The pieces of a cleaned answer. Quotes are not pieces: they say which ones are upright."""
    found: list[Piece] = []
    upright, after_space = False, True
    for piece in _PIECE.finditer(text):
        sign = piece.group()
        if sign == '"':
            upright = not upright
            after_space = True
        elif sign.isspace():
            after_space = True
        else:
            found.append(Piece(sign, upright, piece.start(), piece.end(), after_space))
            after_space = False
    return found


def _lookup(word: str, upright: bool, may_be_variable: bool) -> list[Unit]:
    """Readings of one word as a unit."""
    bare = word.removesuffix(".")
    if len(bare) == 1 and bare.isalpha() and not upright and may_be_variable:
        return []
    for name in (bare, bare.casefold() if len(bare) > 2 else bare):
        for form in (
            name,
            name.removesuffix("s") if len(name) > 2 else name,
            name.removesuffix("es") if len(name) > 4 else name,
        ):
            if form in UNITS and (len(form) > 1 or form == name):
                return UNITS[form]
    return []


def _power(unit: Unit, power: int) -> Unit:
    return Unit(unit.name, tuple((base, power * n) for base, n in unit.dimension), unit.factor**power)


def _product(one: Unit, other: Unit) -> Unit:
    powers = dict(one.dimension)
    for base, n in other.dimension:
        powers[base] = powers.get(base, 0) + n
    dimension = tuple(sorted((base, n) for base, n in powers.items() if n))
    return Unit(f"{one.name} {other.name}", dimension, one.factor * other.factor)


class _UnitReader:
    """Reads pieces from a place on as one unit: factors joined by a product, `/` or `per`, with powers."""

    def __init__(self, given: list[Piece], glued_letters: bool) -> None:
        self.given, self.glued_letters = given, glued_letters

    def read(self, place: int) -> tuple[list[Unit], int]:
        """The readings and the place behind the longest unit that starts here."""
        units, place = self._factor(place, first=True)
        if not units:
            return [], place
        while place < len(self.given):
            sign = self.given[place].text
            inverse = sign in ("/", "per", "a", "each", "an") and not (
                sign in ("a", "an") and not self.given[place].upright
            )
            start = place + 1 if inverse or sign in (r"\cdot", "*", r"\times", "-") else place
            more, end = self._factor(start, first=False)
            if not more or (start == place and self._starts_a_term(place)):
                break
            units = [_product(unit, _power(other, -1 if inverse else 1)) for unit in units for other in more]
            place = end
        return units, place

    def _starts_a_term(self, place: int) -> bool:
        return self.given[place].text[0].isdigit()

    def _factor(self, place: int, first: bool) -> tuple[list[Unit], int]:
        given = self.given
        if place >= len(given):
            return [], place
        piece = given[place]
        sign = piece.text
        if sign == r"\frac":
            return self._fraction(place)
        if sign == "(":
            units, end = self.read(place + 1)
            closed = bool(units) and end < len(given) and given[end].text == ")"
            return self._raised(units, end + 1) if closed else ([], place)
        word = sign.casefold()
        if word in (*_AREA, *_VOLUME):
            units, end = self._factor(place + 1, first=False)
            return ([_power(unit, 2 if word in _AREA else 3) for unit in units], end) if units else ([], place)
        if sign.startswith("^") and "circ" in sign:
            following = given[place + 1].text if place + 1 < len(given) else ""
            if following in ("C", "F"):
                return UNITS["°" + following], place + 2
            return UNITS["°"], place + 1
        if sign == r"\mu" and place + 1 < len(given):
            units = _lookup(given[place + 1].text, True, False)
            return (
                ([Unit("µ" + u.name, u.dimension, u.factor / 10**6) for u in units], place + 2)
                if units
                else ([], place)
            )
        if word in ("degree", "degrees", "deg"):
            following = given[place + 1].text.casefold() if place + 1 < len(given) else ""
            if following in ("celsius", "centigrade", "c", "fahrenheit", "f"):
                return UNITS["°F" if following.startswith("f") else "°C"], place + 2
        if place + 1 < len(given) and given[place + 1].is_word:
            pair = f"{word} {given[place + 1].text.casefold()}"
            for form in (pair, pair.removesuffix("s")):
                if form in UNITS:
                    return self._raised(UNITS[form], place + 2)
        if not (
            piece.is_word or sign in (r"\$", "%", "'", "''", r"\Omega", r"\euro", r"\pounds", r"\yen", r"\rupee", "°")
        ):
            return [], place
        if first and sign in ("'", "''"):
            return UNITS[sign], place + 1
        # Only behind a number is a glued letter a variable: the s of m/s is a unit as the m is.
        glued = first and not piece.after_space
        units = UNITS.get(sign, []) if not piece.is_word else _lookup(
            sign, piece.upright, not self.glued_letters and (glued or sign in _AS_VARIABLES)
        )  # fmt: skip
        return self._raised(units, place + 1) if units else ([], place)

    def _raised(self, units: list[Unit], place: int) -> tuple[list[Unit], int]:
        if place < len(self.given):
            sign = self.given[place].text
            if sign.startswith("^") and (number := re.search(r"[+-]?\s*\d+", sign)) is not None:
                return [_power(unit, int(number.group().replace(" ", ""))) for unit in units], place + 1
            if sign.casefold() in ("squared", "cubed"):
                return [_power(unit, 2 if sign.casefold() == "squared" else 3) for unit in units], place + 1
        return units, place

    def _fraction(self, place: int) -> tuple[list[Unit], int]:
        given = self.given
        if place + 1 >= len(given) or given[place + 1].text != "{":
            return [], place
        top, end = self.read(place + 2)
        if not top or end + 1 >= len(given) or (given[end].text, given[end + 1].text) != ("}", "{"):
            return [], place
        bottom, end = self.read(end + 2)
        if not bottom or end >= len(given) or given[end].text != "}":
            return [], place
        return [_product(one, _power(other, -1)) for one in top for other in bottom], end + 1


_NUMERIC_END = re.compile(r"(?:\d|\}|\)|\\pi|!|\be)\s*$")
_SUBSCRIPTED = re.compile(r"_\s*(?:\{[^{}]*\}|\w)\s*$")
_TURNS = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|cis|angle)(?![A-Za-z])")
_NO_LETTERS = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|div|pm|infty|binom|ldots|left|right|approx)(?![A-Za-z])|[\s\d.,+\-*/^(){}!\[\]:]"
)


def is_numeric(text: str) -> bool:
    """Whether a text is made of digits, operations, roots, fractions and pi only."""
    return bool(text.strip()) and not _NO_LETTERS.sub("", text)


def quantity(text: str, glued_letters: bool) -> list[Term] | None:
    r"""The terms of a quantity; None if the text is not a value with units. `glued_letters` allows the m of `5m`, which
    might be a variable.

    >>> [term.value for term in quantity('2 "hours" 30 "minutes"', False)]
    ['2', '30']
    """
    given = pieces(text)
    if not given or len(given) > MAX_PIECES:
        return None
    sign = ""
    prefix: list[Unit] = []
    start = 0
    if given[0].text in "+-" and len(given) > 1 and given[1].text in CURRENCY_SIGNS:
        sign, start = given[0].text, 1
    if given[start].text in CURRENCY_SIGNS or given[start].text in (
        "USD",
        "EUR",
        "GBP",
        "INR",
        "Rs",
        "Rs.",
        "US",
        "JPY",
    ):
        if given[start].text == "US" and start + 1 < len(given) and given[start + 1].text == r"\$":
            start += 1
        prefix = UNITS.get(given[start].text.removesuffix("."), [])
        start += 1
        if not prefix:
            return None
    reader = _UnitReader(given, glued_letters)
    terms: list[Term] = []
    while start < len(given):
        term, start = _term(text, given, start, reader)
        if term is None:
            return None
        terms.append(term)
        while start < len(given) and given[start].text in ("and", ",", r"\&") and terms[-1].units:
            start += 1
    if prefix and len(terms) == 1:
        behind = terms[0].units
        if behind and all(unit.dimension == prefix[0].dimension for unit in behind):
            joined = tuple(prefix)
        elif behind and behind[0].dimension and all(n < 0 for _, n in behind[0].dimension):
            joined = tuple(_product(prefix[0], unit) for unit in behind)
        else:
            joined = tuple(prefix) if not behind else tuple(_product(prefix[0], unit) for unit in behind)
        terms = [Term(sign + terms[0].value, joined, terms[0].nouns)]
    elif prefix:
        return None
    if not any(term.units or term.nouns for term in terms):
        return None
    if len(terms) > 1 and not _adds_up(terms):
        return None
    return terms


def _term(text: str, given: list[Piece], start: int, reader: _UnitReader) -> tuple[Term | None, int]:
    """The value from `start` on and the unit behind it."""
    place = start
    depth = 0
    while place < len(given):
        piece = given[place]
        if place > start and depth == 0:
            value = text[given[start].start : given[place - 1].end]
            per = piece.text in ("per", "/", "each") and not is_numeric(text[piece.end : piece.end + 2])
            units, end = reader.read(place + 1 if per else place)
            behind = given[end].text if end < len(given) else ""
            closes = end == len(given) or behind[0].isdigit() or behind[0] in ",\\&" or given[end].is_word
            # The g of m_1 g is a variable, as the m is.
            if not piece.upright and len(piece.text) == 1 and piece.is_word and _SUBSCRIPTED.search(value):
                units = []
            turned = piece.text.startswith("^") and _TURNS.search(value) is not None
            if units and closes and _ends_value(value) and not turned:
                if per:
                    units = [_power(unit, -1) for unit in units]
                nouns, end = _nouns(given, end)
                return Term(_unquoted(value), tuple(units), nouns), end
            if piece.is_word and _ends_value(value) and (piece.upright or len(piece.text) > 2):
                nouns, end = _nouns(given, place)
                if nouns:
                    return Term(_unquoted(value), (), nouns), end
        depth += {"{": 1, "(": 1, "[": 1, "}": -1, ")": -1, "]": -1}.get(piece.text, 0)
        if piece.is_word and len(piece.text) > 1 and depth == 0:
            return None, place
        place += 1
    value = text[given[start].start :]
    return (Term(_unquoted(value), ()), len(given)) if _ends_value(value) else (None, place)


def _nouns(given: list[Piece], place: int) -> tuple[frozenset[str], int]:
    found = set()
    while place < len(given):
        word = given[place].text.removesuffix(".").casefold()
        if not given[place].is_word or (word == "and" or word == "or"):
            break
        found.add(word.removesuffix("s") if len(word) > 3 else word)
        place += 1
    return frozenset(found), place


def _ends_value(value: str) -> bool:
    return bool(_NUMERIC_END.search(value.replace('"', " "))) or is_numeric(value)


def _unquoted(value: str) -> str:
    return value.replace('"', " ").strip()


def _adds_up(terms: list[Term]) -> bool:
    """Whether terms are parts of one quantity: the same dimension, each smaller than the one before, plain numbers."""
    if not all(term.units and is_numeric(term.value) for term in terms):
        return False
    for one in terms[0].units:
        last = one
        for term in terms[1:]:
            match = [u for u in term.units if u.dimension == one.dimension and u.factor < last.factor]
            if not match:
                break
            last = match[0]
        else:
            return True
    return False


def aligned(terms: list[Term]) -> list[list[Unit]]:
    """For each reading of the whole quantity, the unit of each term: `60 degrees 30 minutes` is an angle throughout."""
    if not terms or not all(term.units for term in terms):
        return []
    readings = []
    for one in terms[0].units:
        chain = [one]
        for term in terms[1:]:
            match = [u for u in term.units if u.dimension == one.dimension]
            if match:
                chain.append(match[0])
        if len(chain) == len(terms):
            readings.append(chain)
    return readings
