"""The dense ceiling of a control group, pooled over as few steps as say something."""

from __future__ import annotations

import torch

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.step_metrics import ESTIMATOR, tail_report
from sparroll.train.tail_metrics import ControlCeiling


def tail(step: int, rollouts: int, acceptance: float = 0.95) -> TailStatistics:
    """The tail of rollouts of 30 tokens with nearly this acceptance."""
    statistics = TailStatistics(bin_tokens=50)
    for number in range(rollouts):
        noise = torch.linspace(-0.01, 0.01, 30)
        statistics.add(acceptance + noise, 40 + torch.arange(30), f"{step}/{number}#0")
    return statistics


def test_few_dense_rollouts_are_pooled_with_those_of_the_steps_before() -> None:
    ceiling, together = ControlCeiling(least_rollouts=2), TailStatistics(bin_tokens=50)
    for step, level in ((1, 0.9), (2, 0.92), (3, 0.94)):
        together.merge(tail(step, 3, level))
        table = ceiling.add(step, tail(step, 3, level))
    assert table is not None and table.overall == together.table(ESTIMATOR).overall
    assert table.overall.rollouts == 9


def test_steps_that_are_not_needed_any_more_are_forgotten() -> None:
    ceiling = ControlCeiling(least_rollouts=2)
    ceiling.add(1, tail(1, 6, 0.5))
    table = ceiling.add(2, tail(2, 8))
    assert table is not None and table.overall == tail(2, 8).table(ESTIMATOR).overall
    more = ControlCeiling(least_rollouts=12)
    more.add(1, tail(1, 6, 0.5))
    table = more.add(2, tail(2, 8))
    assert table is not None and table.overall.rollouts == 14


def test_a_step_without_a_dense_rollout_says_nothing_new() -> None:
    ceiling = ControlCeiling(least_rollouts=2)
    assert ceiling.add(1, TailStatistics(bin_tokens=50)) is None
    ceiling.add(2, tail(2, 3))
    assert ceiling.add(3, TailStatistics(bin_tokens=50)) is None
    assert [step for step, _ in ceiling.window.evidence] == [2]


def test_a_restored_one_goes_on_as_the_one_that_was_saved() -> None:
    one, other = ControlCeiling(8), ControlCeiling(8)
    one.add(1, tail(1, 3, 0.9))
    other.restore(one.state())
    first, second = (each.add(2, tail(2, 3)) for each in (one, other))
    assert first is not None and second is not None and first.overall == second.overall


def test_the_worst_bin_is_that_of_the_bins_with_enough_tokens() -> None:
    statistics = TailStatistics(bin_tokens=100, replicates=20)
    for number in range(10):
        statistics.add(torch.full((100,), 0.9), torch.arange(100), str(number))
    statistics.add(torch.full((5,), 0.1), 100 + torch.arange(5), "thin")
    worst = tail_report(statistics.table("exact"), 200)["mismatch/acceptance_q05_worst_bin"]
    assert abs(worst - 0.9) < 1e-3
