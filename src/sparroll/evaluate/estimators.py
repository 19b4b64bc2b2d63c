"""From the verdicts on one problem's samples to its pass@k and majority@k, both unbiased. No intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparroll.errors import UserError


def ks_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    return sorted({2**power for power in range(samples.bit_length())} | {samples})


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of `k` samples drawn without replacement from these passes: 1 - C(n-c, k) / C(n, k).

    Unbiased for 1 - (1 - p)^k where each sample passes with probability p (Chen et al. 2021, section 2.1), as the product
    of 1 - k / i over the i from n-c+1 to n, which neither overflows nor cancels.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise UserError(f"pass@{k} cannot be had from {passed} of {samples} samples", "k goes from 1 to the samples")
    if samples - passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1)))


@dataclass(frozen=True)
class Vote:
    """One vote of k samples."""

    value: float
    """Reward of the winning answer; the mean over the winners where several answers got the most votes."""
    tied: bool


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> Vote:
    """The vote of all these samples. One without an answer does not vote; where none does, the value is 0.

    A tie is worth the mean reward of the tied answers: what breaking it by a fair draw is worth on average. Samples that
    agree in the answer share the mean of their rewards.
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
    """Votes of the blocks of `k` consecutive samples; samples left over after the last whole block are not used.

    The mean of their values is unbiased for the majority of k fresh samples, since samples of one problem are exchangeable.
    """
    if not 1 <= k <= len(answers):
        raise UserError(f"majority@{k} cannot be had from {len(answers)} samples", "k goes from 1 to the samples")
    starts = range(0, len(answers) - k + 1, k)
    return [majority(answers[start : start + k], rewards[start : start + k]) for start in starts]
