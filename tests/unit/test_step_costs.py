"""benchmarks/step_costs.py: which steps count, what sparroll adds, and what re-scoring would cost. Figures made by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import benchmark


@pytest.fixture
def step_costs() -> ModuleType:
    return benchmark("step_costs")


def step(seconds: float, **more: Any) -> dict[str, Any]:
    return {"step": 1, "step_seconds": seconds, **more}


def test_the_median_of_all_steps_but_the_first_counts(step_costs: ModuleType) -> None:
    metrics = [{"timing_s/gen": seconds} for seconds in (50.0, 9.0, 5.0, 6.0)]
    steps = [step(seconds, metrics=each) for seconds, each in zip((90.0, 30.0, 10.0, 20.0), metrics, strict=True)]
    found = step_costs.middle({"steps": steps})
    assert found == {"step_seconds": 20.0, "metrics": {"timing_s/gen": 6.0}, "steps_counted": 3}


def test_a_case_without_a_second_step_has_no_median(step_costs: ModuleType) -> None:
    assert step_costs.middle({"steps": [step(90.0)]}) is None and step_costs.middle({"steps": []}) is None


def test_steps_under_a_moved_schedule_do_not_count(step_costs: ModuleType) -> None:
    steps = [step(seconds, schedule=name) for seconds, name in ((9, "a"), (3, "a"), (5, "a"), (1, "b"), (1, "b"))]
    assert step_costs.middle({"steps": steps})["step_seconds"] == 4


def test_a_figure_that_a_step_lacks_has_no_median(step_costs: ModuleType) -> None:
    steps = [step(9.0), step(3.0, tail=0.5), step(5.0)]
    assert step_costs.middle({"steps": steps}) == {"step_seconds": 4.0, "steps_counted": 2}


def inside(**more: Any) -> dict[str, Any]:
    """A step of 100 s with 10,000 tokens, sampled in 50 s."""
    metrics = {
        f"time/sparroll_{part}_seconds": seconds for part, seconds in (("measure", 2), ("correct", 1), ("watch", 1))
    }
    return {"step_seconds": 100.0, "rollout_seconds": 50.0, "rollout_tokens": 10_000, "metrics": metrics | more}


def test_the_ceilings_seconds_are_spread_over_its_steps_and_the_plugins_seconds_are_taken_off(
    step_costs: ModuleType,
) -> None:
    parts = step_costs.added_seconds(inside(), 40.0, 10, {"tokens_per_second": 250.0})
    assert parts == {"measure": 2.0, "correct": 1.0, "watch": 1.0, "ceiling": 4.0, "sampling": 10.0}
    shares = step_costs.added_shares(parts, 100.0)
    assert shares["ceiling"] == 4 / 104 and shares["known"] == 8 / 104 and shares["whole"] == 18 / 104


def test_without_the_plugins_figure_there_is_no_whole(step_costs: ModuleType) -> None:
    shares = step_costs.added_shares(step_costs.added_seconds(inside(), 40.0, 0), 100.0)
    assert shares == {"measure": 0.02, "correct": 0.01, "watch": 0.01, "ceiling": 0.0, "known": 0.04}


def test_a_plugin_that_happened_to_be_slower_is_no_gain(step_costs: ModuleType) -> None:
    assert step_costs.added_seconds(inside(), 0.0, 10, {"tokens_per_second": 100.0})["sampling"] == 0


def test_the_ceilings_seconds_are_those_of_the_steps_that_measured_it(step_costs: ModuleType) -> None:
    every = [{"metrics": {"time/sparroll_ceiling_seconds": seconds}} for seconds in (30.0, 0.0, 50.0)]
    assert step_costs.ceiling_seconds({"steps": [*every, {}]}) == 40
    assert step_costs.ceiling_seconds({"steps": every[1:2]}) == 0


def test_the_default_probes_share_is_bounded_by_how_long_a_larger_step_takes(step_costs: ModuleType) -> None:
    # 8 of 32 rollouts in 4 s, so .5 s each; without them, a step has 46 s of sampling and 50 s of the rest.
    metrics = {"rescoring/seconds": 4.0, "rescoring/measured": 8.0, "rescoring/read_tokens": 8_000.0}
    found = step_costs.rescoring(inside(**metrics) | {"rollout_seconds": 46.0}, 32)
    assert found["share"] == 0.04 and found["probe_share"] == 0.25 and found["tokens_per_second"] == 2000
    assert found["default_of_32_low"] == found["default_of_32_high"] == 0.04
    # A quarter of 128 is 32, in 16 s: beside 4 * 96 s, or 46 + 4 * 50 s.
    assert found["default_of_128_low"] == 16 / 400 and found["default_of_128_high"] == 16 / 262
    # 16 rollouts have 8 re-scored ones all the same: beside 48 s, or 46 + 25 s.
    assert found["default_of_16_high"] == 4 / 52 and found["default_of_16_low"] == 4 / 75
    # 32 re-scored ones take 16 s, which is 3 % of 46 + 50 / 32 n + 16 from n = 301.65 on.
    assert found["rollouts_for_3_percent"] == 302


def test_checked_rollouts_are_not_re_scored(step_costs: ModuleType) -> None:
    metrics = {"rescoring/seconds": 0.2, "rescoring/measured": 32.0, "rescoring/read_tokens": 0.0}
    assert step_costs.rescoring(inside(**metrics), 32) == {}
