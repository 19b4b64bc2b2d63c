"""pass@k and majority@k against closed forms and enumeration."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest
from scipy import stats

from sparroll.errors import UserError
from sparroll.evaluate.estimators import Vote, ks_up_to, majority, majority_at_k, pass_at_k


@pytest.mark.parametrize("samples", [1, 2, 7, 16, 64])
def test_pass_at_k_is_the_closed_form(samples: int) -> None:
    for passed in range(samples + 1):
        for k in range(1, samples + 1):
            exact = 1 - Fraction(comb(samples - passed, k), comb(samples, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    samples = [1, 0, 0, 1, 0, 0]
    for k in range(1, 7):
        share = np.mean([any(subset) for subset in combinations(samples, k)])
        assert pass_at_k(6, 2, k) == pytest.approx(share)


@pytest.mark.parametrize("p", [0.02, 0.3, 0.9])
def test_pass_at_k_is_unbiased(p: float) -> None:
    for k in (1, 2, 4, 8):
        expected = sum(stats.binom.pmf(c, 16, p) * pass_at_k(16, c, k) for c in range(17))
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


def test_pass_at_k_stays_exact_where_binomials_overflow() -> None:
    exact = 1 - Fraction(comb(9_990, 5_000), comb(10_000, 5_000))
    assert pass_at_k(10_000, 10, 5_000) == pytest.approx(float(exact), abs=1e-12)
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_of_impossible_counts_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(UserError, match="cannot be computed"):
        pass_at_k(samples, passed, k)


def test_ks_are_the_powers_of_two_and_the_samples() -> None:
    assert ks_up_to(1) == [1]
    assert ks_up_to(6) == [1, 2, 4, 6]
    assert ks_up_to(16) == [1, 2, 4, 8, 16]


def test_the_majority_is_worth_its_reward() -> None:
    assert majority(["7", "7", "3"], [1.0, 1.0, 0.0]) == Vote(1.0, False)
    assert majority(["7", "3", "3"], [1.0, 0.0, 0.0]) == Vote(0.0, False)


def test_a_tie_is_worth_the_mean_of_the_tied_answers() -> None:
    assert majority(["7", "3"], [1.0, 0.0]) == Vote(0.5, True)
    assert majority(["7", "3", "5", "7", "3", "5"], [1.0, 0.0, 0.0] * 2) == Vote(pytest.approx(1 / 3), True)


def test_samples_without_an_answer_do_not_vote() -> None:
    assert majority([None, None, "7"], [0.0, 0.0, 1.0]) == Vote(1.0, False)
    assert majority([None, None], [0.0, 0.0]) == Vote(0.0, False)


def test_majority_at_one_is_the_mean_and_at_all_is_the_vote() -> None:
    answers, rewards = ["7", "3", "7", None, "7"], [1.0, 0.0, 1.0, 0.0, 1.0]
    assert np.mean([vote.value for vote in majority_at_k(answers, rewards, 1)]) == pytest.approx(np.mean(rewards))
    assert majority_at_k(answers, rewards, 5) == [majority(answers, rewards)]


def test_majority_at_k_is_unbiased() -> None:
    # Answers a (right), b, c with these chances; the majority of 3 by enumeration, against blocks of 3 out of 6.
    chance = {"a": 0.5, "b": 0.3, "c": 0.2}

    def expected(samples: int) -> float:
        total = 0.0
        for drawn in product(chance, repeat=samples):
            votes = majority_at_k(drawn, [float(one == "a") for one in drawn], 3)
            total += np.prod([chance[one] for one in drawn]) * np.mean([vote.value for vote in votes])
        return total

    assert expected(6) == pytest.approx(expected(3), abs=1e-12)
    # a twice or more, or all three different, a third of which are worth 1.
    assert expected(3) == pytest.approx(0.5**3 + 3 * 0.25 * 0.5 + 6 * 0.5 * 0.3 * 0.2 / 3)
