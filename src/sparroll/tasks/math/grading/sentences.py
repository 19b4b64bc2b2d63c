"""The answer inside a sentence: `The answer is 5.` says 5, `5 (since x > 0)` too, `not 5` and `at least 5` do not.
Works on cleaned text; what it cannot take apart it gives back as nothing."""

from __future__ import annotations

import re

from sparroll.tasks.math.grading.numbers import number_words
from sparroll.tasks.math.grading.splitting import words_in
from sparroll.tasks.math.grading.units import Piece, is_numeric, pieces

_SHORT = frozenset(
    words_in(
        "is so we the are get has can be in of to it its was for all ans our has had you and let by then thus "
        "as at if that this these sum set one two only there here with per no not"
    )
)
_REFUSED = re.compile(
    r"\b(?:not|never|neither|nor|cannot|n't|isn't|least|most|except|greater|less|fewer|larger|smaller|unknown"
    r"|impossible|wrong|incorrect|hardly|unlike)\b"
    r"|\b(?:anything|anyone|everything|everyone|all|any)\s+but\b|\b(?:instead\s+of|far\s+from)\b"
    r"|\b(?:none|no\s+solutions?)\b[\s\"]*\bor\b|\bor\b[\s\"]*\b(?:none|no\s+solutions?)\b"
    r"|\b(?:more|other|rather)\s+than\b|\b(?:over|under|above|below|about|around|roughly|approximately|nearly"
    r"|almost|up\s+to|between)\b(?=[\s\"]*[\d\\$-])"
    r"|n't\b",
    re.IGNORECASE,
)
_CALLED_FALSE = re.compile(
    r"=[^,;]*\b(?:is|are)\s+(?:false|untrue)\b"
    r"|\d[\s\"$})]*(?:\bis\s+|\(\s*\"?\s*)(?:false|untrue)\b"
    r"|\b(?:false|untrue)\b[\s\":,;.=]*(?=[\d\\$(-]|[A-Za-z]\s*=)",
    re.IGNORECASE,
)
"""An equation or a number beside the word: `x = 0 is false`, `3 (false)`, `false: 3`. In `3 statements are false` the
number counts."""
_RELATED = re.compile(
    r"\b(?:divisible|divided|multiplied|increased|decreased|divides|(?:multiples?|factors?|divisors?|powers?|half|twice"
    r"|double|square|root|remainder|digits?)\s+of|(?:ends|starts|begins)\s+(?:in|with))(?:\s+by)?\s*\"?\s*$",
    re.IGNORECASE,
)
"""Words behind which a number is not the answer but something that the answer is related to."""
_COPULA = re.compile(
    r'^([^\n]*?\d[^\n]*(?<![A-Za-z\\]))(?:is|are|was|equals|has|have|gives|leaves)\s*"?\s*(?=[-\d\\.$])(.+)$',
    re.DOTALL,
)
"""Behind a number, the word after which the answer comes: the root of 16 is 4."""
_ABOUT = re.compile(
    r'^(?P<before>.*?)"?\s*\b(?:about|around|roughly|approximately|nearly|approx\.?)\b\s*:?\s*"?(?=[\s"]*[\d\\$.-])',
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r'\s*[,;.(\[]?\s*"?\s*[(\[]?\s*\b(?:since|because|where|when|whenever|provided|assuming|given|which'
    r"|so\s+that|at|occurs|attained|achieved|respectively|as\s+required|hence|therefore|rounded|approx|for|if"
    r"|with)\b.*$",
    re.IGNORECASE | re.DOTALL,
)
_ASIDE = re.compile(
    r'\(\s*"[^()]*\)\s*$|"\s*\([^()"]*[A-Za-z]{3,}[^()"]*\)\s*"\s*$|\s\(\s*[A-Za-z -]{3,}\.?\s*\)\s*"?\s*$'
)


