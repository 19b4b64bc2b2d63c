"""When a step counts as one that trained nothing, and when that stops the run."""

from __future__ import annotations

from sparroll.control.empty_steps import EmptySteps
from sparroll.control.watcher import StepEvidence
from sparroll.mismatch import TailStatistics
from sparroll.types import StepReport


def report(kept: int, rollouts: int = 8, trained: int = 0) -> StepReport:
    """A step's metrics as the update leaves them: without a rollout to train on there are no trained tokens to report."""
    made = {"policy/kept_tokens": float(kept), "policy/trained_rollouts": float(rollouts)}
    return made | ({"policy/trained_tokens": float(trained)} if rollouts else {})


def shown(step: StepReport) -> StepEvidence:
    return StepEvidence(1, None, False, TailStatistics(), step)


def test_so_many_steps_in_a_row_without_a_kept_token_stop_the_run_and_one_is_only_told() -> None:
    watch = EmptySteps(3)
    decisions = [
        watch.watch(shown(step)) for step in (report(0), report(0), report(50, trained=40), report(0), report(0))
    ]
    assert [decision.action for decision in decisions] == ["warn", "warn", "none", "warn", "warn"]
    assert decisions[0].events[0] == "the correction kept no token: the policy learned nothing"
    last = watch.watch(shown(report(0)))
    assert last.action == "stop"
    assert "kept no token for 3 steps: stopped" in last.events[0]


def test_tokens_kept_only_where_there_is_no_advantage_train_nothing_either() -> None:
    watch = EmptySteps(2)
    assert (
        watch.watch(shown(report(50)))
        .events[0]
        .startswith("the correction kept no token of a rollout with an advantage")
    )
    assert watch.watch(shown(report(50))).action == "stop"


def test_a_step_without_any_advantage_neither_counts_nor_clears() -> None:
    watch = EmptySteps(2)
    steps = (report(0), report(50, rollouts=0), report(50, rollouts=0), report(0))
    assert [watch.watch(shown(step)).action for step in steps] == ["warn", "none", "none", "stop"]
    assert EmptySteps(1).watch(shown(report(0, rollouts=0))).action == "stop"


def test_a_step_for_which_dynamic_sampling_found_no_prompt_counts_and_says_so() -> None:
    searched = {"groups/kept": 0.0, "groups/sampled": 40.0, "groups/rounds": 10.0}
    watch = EmptySteps(2)
    first = watch.watch(shown(report(50, rollouts=0) | searched))
    assert first.action == "warn"
    assert "no prompt whose rollouts differ in reward (40 in 10 rounds): the policy learned nothing" in first.events[0]
    assert watch.watch(shown(report(50, rollouts=0) | searched)).action == "stop"
    assert EmptySteps(1).watch(shown(report(50, trained=40) | searched | {"groups/kept": 1.0})).action == "none"


def test_a_step_whose_responses_were_all_left_out_names_both_causes() -> None:
    decision = EmptySteps(2).watch(shown(report(0) | {"policy/left_out_rollouts": 8.0}))
    assert decision.events[0].startswith("the correction and reward.leave_out_truncated kept no token")


def test_zero_never_stops() -> None:
    watch = EmptySteps(0)
    assert {watch.watch(shown(report(0))).action for _ in range(10)} == {"warn"}
    assert watch.in_a_row == 10
