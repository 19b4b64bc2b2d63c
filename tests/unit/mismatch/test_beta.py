"""The fit recovers what was planted, from values and from counts; degenerate data are named, not fitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics, fit_beta


def planted(a: float, b: float, weight: float, count: int, seed: int = 0) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    below = 0.999 * generator.beta(a, b, count)
    return torch.from_numpy(np.where(generator.random(count) < weight, generator.uniform(0.999, 1, count), below))


@pytest.mark.parametrize(
    ("a", "b", "weight"), [(2.209, 0.47, 0.547), (7.88, 0.55, 0.727), (11.32, 0.55, 0.7675), (1, 1, 0), (40, 3, 0.1)]
)
def test_planted_parameters_are_recovered(a: float, b: float, weight: float) -> None:
    fit = fit_beta(planted(a, b, weight, 200_000))
    assert (fit.a, fit.b, fit.weight) == pytest.approx((a, b, weight), rel=0.03, abs=0.003)
    assert fit.ks < 0.01
    assert fit.values == 200_000


def test_the_fit_is_that_of_scipy() -> None:
    values = planted(3.0, 0.8, 0.0, 5_000)
    a, b, _, _ = stats.beta.fit((values / 0.999).numpy(), floc=0, fscale=1)
    fit = fit_beta(values)
    assert (fit.a, fit.b) == pytest.approx((a, b), rel=1e-4)
    assert fit.ks == pytest.approx(stats.kstest(values.numpy(), stats.beta(a, b, scale=0.999).cdf).statistic, abs=1e-4)


def test_what_is_no_beta_shows_in_the_distance() -> None:
    values = torch.cat([torch.full((500,), 0.2), torch.full((500,), 0.8)])
    assert fit_beta(values).ks > 0.2


def test_weight_is_the_share_from_999_on() -> None:
    values = torch.cat([torch.linspace(0.1, 0.9, 60), torch.tensor([0.999, 1.0, 0.9991, 0.9989])])
    assert fit_beta(values.double()).weight == pytest.approx(3 / 64)


def test_the_published_weight_reads_as_the_share_from_999_on() -> None:
    """Budget 16384 nearly is dense decoding, whose published 5th percentile is .94 to .95. Of the two readings of the
    published weight the share from 0.999 on comes close; the share of the Beta does not."""
    beta, weight = stats.beta(11.32, 0.55, scale=0.999), 0.7675
    assert beta.ppf(0.05 / (1 - weight)) > 0.92
    assert beta.ppf(0.05 / weight) < 0.85


def test_zeros_and_float32_values_next_to_the_end_are_fitted() -> None:
    values = torch.cat([planted(2.0, 0.5, 0.5, 5_000), torch.zeros(5), torch.full((5,), 0.999 - 1e-9)])
    fit = fit_beta(values.float())
    assert np.isfinite([fit.a, fit.b, fit.ks]).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.ones(1000), "needs 20 values below 0.999, got 0 of 1000"),
        (torch.rand(19) * 0.9, "needs 20 values below 0.999, got 19 of 19"),
        (torch.zeros(0), "needs 20 values below 0.999, got 0 of 0"),
        (torch.full((100,), 0.7), "all 100 below 0.999 are near 0.7"),
        (torch.zeros(100), "needs different values"),
        (torch.full((100,), float("nan")), "without NaN"),
        (torch.full((100,), 1.5), r"in \[0, 1\]"),
    ],
)
def test_nothing_to_fit_is_said(values: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_beta(values)


@pytest.mark.parametrize(("a", "b"), [(0.3, 0.3), (300, 200), (0.2, 30), (2000, 1)])
def test_extreme_shapes_converge(a: float, b: float) -> None:
    fit = fit_beta(planted(a, b, 0.0, 50_000))
    assert np.isfinite([fit.a, fit.b]).all()
    assert fit.ks < 0.1


def test_counts_are_enough_for_the_fit() -> None:
    values = planted(2.209, 0.47, 0.547, 60_000)
    statistics = TailStatistics()
    for rollout in range(6):
        statistics.add(values[rollout::6], torch.arange(10_000), rollout)
    fit, direct = statistics.beta(), fit_beta(values)
    assert (fit.a, fit.b) == pytest.approx((direct.a, direct.b), rel=1e-6)
    assert (fit.weight, fit.values) == (direct.weight, direct.values)
    assert fit.ks == pytest.approx(direct.ks, abs=0.002)


def test_counts_without_anything_below_one_have_no_fit() -> None:
    statistics = TailStatistics()
    statistics.add(torch.ones(500), torch.arange(500), "dense")
    with pytest.raises(UserError, match="got 0 of 500"):
        statistics.beta()
