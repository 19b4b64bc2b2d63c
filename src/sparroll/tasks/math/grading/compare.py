r"""The verdict on one pair of gold answer and answer: what kind of thing the gold one is, and whether the answer is
that. Knows no processes and no limits of time."""

from __future__ import annotations

import re
from functools import lru_cache

from sparroll.tasks.math.grading import hedges, quantities, real_sets, relations, sentences, shapes, units, words
from sparroll.tasks.math.grading.algebra import Unreadable, parse
from sparroll.tasks.math.grading.numbers import continued, digits, with_decimal_comma
from sparroll.tasks.math.grading.splitting import split, whole_group
from sparroll.tasks.math.grading.typography import clean

_ARROW = re.compile(r"\\(?:Rightarrow|implies|Longrightarrow|therefore)(?![A-Za-z])")
_INTEGER_CLAUSE = re.compile(
    r'\s*[,;(]?\s*"?\s*(?:where|for|with|and)?\s*(?:any|some|all)?\s*(?:integers?)?\s*"?\s*([a-z])\s*'
    r'(?:\\in\s*\\mathbb\s*\{?\s*Z\s*\}?|"?\s*is\s+(?:an|any)\s+integer\s*"?)\s*\)?$'
)
_RANGE_WORD = re.compile(r'^\s*(-?[\d.]+)\s*"?\s*to\s*"?\s*(-?[\d.]+)\s*$')


def readable(gold_latex: str) -> bool:
    """Whether a gold answer can be compared with anything: it is words, or its expressions parse."""
    gold = clean(gold_latex)
    if not gold:
        return False
    if words.gold_choice(gold) or words.letter_set(gold) or words.as_time(gold) or words.as_date(gold):
        return True
    if words.plain_words(gold) is not None or words.letters_only(gold) or quantities.based(gold):
        return True
    text = _mathematics(gold)
    if text is None:
        return False
    try:
        return _parses(text)
    except Unreadable:
        return False


def same_answer(gold_latex: str, answer_latex: str) -> bool:
    """Whether the answer is right. The gold answer is readable."""
    gold, answer = clean(gold_latex), clean(answer_latex)
    if not answer:
        return False
    if _squeezed(gold) == _squeezed(answer):
        return True
    for kind in (_by_choice, _by_clock, _by_words, _by_letters):
        verdict = kind(gold, answer)
        if verdict is not None:
            return verdict
    return _by_mathematics(gold, answer)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text.replace('"', " ").strip())


def _by_choice(gold: str, answer: str) -> bool | None:
    several = words.letter_set(gold)
    if several is not None:
        found = words.letter_set(answer)
        if found is not None:
            return found == several and (len(several) > 1)
        return False if words.separated(gold) or words.choice(answer) else None
    wanted = words.gold_choice(gold)
    if wanted is None:
        return None
    stated = sentences.value_of(answer)
    found_choice = words.choice(answer) or (words.choice(stated) if stated else None)
    if found_choice is None and stated is None:
        return False
    if found_choice is not None:
        before = answer[: len(answer) - len(found_choice.rest)] if found_choice.rest else answer
        if sentences.denies(before) or (found_choice.rest.startswith("is") and sentences.denies(found_choice.rest)):
            return False
    if not wanted.rest:
        return found_choice is not None and found_choice.letter == wanted.letter
    if found_choice is not None and (found_choice.letter <= "J"):
        if found_choice.letter != wanted.letter:
            return False if not found_choice.rest or words.gold_choice(answer) else _by_mathematics(wanted.rest, answer)
        return not found_choice.rest or same_answer(wanted.rest, found_choice.rest)
    return readable(wanted.rest) and same_answer(wanted.rest, answer)


def _by_clock(gold: str, answer: str) -> bool | None:
    wanted = words.as_time(gold)
    if wanted is not None:
        found = words.as_time(answer) or words.as_time(re.sub(r'^"?\s*(?:at|it is)\s', "", answer))
        if found is not None:
            return words.same_time(wanted, found)
        if wanted[1] in ("am", "pm"):
            return False
    date = words.as_date(gold)
    if date is not None and (found_date := words.as_date(answer)) is not None:
        return date[:2] == found_date[:2] and (None in (date[2], found_date[2]) or date[2] == found_date[2])
    return None


def _by_words(gold: str, answer: str) -> bool | None:
    wanted, found = words.plain_words(gold), words.plain_words(answer)
    if wanted is None or quantities.words_as_number(wanted) is not None or units.quantity(digits(gold), False):
        return None
    if found is None and (letters := words.letters_only(answer)) is not None:
        found = letters.casefold()
    if found is not None:
        return _states(wanted, found)
    if wanted in words.EMPTY or wanted in words.REALS or wanted in ("infinity", "infinite"):
        return None
    prose = words.plain_words(re.sub(r"[^A-Za-z0-9 .,;:'!?()/-]", " ", answer.replace('"', " ")))
    return prose is not None and '"' in answer and _states(wanted, prose)


