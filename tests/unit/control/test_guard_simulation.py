"""The guard does not cry wolf and finds a bin that falls: benchmarks/guard_simulation.py in small. And that its short cut is
the guard, and its simulated tokens have the law that they are meant to have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from sparroll.mismatch import TailStatistics

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def simulation() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import guard_simulation

        yield guard_simulation


@pytest.fixture(scope="module")
def world(simulation: ModuleType) -> ModuleType:
    import guard_world

    return guard_world


def test_a_tail_above_the_target_raises_no_alarm_in_a_thousand_steps_where_the_old_rule_always_did(
    simulation: ModuleType, world: ModuleType
) -> None:
    runs = [simulation.steady(world.SHAPES[0], 0.87, 0.1, 1000, number) for number in range(60)]
    assert [run.alarms() for run in runs] == [[]] * 60
    below, alarmed = np.mean([run.old_rule() for run in runs], axis=0)
    assert below > 0.95 and alarmed == 1.0


def test_a_bin_that_falls_is_found_within_ten_steps(simulation: ModuleType, world: ModuleType) -> None:
    found = [simulation.fallen(world.SHAPES[0], 0.1, number).alarms() for number in range(20)]
    assert sum(bool(each) for each in found) >= 19
    assert all(each[0] >= simulation.WINDOW_STEPS for each in found if each)


def test_merged_bins_raise_no_false_alarm_either_and_find_a_low_tail(simulation: ModuleType, world: ModuleType) -> None:
    """No bin ever has the tokens for a test alone, and the tokens of a rollout depend on each other across its bins."""
    assert [len(group) for group in simulation.groups_of(18, 8, 2, 1)] == [18]
    assert [len(group) for group in simulation.groups_of(18, 8, 2, 10)] == [2] * 9
    shape = world.SHAPES[0]
    assert [simulation.thin(shape, [0.87] * 300, 0.1, number).alarms() for number in range(12)] == [[]] * 12
    found = [simulation.thin(shape, [0.87] * 10 + [0.7] * 10, 0.1, number).alarms() for number in range(20)]
    assert sum(bool(each) and each[0] >= 10 for each in found) >= 19


@pytest.mark.parametrize("tail", [0.7, 0.87])
def test_the_short_cut_is_the_guard_where_bins_are_merged(
    simulation: ModuleType, world: ModuleType, tail: float
) -> None:
    for number in range(2):
        run = simulation.thin(world.SHAPES[0], [tail] * 12, 0.2, number, bins=5)
        assert run.alarms() == run.alarms_by_guard()
        assert bool(run.alarms()) == (tail < 0.86)


def test_another_seed_gives_other_runs_and_the_same_one_the_same(simulation: ModuleType, world: ModuleType) -> None:
    def tokens(seed: int, number: int) -> bytes:
        run = simulation.steady(world.SHAPES[0], 0.87, 0.1, 3, number, bins=2, seed=seed)
        scant = simulation.thin(world.SHAPES[0], [0.87], 0.1, number, bins=2, seed=seed)
        parts = [run.below_BS, run.histograms(0, 0), scant.histograms(0, 0)]
        return b"".join(part.tobytes() for part in parts)

    assert tokens(0, 1) == tokens(0, 1)
    assert len({tokens(seed, number) for seed in (0, 1) for number in (0, 1)}) == 4


@pytest.mark.parametrize("tail", [0.83, 0.88])
def test_the_short_cut_is_the_guard(simulation: ModuleType, world: ModuleType, tail: float) -> None:
    for number in range(2):
        run = simulation.steady(world.SHAPES[0], tail, 0.2, 14, number, bins=2)
        assert run.alarms() == run.alarms_by_guard()
        assert bool(run.alarms()) == (tail < 0.86)


def test_simulated_statistics_are_those_of_the_same_tokens_added_one_rollout_at_a_time(world: ModuleType) -> None:
    law = world.Tail(world.SHAPES[1], 0.87, 0.86, 0.3, rollouts=6)
    rng = np.random.default_rng(0)
    histograms = {place: law.cells(rng, 12) for place in (0, 3)}
    ids = [f"a#{rollout}" for rollout in range(6)]
    added = TailStatistics(world.BIN_TOKENS, replicates=30)
    for rollout, name in enumerate(ids):
        cells = [np.repeat(np.arange(2002), histograms[place][rollout]) for place in (0, 3)]
        # The middle of a cell; the last two are the values at the upper end and 1 itself.
        acceptance = torch.from_numpy(np.concatenate(cells) - 0.5).div(2000).clamp(max=1.0)
        context = torch.tensor([0, 3]).repeat_interleave(law.tokens) * world.BIN_TOKENS
        added.add(acceptance, context, name)
    made = world.statistics_of(histograms, ids, replicates=30).state()
    for name in ("bins", "counts", "replicates"):
        assert torch.equal(made[name], added.state()[name]), name
    assert torch.equal(made["sums"][:, :2], added.state()["sums"][:, :2])


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_simulated_tokens_have_the_tail_and_the_correlation_that_were_asked_for(
    world: ModuleType, correlation: float
) -> None:
    law = world.Tail(world.SHAPES[0], 0.87, 0.86, correlation)
    rng = np.random.default_rng(1)
    drawn = law.draw(rng, (300,))
    histograms = np.stack([law.cells(rng, int(below)) for below in drawn])
    counts = histograms.sum((0, 1))
    assert counts.sum() == 300 * 64 * 16
    # The 5th percentile lies at the border of cell 1740, which is .87.
    assert counts[:1741].sum() / counts.sum() == pytest.approx(0.05, abs=0.002)
    assert counts[-1] / counts.sum() == pytest.approx(law.shape.weight, abs=0.01)
    below = histograms[:, :, :1721].sum(2)
    share = below.mean() / 16
    effect = below.var() / (16 * share * (1 - share))
    assert effect == pytest.approx(law.design_effect, rel=0.05)
    assert np.array_equal(below.sum(1), drawn)
