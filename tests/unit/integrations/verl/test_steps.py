"""What replicas measured becomes one tail, its metrics and the next schedule; a resumed run goes on where it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.engines.report import EngineReport, LayerReport
from sparroll.engines.vllm.rescoring import RescoringCounts
from sparroll.errors import UserError
from sparroll.integrations import saved_state
from sparroll.integrations.measured import CheckSums, EngineStep, ran_report, share_of_engine
from sparroll.integrations.verl.settings import RunFacts, SparseSettings
from sparroll.integrations.verl.steps import Steps, average
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule
from sparroll.types import Checks, Rollout

FACTS = RunFacts("some/model", 4, 4, 100, 300)
POLICY = {"policy/kept_tokens": 90.0, "policy/trained_rollouts": 16.0, "policy/trained_tokens": 90.0}
LOW, HIGH = 0.5, 0.99


def settings(**table: Any) -> SparseSettings:
    mismatch = {"bin_tokens": 200, "least_tokens": 100}
    return SparseSettings.read({"schedule": Schedule.fixed(64).inline(), "mismatch": mismatch, **table}, FACTS)


def replica(step: int, rollouts: range, acceptance: float, number: int = 0) -> EngineStep:
    """Rollouts of 100 tokens with that acceptance."""
    statistics = TailStatistics(bin_tokens=200)
    for rollout in rollouts:
        statistics.add(torch.full((100,), acceptance), torch.arange(50, 150), f"{step}/{number}/{rollout}")
    counts = RescoringCounts(held=len(rollouts), measured=len(rollouts), seconds=float(number + 1))
    ran = EngineReport("vllm", "", None, 0, layers=[LayerReport(dense_steps=9), LayerReport(0, 40, 4000, 1000)])
    return EngineStep(statistics.state(), counts, "top_k_lower", ran, CheckSums())


def test_two_replicas_give_the_tail_of_one_and_their_counters_add_up() -> None:
    whole = Steps(settings()).complete(1, [replica(1, range(16), HIGH)], POLICY)
    halves = [replica(1, range(8), HIGH), replica(1, range(8, 16), HIGH)]
    parts = Steps(settings()).complete(1, halves, POLICY)
    assert {k: v for k, v in parts.report.items() if k.startswith("mismatch/")} == {
        k: v for k, v in whole.report.items() if k.startswith("mismatch/")
    }
    assert parts.report["rescoring/measured"] == 16
    assert parts.report["rollout/sparse_steps"] == 2 * whole.report["rollout/sparse_steps"]
    assert parts.report["rollout/kv_read_share"] == whole.report["rollout/kv_read_share"]


def test_steps_are_those_of_the_layer_that_was_sparse_most_often() -> None:
    first_layer_dense = replica(1, range(1), HIGH)
    report = ran_report([first_layer_dense])
    assert (report["rollout/sparse_steps"], report["rollout/dense_steps"]) == (40, 0)
    ran = EngineReport("vllm", "", None, 0, layers=[LayerReport(dense_steps=9)] * 2)
    report = ran_report([dataclasses.replace(first_layer_dense, ran=ran)], "validation")
    assert (report["validation/sparse_steps"], report["validation/dense_steps"]) == (0, 9)


def test_what_sparse_rollouts_read_beside_a_control_group_is_told_apart_over_all_replicas() -> None:
    layers = [LayerReport(1, 2, context_tokens=300, read_tokens=150)] * 2
    dense = {"dense_request_steps": 1, "dense_request_context_tokens": 100}
    plain, beside = (EngineReport("vllm", "", None, 0, layers=layers, **more) for more in ({}, dense))
    replicas = [dataclasses.replace(replica(1, range(1), HIGH), ran=ran) for ran in (plain, beside)]
    report = ran_report(replicas)
    assert report["rollout/kv_read_share"] == 0.5
    assert report["control/sparse_kv_read_share"] == (300 + 100) / (600 + 400)
    assert "control/sparse_kv_read_share" not in ran_report(replicas[:1]) | ran_report(replicas, "validation")


def test_the_guard_goes_on_with_the_stricter_schedule_and_says_so() -> None:
    stricter = Schedule.fixed(128).inline()
    steps = Steps(settings(control={"by": "guard", "stricter": [stricter]}, guard={"at_least": 0.8}))
    decided = steps.complete(1, [replica(1, range(16), LOW)], POLICY)
    assert steps.schedule == Schedule.load(stricter) and "fixed-64 -> fixed-128" in decided.events[-1]
    assert not decided.stopped


def test_a_guard_that_stops_ends_the_run_with_the_reason() -> None:
    steps = Steps(settings(guard={"at_least": 0.8, "action": "stop"}))
    assert "surely under 0.800" in steps.complete(1, [replica(1, range(16), LOW)], POLICY).stopped


def test_a_step_without_a_measured_token_decides_nothing_about_the_tail() -> None:
    steps = Steps(settings(guard={"at_least": 0.8, "action": "stop"}))
    decided = steps.complete(1, [replica(1, range(0), LOW)], POLICY)
    assert not decided.stopped and not any(name.startswith("mismatch/acceptance") for name in decided.report)


def aborted(step: int) -> EngineStep:
    return dataclasses.replace(replica(step, range(0), LOW), counts=RescoringCounts(held=64, aborted=64))


@pytest.mark.parametrize(
    ("table", "who"),
    [
        ({"guard": {"at_least": 0.8, "action": "stop", "window_steps": 3}}, "the guard"),
        ({"control": {"by": "controller", "target": 0.8, "window_steps": 3}}, "the guard and the controller"),
        ({"guard": {"action": "off"}}, None),
    ],
)
def test_a_window_of_sparse_steps_without_a_measured_token_is_said(
    table: dict[str, Any], who: str | None, tmp_path: Path
) -> None:
    made = settings(**table)
    steps = Steps(made)
    said = [steps.complete(step, [aborted(step)], POLICY).events for step in (1, 2)]
    # A resumed run goes on counting.
    saved_state.write(tmp_path, steps.state())
    steps = Steps(made)
    steps.restore(saved_state.read(tmp_path, "a hint"))
    said += [steps.complete(step, [aborted(step)], POLICY).events for step in (3, 4, 5)]
    said.append(steps.complete(6, [replica(6, range(16), HIGH)], POLICY).events)
    said += [steps.complete(step, [aborted(step)], POLICY).events for step in (7, 8, 9)]
    assert [any("no rollout was measured" in line for line in each) for each in said] == [
        who is not None and number in (3, 9) for number in range(1, 10)
    ]
    if who is not None:
        assert f"{who} had nothing to decide by in the last 3 steps" in "".join(said[2])
        assert "of the 64 that ended in this one, 64 were aborted" in "".join(said[2])


def test_steps_in_which_the_correction_drops_everything_end_the_run() -> None:
    steps = Steps(settings(guard={"at_least": 0.8, "empty_steps": 2}))
    empty = POLICY | {"policy/kept_tokens": 0.0, "policy/trained_tokens": 0.0}
    assert not steps.complete(1, [replica(1, range(16), HIGH)], empty).stopped
    assert "kept no token" in steps.complete(2, [replica(2, range(16), HIGH)], empty).stopped


def test_a_resumed_run_decides_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    made = settings(schedule="dense", control={"by": "controller", "target": 0.8, "patience": 1})
    whole, cut = Steps(made), Steps(made)
    for step in (1, 2):
        for each in (whole, cut):
            each.complete(step, [replica(step, range(16), HIGH if step == 1 else LOW)], POLICY)
    cut.measured_ceiling([replica(9, range(16), HIGH).state], 2)
    saved_state.write(tmp_path, cut.state())
    again = Steps(made)
    again.restore(saved_state.read(tmp_path, "a hint"))
    assert again.ceiling == cut.ceiling and not again.news
    assert again.schedule is not None and again.schedule.steps == whole.schedule.steps  # type: ignore[union-attr]
    for step in (3, 4):
        one, other = (each.complete(step, [replica(step, range(16), LOW)], POLICY) for each in (whole, again))
        assert one.events == other.events
        assert {**other.report, **one.report} == other.report
        assert again.schedule.steps == whole.schedule.steps  # type: ignore[union-attr]


def test_a_checkpoint_of_a_run_without_us_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no sparroll\.json"):
        saved_state.read(tmp_path, "a hint")


def test_the_ceiling_is_due_first_after_the_first_step_and_then_every_few() -> None:
    steps = Steps(settings(mismatch={"ceiling_every_steps": 5, "bin_tokens": 200}))
    assert steps.ceiling_due(1)
    steps.measured_ceiling([replica(1, range(8), HIGH).state], 1)
    assert [number for number in range(2, 11) if steps.ceiling_due(number)] == [5, 10]
    report = steps.complete(2, [replica(2, range(16), HIGH)], POLICY).report
    assert report["mismatch/dense_ceiling_step"] == 1 and report["mismatch/dense_ceiling_q05"] == pytest.approx(
        HIGH, abs=1e-3
    )


def test_checks_of_drafts_are_summed_over_replicas() -> None:
    sums = CheckSums(100, 1, 3.0, 90.0, Checks(windows=10, cut_windows=1, drafted_tokens=80, taken_back_tokens=4))
    replicas = [dataclasses.replace(replica(1, range(8), HIGH, n), estimator="exact", checked=sums) for n in (0, 1)]
    report = Steps(settings(verify={"window": 8})).complete(1, replicas, POLICY).report
    assert report["check/windows"] == 20 and report["check/cut_share"] == 0.1 and report["check/window_tokens"] == 8
    assert report["check/draft_acceptance_mean"] == 0.9 and report["check/largest_nats"] == 3.0


def test_reports_of_several_updates_are_averaged_and_what_is_counted_added() -> None:
    reports = [{"policy/kept_tokens": 2.0, "correction/weight_mean": 1.0}, {"policy/kept_tokens": 3.0}]
    assert average(reports) == {"policy/kept_tokens": 5.0, "correction/weight_mean": 1.0}
    assert average([]) == {}
    largest = [{"correction/weight_max": 2.0, "correction/weight_max_before": 9.0}, {"correction/weight_max": 8.0}]
    assert average(largest) == {"correction/weight_max": 8.0, "correction/weight_max_before": 9.0}
    assert [share_of_engine(32, 3), share_of_engine(None, 3)] == [11, None]


def far_replica(step: int, rollouts: range, far_tokens: int) -> EngineStep:
    """Rollouts of 100 tokens whose acceptance is high, so many of them 12 nats off in each."""
    statistics = TailStatistics(bin_tokens=200)
    off_T = torch.where(torch.arange(100) < far_tokens, 12.0, 0.0)
    for rollout in rollouts:
        statistics.add(torch.full((100,), HIGH), torch.arange(50, 150), f"{step}/0/{rollout}", off_T)
    return dataclasses.replace(replica(step, rollouts, HIGH), state=statistics.packed_state())


def test_a_guard_of_impossible_tokens_sees_all_replicas_and_survives_a_resume(tmp_path: Path) -> None:
    asked = {"guard": {"impossible_at_most": 1e-2, "impossible_nats": 10, "action": "stop", "window_steps": 3}}
    one, other = Steps(settings(**asked)), Steps(settings(**asked))
    quiet = one.complete(1, [far_replica(1, range(8), 0), far_replica(1, range(8, 16), 0)], POLICY)
    assert not quiet.stopped and quiet.report["mismatch/impossible_share_10"] == 0
    assert 0 < quiet.report["mismatch/impossible_share_10_high"] < 1e-2
    saved_state.write(tmp_path, one.state())
    other.restore(saved_state.read(tmp_path, ""))
    halves = [far_replica(2, range(8), 9), far_replica(2, range(8, 16), 9)]
    found = [each.complete(2, halves, POLICY) for each in (one, other)]
    assert found[0].stopped == found[1].stopped and "more than 10 nats off" in found[0].stopped
    assert found[0].report == found[1].report and found[0].report["mismatch/impossible_share_10"] == 0.09


def test_a_schedule_of_impossible_tokens_is_held_by_the_guard_and_the_controller_of_other_trainers() -> None:
    target = {"statistic": "impossible_share", "nats": 5, "at_most": 1e-3}
    made = dataclasses.replace(Schedule.fixed(64), target=target)
    (guard, *_) = Steps(settings(schedule=made.inline())).watchers
    assert guard.impossible == ImpossibleLimit(5, 1e-3) and guard.at_least is None  # type: ignore[attr-defined]
    control = {"by": "controller", "impossible_at_most": 1e-2}
    steps = Steps(settings(control=control))
    decided = steps.complete(1, [far_replica(1, range(16), 4)], POLICY)
    assert "more than 10 nats off 0.04" in " ".join(decided.events)
    assert steps.schedule is not None and steps.schedule.kv_budget_tokens(100) > 64


CONTROL = {"control_group": {"share": 0.25, "share_first": 0.25}, "guard": {"at_least": 0.8, "reward_gap": 0.1}}


def compared(steps: Steps, number: int, gain: float, dense_acceptance: float = 0.95, decoded: int = 36) -> EngineStep:
    """A step of 4 prompts with 4 rollouts of 10 tokens, one of them dense: it gets `gain` more reward than the others.
    -> what an engine measured, which decoded so many steps for dense requests"""
    group = steps.control_group
    assert group is not None
    group.begin(number)
    flags = group.flags(range(4), 4, 0)
    names = [None if flag else "sparse" for flag in flags]
    rollouts = [
        Rollout([number, n // 4], [2] * 10, torch.zeros(10), "stop", schedule_name=s) for n, s in enumerate(names)
    ]
    group.compare(range(4), rollouts, [gain * flag for flag in flags])
    step = replica(number, range(16), HIGH)
    ran = dataclasses.replace(step.ran, dense_request_steps=decoded)
    return dataclasses.replace(step, ran=ran, ceiling=replica(number, range(100, 104), dense_acceptance).state)


def test_the_control_group_is_compared_and_shows_the_ceiling() -> None:
    steps = Steps(settings(**CONTROL))
    report = steps.complete(1, [compared(steps, 1, 0.5)], POLICY).report
    assert report["control/reward_gap"] == report["control/step_reward_gap"] == 0.5
    assert (report["control/pairs"], report["control/rollouts"], report["control/dense_steps"]) == (4, 4, 36)
    assert report["mismatch/dense_ceiling_q05"] == pytest.approx(0.95, abs=1e-3)
    assert report["mismatch/dense_ceiling_step"] == 0 and not steps.ceiling_due(1)
    # The ceiling pools the newest steps that have 8 rollouts together.
    report = steps.complete(2, [compared(steps, 2, 0.3, 0.5)], POLICY).report
    assert report["control/reward_gap"] == pytest.approx(0.4) and report["control/pairs"] == 8
    assert report["mismatch/dense_ceiling_mean"] == pytest.approx((0.95 + 0.5) / 2, abs=1e-3)


def test_a_sure_gap_is_an_alarm_of_the_guard() -> None:
    steps = Steps(settings(**CONTROL))
    events = [steps.complete(number, [compared(steps, number, 1.0)], POLICY).events for number in range(1, 16)]
    said = [line for of_step in events for line in of_step]
    assert any("sparse rollouts get less reward than dense ones" in line for line in said)


def test_dense_requests_that_were_decoded_sparsely_end_the_run() -> None:
    steps = Steps(settings(**CONTROL))
    with pytest.raises(RuntimeError, match="decoded 35 steps of dense requests, and the control group took 36"):
        steps.complete(1, [compared(steps, 1, 0.0, decoded=35)], POLICY)


def test_a_control_group_counts_in_a_step_whose_tail_was_not_measured() -> None:
    steps = Steps(settings(**CONTROL))
    empty = dataclasses.replace(
        compared(steps, 1, 0.5), state=replica(1, range(0), HIGH).state, counts=RescoringCounts()
    )
    report = steps.complete(1, [empty], POLICY).report
    assert report["control/reward_gap"] == 0.5 and not any(name.startswith("mismatch/acceptance") for name in report)


def test_while_all_rollouts_are_dense_there_is_no_control_group() -> None:
    stricter = {"by": "guard", "stricter": ["dense"]}
    steps = Steps(settings(**CONTROL, control=stricter))
    steps.schedule = None
    assert steps.control_group is None and not steps.control_shows_ceiling
    assert not any(
        name.startswith("control/") for name in steps.complete(1, [replica(1, range(16), HIGH)], POLICY).report
    )


def test_a_control_group_goes_on_exactly_after_a_resume(tmp_path: Path) -> None:
    one, other = Steps(settings(**CONTROL)), Steps(settings(**CONTROL))
    one.complete(1, [compared(one, 1, 0.5)], POLICY)
    saved_state.write(tmp_path, one.state())
    other.restore(saved_state.read(tmp_path, ""))
    found = [each.complete(2, [compared(each, 2, 0.25, 0.7)], POLICY) for each in (one, other)]
    assert found[0] == found[1] and found[0].report["control/pairs"] == 8
    plain = Steps(settings(guard={"at_least": 0.8}))
    plain.complete(1, [replica(1, range(16), HIGH)], POLICY)
    saved_state.write(tmp_path, plain.state())
    with pytest.raises(UserError, match="checkpoint is of a run without one"):
        other.restore(saved_state.read(tmp_path, ""))
