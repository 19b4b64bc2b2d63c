"""Which rollouts of a step are decoded densely, as a control group beside the sparse ones. Nothing is sampled or judged
here: gap_evidence.py, paired_prompts.py and reward_gap.py say what the group shows.

The choice depends on nothing but the seed, the step and the shape of the step, so every process makes the same one, and
so does a resumed run. Within a prompt it is a random draw, which is what makes the comparison exact: where the way of
decoding makes no difference, each of a prompt's rollouts is equally likely to be the dense one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from sparroll.errors import UserError

MOST_SHARE = 0.5
"""A larger control group would be the larger of the two groups."""


@dataclass(frozen=True)
class ControlGroupSettings:
    """How large the control group is, and how large a gap is tolerated. The defaults' power is in
    docs/control-group.md."""

    share: float = 1 / 32
    """Share of a step's rollouts that is decoded densely; 0: there is no control group."""
    share_first: float = 1 / 4
    """The share over the first steps under a schedule, and later in steps in which there may well be a gap, but not
    surely (gap_evidence.LOOK_CLOSER). As large as `share`: it never changes."""
    first_steps: int = 30
    """How many steps under one schedule are its first steps."""
    window_steps: int = 50
    """How many of the last steps the differences are pooled over."""
    reward_gap: float | None = 0.05
    """Largest tolerated mean reward of dense rollouts minus that of sparse ones; None: there is no alarm."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= MOST_SHARE:
            raise UserError(
                f"the control group's share must be between 0 and {MOST_SHARE}, got {self.share}", "0: none"
            )
        if self.share and not self.share <= self.share_first <= MOST_SHARE:
            raise UserError(
                f"the control group's share over the first steps must be between its share ({self.share:g}) and "
                f"{MOST_SHARE}, got {self.share_first}",
                "the same share in all steps: give both the same value",
            )
        if self.first_steps < 0 or self.window_steps < 1:
            raise UserError(
                f"a control group needs a window of 1 step or more and 0 first steps or more, got {self.window_steps} "
                f"and {self.first_steps}"
            )
        if self.reward_gap is not None and not 0 <= self.reward_gap < math.inf:
            raise UserError(f"the tolerated reward gap must be 0 or more, got {self.reward_gap}")


def dense_count(seed: int, step: int, rollouts: int, share: float, first_prompt: int = 0) -> int:
    """How many of a step's rollouts are dense: share * rollouts, rounded down or up. Fractions are carried from step to
    step: over any stretch of steps the counts add up to the share, but for less than one rollout.

    Nothing is kept for that: it is how many whole numbers lie between the share of all rollouts before this step and
    that after it, both moved by a draw that follows from the seed. So the expectation is exact, too.
    """
    each, moved = share * rollouts, _draw(f"{seed}/{first_prompt}")
    return math.floor(each * step + moved) - math.floor(each * (step - 1) + moved)


def dense_flags(seed: int, step: int, prompts: int, samples: int, share: float, first_prompt: int = 0) -> list[bool]:
    """Whether each rollout of a step is decoded densely, [prompts * samples], prompt by prompt.

    step: from 1.  prompts: of the whole step, over all processes.  first_prompt: number of the first of them, where a
    step samples in several rounds.

    No prompt has two dense rollouts more than another. So as many prompts as possible have both kinds: only when every
    prompt has a dense rollout does one get a second. Which prompts and which of their samples are drawn anew in every
    step, so a prompt that comes again has others. Raises UserError where no prompt could have both kinds.
    """
    if share == 0:
        return [False] * (prompts * samples)
    if samples < 2:
        raise UserError(
            "a control group compares rollouts of one prompt, and each prompt has a single one here",
            "sample 2 rollouts or more of each prompt, or leave the control group out with a share of 0",
        )
    if not 0 < share <= MOST_SHARE:
        raise UserError(f"the control group's share must be between 0 and {MOST_SHARE}, got {share}")
    each, more = divmod(dense_count(seed, step, prompts * samples, share, first_prompt), max(prompts, 1))
    numbers = range(first_prompt, first_prompt + prompts)
    with_more = set(_shuffled(numbers, f"{seed}/{step}")[:more])
    flags: list[bool] = []
    for number in numbers:
        dense = set(_shuffled(range(samples), f"{seed}/{step}/{number}")[: each + (number in with_more)])
        flags += [sample in dense for sample in range(samples)]
    return flags


def _shuffled(items: range, key: str) -> list[int]:
    """In an order that looks random and follows from the key."""
    return sorted(items, key=lambda item: _hash(f"{key}/{item}"))


def _draw(key: str) -> float:
    """Uniform in [0, 1), in steps of 2**-53."""
    return (int.from_bytes(_hash(key), "little") >> 11) * 2.0**-53


def _hash(key: str) -> bytes:
    return hashlib.blake2b(f"control group {key}".encode(), digest_size=8).digest()
