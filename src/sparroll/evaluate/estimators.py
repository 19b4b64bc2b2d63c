"""From the verdicts on one problem's samples to its pass@k and majority@k, both unbiased. Intervals are in
intervals.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparroll.errors import UserError


def ks_up_to(samples: int) -> list[int]:
    """The values of k that are reported: 1, 2, 4, ... and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of `k` samples drawn without replacement from these passes: 1 - C(n-c, k) / C(n,
    k).

    This is an unbiased estimate of 1 - (1 - p)^k if each sample passes with probability p (Chen et al. 2021, section
    2.1). It is computed as one minus the product of 1 - k / i for i from n-c+1 to n, which neither overflows nor
    cancels.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise UserError(
            f"pass@{k} cannot be computed from {passed} of {samples} samples", "k goes from 1 to the number of samples"
        )
    if samples - passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


@dataclass(frozen=True)
class Vote:
    """The outcome of one vote of k samples."""

    value: float
    """Reward of the winning answer. If several answers got the most votes, the mean of their rewards."""
    tied: bool


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> Vote:
    """The vote of all these samples. A sample without an answer does not vote; if none votes, the value is 0.

    A tie counts as the mean reward of the tied answers, which is what a fair draw among them gives on average. The
    reward of an answer is the mean over the samples that gave it.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Vote(0.0, False)
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    worth = [
        np.mean([reward for answer, reward in zip(answers, rewards, strict=True) if answer == winner])
        for winner in winners
    ]
    return Vote(float(np.mean(worth)), len(winners) > 1)


def majority_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int) -> list[Vote]:
    """One vote for each block of `k` consecutive samples. Samples after the last complete block are not used.

    The mean of the values is an unbiased estimate for the majority of k new samples, because samples of one problem are
    exchangeable.
    """
    if not 1 <= k <= len(answers):
        raise UserError(
            f"majority@{k} cannot be computed from {len(answers)} samples", "k goes from 1 to the number of samples"
        )
    starts = range(0, len(answers) - k + 1, k)
    return [majority(answers[start : start + k], rewards[start : start + k]) for start in starts]
