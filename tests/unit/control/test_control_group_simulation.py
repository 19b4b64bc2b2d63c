"""No gap is almost never found, and a real one soon: benchmarks/control_group_simulation.py in small. And that its short cut
is RewardGap, and its draws have the shares and solve rates that they are meant to have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from sparroll.control.control_group import dense_count, dense_flags

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def simulation() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import control_group_simulation

        yield control_group_simulation


@pytest.fixture(scope="module")
def world(simulation: ModuleType) -> ModuleType:
    import control_group_world

    return control_group_world


def test_without_a_gap_hardly_a_run_of_a_thousand_steps_is_sure_of_one(simulation: ModuleType) -> None:
    found = simulation.simulate(simulation.Case("false_alarms"), 150, seed=0)
    assert (found.sure_R > 0).sum() <= 5, "beyond the 99 % quantile of 1 % of 150"
    assert (found.alarm_R > 0).sum() <= 5
    assert 1 / 32 < found.dense_share < 0.05


def test_a_gap_of_a_tenth_is_found_within_thirty_steps_of_128_rollouts(simulation: ModuleType) -> None:
    found = simulation.delays(simulation.Case("found", gap=0.1), 100, 0, 0)
    assert found["alarm"]["within_30_steps"]["share"] > 0.85
    assert found["sure"]["median_steps"] <= 15


@pytest.mark.parametrize("case", [{"gap": 0.3}, {"gap": 0.2, "late": True}, {"prompts": 8, "samples": 16, "gap": 0.4}])
@pytest.mark.parametrize("place", [0, 4, 5, 6])
def test_the_short_cut_is_the_reward_gap(simulation: ModuleType, case: dict[str, float], place: int) -> None:
    """`confirm` shows RewardGap every step until its alarm, and asserts that it says the same."""
    tested = simulation.Case("found", simulation.WORLDS[place], **case)
    found = simulation.simulate(tested, 4, seed=3, steps=200, confirm=4)
    assert (found.alarm_R > 0).all()


def test_a_simulated_step_has_as_many_dense_rollouts_as_a_real_one(world: ModuleType) -> None:
    drawn = world.Runs(world.WORLDS[0], 2000, 16, 8, (0,))
    for share in (1 / 32, 0.1, 1 / 4):
        counts = [drawn.counts(step, np.full(2000, share)) for step in (1, 2, 3)]
        real = [dense_count(seed, step, 128, share) for seed in range(300) for step in (1, 2, 3)]
        assert set(np.concatenate(counts)) == set(real)
        assert np.mean(counts) == pytest.approx(128 * share, abs=0.05)
    entries = drawn.step(1, 10, np.full(2000, 1 / 4), 0.0)
    flags = np.array(dense_flags(0, 1, 16, 8, 1 / 4)).reshape(16, 8)
    assert entries.dense_E[entries.run_E == 0].tolist() == flags.sum(1).tolist()


def test_dense_rollouts_of_every_world_are_right_more_often_by_the_gap(world: ModuleType) -> None:
    for each in world.WORLDS:
        drawn = world.Runs(each, 4000, 16, 8, (0,))
        for gap in (0.0, 0.1):
            entries = drawn.step(5, 10, np.full(4000, 1 / 4), gap)
            dense, sparse = entries.dense_E.sum(), (8 - entries.dense_E).sum()
            right = entries.dense_right_E.sum() / dense, (entries.right_E - entries.dense_right_E).sum() / sparse
            assert right[0] - right[1] == pytest.approx(gap, abs=0.01), each.name
            assert right[0] == pytest.approx(each.mean(0.5), abs=0.015), each.name


def test_another_seed_or_case_gives_other_runs_and_the_same_one_the_same(simulation: ModuleType) -> None:
    case = simulation.Case("found", gap=0.2)

    def first(seed: int, of: object) -> bytes:
        return bytes(simulation.simulate(of, 20, seed=seed, steps=40).sure_R.tobytes())

    assert first(0, case) == first(0, case)
    assert len({first(0, case), first(1, case), first(0, replace(case, part="worlds"))}) == 3
