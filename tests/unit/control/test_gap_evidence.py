"""Bets against enumeration, and the statistic against its recursion."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest

from sparroll.control.gap_evidence import (
    ALARM,
    FALSE_ALARM,
    HEAD_START,
    LOG_ODDS,
    LOOK_CLOSER,
    MOST,
    RUN_STEPS,
    GapEvidence,
    log_bets,
)


def chosen(places: tuple[int, ...], count: int) -> list[bool]:
    return [place in places for place in range(count)]


@pytest.mark.parametrize(
    "rewards", [[1, 0, 0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 0, 1], [0.5, -1, 2, 2, 0.25], [10, 0, 0, 20]]
)
@pytest.mark.parametrize("dense", [1, 2, 3])
def test_without_a_gap_the_mean_bet_over_all_choices_is_one(rewards: list[float], dense: int) -> None:
    """The dense rollouts were drawn at random, so this is the expectation, whatever the rewards are."""
    every = [log_bets(rewards, chosen(places, len(rewards))) for places in combinations(range(len(rewards)), dense)]
    assert np.exp(every).mean(0) == pytest.approx([1.0] * len(LOG_ODDS))


def test_a_bet_by_hand() -> None:
    """One of four is right, and it is the dense one: exp(L * 3/4) / ((exp(L * 3/4) + 3 exp(-L / 4)) / 4)."""
    for odds, log_bet in zip(LOG_ODDS, log_bets([1, 0, 0, 0], [True, False, False, False]), strict=True):
        right, wrong = math.exp(odds * 0.75), math.exp(-odds / 4)
        assert math.exp(log_bet) == pytest.approx(right / ((right + 3 * wrong) / 4))


def test_a_bet_does_not_depend_on_the_scale_of_rewards() -> None:
    rewards, dense = [0.2, 0.9, 0.4, 0.7], [True, True, False, False]
    assert log_bets([100 * each - 7 for each in rewards], dense) == pytest.approx(log_bets(rewards, dense))


@pytest.mark.parametrize(("rewards", "dense"), [([1, 1, 1], [True, False, False]), ([1, 0], [True, True])])
def test_nothing_is_bet_where_nothing_can_be_seen(rewards: list[float], dense: list[bool]) -> None:
    assert log_bets(rewards, dense) == (0.0,) * len(LOG_ODDS)


def test_many_samples_of_a_prompt_do_not_overflow() -> None:
    rewards = [1.0] * 1000 + [0.0] * 1000
    found = log_bets(rewards, [place % 2 == 0 for place in range(2000)])
    # As many right as expected: every bet loses, the larger the log odds the more.
    assert [round(each, 1) for each in found] == sorted((round(each, 1) for each in found), reverse=True)
    assert all(-2000 < each < 0 for each in found)


def test_the_statistic_follows_its_recursion_and_is_a_mean_over_log_odds() -> None:
    evidence, by_hand = GapEvidence(), [HEAD_START] * 4
    for bets in ([(0.3, 0.5, -0.1, 0.0), (0.1, 0.0, 0.2, -2.0)], [], [(0.5, 1.0, 2.0, -9.0)]):
        evidence.add(bets)
        factors = [math.exp(sum(each)) for each in zip(*bets, strict=True)] or [1.0] * 4
        by_hand = [(each + 1) * factor for each, factor in zip(by_hand, factors, strict=True)]
    assert math.exp(evidence.log) == pytest.approx(sum(by_hand) / 4 + 1)


def test_it_is_sure_at_the_alarm_and_under_way_to_it_before() -> None:
    assert (HEAD_START + RUN_STEPS) / ALARM == FALSE_ALARM
    for value, under_way, sure in (
        (LOOK_CLOSER - 1, False, False),
        (LOOK_CLOSER + 1, True, False),
        (ALARM - 10, True, False),
        (ALARM + 10, True, True),
    ):
        evidence = GapEvidence()
        evidence.logs = [math.log(value + 1)] * 4
        assert (evidence.is_under_way, evidence.is_sure) == (under_way, sure), value


def test_it_never_grows_beyond_its_limit_and_forgets_a_gap_that_has_passed() -> None:
    evidence = GapEvidence()
    for _ in range(500):
        evidence.add([(5.0,) * 4])
    assert math.exp(evidence.log) == pytest.approx(MOST + 1)
    for _ in range(60):
        evidence.add([(-0.3,) * 4])
    assert not evidence.is_sure


def test_clearing_it_gives_no_second_head_start() -> None:
    evidence = GapEvidence()
    assert math.exp(evidence.log) == pytest.approx(HEAD_START + 1)
    evidence.clear()
    assert evidence.log == 0


def test_without_a_gap_its_expectation_grows_by_one_a_step() -> None:
    """Over 40,000 runs of 12 steps with one pair each: HEAD_START + 12, which the bound on false alarms rests on."""
    rng = np.random.default_rng(0)
    bets = {r: [log_bets([1.0] * r + [0.0] * (8 - r), chosen((place,), 8)) for place in (0, 7)] for r in range(9)}
    table_R2L = np.exp([bets[r] for r in range(9)])
    solved = rng.binomial(8, rng.beta(0.5, 0.5, (12, 40_000)))
    dense_is_right = rng.random((12, 40_000)) < solved / 8
    value = np.full((4, 40_000), HEAD_START)
    for step in range(12):
        value = (value + 1) * table_R2L[solved[step], np.where(dense_is_right[step], 0, 1)].T
    # The largest log odds have the widest spread; the others' means are known to a few units.
    mean, error = value.mean(1), value.std(1) / 200
    assert (np.abs(mean - HEAD_START - 12) < 4 * error).all()
