"""Finds training rows that share a run of n words with an eval row. Compares texts; it leaves no row out itself.

13 words is the length that GPT-3's check used (Brown et al. 2020, appendix C). It is long enough that phrases which
many problems share ("how many positive integers less than") do not count. Words are runs of letters and digits in one
Unicode form and case, so spacing, punctuation and LaTeX braces do not hide a copy. A copy with other numbers or words
is not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparroll.tasks.data.rows import Row
from sparroll.tasks.data.select import same_words

WORDS = 13
FEWEST_WORDS = 5
"""An eval row that is shorter than a run is shared if a training row contains all of it. If it has fewer words than
this, it is shared only if a training row equals it."""

_WORD = re.compile(r"[^\W_]+")
Run = tuple[str, ...]


@dataclass(frozen=True)
class Overlap:
    """A training row and an eval row that share words.

    >>> Overlap(train_id="polaris:train/7", eval_id="aime24:train/3", words=("find", "the", "number", ...))
    """

    train_id: str
    eval_id: str
    words: Run


def overlaps(train: Sequence[Row], evaluation: Sequence[Row], ngram_words: int = WORDS) -> list[Overlap]:
    """An entry for each training row that shares a run with an eval row. It names the first shared run."""
    owner: dict[Run, str] = {}
    whole: dict[Run, str] = {}
    for row in evaluation:
        words = words_of(row)
        if len(words) < min(FEWEST_WORDS, ngram_words):
            whole.setdefault(words, row.row_id)
        for run in _runs(words, min(ngram_words, len(words))) if len(words) >= min(FEWEST_WORDS, ngram_words) else ():
            owner.setdefault(run, row.row_id)
    lengths = sorted({len(run) for run in owner}, reverse=True)
    found = []
    for row in train:
        words = words_of(row)
        if words in whole:
            found.append(Overlap(row.row_id, whole[words], words))
            continue
        shared = next((run for length in lengths for run in _runs(words, length) if run in owner), None)
        if shared is not None:
            found.append(Overlap(row.row_id, owner[shared], shared))
    return found


def words_of(row: Row) -> Run:
    return tuple(_WORD.findall(same_words(row.text)))


def _runs(words: Run, length: int) -> Iterator[Run]:
    return (words[start : start + length] for start in range(len(words) - length + 1))
