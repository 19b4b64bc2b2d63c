"""Which prompts a step gets: an endless walk over the training set, with a new order in each epoch. Its position is one
number."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from sparroll.errors import UserError
from sparroll.tasks import Split, Task
from sparroll.types import Prompt

ALL = 2**62
"""More prompts than any finite task has."""


class PromptStream:
    """`train_prompts` prompts of the task's train split, shuffled anew in each epoch. None: all prompts of a finite
    task."""

    def __init__(self, task: Task, level: int, seed: int, train_prompts: int | None):
        self.prompts = task.prompts("train", level, seed, ALL if train_prompts is None else train_prompts)
        if not self.prompts:
            raise UserError(f"the task {task.name!r} has no training prompts at level {level}")
        self.seed = seed
        self.drawn = 0
        """How many prompts were handed out so far. A checkpoint keeps this position."""
        self._shuffled: tuple[int, list[int]] = (-1, [])
        """The latest epoch that was needed, and its order."""

    def next(self, count: int) -> list[Prompt]:
        """The next prompts; a step may straddle two epochs."""
        taken = [self._at(position) for position in range(self.drawn, self.drawn + count)]
        self.drawn += count
        return taken

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self.prompts))
        return self.prompts[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if self._shuffled[0] != epoch:
            order = list(range(len(self.prompts)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._shuffled = epoch, order
        return self._shuffled[1]


class GivenPrompts:
    """Your own prompts as a task without rewards. Every eighth prompt, beginning with the first, is held out as the
    eval split.

    The name contains a digest of the prompts, so that a run is not resumed with others.
    """

    def __init__(self, prompts: Sequence[Prompt], where: str):
        if len(prompts) < 2:
            raise UserError(f"{where} has {len(prompts)} prompts", "one is held out, so at least two are needed")
        texts = "\0".join(prompt.text for prompt in prompts)
        self.name = f"{where}#{hashlib.sha256(texts.encode()).hexdigest()[:12]}"
        self._given = list(prompts)

    def prompts(self, split: Split, level: int, seed: int, count: int) -> list[Prompt]:
        """The first `count` of the split; level and seed change nothing."""
        held_out = split == "eval"
        return [prompt for place, prompt in enumerate(self._given) if (place % 8 == 0) == held_out][:count]

    def reward(self, prompt: Prompt, response_text: str) -> float:
        """Raises UserError: your own prompts come without right answers."""
        raise UserError(f"the prompts of {self.name} have no rewards", "choose a task")
