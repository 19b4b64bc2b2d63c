"""Problems made from a seed, with answers that a program checks and reference chains of thought. Words, not token ids.

A problem is fixed by (split, kind, level, seed, index). Streams of different arguments are independent, and the two
splits can never share a problem, whatever their seeds: a checksum of the prompt's words decides which split it belongs
to (one prompt in eight is "eval"), and drawing repeats until the prompt belongs to the split that was asked for.
"""

from __future__ import annotations

from functools import partial
from random import Random
from zlib import crc32

from sparroll.errors import UserError
from sparroll.tasks import base
from sparroll.tasks.synthetic.kinds import ANSWER, EOS, KIND, KINDS, PAD, Problem
from sparroll.types import Prompt

LEVELS = range(9)
"""0 is a short warm-up; 1 to 8 are the ladder."""

RESPONSE_TOKENS = (
    (60, 150),
    (180, 300),
    (240, 400),
    (320, 520),
    (420, 680),
    (580, 900),
    (750, 1150),
    (850, 1500),
    (900, 2000),
)
"""Per level: fewest and most tokens of a reference response, over all kinds, end-of-sequence included."""

EVAL_SHARE = 8
"""One prompt in this many belongs to the eval split."""


def problem(split: base.Split, kind: str, level: int, seed: int, index: int) -> Problem:
    """The problem at one place of one stream."""
    _check(split, kind, level)
    rng = Random(f"synthetic|{split}|{kind}|{level}|{seed}|{index}")
    while True:
        drawn = KIND[kind].draw(rng, level)
        if (crc32(" ".join(drawn.words).encode()) % EVAL_SHARE == 0) == (split == "eval"):
            return drawn


def reference_response(split: base.Split, kind: str, level: int, seed: int, index: int) -> str:
    """A correct response to the problem at the same place, ending with the end-of-sequence word."""
    return " ".join(example(split, kind, level, seed, index)[1])


def example(split: base.Split, kind: str, level: int, seed: int, index: int) -> tuple[list[str], list[str]]:
    """Words of a prompt and of its reference response."""
    drawn = problem(split, kind, level, seed, index)
    rng = Random(f"reference|{split}|{kind}|{level}|{seed}|{index}")
    return list(drawn.words), [*KIND[kind].reference(drawn.facts, rng), ANSWER, *drawn.answer, EOS]


def marked_answer(response_text: str) -> str | None:
    """What follows the last answer mark, up to the end of the sequence; None without a mark."""
    words = response_text.split()
    if ANSWER not in words:
        return None
    last = len(words) - 1 - words[::-1].index(ANSWER)
    answer = words[last + 1 :]
    ends = [answer.index(end) for end in (EOS, PAD) if end in answer]
    return " ".join(answer[: min(ends, default=len(answer))])


class SyntheticTask:
    """Problems of the named kinds in turn: prompt i is of kind i modulo their number."""

    def __init__(self, name: str = "synthetic", kinds: tuple[str, ...] = KINDS) -> None:
        self.name = name
        self.kinds = kinds

    def prompts(self, split: base.Split, level: int, seed: int, count: int, start: int = 0) -> list[Prompt]:
        """Prompts `start` to `start + count` of the stream (split, level, seed)."""
        return [self._prompt(split, level, seed, index) for index in range(start, start + count)]

    def _prompt(self, split: base.Split, level: int, seed: int, index: int) -> Prompt:
        kind = self.kinds[index % len(self.kinds)]
        drawn = problem(split, kind, level, seed, index)
        prompt_id = f"synthetic/{split}/{kind}/{level}/{seed}/{index}"
        return Prompt(prompt_id, " ".join(drawn.words), " ".join(drawn.answer), task=self.name, level=level)

    def reward(self, prompt: Prompt, response_text: str) -> float:
        return float(marked_answer(response_text) == prompt.answer)

    def answer_key(self, response_text: str) -> str | None:
        """What the response answers, for majority votes; None without an answer mark."""
        return marked_answer(response_text)


def register_all() -> None:
    """`synthetic` mixes all kinds; `synthetic_chain`, `_walk`, `_sort` and `_add` are one each."""
    base.register("synthetic", SyntheticTask)
    for kind in KINDS:
        name = f"synthetic_{kind}"
        base.register(name, partial(SyntheticTask, name, (kind,)))


def _check(split: str, kind: str, level: int) -> None:
    if split not in ("train", "eval"):
        raise UserError(f"unknown split {split!r}", "use 'train' or 'eval'")
    if kind not in KIND:
        raise UserError(f"unknown kind {kind!r}", f"kinds are {', '.join(KINDS)}")
    if level not in LEVELS:
        raise UserError(f"level must be 0 to {LEVELS[-1]}, got {level!r}", f"0 is a warm-up, {LEVELS[-1]} the longest")
