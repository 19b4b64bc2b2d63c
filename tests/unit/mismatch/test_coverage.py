"""Do 95 % intervals hold the truth 95 times in 100 when tokens of a rollout depend on each other? Simulated, seeded."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.bootstrap import interval
from sparroll.mismatch.histogram import CELLS, cells, quantile

LEVEL = 0.05
TOKENS, REPLICATES = 200, 200
Interval = tuple[float, float]


def truth(spread: float) -> float:
    """5th percentile over all tokens of `rollouts`: a logistic normal with the variances of both levels added."""
    return float(special.expit(2.5 + stats.norm.ppf(LEVEL) * math.sqrt(1 + spread**2)))


def counted(values: np.ndarray) -> torch.Tensor:
    """[count, C] histograms of the rows."""
    places = cells(torch.from_numpy(values)) + CELLS * torch.arange(len(values))[:, None]
    return torch.bincount(places.flatten(), minlength=len(values) * CELLS).view(-1, CELLS)


def histograms(generator: np.random.Generator, count: int, spread: float) -> torch.Tensor:
    """[count, C] of rollouts whose own level varies by `spread`, tokens by 1, before the logistic function."""
    levels = spread * generator.normal(size=(count, 1))
    return counted(special.expit(2.5 + levels + generator.normal(size=(count, TOKENS))))


def with_bad_rollouts(generator: np.random.Generator, count: int, tokens: int = 40) -> torch.Tensor:
    """[count, C] of rollouts whose means are Beta(8, 1): one in 17 is below .7 and holds most of the lowest tokens."""
    means = generator.beta(8, 1, size=(count, 1))
    return counted(generator.beta(20 * means + 0.1, 20 * (1 - means) + 0.1, size=(count, tokens)))


def over_rollouts(generator: np.random.Generator, counts: torch.Tensor) -> Interval:
    weights = torch.from_numpy(generator.poisson(1.0, (REPLICATES, len(counts)))).double()
    return interval(counts.sum(0), (weights @ counts.double()).long(), LEVEL, len(counts))


def percentiles(generator: np.random.Generator, counts: torch.Tensor) -> Interval:
    """The textbook percentile interval of the same bootstrap over rollouts."""
    weights = torch.from_numpy(generator.poisson(1.0, (REPLICATES, len(counts)))).double()
    low, high = np.nanquantile(quantile((weights @ counts.double()).long(), LEVEL), [0.025, 0.975])
    return low, high


def over_tokens(generator: np.random.Generator, counts: torch.Tensor) -> Interval:
    """As if every token were a rollout of its own: Poisson(1) for each makes Poisson(count) in a cell."""
    total = counts.sum(0)
    return interval(
        total, torch.from_numpy(generator.poisson(total.numpy(), (REPLICATES, CELLS))), LEVEL, int(total.sum())
    )


def coverage(method, count: int, spread: float, simulations: int) -> tuple[float, float]:
    """Shares of simulations with the truth inside the interval, and not under its lower end."""
    generator = np.random.default_rng(count)
    ends = np.array([method(generator, histograms(generator, count, spread)) for _ in range(simulations)])
    above_low = ends[:, 0] <= truth(spread)
    return (above_low & (truth(spread) <= ends[:, 1])).mean(), above_low.mean()


# With 2000 simulations: .970 .943 .951 .919 inside, .974 .955 .967 .931 not under the lower end.
@pytest.mark.parametrize(
    ("count", "spread", "least"), [(4, 0.4, 0.92), (12, 0.4, 0.9), (40, 0.4, 0.9), (12, 0.7, 0.88)]
)
def test_intervals_over_rollouts_hold_the_truth_about_as_often_as_they_say(
    count: int, spread: float, least: float
) -> None:
    inside, above_low = coverage(over_rollouts, count, spread, simulations=300)
    assert inside > least
    assert above_low > least + 0.01


@pytest.mark.parametrize(("rollouts", "said"), [(8, 0.16), (30, 0.09)])
def test_the_lower_end_is_too_high_more_often_where_few_rollouts_hold_the_lowest_tokens(
    rollouts: int, said: float
) -> None:
    """As the docstring of `interval` says. An end that keeps its promise lies above the truth in 2.5 % of simulations."""
    generator = np.random.default_rng(0)
    level = float(quantile(sum(with_bad_rollouts(generator, 5_000).sum(0) for _ in range(4)), LEVEL))
    lows = [over_rollouts(generator, with_bad_rollouts(generator, rollouts))[0] for _ in range(300)]
    assert np.mean(np.array(lows) > level) == pytest.approx(said, abs=0.05)


def test_the_percentiles_of_the_replicates_put_the_lower_end_too_high() -> None:
    """Why `interval` does not use them: a schedule is calibrated by the lower end. (.931 and .848 in a thousand or more.)"""
    ours, theirs = (coverage(method, 12, 0.7, simulations=300)[1] for method in (over_rollouts, percentiles))
    assert theirs < 0.9
    assert theirs + 0.03 < ours


def test_intervals_over_tokens_do_not() -> None:
    inside, _ = coverage(over_tokens, 12, 0.7, simulations=80)
    assert inside < 0.6


def test_intervals_are_not_wide_without_need() -> None:
    """Where tokens are independent, both ways must agree once there are rollouts enough."""
    generator = np.random.default_rng(0)
    widths = []
    for method in (over_rollouts, over_tokens):
        ends = np.array([method(generator, histograms(generator, 60, 0.0)) for _ in range(40)])
        widths.append((ends[:, 1] - ends[:, 0]).mean())
    assert 0.9 < widths[0] / widths[1] < 1.3


def test_the_statistics_give_the_interval_of_their_own_weights() -> None:
    """End to end: few simulations through `add` and `table` agree with the many above."""
    generator, hits = np.random.default_rng(1), 0
    for simulation in range(30):
        statistics = TailStatistics(seed=simulation)
        for rollout, level in enumerate(0.4 * generator.normal(size=12)):
            values = torch.from_numpy(special.expit(2.5 + level + generator.normal(size=TOKENS)))
            statistics.add(values, torch.arange(TOKENS), rollout)
        row = statistics.table("exact").overall
        hits += row.low <= truth(0.4) <= row.high
    assert hits >= 26


def test_a_surer_interval_is_wider_and_its_upper_end_alone_is_a_bound() -> None:
    """At 90 % each end may be beyond the truth in 5 % of cases, at 99 % in .5 %."""
    generator, missed = np.random.default_rng(2), {0.9: 0, 0.95: 0, 0.99: 0}
    for _ in range(100):
        counts = histograms(generator, 40, 0.4)
        weights = torch.from_numpy(generator.poisson(1.0, (REPLICATES, len(counts)))).double()
        drawn = (weights @ counts.double()).long()
        ends = [interval(counts.sum(0), drawn, LEVEL, len(counts), confidence) for confidence in missed]
        assert ends[0][0] > ends[1][0] > ends[2][0] and ends[0][1] < ends[1][1] < ends[2][1]
        assert ends[1] == interval(counts.sum(0), drawn, LEVEL, len(counts))
        for confidence, (_, high) in zip(missed, ends, strict=True):
            missed[confidence] += high < truth(0.4)
    assert missed[0.9] <= 10
    assert missed[0.99] <= 2
