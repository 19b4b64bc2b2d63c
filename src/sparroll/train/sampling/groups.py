"""Which prompts of a step are trained on: all of them or, with dynamic sampling, those whose rollouts differ in reward,
from as many rounds of sampling as that takes. Nothing is sampled or graded here. The choice is the same on any number
of processes."""

# G prompts (groups), N rollouts per prompt

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparroll.train.config.run import TrainConfig
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.sampling.advantages import group_advantages
from sparroll.train.sampling.rewards import Graded, reward_report
from sparroll.types import Prompt, Rollout, StepReport, TokenBatch, TokenScores

Kind = Literal["spread", "all_right", "all_wrong", "ungraded"]
"""What a prompt's rollouts got. spread: their rewards differ. all_right and all_wrong: the rewards are equal, and above
0 or not. ungraded: no rollout has a reward."""


@dataclass
class Groups:
    """This process's share of a step's rollouts."""

    sampled: list[Rollout]
    """All rollouts, in the order in which they were sampled."""
    rollouts: list[Rollout]
    """The rollouts that are trained on, group by group. Their prompts are numbered from 0 without gaps, over all
    processes."""
    reward_GN: Tensor
    """Their rewards."""
    left_out_B: Tensor | None
    """Whether each of them stays out of the loss; None where the settings leave nothing out."""
    report: StepReport
    events: list[str]

    def advantages(self, normalise: bool) -> Tensor:
        """[G, N]; 0 for rollouts that stay out of the loss. Their rewards still count for the mean of their group."""
        advantage_GN = group_advantages(self.reward_GN, normalise)
        if self.left_out_B is None:
            return advantage_GN
        return advantage_GN.masked_fill(self.left_out_B.view_as(advantage_GN), 0.0)

    def batch(self, normalise_advantage: bool) -> TokenBatch:
        """The rollouts that are trained on, with advantages, as the batch that the next stages fill in and the update
        reads."""
        batch = TokenBatch.from_rollouts(self.rollouts, pad_id=0)
        batch.advantage_B = self.advantages(normalise_advantage).flatten()
        batch.left_out_B = self.left_out_B
        return batch


def kind_of(value_N: Tensor) -> Kind:
    """The kind of one prompt's rewards; NaN means ungraded.

    >>> kind_of(torch.tensor([1.0, 1.0, torch.nan]))
    'all_right'
    """
    graded = value_N[~value_N.isnan()]
    if not len(graded):
        return "ungraded"
    if bool((graded != graded[0]).any()):
        return "spread"
    return "all_right" if graded[0] > 0 else "all_wrong"


