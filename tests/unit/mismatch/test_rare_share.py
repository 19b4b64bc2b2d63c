"""Do intervals of rare shares hold the truth where events come in clusters, and none may have been seen? Simulated, with
fixed seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from sparroll.mismatch.impossible import ImpossibleShare, ImpossibleTokens
from sparroll.mismatch.rare_share import design_effect, rare_interval

TOKENS = 200
FAR, NEAR = 12.0, 3.0
"""Nats of a token that is impossible, and of one that is only more than 2 nats off."""


def test_independent_tokens_have_the_exact_binomial_interval() -> None:
    """With as many rollouts as tokens, Student's correction is nothing."""
    low, high = rare_interval(events=7, tokens=10**6, effective_rollouts=1e6, design=1.0, confidence=0.95)
    exact = stats.binomtest(7, 10**6).proportion_ci(method="exact")
    assert (low, high) == pytest.approx((exact.low, exact.high), rel=1e-4)


def test_without_an_event_there_is_an_upper_end_above_zero() -> None:
    """1 - (1 - high)^n is the confidence: 3.69 / n at 95 %, two-sided."""
    low, high = rare_interval(0, 10**6, 1e6, 1.0, 0.95)
    assert low == 0 and high == pytest.approx(-math.log(0.025) / 1e6, rel=1e-4)
    assert rare_interval(0, 10**6, 1e6, 4.0, 0.95)[1] == pytest.approx(4 * high, rel=1e-4)


def test_one_rollout_says_nothing() -> None:
    assert rare_interval(3, 1000, 1.0, 1.0, 0.95) == (0.0, 1.0)
    assert design_effect(3, 1000, 9, 3000, 1000**2, 1.0) == 1.0


def test_events_that_share_one_rollout_count_once() -> None:
    """100 rollouts of 100 tokens: five events in one of them are worth one, five in five are worth five."""
    squared = 100 * 100**2
    assert design_effect(5, 10_000, 25, 500, squared, 100) == pytest.approx(5, rel=0.02)
    assert design_effect(5, 10_000, 5, 500, squared, 100) == pytest.approx(1, rel=0.02)


def test_equal_rollouts_are_no_better_than_independent_tokens() -> None:
    assert design_effect(100, 10_000, 100, 10_000, 100 * 100**2, 100) == 1.0


def bursts(
    generator: np.random.Generator, rollouts: int, expected: float, mean: float, spread: float
) -> ImpossibleTokens:
    """Rollouts with bursts of far tokens, geometric with this mean, at a rate that varies between rollouts with this
    variance. One in ten bursts is impossible, `expected` tokens of all; the others are near."""
    counted = ImpossibleTokens(TOKENS)
    rates = generator.gamma(1 / spread, spread, rollouts) if spread else np.ones(rollouts)
    for count in generator.poisson(10 * expected / mean / rollouts * rates):
        off_T = np.zeros(TOKENS)
        for size in generator.geometric(1 / mean, count):
            start = generator.integers(0, TOKENS)
            off_T[start : start + size] = FAR if generator.random() < 0.1 else NEAR
        counted.add(torch.from_numpy(off_T), torch.arange(TOKENS))
    return counted


def truth(expected: float, mean: float, spread: float) -> float:
    """By brute force: bursts overlap and are cut at the end of a rollout."""
    generator, count = np.random.default_rng(9), 60
    found = [bursts(generator, 100, expected * 100 / 32, mean, spread).share(10) for _ in range(count)]
    return float(np.mean([each.value for each in found if each is not None]))


# Shares under the upper end and above the lower one with 600 simulations are .98 to 1 in all of these.
@pytest.mark.parametrize(("expected", "mean", "spread"), [(0.5, 1, 0), (3, 1, 0), (3, 3, 1), (12, 3, 1), (4, 8, 0)])
def test_intervals_hold_the_truth_where_events_come_in_bursts(expected: float, mean: float, spread: float) -> None:
    generator, share = np.random.default_rng(1), truth(expected, mean, spread)
    found = [bursts(generator, 32, expected, mean, spread).share(10) for _ in range(150)]
    known = [each for each in found if each is not None]
    assert len(known) == 150
    assert np.mean([each.low <= share for each in known]) >= 0.96
    assert np.mean([each.high >= share for each in known]) >= 0.96


def test_tokens_taken_for_independent_would_be_too_sure() -> None:
    """Why clusters are counted: bursts of eight at 95 % otherwise."""
    generator, share = np.random.default_rng(2), truth(12, 8, 0)
    inside = 0
    for _ in range(100):
        found = bursts(generator, 32, 12, 8, 0).share(10)
        assert found is not None
        low, high = rare_interval(found.events, found.tokens, 32, 1.0, 0.95)
        inside += low <= share <= high
    assert inside < 75


def test_the_upper_end_knows_clusters_from_shorter_distances() -> None:
    """No token is more than 10 nats off, but those over 2 come in pairs: the next impossible ones may, too."""
    alone, pairs = ImpossibleTokens(TOKENS), ImpossibleTokens(TOKENS)
    for rollout in range(40):
        for counted, near in ((alone, 1), (pairs, 2 * (rollout % 2))):
            off_T = torch.zeros(TOKENS)
            off_T[:near] = NEAR
            counted.add(off_T, torch.arange(TOKENS))
    one, two = alone.share(10), pairs.share(10)
    assert isinstance(one, ImpossibleShare) and isinstance(two, ImpossibleShare)
    assert one.value == two.value == one.low == two.low == 0 and one.events == 0
    assert two.high > 1.02 * one.high > 0


def test_few_rollouts_widen_the_interval_of_nothing_seen() -> None:
    """No event in 2,000 tokens of 8 rollouts. Without Student's correction the end would be .00184."""
    assert rare_interval(0, 2000, 8, 1.0, 0.95)[1] == pytest.approx(0.002681, rel=1e-3)
