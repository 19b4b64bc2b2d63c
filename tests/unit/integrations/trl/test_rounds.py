"""Rounds of a run: several processes make one tail and one decision, and a state goes through a checkpoint's files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll import Schedule
from sparroll.draft_check import DraftCheck
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.vllm.rescoring import RescoringCounts
from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.measured import CheckSums, EngineStep, SpentSeconds
from sparroll.integrations.trl.rounds import SamplingRounds
from sparroll.integrations.trl.settings import SparseRollouts, SparseSetup, TrainerFacts
from sparroll.mismatch import TailStatistics
from sparroll.types import StepReport

FACTS = TrainerFacts("m", 8, 8, 300, 400, 1000)
KEPT: StepReport = {"policy/kept_tokens": 10.0, "policy/trained_rollouts": 4.0, "policy/trained_tokens": 10.0}


def rounds(**settings: Any) -> SamplingRounds:
    mismatch = {"bin_tokens": 100, "least_tokens": 100, "ceiling_every_steps": 0}
    return SamplingRounds(SparseSetup.of(SparseRollouts(Schedule.fixed(128), mismatch=mismatch, **settings), FACTS))


def measured(places: range, at: float, number: int = 1, ceiling: bool = False) -> EngineStep:
    """Rollouts of 100 tokens each, whose acceptance is about `at`."""
    statistics = TailStatistics(bin_tokens=100)
    for place in places:
        generator = torch.Generator().manual_seed(place + 100 * number)
        acceptance_T = (at + 0.1 * torch.rand(100, generator=generator)).clamp(0, 1)
        statistics.add(acceptance_T, 150 + torch.arange(100), f"{number}/{place}")
    ran = EngineReport("vllm", "m", None, 0, layers=[LayerReport(5, 0, 100, 100), LayerReport(2, 3, 100, 60)])
    counts = RescoringCounts(held=len(places), measured=len(places), seconds=0.5)
    state, spent = statistics.state(), SpentSeconds(measure=0.1 * len(places), ceiling=3.0 if ceiling else 0.0)
    return EngineStep(state, counts, "top_k_lower", ran, CheckSums(), state if ceiling else None, spent)


def test_two_processes_make_the_metrics_of_one() -> None:
    alone, both = rounds(), rounds()
    one = alone.complete([measured(range(16), 0.8, ceiling=True)], KEPT).report
    halves = [measured(range(8), 0.8, ceiling=True), measured(range(8, 16), 0.8, ceiling=True)]
    two = both.complete(halves, KEPT).report
    for name in (name for name in one if name.startswith("mismatch/")):
        assert one[name] == two[name], name
    assert two["rescoring/measured"] == 16 and two["rescoring/seconds"] == 0.5
    # The round ends later.
    assert "rescoring/share_of_step" not in two
    assert (two["rollout/sparse_steps"], two["rollout/dense_steps"]) == (6, 4)
    assert two["rollout/kv_read_share"] == 0.8
    # They measure at the same time.
    assert two["time/sparroll_measure_seconds"] == 0.8 and two["time/sparroll_ceiling_seconds"] == 3.0
    assert two["mismatch/dense_ceiling_step"] == 0


def test_the_ceiling_is_measured_once_or_every_few_rounds_and_never_of_checked_drafts() -> None:
    made = rounds()
    assert made.ceiling_prompts == 2
    made.complete([measured(range(8), 0.9, ceiling=True)], KEPT)
    assert made.ceiling_prompts == 0
    assert rounds(verify=DraftCheck()).ceiling_prompts == 0
    before = made.ceiling["mismatch/dense_ceiling_mean"]
    made.evaluated([measured(range(8), 0.7, 5).state, measured(range(8, 16), 0.7, 5).state])
    assert made.ceiling["mismatch/dense_ceiling_mean"] < before and made.ceiling["mismatch/dense_ceiling_step"] == 1
    kept = made.ceiling
    made.evaluated([])
    assert made.ceiling == kept


def test_a_guard_switches_and_then_stops_and_both_survive_a_checkpoint(tmp_path: Path) -> None:
    settings = {
        "guard": {"action": "stop", "at_least": 0.86, "window_steps": 3},
        "control": {"by": "guard", "stricter": [Schedule.fixed(256).inline()]},
    }
    whole, begun = rounds(**settings), rounds(**settings)
    for number in range(1, 4):
        whole.complete([measured(range(16), 0.5, number)], KEPT)
    begun.complete([measured(range(16), 0.5, 1)], KEPT)
    saved_state.write(tmp_path, begun.state())
    resumed = rounds(**settings)
    resumed.restore(saved_state.read(tmp_path, "start anew"))
    assert resumed.schedule == begun.schedule == Schedule.fixed(256)
    for number in range(2, 4):
        resumed.complete([measured(range(16), 0.5, number)], KEPT)
    assert resumed.stopped == whole.stopped != "" and resumed.done == whole.done
    assert str(resumed.state()["watchers"]) == str(whole.state()["watchers"])


def test_rounds_in_which_nothing_is_kept_stop_the_run() -> None:
    made = rounds(guard={"empty_steps": 2})
    nothing = dict.fromkeys(KEPT, 0.0) | {"policy/trained_rollouts": 4.0}
    for _ in range(2):
        watched = made.complete([measured(range(8), 0.9)], nothing)
    assert "the correction kept no token for 2 steps" in made.stopped and watched.events


def test_a_round_without_a_measurement_decides_nothing() -> None:
    made = rounds(guard={"action": "stop", "at_least": 0.99})
    watched = made.complete([measured(range(0), 0.5)], KEPT)
    assert not made.stopped and not watched.events and "mismatch/acceptance_q05" not in watched.report


def test_a_state_of_another_format_is_refused(tmp_path: Path) -> None:
    saved_state.write(tmp_path, rounds().state())
    path = tmp_path / saved_state.PLAIN
    path.write_text(path.read_text().replace(f'"format": {saved_state.FORMAT}', '"format": 99'))
    with pytest.raises(UserError, match="another version"):
        saved_state.read(tmp_path, "start anew")


CONTROL = {"control_share": 0.125, "control_share_first": 0.125}


def compared(made: SamplingRounds, number: int, gain: float) -> EngineStep:
    """A round of 8 prompts with 8 rollouts of 10 tokens, one of them dense: it gets `gain` more reward than the others."""
    group = made.control_group
    assert group is not None
    group.begin(number)
    flags = group.flags(range(8), 8, 0)
    figures = {"reward": [gain * flag for flag in flags], "length": [10.0] * len(flags)}
    group.compare_figures({n: f"{n}" for n in range(8)}, flags, figures)
    step = measured(range(8), 0.9, number, ceiling=True)
    return dataclasses.replace(step, ran=dataclasses.replace(step.ran, dense_request_steps=72))


def test_a_control_group_shows_the_ceiling_and_goes_on_after_a_checkpoint(tmp_path: Path) -> None:
    whole, cut = rounds(**CONTROL), rounds(**CONTROL)
    assert whole.ceiling_prompts == 0
    report, _ = (each.complete([compared(each, 1, 0.5)], KEPT).report for each in (whole, cut))
    assert (report["control/reward_gap"], report["control/rollouts"], report["control/dense_steps"]) == (0.5, 8, 72)
    assert report["mismatch/dense_ceiling_step"] == 0
    before = dict(whole.ceiling)
    whole.evaluated([measured(range(8), 0.1, 5).state])
    assert whole.ceiling == before and whole.ceiling_prompts == 0
    saved_state.write(tmp_path, cut.state())
    again = rounds(**CONTROL)
    again.restore(saved_state.read(tmp_path, ""))
    found = [each.complete([compared(each, 2, 0.1)], KEPT).report for each in (whole, again)]
    assert found[0] == found[1] and found[0]["control/reward_gap"] == pytest.approx(0.3)


def test_where_drafts_are_checked_a_control_group_shows_no_ceiling() -> None:
    made = rounds(verify=DraftCheck(), **CONTROL)
    assert made.control_group is not None and not made.control_shows_ceiling and made.ceiling_prompts == 0
