r"""Numbers in one way: `1 234 567`, `0.\overline{3}`, `1.5e3`, `2 1/3`, `1.5 million` and `twenty-one` become digits
and fractions that a LaTeX parser reads exactly. Works on the text of typography.clean."""

from __future__ import annotations

import re
from fractions import Fraction

from sparroll.tasks.math.grading.splitting import words_in
from sparroll.tasks.math.grading.unit_table import UNITS

MAX_EXPONENT = 30
"""Powers of ten up to this one are written out."""

_GROUPED = re.compile(r"(?<![\d.,])(?<!\d )\d{1,3}(?:(?P<sign> |'|,|\{,\}|_)\d{3})(?:(?P=sign)\d{3})*(?!\d)(?! \d)")
_DOTTED = re.compile(r"(?<![\d.,])\d{1,3}(?:\.\d{3}){2,}(?:,(\d+))?(?![\d.,])")
_INDIAN = re.compile(r"(?<![\d.,])\d{1,2}(?:,\d{2})+,\d{3}(?![\d,])")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d)")
_SCIENTIFIC = re.compile(r'(?<![\w.}])(\d+(?:\.\d+)?|\.\d+)\s*"?\s*[eE]\s*"?\s*\{?([+-]?\d{1,9})\}?(?![\w.^])')
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*(10\s*\^)")
_POWER_OF_TEN = re.compile(r"10\s*\^\s*(-?\d{2,9})(?!\d)")
_BAR = r"(?:\\(?:overline|bar)\s*(?:\{\s*(\d+)\s*\}|(\d)))"
_RECURRING = re.compile(rf"(\d*)\.(\d*)\s*\{{?\s*{_BAR}\s*\}}?(?:\\ldots|\.\.\.)?")
_DOTTED_DIGITS = re.compile(r"(\d*)\.(\d*)\s*\\dot\s*\{?(\d)\}?(?:(\d*)\s*\\dot\s*\{?(\d)\}?)?")
_PARENTHESES = re.compile(r"(?<![\w)])(\d+)\.(\d*)\((\d+)\)(?:\\ldots|\.\.\.)?(?![\d(^])")
_REPEATING = re.compile(r'(\d*)\.(\d+)\s*(?:\\ldots|\.\.\.+)?\s*"?\(?\s*(?:repeating|recurring)\s*\)?"?')
_ELLIPSIS = re.compile(r"(?<![\d.])(\d*)\.(\d+)\s*(?:\\ldots|\.\.\.+)(?!\d)")
_MIXED = re.compile(r"(?<![\d.,^_}\w/])(\d+)\s+(?:\"?and\"?\s+)?(\d+)\s*/\s*(\d+)(?![\d.\w^(!])")
_MIXED_FRAC = re.compile(
    r"(?<![\d.,^_}\w/])(\d+)\s*(?:\"?and\"?\s*)?\\frac\s*(?:\{\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}"
    r"|(\d))(?!\s*[\^!])"
)

_SMALL = dict(
    zip(
        words_in(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
            "sixteen seventeen eighteen nineteen"
        ),
        range(20),
        strict=True,
    )
)
_TENS = dict(zip(words_in("twenty thirty forty fifty sixty seventy eighty ninety"), range(20, 100, 10), strict=True))
_LARGE = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4, "fifth": 5,
    "fifths": 5, "sixth": 6, "sixths": 6, "seventh": 7, "sevenths": 7, "eighth": 8, "eighths": 8, "ninth": 9,
    "ninths": 9, "tenth": 10, "tenths": 10, "hundredth": 100, "hundredths": 100,
}  # fmt: skip
_SHORT = {"k": 10**3, "K": 10**3, "M": 10**6, "m": 10**6, "B": 10**9, "b": 10**9, "bn": 10**9, "T": 10**12}
_MAGNITUDE = re.compile(
    r'(\d+(?:\.\d+)?|\.\d+|\\frac\{\d+\}\{\d+\}|\d+/\d+)\s*"?\s*(hundred|dozen|thousand|million|billion'
    r"|trillion|quadrillion|mil|mln|bn)s?\b",
    re.IGNORECASE,
)
_MONEY_MAGNITUDE = re.compile(r'((?:\\\$|\\euro|\\pounds)\s*)(\d+(?:\.\d+)?)\s*"?\s*(k|K|M|B|b|T)\b')
_THOUSANDS = re.compile(r'(?<![\w.^_])(\d+(?:\.\d+)?)\s*"\s*k\s*"')
_HOURS = re.compile(r'(?<![\w.])(\d{1,3})\s*"?\s*h\s*"?\s*([0-5]\d)$')
_PART_OF_UNIT = re.compile(r"\b(?:a\s+)?(half|quarter)\s+(?:of\s+)?an?\s+(?=([a-z]+)\b)", re.IGNORECASE)
_ORDINAL = re.compile(r'(?<![\w.])(\d+)\s*"?\s*(?:st|nd|rd|th)\b"?')
_NUMBER_WORD = re.compile(
    r"\b(?:(?:minus|negative)\s+)?(?:" + "|".join([*_SMALL, *_TENS, "a", "an", "half"]) + r")(?:[\s-]+(?:and[\s-]+)?(?:"
    + "|".join([*_SMALL, *_TENS, "hundred", "a", *_LARGE, *_PARTS]) + r"))*\b", re.IGNORECASE,
)  # fmt: skip