def _states(gold_words: str, answer_words: str) -> bool:
    return words.words_match(gold_words, answer_words) and not hedges.hedges(gold_words, answer_words)


def _by_letters(gold: str, answer: str) -> bool | None:
    one, other = words.letters_only(gold), words.letters_only(answer)
    if one is None:
        return None
    if other is None:
        return (
            False
            if not words.may_be_a_product(one) and quantities.words_as_number(one) is None and not _special(one)
            else None
        )
    if one.casefold() == other.casefold():
        return True
    if quantities.words_as_number(one) or quantities.words_as_number(other):
        return None
    # Factors of a product are usually written in alphabetical order.
    ordered = len(one) == 2 or any(list(letters.casefold()) == sorted(letters.casefold()) for letters in (one, other))
    product = '"' not in gold and words.may_be_a_product(one) and words.may_be_a_product(other) and ordered
    return product and sorted(one.casefold()) == sorted(other.casefold())


def _special(letters: str) -> bool:
    low = letters.casefold()
    return low in words.EMPTY or low in words.REALS or low in ("infinity", "pi")


@lru_cache(maxsize=1024)
def _mathematics(cleaned: str) -> str | None:
    """The mathematics of a cleaned answer, with its numbers in digits; None if it is prose without any."""
    spoken = quantities.words_as_number(cleaned)
    if spoken is not None:
        return spoken
    if quantities.based(cleaned):
        return cleaned
    plain = words.plain_words(cleaned)
    if plain is not None:
        if plain in words.EMPTY:
            return r"\emptyset"
        if plain in words.REALS:
            return r"\mathbb{R}"
    text = _RANGE_WORD.sub(r"\1:\2", cleaned)
    text = _ARROW.split(text)[-1].strip()
    text = _without_integer_clause(text)
    text = _digits_by_shape(text)
    if real_sets.looks_like_set(text) and real_sets.is_set(text):
        return text
    if real_sets.looks_like_set(text) and not sentences.refuses(text.replace(r"\ne", " ")):
        stated = sentences.value_of(text)
        return stated if stated is not None else text
    if real_sets.looks_like_set(text):
        return text
    if units.quantity(text, glued_letters=False) is not None and not sentences.refuses(text):
        return text
    stated = sentences.value_of(text)
    return None if stated is None else _digits_by_shape(stated)


def _without_integer_clause(text: str) -> str:
    """`x = 2k, k \\in \\mathbb{Z}` in one name for the integer: the clause is dropped and the letter is k."""
    found = _INTEGER_CLAUSE.search(text)
    if found is None or not re.search(rf"(?<![A-Za-z\\]){found[1]}(?![A-Za-z])", text[: found.start()]):
        return text
    return re.sub(rf"(?<![A-Za-z\\]){found[1]}(?![A-Za-z])", "k", text[: found.start()])


def _digits_by_shape(text: str) -> str:
    """Digits of a text. In brackets a comma separates members, never thousands."""
    group = whole_group(text)
    bracketed = group is not None or text[:1] in "[](" or text.startswith(r"\{")
    if bracketed and "," in text:
        kept = re.sub(r"(?<=\d),(?=\d)", ", ", text)
        return digits(kept)
    return digits(text)


def _by_mathematics(gold: str, answer: str) -> bool:
    wanted, found = _mathematics(gold), _mathematics(answer)
    if wanted is None or found is None:
        return False
    golds, answers = continued(wanted) or [wanted], continued(found) or [found]
    if units.is_numeric(wanted) and "," not in wanted and (comma := with_decimal_comma(found)) is not None:
        answers = [*answers, comma]
    return any(shapes.same(one, other) for one in golds for other in answers)


def _parses(text: str) -> bool:
    """Whether every expression in a gold answer parses."""
    if real_sets.looks_like_set(text):
        try:
            real_sets.real_set(text)
            return True
        except Unreadable:
            pass
    if continued(text):
        return True
    found = shapes.shape(text)
    if found.kind == "set" and not found.items:
        return True
    for item in found.items:
        if found.kind != "one" and shapes.shape(item).kind != "one":
            if not _parses(item):
                return False
        elif not _item_parses(item):
            return False
    return bool(found.items)


def _item_parses(item: str) -> bool:
    if (
        item == r"\ldots"
        or relations.congruence(item)
        or quantities.based(item)
        or words.plain_words(item)
        or re.fullmatch(r'\s*"[^"]+"\s*', item)
    ):
        return True
    for side in split(item, (r"\approx", r"\le", r"\ge", r"\ne", "<", ">", "=", ":")):
        terms = units.quantity(side.strip(), glued_letters=True)
        for term in terms or [units.Term(side, ())]:
            if term.value.strip():
                parse(term.value.strip())
    return True
