"""A run without any reward says so after its first steps, with the reason."""

from __future__ import annotations

import json

from sparroll.control.unrewarded_steps import UnrewardedSteps
from sparroll.control.watcher import Decision, StepEvidence
from sparroll.mismatch import TailStatistics

BOX = r"the last \boxed{...}"


def shown(step: int, rewarded: float = 0.0, no_answer: float | None = 0.0, cut: float = 0.0) -> StepEvidence:
    report = {"reward/rewarded_share": rewarded, "rollout/count": 16.0, "rollout/cut_share": cut}
    report |= {} if no_answer is None else {"reward/no_answer_share": no_answer}
    return StepEvidence(step, None, False, TailStatistics(), report)


def told(watch: UnrewardedSteps, steps: list[StepEvidence]) -> list[int]:
    """The steps with an event."""
    return [each.step for each in steps if watch.watch(each).action == "warn"]


def test_three_steps_without_a_reward_are_told_and_then_twice_as_many() -> None:
    assert told(UnrewardedSteps(100), [shown(step) for step in range(1, 30)]) == [3, 6, 12, 24]


def test_a_rewarded_step_starts_the_count_anew_but_not_the_patience() -> None:
    steps = [shown(step, rewarded=0.1 if step == 4 else 0.0) for step in range(1, 16)]
    assert told(UnrewardedSteps(100), steps) == [3, 10]
    assert UnrewardedSteps(100).watch(shown(1, rewarded=1.0)) == Decision()


def test_a_run_of_fewer_steps_is_told_at_its_last() -> None:
    assert told(UnrewardedSteps(2), [shown(1), shown(2)]) == [2]


def test_no_box_in_any_response_is_told_at_once_with_what_the_task_reads() -> None:
    watch = UnrewardedSteps(100, BOX)
    (event,) = watch.watch(shown(1, no_answer=1.0)).events
    assert event.startswith(
        r"no rollout of step 1 was rewarded (16 rollouts): no answer was found in any response; the task reads the last "
        r"\boxed{...}; ask for that form"
    )
    assert told(watch, [shown(step, no_answer=1.0) for step in range(2, 13)]) == [6, 12]


def test_the_reason_is_what_the_newest_step_shows() -> None:
    def reason(no_answer: float | None, cut: float = 0.0) -> str:
        (event,) = UnrewardedSteps(1, BOX).watch(shown(1, no_answer=no_answer, cut=cut)).events
        return event.partition(": ")[2]

    assert reason(0.0).startswith("every answer was wrong; choose easier prompts")
    assert reason(None).startswith("every response got the lowest reward; choose")
    assert reason(0.999).startswith(
        "99% of the last step's responses had no answer, and the others' were wrong; the task"
    )
    assert "; 75% of the responses were cut; raise rollout.max_new_tokens; ask" in reason(1.0, cut=0.75)


def test_a_restored_count_goes_on() -> None:
    one, other = UnrewardedSteps(100), UnrewardedSteps(100)
    assert told(one, [shown(1), shown(2)]) == []
    other.restore(json.loads(json.dumps(one.state())))
    decision = one.watch(shown(3))
    assert other.watch(shown(3)) == decision
    assert "no rollout of steps 1 to 3 was rewarded (48 rollouts)" in decision.events[0]