def is_prose(piece: Piece, following: Piece | None) -> bool:
    """Whether a piece is a word of a sentence rather than a variable or a product of some."""
    if not piece.is_word:
        return False
    word = piece.text.rstrip(".").casefold()
    if not word.isascii():
        return True
    if piece.upright:
        return len(word) > 1 or word == "a"
    if len(word) == 1:
        return word == "a" and following is not None and following.is_word and len(following.text) > 2
    return word in _SHORT or len(word) >= 4


def _only_named(text: str) -> bool:
    """Whether a text is a list of named values, whose names may be words: `"length" = 5, "width" = 3`."""
    parts = re.split(r"[,;]", text)
    return len(parts) > 1 and all(re.match(r'\s*(?:"[^"]+"|\\?[A-Za-z]+(?:_\S+)?)\s*=', part) for part in parts)


def refuses(text: str) -> bool:
    """Whether a sentence denies its value or only bounds it."""
    return _REFUSED.search(text) is not None or _CALLED_FALSE.search(text) is not None


def denies(text: str) -> bool:
    """Whether a sentence says that something is not so."""
    return (
        re.search(r"\b(?:not|never|neither|nor|cannot|wrong|incorrect|false|isn't)\b", text, re.IGNORECASE) is not None
    )


def value_of(text: str) -> str | None:
    r"""What a sentence says the answer is; the text itself if it has no prose, None if it cannot be told.

    >>> value_of('"The answer is" 5')
    '5'
    """
    about = _ABOUT.match(text)
    if about and not re.search(r"[\d=]", about["before"]):
        text = r"\approx " + text[about.end() :]
    if not _has_prose(text) or _only_named(text):
        return text
    if refuses(text):
        return None
    trimmed = _without_clause(text)
    trimmed = number_words(trimmed) if not is_numeric(trimmed) and not re.search(r"\d", trimmed) else trimmed
    return _after_prose(trimmed)


def _has_prose(text: str) -> bool:
    given = pieces(text)
    return any(
        is_prose(piece, given[place + 1] if place + 1 < len(given) else None) for place, piece in enumerate(given)
    )


def _without_clause(text: str) -> str:
    for pattern in (_ASIDE, _CLAUSE):
        shorter = pattern.sub("", text)
        if shorter != text and re.search(r"\d|\\|[=<>]|(?<![A-Za-z])[a-zA-Z](?![A-Za-z])", shorter):
            text = shorter + ('"' if shorter.count('"') % 2 else "")
    return text.strip()


def _after_prose(text: str) -> str | None:
    """Without the words before the first value and, of several sentences' parts, those before the last copula."""
    given = pieces(text)
    place = 0
    while place < len(given):
        following = given[place + 1] if place + 1 < len(given) else None
        punctuation = given[place].text in (":", ",", ".", ";", "'") and place > 0
        if not (is_prose(given[place], following) or punctuation):
            break
        # A variable that the words are about: "the value of x is 5".
        place += 1
        named = following is not None and len(following.text) == 1 and following.is_word and place + 1 < len(given)
        if named and given[place + 1].text.casefold() in ("is", "are", "must", "be", ":"):
            place += 1
    if place == len(given):
        return None
    rest = text[given[place].start :]
    said = _COPULA.match(rest)
    if said and not re.search(r"[;=]|\b(?:and|or)\b", said[1]):
        return said[2].replace('"', " ").strip() if said[2].count('"') % 2 else said[2].strip()
    if _RELATED.search(text[: given[place].start]):
        return None
    opened = text[: given[place].start].count('"') % 2 == 1
    rest = re.sub(r'"([^"A-Za-z]*)"', r" \1 ", ('"' if opened else "") + rest)
    inner = re.match(r'^(\\?[A-Za-z])\s*"?\s*(?:is|are|equals|must be)\b\s*"?\s*(.+)$', rest)
    return f"{inner[1]} = {inner[2]}" if inner else rest.strip().removeprefix("=").strip()
