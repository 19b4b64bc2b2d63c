"""Problems made from a seed, with answers that a program checks, and reference chains of thought. In words, not token
ids.

(split, kind, level, seed, index) determines a problem. Streams with different arguments are independent. The two splits
never share a problem, whatever their seeds are: a checksum of the prompt's words decides which split it belongs to (one
prompt in eight is "eval"), and problems are drawn until one belongs to the wanted split.
"""

from __future__ import annotations

from functools import partial
from random import Random
from zlib import crc32

from sparroll.errors import UserError
from sparroll.tasks import base
from sparroll.tasks.synthetic.kinds import ANSWER, EOS, KIND, KINDS, PAD, TASK_KINDS, Problem
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
"""For each level the fewest and the most tokens of a reference response, over all kinds, end-of-sequence included."""

MOST_PROMPTS = 1_000_000
EVAL_SHARE = 8
"""One prompt in so many belongs to the eval split."""


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
    """The words of a prompt, and those of its reference response."""
    drawn = problem(split, kind, level, seed, index)
    rng = Random(f"reference|{split}|{kind}|{level}|{seed}|{index}")
    return list(drawn.words), [*KIND[kind].reference(drawn.facts, rng), ANSWER, *drawn.answer, EOS]


def marked_answer(response_text: str) -> str | None:
    """The words after the last answer mark, up to the end of the sequence; None if there is no mark."""
    words = response_text.split()
    if ANSWER not in words:
        return None
    last = len(words) - 1 - words[::-1].index(ANSWER)
    answer = words[last + 1 :]
    ends = [answer.index(end) for end in (EOS, PAD) if end in answer]
    return " ".join(answer[: min(ends, default=len(answer))])


class SyntheticTask:
    """Problems of the given kinds in turn: prompt i has kind number i modulo the number of kinds."""

    answer_form = f'the words after the last "{ANSWER}"'

    def __init__(self, name: str = "synthetic", kinds: tuple[str, ...] = TASK_KINDS) -> None:
        self.name = name
        self.kinds = kinds

    def prompts(self, split: base.Split, level: int, seed: int, count: int, start: int = 0) -> list[Prompt]:
        """Prompts `start` to `start + count` of the stream (split, level, seed). The stream has no end, so more than
        MOST_PROMPTS at once are refused."""
        if count > MOST_PROMPTS:
            raise UserError(f"the task {self.name} makes at most {MOST_PROMPTS:,} prompts, got a count of {count:,}")
        return [self._prompt(split, level, seed, index) for index in range(start, start + count)]

    def _prompt(self, split: base.Split, level: int, seed: int, index: int) -> Prompt:
        kind = self.kinds[index % len(self.kinds)]
        drawn = problem(split, kind, level, seed, index)
        prompt_id = f"synthetic/{split}/{kind}/{level}/{seed}/{index}"
        return Prompt(prompt_id, " ".join(drawn.words), " ".join(drawn.answer), task=self.name, level=level)

    def reward(self, prompt: Prompt, response_text: str) -> float:
        return float(marked_answer(response_text) == prompt.answer)

    def answer_key(self, response_text: str) -> str | None:
        """The answer of a response, for majority votes; None if there is no answer mark."""
        return marked_answer(response_text)


def register_all() -> None:
    """Register the tasks: `synthetic` takes walks and sums in turn; `synthetic_walk` and `synthetic_add` have one kind
    each."""
    base.register("synthetic", SyntheticTask)
    for kind in TASK_KINDS:
        name = f"synthetic_{kind}"
        base.register(name, partial(SyntheticTask, name, (kind,)))


def _check(split: str, kind: str, level: int) -> None:
    if split not in ("train", "eval"):
        raise UserError(f"unknown split {split!r}", "use 'train' or 'eval'")
    if kind not in KIND:
        raise UserError(f"unknown kind {kind!r}", f"kinds are {', '.join(KINDS)}")
    if level not in LEVELS:
        raise UserError(f"level must be 0 to {LEVELS[-1]}, got {level!r}", f"0 is a warm-up, {LEVELS[-1]} the longest")