def digits(text: str) -> str:
    r"""Every number of a cleaned answer in digits, fractions and powers.

    >>> digits(r"1 234.5 + 0.\overline{3} + 2 1/3 + 1e3")
    '1234.5 + \\frac{1}{3} + \\frac{7}{3} + 1000'
    """
    text = _joined(text)
    text = _RECURRING.sub(lambda m: recurring(m[1], m[2], m[3] or m[4]), text)
    text = _DOTTED_DIGITS.sub(lambda m: recurring(m[1], m[2], m[3] + (m[4] or "") + (m[5] or "")), text)
    text = _PARENTHESES.sub(lambda m: recurring(m[1], m[2], m[3]), text)
    text = _REPEATING.sub(_repeating, text)
    text = _SCIENTIFIC.sub(lambda m: _scientific(m[1], int(m[2])), text)
    text = _TIMES_TEN.sub(r" \\times \1", text)
    text = _POWER_OF_TEN.sub(r"10^{\1}", text)
    text = _MIXED.sub(lambda m: _mixed(m[1], m[2], m[3]), text)
    text = _MIXED_FRAC.sub(lambda m: _mixed(m[1], m[2] or m[3], m[4] or m[5]), text)
    text = _MONEY_MAGNITUDE.sub(lambda m: m[1] + _times(m[2], _SHORT[m[3]]), text)
    if "h" in text or "k" in text or re.search("half|quarter", text, re.IGNORECASE):
        text = _THOUSANDS.sub(lambda m: _times(m[1], 1000), text)
        text = _HOURS.sub(r'\1 "h" \2 "min"', text)
        text = _PART_OF_UNIT.sub(_part_of_unit, text)
    text = _MAGNITUDE.sub(_magnitude, text)
    # A fraction before a factor stands for itself: 4/3 pi.
    text = re.sub(r"(?<![\w.}^)/])(\d+)\s*/\s*(\d+)\s+(?=[A-Za-z\\])", r"\\frac{\1}{\2} ", text)
    return _ORDINAL.sub(r"\1", text)


def _part_of_unit(found: re.Match[str]) -> str:
    """Half an hour as half of the unit."""
    if found[2].casefold() not in UNITS:
        return found.group()
    number = rf"\frac{{1}}{{{_PARTS[found[1].casefold()]}}} "
    if found.string[: found.start()].count('"') % 2 == 0:
        return number
    return f'" {number}"'


def _joined(text: str) -> str:
    """Without signs between groups of digits, and with a point before decimals."""
    text = _GROUPED.sub(_grouped, text)
    text = _INDIAN.sub(lambda m: m.group().replace(",", ""), text)
    text = _DOTTED.sub(lambda m: re.sub(r"\.|,.*", "", m.group()) + ("." + m[1] if m[1] else ""), text)
    return _BRACED_COMMA.sub(".", text)


def _grouped(found: re.Match[str]) -> str:
    # 1,234,5 is a list.
    listed = found["sign"] == "," and re.match(r",\d", found.string[found.end() :])
    return found.group() if listed else re.sub(r"\D", "", found.group())


def with_decimal_comma(text: str) -> str | None:
    """`3,14` read as 3.14, as it is written in much of the world; None if the text is nothing of the kind."""
    found = re.fullmatch(r"(-?\s*\d+),(\d+)(.*)", text, re.DOTALL)
    return f"{found[1]}.{found[2]}{found[3]}" if found and "," not in found[3] else None


def recurring(whole: str, fixed: str, block: str) -> str:
    """The fraction that a recurring decimal is."""
    scale = 10 ** len(fixed)
    value = Fraction(int((whole or "0") + fixed), scale) + Fraction(int(block), scale * (10 ** len(block) - 1))
    return _fraction(value)


def _repeating(found: re.Match[str]) -> str:
    for size in range(1, len(found[2]) + 1):
        block = found[2][-size:]
        if found[2].endswith(block * 2) or size == len(found[2]):
            return recurring(found[1], found[2][: len(found[2]) - size], block)
    raise AssertionError("a block of the whole length always fits")


