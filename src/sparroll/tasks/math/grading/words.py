"""Answers that are no mathematics: words, choice letters, times of day and dates. Works on cleaned text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparroll.tasks.math.grading.splitting import words_in

_WORDS = re.compile(r"[^\W\d_](?:[^\W_]|[ .,;:'!?()/-])*")
_CHOICE = re.compile(
    r'^"?\s*(?:(?:the\s+)?(?:correct\s+|right\s+|final\s+)?(?:answer|option|choice|letter|statement'
    r"|part)s?(?:\s+is)?\s*:?\s*)*"
    r'(?P<open>\(|\[)?\s*"?\s*(?P<letter>[A-Za-z])\s*"?\s*(?P<close>[)\].:])*\s*"?(?P<rest>.*)$',
    re.IGNORECASE | re.DOTALL,
)
_NEGATIONS = frozenset(
    {"not", "never", "neither", "nor", "cannot", "isn't", "doesn't", "aren't", "don't", "without", "non"}
)
_CONDITIONS = frozenset(
    words_in(
        "if only unless except excluding besides provided when whenever until than before after other nearly almost"
    )
)
"""Words that take back a part of what stands beside them, or make it another thing."""
_POLAR = frozenset({"yes", "no", "true", "false"})
_GOES_ON = frozenset(words_in("it they this that there he she we because since as"))
"""How a sentence goes on behind its yes or no, where there is no comma."""
SAME = [
    frozenset(phrases.split("|"))
    for phrases in (
        "no solution|no solutions|no real solution|no real solutions|empty set|none|no roots|no real roots"
        "|no such value"
        "|null set|no value|no values|has no solution|there is no solution|there are no solutions|no solution exists",
        "dne|does not exist|doesn't exist|undefined|not defined|do not exist",
        "all real numbers|all reals|all real values|reals|real numbers|the real numbers|all x|every real number"
        "|any real number|all real x|all real numbers x|all values of x",
        "infinitely many|infinitely many solutions|infinite solutions|infinite number of solutions|infinite"
        "|an infinite number",
        "true|t",
        "false|f",
        "yes|y",
    )
]
"""Phrases that say the same."""
_CLASSES = frozenset(
    {"quadrant", "type", "case", "figure", "graph", "option", "statement", "team", "box", "player", "group", "plan"}
)
_KINDS = frozenset(
    words_in(
        "triangle quadrilateral polygon angle line curve function matrix number sequence series distribution test only "
        "triangles angles lines numbers"
    )
)
"""Kinds of things that may be left out behind what tells one from others: "scalene" for "scalene triangle"."""
EMPTY, REALS = SAME[0], SAME[2]

_MONTHS = words_in("january february march april may june july august september october november december")
_DATE_WORDS = re.compile(r"[A-Za-z]+|\d+")
_TIME = re.compile(r"^(\d{1,2})(?:\s*:\s*(\d{2}))?(?:\s*:\s*(\d{2}))?\s*([ap])?\.?\s*(m)?\.?$")
_PRODUCT_LETTERS = [
    frozenset(letters)
    for letters in words_in("abcdxyz klmn abmnxyz pqrst uvwxyz abckmn rstuv abcpqr hrbw mgh knpqr abcrst")
]
"""Letters that stand together in products."""
_SHORT_WORDS = frozenset(
    words_in(
        "no on yes up so go do to of in is it at an as or if by he we me my us be am ok odd one two six ten "
        "tie win red sun mon tue wed thu fri sat cat act dog god tap pat apt bad dab cab tan ant nat rat art "
        "tar was saw war raw now own won net ten not ton nor dne all any may day are ear era arm mar ram map "
        "amp max min new old big low top dry wet mad dam bat tab stab"
    )
)


@dataclass(frozen=True)
class Choice:
    """A choice letter, and what stands behind it."""

    letter: str
    rest: str


def plain_words(text: str) -> str | None:
    """The lower-case words of an answer that is nothing but words; None for anything that may be mathematics."""
    bare = " ".join(text.replace('"', " ").replace("$", " ").split()).strip(" .,;:!?")
    if not _WORDS.fullmatch(bare + "") or "=" in bare:
        return None
    longest = max(map(len, re.findall("[A-Za-z]+", bare)), default=0)
    upright = text.count('"') >= 2
    if not (upright or longest >= 4 or bare.casefold() in _SHORT_WORDS or (" " in bare and longest >= 3)):
        return None
    return " ".join(bare.casefold().split())


def words_match(gold: str, answer: str) -> bool:
    """Whether words say the gold words: the same ones, or a sentence that states them without denying them."""
    one, other = core(gold), core(answer)
    if one == other or one.replace("-", " ") == other.replace("-", " "):
        return True
    for same in SAME:
        if (gold in same or one in same) and (
            answer in same or other in same or any(_states(other, phrase) for phrase in same if len(phrase) > 5)
        ):
            return True
    if (date := as_date(gold)) is not None:
        return as_date(answer) == date
    if _parts(one) == _parts(other) and len(_parts(one)) > 1:
        return True
    gold_words, answer_words = one.split(), re.sub(r"[.,;:!?()]", " ", other).split()
    if not gold_words or not answer_words:
        return False
    # "Yes, it does not depend on n" says yes.
    if re.match(rf"{re.escape(one)}\s*[,.;:!(-](?!\s*(?:but\s+)?(?:{'|'.join(_CONDITIONS)})\b)", answer):
        return True
    if _CONDITIONS & set(answer_words) - set(gold_words):
        return False
    if one in _POLAR and answer_words[-1] != one:
        return answer_words[0] == one and answer_words[1] in _GOES_ON
    if any(word in _NEGATIONS for word in answer_words) != any(word in _NEGATIONS for word in gold_words):
        return False
    if ("or" in answer_words and "or" not in gold_words) or ("and" in answer_words and "and" not in gold_words):
        return False
    if inside(gold_words, answer_words):
        return True
    # A kind of thing may be left out, before what tells one from others or behind it.
    if len(gold_words) == 2 and gold_words[0] in _CLASSES and answer_words == gold_words[1:]:
        return True
    # One of several names is not all of them.
    if {"and", "or"} & set(gold_words) or "," in gold:
        return False
    return gold_words[-1] in _KINDS and answer_words == gold_words[:-1]


def _states(sentence: str, phrase: str) -> bool:
    """Whether a sentence has this phrase in it, and nothing beside it that denies or limits it."""
    before, found, after = f" {sentence} ".partition(f" {phrase} ")
    beside = set(re.sub(r"[.,;:!?()]", " ", f"{before} {after}").split())
    return bool(found) and not beside & (
        _NEGATIONS | _CONDITIONS | {"greater", "less", "positive", "negative", "nonzero"}
    )


def _parts(words: str) -> frozenset[str]:
    """The names in a list of names, whose order does not matter."""
    return frozenset(part for part in re.split(r"\s*,\s*(?:and\s+)?|\s+and\s+", words) if part)


def core(words: str) -> str:
    """Words without articles and punctuation around them."""
    words = re.sub(r"\bdoesn't\b", "does not", words.strip(" .,;:!?()"))
    kept = [word for word in words.split() if word not in ("the", "a", "an", "due")]
    return " ".join(kept) if kept else words


def inside(needle: list[str], hay: list[str]) -> bool:
    """Whether words stand in a row among others."""
    return any(hay[place : place + len(needle)] == needle for place in range(len(hay) - len(needle) + 1))


def letters_only(text: str) -> str | None:
    """The letters of an answer that is one run of at least two letters, such as `no` or `xy`; otherwise None."""
    bare = text.replace('"', " ").strip()
    return bare if re.fullmatch(r"[A-Za-z]{2,}", bare) else None


def may_be_a_product(letters: str) -> bool:
    """Whether letters in a row may be factors, whose order does not matter, rather than a word."""
    low = letters.casefold()
    if _neighbours("".join(sorted(low))):
        return True
    if low in _SHORT_WORDS or len(letters) > 4:
        return False
    if len(letters) == 2:
        return not set(low) & set("oeil")
    return any(set(low) <= group for group in _PRODUCT_LETTERS)


def _neighbours(letters: str) -> bool:
    """Whether letters follow each other in the alphabet, as names of variables do."""
    return (
        len(letters) > 2
        and letters in "abcdefghijklmnopqrstuvwxyz"
        and letters not in ("def", "nop", "rst", "stu", "tuv")
    )


def choice(text: str) -> Choice | None:
    """The choice letter that an answer starts with, as in `B`, `(B)`, `Option B`, `B. 12` and `(B) 12`."""
    found = _CHOICE.match(text)
    if found is None:
        return None
    rest = found["rest"].replace('"', " ").strip()
    named = re.match(r'^"?\s*(?:the|correct|answer|option|choice|letter)', text, re.IGNORECASE) is not None
    marked = (bool(found["open"]) and bool(found["close"])) or bool(found["close"])
    said = re.match(r"\([^()]+\)$|(?:is|because|since)\b|,\s*(?:because|since|as|the)\b", rest) is not None
    # "b = 2" gives a variable its value, unless the letter is marked as that of a choice.
    upright = re.match(r'\s*"\s*[A-Za-z]\s*"', text) is not None
    said = said or (rest.startswith("=") and (marked or named or upright or found["letter"].isupper()))
    if rest and not marked and not named and not said:
        return None
    if rest and not said and (rest[0] in ",;|" or re.match(r"(?:and|or|&)\b", rest)):
        return None
    if re.fullmatch(r"(?:[(\s]*[A-J]\s*[).:][\s,;]*)+", rest):
        return None
    return Choice(found["letter"].upper(), rest)


def gold_choice(text: str) -> Choice | None:
    """The choice letter of a gold answer: one of A to J, alone or in parentheses before its value."""
    bare = text.replace('"', " ").strip()
    alone = re.fullmatch(r"\(?\s*([A-J])\s*\)?\s*\.?", bare)
    if alone:
        return Choice(alone[1], "")
    valued = re.match(r"\(\s*([A-J])\s*\)\s*(.+)$", bare, re.DOTALL)
    if valued is None:
        valued = re.match(r"([A-J])\s*[).:]\s*(.+)$", bare, re.DOTALL)
    return Choice(valued[1], valued[2].strip()) if valued and valued[2].strip()[0] not in ",;=^_" else None


def letter_set(text: str) -> frozenset[str] | None:
    """Several choice letters: `A, C`, `A and C`, `ACD`. Letters that run together are in alphabetical order."""
    bare = re.sub(r'["$(){}\\]', " ", text)
    bare = re.sub(r"^\s*(?:options?|choices?|answers?|statements?)\b\s*:?", " ", bare, flags=re.IGNORECASE)
    parts = [part for part in re.split(r"\s*(?:,|;|\band\b|&)\s*|\s+", bare) if part]
    if len(parts) > 1 and all(re.fullmatch(r"[A-J]", part) for part in parts):
        return frozenset(parts)
    if len(parts) == 1 and re.fullmatch(r"[A-H]{2,6}", parts[0]) and list(parts[0]) == sorted(set(parts[0])):
        return frozenset(parts[0])
    return None


def separated(text: str) -> bool:
    return bool(re.search(r",|;|\band\b|&", text))


def as_time(text: str) -> tuple[int, str] | None:
    """A time of day: minutes of a clock's twelve or 24 hours, and its half: "am", "pm", "24" where only a clock of 24
    hours shows such an hour, or "" if nothing is said."""
    bare = re.sub(r"[\"\s]+", " ", text).strip().casefold().replace("o'clock", "").strip()
    if bare in ("noon", "12 noon", "12:00 noon"):
        return 720, "pm"
    if bare in ("midnight", "12 midnight"):
        return 0, "am"
    bare = re.sub(
        r"\s*(?:in the morning)$", " am", re.sub(r"\s*(?:in the (?:afternoon|evening)|at night)$", " pm", bare)
    )
    found = _TIME.match(bare)
    if found is None or not (found[2] or found[4]) or (found[4] and not found[5]):
        return None
    hour, minute = int(found[1]), int(found[2] or 0)
    if hour > 24 or minute > 59:
        return None
    half = {"a": "am", "p": "pm", None: ""}[found[4]]
    if half and not 1 <= hour <= 12:
        return None
    if half:
        hour = hour % 12 + (12 if half == "pm" else 0)
    elif not 1 <= hour <= 12:
        hour, half = hour % 24, "24"
    return hour * 60 + minute, half


def same_time(one: tuple[int, str], other: tuple[int, str]) -> bool:
    """Whether two times of day agree. Where one says am or pm and the other says nothing, either half is meant."""
    one_said = {one[1], other[1]} in ({"", "am"}, {"", "pm"})
    return one[0] % 720 == other[0] % 720 if one_said else one[0] == other[0]


def as_date(text: str) -> tuple[int, int, int | None] | None:
    """Month, day and year of a date such as `July 4, 1776`, `4 July 1776` or `1776-07-04`."""
    bare = text.replace('"', " ").strip(" .").casefold()
    iso = re.fullmatch(r"(\d{4})-(\d{1,2})-(\d{1,2})", bare)
    if iso:
        return int(iso[2]), int(iso[3]), int(iso[1])
    bare = re.sub(
        r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b|\b(?:on|mon|tues|wednes|thurs|fri|satur|sun)(?:day)?\b", " ", bare
    )
    parts = _DATE_WORDS.findall(bare)
    months = [_month(part) for part in parts if part.isalpha()]
    numbers = [int(part) for part in parts if part.isdigit()]
    if len(months) != 1 or months[0] is None or not 1 <= len(numbers) <= 2 or re.search(r"[^\w\s,.]", bare):
        return None
    if len(numbers) == 1:
        return (months[0], numbers[0], None) if numbers[0] <= 31 else None
    day, year = (numbers[0], numbers[1]) if numbers[0] <= 31 else (numbers[1], numbers[0])
    return (months[0], day, year) if day <= 31 < year else None


def _month(word: str) -> int | None:
    found = [
        number for number, name in enumerate(_MONTHS, 1) if name == word or (len(word) >= 3 and name.startswith(word))
    ]
    return found[0] if found else None
