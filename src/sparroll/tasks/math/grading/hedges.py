"""Whether words hedge: they name several things of which the answer can be only one, such as `yes, no`. Works on the
lower-case words of words.py; whether words state the gold ones is decided there."""

from __future__ import annotations

import re

from sparroll.tasks.math.grading.splitting import words_in
from sparroll.tasks.math.grading.words import SAME, core, inside

_RIVALS = [
    frozenset(words_in(names))
    for names in (
        "yes no",
        "true false",
        "even odd",
        "positive negative",
        "rational irrational",
        "prime composite",
        "possible impossible",
        "increasing decreasing constant",
        "convergent divergent",
        "converges diverges",
        "always sometimes never",
        "acute right obtuse",
        "scalene isosceles equilateral",
        "circle ellipse parabola hyperbola",
        "north south east west",
        "monday tuesday wednesday thursday friday saturday sunday",
        "red orange yellow green blue purple violet black white brown pink",
    )
]
"""Words of which only one can be the answer."""
_AGREEING = [
    frozenset(words_in("yes true correct right indeed certainly definitely exactly always possible")),
    frozenset(words_in("no false incorrect wrong indeed certainly definitely never impossible")),
]
"""Words that say one thing together, as in "Yes, correct."."""
_IN_SENTENCES = frozenset(
    words_in(
        "it is are was were does do did has have had can cannot must will would because since as by for from when "
        "where if in on of to with that this these there which who whose we you they thus hence than but not exist exists"
    )
)
"""Words that a sentence has and a name or a choice has not."""
_BETWEEN = re.compile(r"[,;.!?/()]|\s-\s|\b(?:and|or)\b")
_TITLE = re.compile(r"\b(mrs?|ms|dr|st|prof)\.")
_STATING = re.compile(r"^(?:(?:so|then|(?:the\s+)?(?:final\s+)?answer|it|this|they|is|are|maybe|either)\s+)+")


def hedges(gold: str, answer: str) -> bool:
    """Whether an answer names other things beside the gold ones."""
    return _lists_others(gold, answer) or _names_rivals(gold, answer)


def _lists_others(gold: str, answer: str) -> bool:
    """Whether an answer is a list of names or choices of which some are not in the gold answer: "yes, no" states
    neither. An explanation is no part of a list: "yes, it does not depend on n"."""
    wanted = _clauses(gold)
    most_words = 1 + max((len(clause.split()) for clause in wanted), default=0)
    listed = [clause for clause in _clauses(answer) if len(clause.split()) <= most_words and not _explains(clause)]
    others = [clause for clause in listed if not any(_says(clause, one) for one in wanted)]
    agree = any(all(set(clause.split()) <= words for clause in (*wanted, *others)) for words in _AGREEING)
    return len(listed) > len(others) > 0 and not agree


def _clauses(words: str) -> list[str]:
    """What stands between commas and the like, without `it is` and `the answer is`."""
    clauses = [_STATING.sub("", clause.strip()) for clause in _BETWEEN.split(_TITLE.sub(r"\1", words))]
    return [clause for clause in clauses if clause]


def _explains(clause: str) -> bool:
    return bool(_IN_SENTENCES & set(clause.split())) or re.search(r"\d|n't\b", clause) is not None


def _says(clause: str, wanted: str) -> bool:
    alike = any(clause in phrases and wanted in phrases for phrases in SAME)
    return alike or inside(core(wanted).split(), core(clause).split())


def _names_rivals(gold: str, answer: str) -> bool:
    """Whether words that are no sentence have a rival of a gold word: `yes no`, `red blue green`."""
    wanted, given = (set(re.findall(r"[^\W\d_]+", words)) for words in (gold, answer))
    rivals = {word for names in _RIVALS if names & wanted for word in names} - wanted
    return bool(given & rivals) and not given & _IN_SENTENCES