def continued(text: str) -> list[str]:
    r"""Readings of `0.1666\ldots`: each end of the digits may be the block that goes on. Empty without one."""
    found = _ELLIPSIS.search(text)
    if found is None:
        return []
    decimals = found[2]
    readings = []
    for size in range(1, min(len(decimals), 30) + 1):
        value = recurring(found[1], decimals[: len(decimals) - size], decimals[-size:])
        reading = text[: found.start()] + value + text[found.end() :]
        if reading not in readings:
            readings.append(reading)
    return readings


def _fraction(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _mixed(whole: str, top: str, bottom: str) -> str:
    if int(bottom) == 0:
        return rf"{whole} \frac{{{top}}}{{{bottom}}}"
    return rf"\frac{{{int(whole) * int(bottom) + int(top)}}}{{{bottom}}}"


def _scientific(mantissa: str, exponent: int) -> str:
    if abs(exponent) <= MAX_EXPONENT:
        return decimal(Fraction(mantissa) * Fraction(10) ** exponent)
    return rf"{mantissa} \cdot 10^{{{exponent}}}"


def decimal(value: Fraction) -> str:
    """The digits of a fraction whose denominator is a power of ten."""
    places = 0
    while (value * 10**places).denominator != 1:
        places += 1
    numerator = str(int(abs(value) * 10**places)).rjust(places + 1, "0")
    whole, decimals = (numerator[:-places], "." + numerator[-places:]) if places else (numerator, "")
    return ("-" if value < 0 else "") + whole + decimals


def _times(number: str, factor: int) -> str:
    found = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", number)
    value = Fraction(int(found[1]), int(found[2])) if found and int(found[2]) else Fraction(number)
    return _fraction(value * factor)


def _magnitude(found: re.Match[str]) -> str:
    word = found[2].casefold()
    factor = {"hundred": 100, "dozen": 12, "mil": 10**6, "mln": 10**6, "bn": 10**9}.get(word) or _LARGE[word]
    try:
        number = _times(found[1], factor)
    except (ValueError, ZeroDivisionError):
        return found.group()
    # The word may have been the first of several in quotes.
    return number + ' "' if '"' in found.group() else number


def number_of_words(words: str) -> Fraction | None:
    """The number that words say: "twenty-one", "three quarters", "minus two and a half"; None if they say none."""
    parts = [word for word in re.split(r"[\s-]+", words.casefold().strip()) if word not in ("and", "")]
    negative = bool(parts) and parts[0] in ("minus", "negative")
    if negative:
        parts = parts[1:]
    if not parts:
        return None
    value = _positive_words(parts)
    return None if value is None else -value if negative else value


def _positive_words(parts: list[str]) -> Fraction | None:
    factor = {**_LARGE, "dozen": 12}.get(parts[-1])
    if factor and len(parts) > 2 and parts[-2] == "a":
        # half a million, three quarters of a million
        share = _positive_words([part for part in parts[:-2] if part != "of"])
        return None if share is None or share >= 1 else share * factor
    if parts[-1] in _PARTS:
        below = _PARTS[parts[-1]]
        if len(parts) == 1:
            return Fraction(1, 2) if parts[0] == "half" else None
        for place in range(len(parts) - 1):
            top = Fraction(1) if parts[place:-1] in (["a"], ["an"]) else _whole_words(parts[place:-1])
            whole = Fraction(0) if place == 0 else _whole_words(parts[:place])
            if top is not None and whole is not None and top < below:
                return whole + Fraction(top, below)
        return None
    return _whole_words(parts)


def _whole_words(parts: list[str]) -> Fraction | None:
    total, group, last = 0, 0, 10**18
    seen = False
    for word in parts:
        if word in ("a", "an") and not seen:
            group = 1
        elif word in _SMALL and (group % 100 == 0 or (group % 10 == 0 and group % 100 >= 20 and 0 < _SMALL[word] < 10)):
            group += _SMALL[word]
        elif word in _TENS and group % 100 == 0:
            group += _TENS[word]
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word == "dozen" and len(parts) <= 2:
            group = max(group, 1) * 12
        elif word in _LARGE and _LARGE[word] < last:
            total, group, last = total + max(group, 1) * _LARGE[word], 0, _LARGE[word]
        else:
            return None
        seen = True
    if parts in (["a"], ["an"]):
        return None
    return Fraction(total + group) if seen else None


def number_words(text: str) -> str:
    """Number words inside a text become digits, where they stand alone between other words."""

    def as_digits(found: re.Match[str]) -> str:
        value = number_of_words(found.group())
        return found.group() if value is None else f" {_fraction(value)} "

    return _NUMBER_WORD.sub(as_digits, text)
