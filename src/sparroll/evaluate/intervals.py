"""How certain a mean over problems is, and whether two means differ: bootstrap intervals and a sign-flip test.

Samples of one problem depend on each other, so problems are resampled, and never samples.
"""

# P problems, R replicates

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import stats

from sparroll.errors import UserError

REPLICATES = 10_000
LEVEL = 0.95
_FEW = 8
"""With fewer values than this, and than a third, that differ from the one seen most often, resampling alone does not say how
far the mean may be off: its intervals cover 63 to 84 % where 3 % of the problems are never solved and the others nearly
always."""
_BLOCK = 2_000_000
"""How many draws are in memory at a time."""
_MOST_WORK = 200_000_000
"""Limit of the exact test: the number of different sums times the number of problems."""


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its 95 % interval."""

    value: float
    low: float
    high: float
    problems: int


@dataclass(frozen=True)
class SignFlip:
    """Two-sided p-value of the hypothesis that the two sides may be exchanged within each problem."""

    p: float
    method: Literal["exact", "monte_carlo"]
    problems: int
    different: int
    """Problems whose difference is not 0. Only these carry evidence."""


def mean_share(values_P: np.ndarray, seed: int = 0) -> Estimate:
    """Mean of values in [0, 1], one per problem."""
    return _mean_within(values_P, 0.0, 1.0, seed)


def mean_difference(differences_P: np.ndarray, seed: int = 0) -> Estimate:
    """Mean of paired differences in [-1, 1], one per problem."""
    return _mean_within(differences_P, -1.0, 1.0, seed)


def _mean_within(values_P: np.ndarray, least: float, most: float, seed: int) -> Estimate:
    """Where nearly all values are equal, resampling says too little of the others, which may be far away and not be among
    these. To see none of them in P draws has a chance of 2.5 % or more only if they have at most the probability
    1 - s, s = 0.025^(1/P). So then they get that much, and may have any value. Where all values are equal, resampling
    adds nothing to it; for a value of 0 or 1 this is the interval of Clopper and Pearson."""
    values_P = _checked(values_P)
    if values_P.min() < least or values_P.max() > most:
        raise UserError(f"values must lie in [{least:g}, {most:g}], got {values_P.min():g} to {values_P.max():g}")
    count, value = len(values_P), float(values_P.mean())
    seen, times = np.unique(values_P, return_counts=True)
    if len(seen) == 1:
        low = high = value = float(seen[0])
    else:
        low, high = expanded_interval(values_P, seed)
    if count - int(times.max()) < max(2, min(_FEW, count / 3)):
        share = ((1 - LEVEL) / 2) ** (1 / count)
        low, high = share * low + (1 - share) * least, share * high + (1 - share) * most
    return Estimate(value, low, high, count)


def expanded_interval(values_P: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """95 % expanded percentile interval of the mean; the same values always give the same interval.

    A plain percentile interval is too narrow by the factor sqrt((P-1)/P), and uses normal quantiles instead of those of
    t; with 30 problems it covers 93 %. Here the levels are moved outward to make up for both (Hesterberg 2015, section
    4.4).
    """
    values_P = _checked(values_P)
    count = len(values_P)
    if count < 2:
        raise UserError("an interval needs at least two problems, got 1")
    rng = np.random.default_rng(seed)
    rows = max(1, _BLOCK // count)
    means_R = np.concatenate(
        [
            values_P[rng.integers(0, count, size=(min(rows, REPLICATES - start), count))].mean(axis=1)
            for start in range(0, REPLICATES, rows)
        ]
    )
    low, high = np.quantile(means_R, [_tail_share(count), 1 - _tail_share(count)])
    return float(low), float(high)


def sign_flip_test(differences_P: np.ndarray, seed: int = 0) -> SignFlip:
    """Test whether the mean difference is 0. Under this hypothesis each difference has either sign with the same
    probability, and p is the share of sign patterns whose sum is at least as far from 0 as the observed one.

    The test is exact, with every pattern counted, if the differences are multiples of one fraction, as counts over
    samples are. Then the distribution of the sum is computed by convolution, problem by problem. Otherwise 100,000
    random patterns are drawn.
    """
    differences_P = _checked(differences_P)
    count, moved_P = len(differences_P), differences_P[differences_P != 0]
    if not len(moved_P):
        return SignFlip(1.0, "exact", count, 0)
    steps = _as_multiples(moved_P)
    if steps is None:
        return SignFlip(_p_by_draws(moved_P, seed), "monte_carlo", count, len(moved_P))
    return SignFlip(_p_by_convolution(steps), "exact", count, len(moved_P))


def _p_by_convolution(steps: Sequence[int]) -> float:
    most = sum(abs(step) for step in steps)
    chance = np.zeros(2 * most + 1)
    chance[most] = 1.0
    for step in steps:
        chance = 0.5 * (np.roll(chance, step) + np.roll(chance, -step))
    seen = abs(sum(steps))
    sums = np.abs(np.arange(-most, most + 1))
    return float(min(1.0, chance[sums >= seen].sum()))


def _p_by_draws(moved_P: np.ndarray, seed: int, draws: int = 100_000) -> float:
    rng = np.random.default_rng(seed)
    seen = abs(moved_P.sum()) * (1 - 1e-12)
    rows = max(1, _BLOCK // len(moved_P))
    far = 0
    for start in range(0, draws, rows):
        signs = rng.integers(0, 2, size=(min(rows, draws - start), len(moved_P))) * 2 - 1
        far += int((np.abs(signs @ moved_P) >= seen).sum())
    # The observed pattern is one of the possible ones, so p is never 0.
    return (far + 1) / (draws + 1)


def _as_multiples(moved_P: np.ndarray) -> list[int] | None:
    """The differences as whole multiples of one fraction. None if there is no such fraction, or if there are too many
    multiples."""
    parts = 1
    for value in moved_P:
        for size in range(1, 1025):
            if abs(value * size - round(value * size)) < 1e-9:
                parts = math.lcm(parts, size)
                break
        else:
            return None
        if 2 * parts * float(np.abs(moved_P).sum()) * len(moved_P) > _MOST_WORK:
            return None
    return [round(float(value) * parts) for value in moved_P]


@lru_cache
def _tail_share(problems: int) -> float:
    """Level of the interval's lower end: 0.025, moved outward."""
    quantile = stats.t.ppf((1 - LEVEL) / 2, problems - 1) * math.sqrt(problems / (problems - 1))
    return float(stats.norm.cdf(quantile))


def _checked(values_P: np.ndarray) -> np.ndarray:
    values_P = np.asarray(values_P, dtype=np.float64)
    if values_P.ndim != 1 or not len(values_P):
        raise UserError("there are no problems to average over")
    if not np.isfinite(values_P).all():
        raise UserError("values over problems must be finite numbers", "leave out problems without a value")
    return values_P
