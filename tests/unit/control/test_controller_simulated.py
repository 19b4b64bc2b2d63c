"""The controller against simulated models whose tail is a known, monotone function of the budget, with noise shared by the
tokens of a rollout: it comes to the target from both sides, holds it, recovers, and does not oscillate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from sparroll.attention.selectors import PageMean
from sparroll.control.controller import Controller, Rules
from sparroll.control.length_bins import LengthBins
from sparroll.mismatch import TailStatistics
from tail_worlds import BIN, World, evidence, of_rollouts

TARGET = 0.86
BINS = LengthBins(BIN, 2 * BIN, PageMean())
EASY, HARD = World(miss=0.14), World(miss=0.22)
"""At a quarter of the context their tails are .86 and .78."""


@dataclass
class Course:
    """True tails and budgets, [steps, bins], as each step's rollouts had them."""

    tails: np.ndarray
    budgets: np.ndarray

    @property
    def turns(self) -> int:
        """Changes of direction over all bins: raised after lowered, or lowered after raised."""
        signs = [np.sign(moves[moves != 0]) for moves in np.diff(self.budgets, axis=0).T]
        return int(sum((one[1:] != one[:-1]).sum() for one in signs))


def course(worlds: list[World], start: list[int], seed: int, rules: Rules = Rules(TARGET)) -> Course:
    """One world a step."""
    rng, one = np.random.default_rng(seed), Controller(rules, BINS, start)
    tails, budgets = [], []
    for step, world in enumerate(worlds, start=1):
        budgets.append(one.budgets)
        tails.append([world.tail(place, budget) for place, budget in enumerate(one.budgets)])
        one.watch(evidence(step, world.measure(step, one.budgets, rng)))
    return Course(np.array(tails), np.array(budgets))


@pytest.mark.parametrize("seed", range(3))
def test_from_the_least_budget_everywhere_it_reaches_the_target_within_six_steps_and_holds_it(seed: int) -> None:
    run = course([EASY] * 60, [64, 64], seed)
    assert run.tails[0].max() < 0.5
    assert run.tails[6:].min() > TARGET - 0.015
    assert (run.tails[12:] < TARGET).mean() < 0.05
    # And not by reading everything.
    assert run.tails[12:].mean() < TARGET + 0.03


@pytest.mark.parametrize("seed", range(3))
def test_from_512_everywhere_it_holds_the_target_against_a_harder_model(seed: int) -> None:
    run = course([HARD] * 40, [512, 512], seed)
    assert run.tails[0].max() < 0.80
    assert run.tails[4:].min() > TARGET - 0.015
    assert (run.tails[10:] < TARGET).mean() < 0.05


def test_from_above_it_comes_down_slowly_and_stops_above_the_target() -> None:
    run = course([EASY] * 120, [1008, 2000], seed=0)
    assert run.tails[0].min() > 0.91
    assert np.diff(run.budgets, axis=0).min() >= -0.05 * run.budgets.max() - 16
    assert run.tails[100:].max() < TARGET + 0.03
    assert (run.tails < TARGET).mean() < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_it_recovers_within_three_steps_when_the_model_becomes_harder(seed: int) -> None:
    run = course([EASY] * 30 + [HARD] * 30, [512, 1008], seed)
    assert run.tails[30].max() < 0.83
    # The first step that shows it, and two more to correct the aim.
    assert run.tails[33:].min() > TARGET - 0.015
    assert (run.tails[36:] < TARGET).mean() < 0.05


@pytest.mark.slow
def test_it_does_not_oscillate() -> None:
    """In a steady world each failed lowering doubles the wait, so turns come ever more rarely."""
    early = late = 0
    for seed in range(2):
        run = course([EASY] * 200, [560, 1104], seed)
        early += Course(run.tails[:100], run.budgets[:100]).turns
        late += Course(run.tails[100:], run.budgets[100:]).turns
        assert (run.tails < TARGET).mean() < 0.03
    assert early <= 16
    assert late <= 12


def test_rollouts_that_differ_much_make_it_careful_and_not_nervous() -> None:
    """The bound is clustered by rollouts: with few and unlike ones it stays further above the target."""
    nervous = replace(EASY, rollout_spread=0.8, rollouts=16)
    run = course([nervous] * 60, [560, 1104], seed=1)
    assert (run.tails[10:] < TARGET).mean() < 0.1
    assert run.tails[30:].mean() > course([EASY] * 60, [560, 1104], seed=1).tails[30:].mean()


def test_a_target_above_the_dense_ceiling_ends_at_the_whole_bin() -> None:
    world = replace(EASY, dense=0.84)
    run = course([world] * 12, [512, 512], seed=0)
    assert run.budgets[-1].tolist() == [2000, 4000]


def test_rollouts_that_are_added_at_once_are_the_same_rollouts_added_one_by_one() -> None:
    acceptance_UT = torch.from_numpy(np.random.default_rng(0).random((5, 40)).clip(0.1, 0.9995))
    acceptance_UT[0, 3], acceptance_UT[1, 4] = 0.0, 1.0
    context_T = torch.tensor([0, 1, 7, 3]).repeat(10) * BIN + 5
    statistics = TailStatistics(BIN, replicates=30)
    for rollout, acceptance_T in enumerate(acceptance_UT):
        statistics.add(acceptance_T, context_T, f"2/{rollout}")
    one_by_one, at_once = statistics.state(), of_rollouts(acceptance_UT, context_T, 2, replicates=30).state()
    assert all(torch.equal(one_by_one[name], at_once[name]) for name in one_by_one)
