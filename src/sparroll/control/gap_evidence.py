"""Whether there surely is a reward gap between sparse and dense rollouts. The test may be looked at after every step, and
a gap may begin at any step.

If the way of decoding makes no difference to rewards, then given the rewards of a prompt's rollouts, every choice of its
dense ones is equally likely, because they were drawn at random. So what follows is exact: it needs no large numbers, and
it does not matter how difficult a prompt is, how alike the prompts of a step are, or how the policy drifts.

The bet of a prompt for log odds L is exp(L * s) / mean of exp(L * s'). s is the sum of its dense rollouts' rewards, in
units of the difference between the prompt's largest and smallest reward, and the mean is over all choices s' of as many
rollouts. For rewards of 0 and 1 it is the likelihood ratio of conditional logistic regression with one stratum for each
prompt. Without a gap its expectation is 1, whatever came before. From the bets follows Shiryaev's and Roberts' statistic

    R = (R of the step before + 1) * product of the step's bets

with R = HEAD_START before the first step: the mean of R over several L sums the evidence for gaps that began at any
step, where the beginning of the run has as much weight as HEAD_START later steps. Without a gap the expectation of R
grows by 1 a step. So it reaches ALARM within RUN_STEPS steps with probability (HEAD_START + RUN_STEPS) / ALARM at most
(Doob's inequality), which is FALSE_ALARM.

Sources: Shiryaev (1963), Roberts (1966) and Pollak (1985) for the statistic; Shin, Ramdas and Rinaldo, "E-detectors"
(arXiv 2203.03532), for its use with bets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

LOG_ODDS = (0.25, 0.5, 1.0, 2.0)
"""Log odds of a reward with dense over that with sparse decoding. Gaps of about .05, .1, .2 and .4 where prompts are of
all difficulties."""
RUN_STEPS, FALSE_ALARM = 1000, 0.01
"""At most this share of runs of so many steps finds a gap where there is none."""
HEAD_START = 1000.0
ALARM = (HEAD_START + RUN_STEPS) / FALSE_ALARM
"""Where R is at least this, there surely is a gap."""
LOOK_CLOSER = ALARM / 1000
"""From here on the evidence is under way to an alarm. Without a gap that is rare, so a larger control group in such steps
costs little."""
MOST = 100 * ALARM
"""R is never larger, so that a gap that has passed is soon forgotten."""


def log_bets(rewards: Sequence[float], dense: Sequence[bool]) -> tuple[float, ...]:
    """Logarithm of one prompt's bet for each of LOG_ODDS, against the chance that dense rollouts only happened to have
    the larger rewards. 0 where all rewards are equal, all rollouts of one kind, or none could be graded."""
    count = sum(dense)
    if not 0 < count < len(rewards) or max(rewards) == min(rewards):
        return (0.0,) * len(LOG_ODDS)
    span = max(rewards) - min(rewards)
    mean = math.fsum(rewards) / len(rewards)
    scaled = [(reward - mean) / span for reward in rewards]
    seen = math.fsum(value for value, is_dense in zip(scaled, dense, strict=True) if is_dense)
    log_means = _log_means_over_choices(scaled, count).tolist()
    return tuple(odds * seen - log_mean for odds, log_mean in zip(LOG_ODDS, log_means, strict=True))


def _log_means_over_choices(values: Sequence[float], count: int) -> np.ndarray:
    """Logarithm of the mean of exp(L * sum) over all choices of `count` of the values, for each L of LOG_ODDS.

    means[:, j] is that over all choices of j of the values so far; a share j / so_far of these has the last value in it.
    """
    factors = np.multiply.outer(LOG_ODDS, values)
    means = np.full((len(LOG_ODDS), count + 1), -np.inf)
    means[:, 0] = 0
    for so_far in range(1, len(values) + 1):
        most = min(count, so_far)
        with_last = np.arange(1, most + 1) / so_far
        # Where all of them are chosen, none is without the last one.
        with np.errstate(divide="ignore"):
            without = np.log1p(-with_last) + means[:, 1 : most + 1]
        means[:, 1 : most + 1] = np.logaddexp(
            np.log(with_last) + factors[:, so_far - 1, None] + means[:, :most], without
        )
    return means[:, count]


class GapEvidence:
    """R for each of LOG_ODDS. Kept as log(R + 1)."""

    def __init__(self) -> None:
        self.logs = [math.log1p(HEAD_START)] * len(LOG_ODDS)

    def add(self, bets: Iterable[Sequence[float]]) -> None:
        """Take in the `log_bets` of all prompts of one step, in any order."""
        sums = [math.fsum(each) for each in zip(*bets, strict=True)] or [0.0] * len(LOG_ODDS)
        most = math.log(MOST)
        self.logs = [_log_plus_one(min(log + more, most)) for log, more in zip(self.logs, sums, strict=True)]

    def clear(self) -> None:
        """Forget all evidence. There is no second head start: it would double the false alarms."""
        self.logs = [0.0] * len(LOG_ODDS)

    @property
    def log(self) -> float:
        """Logarithm of the mean of R + 1 over LOG_ODDS."""
        largest = max(self.logs)
        return largest + math.log(math.fsum(math.exp(each - largest) for each in self.logs) / len(self.logs))

    @property
    def share(self) -> float:
        """How far it is to an alarm, on a logarithmic scale: 0 for none, 1 or more where there surely is a gap."""
        return self.log / math.log(ALARM + 1)

    @property
    def is_sure(self) -> bool:
        return self.share >= 1

    @property
    def is_under_way(self) -> bool:
        """Whether there may well be a gap."""
        return self.log >= math.log(LOOK_CLOSER + 1)


def _log_plus_one(log: float) -> float:
    """log(exp(log) + 1), without overflow."""
    return log + math.log1p(math.exp(-log)) if log > 0 else math.log1p(math.exp(log))
