"""Replicas merge to the statistics of one, and a step's metrics have the names of our own loop."""

from __future__ import annotations

import pytest
import torch

from sparroll.errors import UserError
from sparroll.integrations.tail import dense_ceiling_report, merged, step_report
from sparroll.mismatch import TailStatistics


def measured(numbers: range, bin_tokens: int = 2000) -> TailStatistics:
    """Statistics of random rollouts that depend on nothing but their number."""
    statistics = TailStatistics(bin_tokens=bin_tokens)
    for number in numbers:
        acceptance_T = torch.rand(300, generator=torch.Generator().manual_seed(number))
        off_T = -4 * acceptance_T.log()
        statistics.add(acceptance_T, 1800 + torch.arange(300), f"1/{number}#0", off_T)
    return statistics


def test_two_replicas_are_the_same_as_one_to_the_last_bit() -> None:
    whole = measured(range(20)).state()
    for parts in ([range(7), range(7, 20)], [range(7, 20), range(7)], [range(0), range(20)]):
        total = merged([measured(part).state() for part in parts])
        assert total is not None
        assert all(torch.equal(tensor, whole[name]) for name, tensor in total.state().items())


def test_a_step_without_a_measured_token_has_no_metrics() -> None:
    assert merged([]) is None and merged([TailStatistics().state()] * 2) is None
    assert step_report(None, 100) == dense_ceiling_report(None, 3) == {}


def test_metrics_have_the_names_of_our_own_loop() -> None:
    total = merged([measured(range(20)).state()])
    report = step_report(total, least_tokens=1000)
    assert report["mismatch/tokens/0-2k"] == 20 * 200 and report["mismatch/tokens/2k-4k"] == 20 * 100
    bins = [report[f"mismatch/acceptance_q05/{name}"] for name in ("0-2k", "2k-4k")]
    assert report["mismatch/acceptance_q05_worst_bin"] == min(bins)
    assert report["mismatch/acceptance_q05_low"] <= report["mismatch/acceptance_q05"] == pytest.approx(0.05, abs=0.01)
    # log(a) is under -2.5 for a share of exp(-2.5) of uniform values.
    assert report["mismatch/impossible_share_10"] == pytest.approx(0.082, abs=0.01)
    assert report["mismatch/impossible_share_10_low"] < report["mismatch/impossible_share_10/0-2k"]
    ceiling = dense_ceiling_report(total, 7)
    assert ceiling["mismatch/dense_ceiling_step"] == 7
    assert ceiling["mismatch/dense_ceiling_q05/2k-4k"] == bins[1]


def test_replicas_that_measured_differently_are_refused() -> None:
    with pytest.raises(UserError, match="different bin_tokens"):
        merged([measured(range(3)).state(), measured(range(3), bin_tokens=250).state()])
