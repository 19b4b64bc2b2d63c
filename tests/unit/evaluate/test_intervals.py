"""Intervals cover what they promise, and the sign-flip test is the one by enumeration."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from sparroll.errors import UserError
from sparroll.evaluate.intervals import mean_difference, mean_share, sign_flip_test

WORLDS = {
    # Chances of the problems are drawn from Beta(a, b); the mean over all problems there could be is a / (a + b).
    "hard and easy ones": (0.5, 0.5),
    "middling": (2.0, 2.0),
    "mostly easy": (3.0, 1.0),
}


@pytest.mark.parametrize("problems", [12, 30, 100])
@pytest.mark.parametrize("world", WORLDS)
def test_intervals_have_their_nominal_coverage(world: str, problems: int) -> None:
    a, b = WORLDS[world]
    rng = np.random.default_rng(5)
    simulations, samples = 400, 8
    values = rng.binomial(samples, rng.beta(a, b, size=(simulations, problems))) / samples
    held = 0
    for values_P in values:
        found = mean_share(values_P)
        held += found.low <= a / (a + b) <= found.high
    # 400 draws at 95 % have a standard deviation of 1.1 %; a plain percentile interval at 12 problems covers 91 %.
    least, most = stats.binom.ppf([0.001, 0.999], simulations, 0.95)
    assert least <= held <= most, f"{held} of {simulations}"


@pytest.mark.parametrize("problems", [12, 30, 64])
def test_intervals_hold_where_nearly_all_problems_agree(problems: int) -> None:
    """3 % of the problems are never solved and the others nearly always, so that a set of problems may have none of the
    former. Resampling covers 63 to 84 % by itself."""
    rng = np.random.default_rng(5)
    simulations, samples = 400, 16
    chances = np.where(rng.random((simulations, problems)) < 0.03, 0.0, 0.995)
    held = 0
    for values_P in rng.binomial(samples, chances) / samples:
        found = mean_share(values_P)
        held += found.low <= 0.97 * 0.995 <= found.high
    assert held >= stats.binom.ppf(0.001, simulations, 0.95), f"{held} of {simulations}"


def test_one_problem_that_differs_does_not_make_an_interval_narrower() -> None:
    ones = np.ones(30)
    other = np.append(ones[:-1], 15 / 16)
    assert mean_share(other).low < mean_share(ones).low
    none = np.zeros(100)
    assert mean_difference(np.append(none[:-1], 1 / 16)).high > mean_difference(none).high


def test_a_plain_percentile_interval_would_fail_that_test() -> None:
    rng = np.random.default_rng(5)
    values = rng.binomial(8, rng.beta(2, 2, size=(400, 12))) / 8
    draws = rng.integers(0, 12, size=(400, 2000, 12))
    means = np.take_along_axis(values[:, None, :], draws, axis=2).mean(axis=2)
    low, high = np.quantile(means, [0.025, 0.975], axis=1)
    held = ((low <= 0.5) & (high >= 0.5)).sum()
    assert held < stats.binom.ppf(0.001, 400, 0.95)


def test_an_interval_is_that_of_the_mean_for_many_problems() -> None:
    found = mean_share(np.array([1.0, 0.0] * 500))
    assert found.value == 0.5
    assert found.low == pytest.approx(0.5 - 1.962 * 0.5 / np.sqrt(1000), abs=0.003)
    assert found == mean_share(np.array([1.0, 0.0] * 500))


def test_where_all_problems_are_right_or_wrong_the_interval_is_clopper_and_pearsons() -> None:
    for count in (1, 5, 30):
        exact = stats.binomtest(count, count).proportion_ci(0.95)
        found = mean_share(np.ones(count))
        assert (found.value, found.high) == (1.0, 1.0)
        assert found.low == pytest.approx(exact.low)
        found = mean_share(np.zeros(count))
        assert (found.value, found.low, found.high) == (0.0, 0.0, pytest.approx(1 - exact.low))


def test_equal_differences_leave_room_for_what_was_not_seen() -> None:
    found = mean_difference(np.zeros(30))
    assert found.value == 0
    assert found.high == -found.low == pytest.approx(1 - 0.025 ** (1 / 30))


def test_equal_values_between_leave_room_on_both_sides_as_the_docs_state() -> None:
    seen = 0.025 ** (1 / 30)
    share, difference = mean_share(np.full(30, 0.25)), mean_difference(np.full(30, -0.25))
    assert (share.low, share.high) == pytest.approx((seen * 0.25, seen * 0.25 + 1 - seen))
    assert (difference.low, difference.high) == pytest.approx((-seen * 0.25 - (1 - seen), -seen * 0.25 + 1 - seen))
    text = " ".join((Path(__file__).parents[3] / "docs" / "evaluate.md").read_text(encoding="utf-8").split())
    assert "s = 0.025^(1/P)" in text and "For shares of 0 and 1 this is the interval of Clopper and Pearson" in text
    assert "of a share is from s v to s v + 1 - s, and that of a difference from s v - (1 - s) to s v + 1 - s" in text


@pytest.mark.parametrize("values", [[], [np.nan, 1.0], [1.5], [-0.1]])
def test_values_that_are_no_shares_are_refused(values: list[float]) -> None:
    with pytest.raises(UserError):
        mean_share(np.array(values))


def _by_enumeration(differences: np.ndarray) -> float:
    sums = [abs(np.dot(signs, differences)) for signs in product((-1, 1), repeat=len(differences))]
    return float(np.mean(np.array(sums) >= abs(differences.sum()) - 1e-9))


def test_the_sign_flip_test_is_the_one_by_enumeration() -> None:
    rng = np.random.default_rng(0)
    for samples in (1, 4, 16):
        for _ in range(10):
            differences = (rng.binomial(samples, 0.6, 9) - rng.binomial(samples, 0.4, 9)) / samples
            found = sign_flip_test(differences)
            assert found.method == "exact"
            assert found.p == pytest.approx(_by_enumeration(differences))
            assert found.different == np.count_nonzero(differences)


def test_left_out_samples_do_not_make_it_inexact() -> None:
    differences = np.array([5 / 16 - 3 / 15, 2 / 13 - 1 / 16, 1.0, -0.5, 3 / 16])
    found = sign_flip_test(differences)
    assert found.method == "exact"
    assert found.p == pytest.approx(_by_enumeration(differences))


def test_with_one_sample_a_problem_it_is_the_sign_test() -> None:
    differences = np.array([1.0] * 140 + [-1.0] * 100 + [0.0] * 60)
    found = sign_flip_test(differences)
    assert found.p == pytest.approx(stats.binomtest(140, 240).pvalue, rel=1e-9)
    assert (found.method, found.different) == ("exact", 240)


def test_other_differences_are_drawn_and_say_so() -> None:
    differences = np.sqrt(np.arange(2.0, 14.0)) / 4 * np.tile([1, 1, -1], 4)
    found = sign_flip_test(differences)
    assert found.method == "monte_carlo"
    assert found.p == pytest.approx(_by_enumeration(differences), abs=0.006)
    assert found == sign_flip_test(differences)


def test_without_a_difference_nothing_is_rejected() -> None:
    assert sign_flip_test(np.zeros(8)).p == 1.0


def test_the_test_rejects_as_often_as_it_says_where_there_is_no_difference() -> None:
    rng = np.random.default_rng(3)
    chance = rng.beta(1, 1, size=(500, 20))
    differences = (rng.binomial(8, chance) - rng.binomial(8, chance)) / 8
    rejected = sum(sign_flip_test(row).p <= 0.05 for row in differences)
    least, most = stats.binom.ppf([0.001, 0.999], 500, 0.05)
    assert least <= rejected <= most