class Rounds:
    """Makes the choice for one step, round by round: `asks_for` says how many prompts to sample next, and `add` takes
    their rollouts in."""

    def __init__(self, config: TrainConfig, ranks: Ranks):
        self.config, self.ranks = config, ranks
        self.wanted = config.train.prompts_per_step
        self.filtering = config.rollout.dynamic_sampling
        self.most_rounds = config.rollout.dynamic_sampling_rounds if self.filtering else 1
        self.round_starts: list[int] = []
        self.kinds: dict[int, Kind] = {}
        """The kind of each prompt of all processes, by its number within the step."""
        self._sampled: list[Rollout] = []
        self._graded: list[Graded] = []
        self._mine: list[int] = []
        """Numbers of this process's prompts, in the order of the rows of `_graded`."""

    @property
    def drawn(self) -> int:
        """How many prompts were drawn so far, over all processes."""
        return len(self.kinds)

    @property
    def asks_for(self) -> int:
        """How many prompts the next round needs, over all processes; 0: no further round. They are enough to fill the
        step if the same share is kept as so far, because each further round takes the time of its longest response."""
        missing = self.wanted - len(self._spread())
        if len(self.round_starts) >= self.most_rounds or missing <= 0:
            return 0
        kept = self.wanted - missing
        return min(self.wanted, math.ceil(missing * self.drawn / kept)) if kept else self.wanted

    def add(self, prompts: dict[int, Prompt], rollouts: list[Rollout], graded: Graded) -> None:
        """Take in this process's share of one round. prompts: by their numbers within the step."""
        self._let_go(number for number, kind in self.kinds.items() if self.filtering and kind != "spread")
        by = self.config.rollout.dynamic_sampling_by
        values_GN = graded.total_GN if by is None else graded.terms_GN[by]
        mine = [(number, kind_of(value_N)) for number, value_N in zip(prompts, values_GN, strict=True)]
        self.round_starts.append(self.drawn)
        self.kinds |= sorted(self.ranks.gather(mine))
        self._sampled += rollouts
        self._graded.append(graded)
        self._mine += prompts

    def groups(self) -> Groups:
        """The rollouts to train on, once `asks_for` is 0.

        Where no prompt's rollouts differ, those of the last round go on with rewards of 0: nothing is learned from
        them, but the step can still be measured.
        """
        assert not self.asks_for, "the step is not full yet"
        kept = self._spread()[: self.wanted] if self.filtering else sorted(self.kinds)
        chosen = kept or [number for number in self.kinds if number >= self.round_starts[-1]]
        place = {number: place for place, number in enumerate(chosen)}
        rows = [row for row, number in enumerate(self._mine) if number in place]
        self._let_go(self.kinds.keys() - place.keys())
        rollouts = [rollout for rollout in self._sampled if rollout.prompt_index in place]
        for rollout in rollouts:
            rollout.prompt_index = place[rollout.prompt_index]
        reward_GN = torch.cat([graded.reward_GN for graded in self._graded])[rows]
        settings = self.config.reward
        report = reward_report(self._graded, settings, self.ranks)
        truncated_B = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts], dtype=torch.bool)
        return Groups(
            self._sampled,
            rollouts,
            reward_GN if kept else torch.zeros_like(reward_GN),
            truncated_B if settings.leave_out_truncated else None,
            report | (self._report(kept, reward_GN) if self.filtering else {}),
            [self._short(kept)] if self.filtering and 0 < len(kept) < self.wanted else [],
        )

    def _spread(self) -> list[int]:
        return sorted(number for number, kind in self.kinds.items() if not self.filtering or kind == "spread")

    def _let_go(self, numbers: Iterable[int]) -> None:
        """Free the top-k lists of these prompts' rollouts, which are not trained on. Lists are the largest part of a
        rollout."""
        dropped = set(numbers)
        for rollout in self._sampled:
            if rollout.prompt_index in dropped:
                rollout.top_k = None
                if rollout.dense is not None:
                    rollout.dense = TokenScores(rollout.dense.logp)

    def _report(self, kept: list[int], reward_GN: Tensor) -> StepReport:
        counts = Counter(self.kinds.values())
        report = {
            "groups/rounds": float(len(self.round_starts)),
            "groups/sampled": float(self.drawn),
            "groups/kept": float(len(kept)),
            "groups/all_right": float(counts["all_right"]),
            "groups/all_wrong": float(counts["all_wrong"]),
            "groups/ungraded": float(counts["ungraded"]),
            "groups/spare": float(counts["spread"] - len(kept)),
        }
        rewards = torch.tensor(self.ranks.gather(reward_GN.flatten().tolist()), dtype=torch.float64)
        # One term may make a group differ while another one leaves it ungraded.
        graded = kept and not rewards.isnan().all()
        return report | ({"reward/kept_mean": float(rewards.nanmean())} if graded else {})

    def _short(self, kept: list[int]) -> str:
        counts = Counter(self.kinds.values())
        return (
            f"dynamic sampling: {len(kept)} of {self.wanted} groups after {len(self.round_starts)} rounds of "
            f"{self.drawn} prompts ({counts['all_right']} all right, {counts['all_wrong']} all wrong): the step goes on "
            "with those"
        )
