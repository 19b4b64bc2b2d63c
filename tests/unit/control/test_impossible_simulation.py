"""The simulation of the guard's limit for impossible tokens: its short cut is the guard, and its shares are what it says."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from sparroll.mismatch.impossible import ImpossibleTokens

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import impossible_simulation as simulation

WHOLE = np.full((14, simulation.BINS), 4.0)


@pytest.mark.parametrize("size", [simulation.THICK, simulation.THIN])
@pytest.mark.parametrize("law", [(1.0, 0.0), (3.0, 1.0)])
def test_the_short_cut_says_what_the_guard_says_step_by_step(size: tuple[int, int], law: tuple[float, float]) -> None:
    found = []
    for number in range(3):
        run = simulation.simulated(1e-3, law, size, WHOLE, "test", number, seed=0)
        assert run.alarms() == run.alarms_by_guard()
        found.append(run.alarms())
    assert any(step is not None for step in found)


def test_counts_made_at_once_are_those_of_rollouts_that_are_added() -> None:
    events_UB = np.array([[0, 2], [1, 0], [3, 1]])
    added = ImpossibleTokens(simulation.BIN)
    for events_B in events_UB:
        off_T = torch.zeros(20)
        for place, count in enumerate(events_B):
            off_T[10 * place : 10 * place + count] = simulation.FAR
        added.add(off_T, torch.arange(2).repeat_interleave(10) * simulation.BIN)
    made = simulation._impossible(events_UB, 10)
    assert all(
        torch.equal(mine, theirs) for mine, theirs in zip(added.state().values(), made.state().values(), strict=True)
    )


@pytest.mark.parametrize("law", simulation.LAWS)
def test_the_simulated_share_is_the_multiple_of_the_limit_that_was_asked_for(law: tuple[float, float]) -> None:
    run = simulation.simulated(1e-3, law, simulation.THICK, np.full((60, simulation.BINS), 2.0), "mean", 0, seed=0)
    assert run.events_SUB.mean() / simulation.THICK[1] == pytest.approx(2e-3, rel=0.1)


@pytest.mark.parametrize("tests", [1, 18])
def test_fewer_events_than_the_least_ones_are_likely_enough_at_the_limit(tests: int) -> None:
    tokens, limit = 64_000, 1e-4
    least = simulation.least_events(limit, tokens, tests)
    beyond = (1 - simulation.confidence_of(tests)) / 2
    assert stats.binom.sf(least - 1, tokens, limit) < beyond <= stats.binom.sf(least - 2, tokens, limit)
