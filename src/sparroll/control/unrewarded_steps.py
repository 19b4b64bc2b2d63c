"""Says when no rollout is rewarded, and why. A run without any reward would go on to its end as if the policy learned. It
is never stopped for that, since a reward may come late. What a reward is, and where a response's answer stands, is
decided by the task and by the functions of [reward]."""

from __future__ import annotations

from typing import Any

from sparroll.control.watcher import Decision, StepEvidence
from sparroll.rounding import percent_down
from sparroll.schedule import Schedule
from sparroll.types import StepReport

FIRST_TOLD = 3
"""After this many steps in a row without a reward the first event is written."""


class UnrewardedSteps:
    """Counts steps in a row in which no rollout was rewarded.

    It speaks after FIRST_TOLD such steps, or at the end of a run of fewer `steps`. Where no response had an answer it
    speaks at once. Each event doubles the number of steps before the next one, so a long run is not flooded.

    answer_form: what the task reads as the answer, in words; None where the task does not say, or judges nothing.
    """

    name = "unrewarded_steps"
    may_switch_to: tuple[Schedule | None, ...] = ()

    def __init__(self, steps: int, answer_form: str | None = None):
        self.steps, self.answer_form = steps, answer_form
        self.tell_after = FIRST_TOLD
        self.in_a_row = 0
        self.rollouts = 0
        """Rollouts of these steps."""

    def watch(self, step: StepEvidence) -> Decision:
        report = step.report
        if report["reward/rewarded_share"] > 0:
            self.in_a_row = self.rollouts = 0
            return Decision()
        self.in_a_row += 1
        self.rollouts += int(report["rollout/count"])
        never_told = self.tell_after == FIRST_TOLD
        at_once = never_told and report.get("reward/no_answer_share") == 1
        at_the_end = never_told and self.in_a_row == step.step == self.steps
        if self.in_a_row < self.tell_after and not at_once and not at_the_end:
            return Decision()
        self.tell_after = 2 * max(self.in_a_row, FIRST_TOLD)
        first = step.step - self.in_a_row + 1
        steps = f"step {step.step}" if self.in_a_row == 1 else f"steps {first} to {step.step}"
        said = f"no rollout of {steps} was rewarded ({self.rollouts} rollouts): {self._why(report)}"
        return Decision("warn", (said,))

    def _why(self, report: StepReport) -> str:
        """The reason as far as the newest step shows it, and what to do about it."""
        unanswered, cut = report.get("reward/no_answer_share"), report["rollout/cut_share"]
        form = f"; the task reads {self.answer_form}" if self.answer_form else ""
        if unanswered == 1:
            reason = f"no answer was found in any response{form}"
            remedy = "ask for that form in the prompt, or read some responses with `sparroll rollout`"
        elif unanswered:
            share = percent_down(unanswered)
            reason = f"{share} of the last step's responses had no answer, and the others' were wrong{form}"
            remedy = "choose easier prompts, or a model that solves some of them"
        else:
            reason = "every answer was wrong" if unanswered == 0 else "every response got the lowest reward"
            remedy = "choose easier prompts, or a model that solves some of them"
        if cut >= 0.5:
            reason += f"; {percent_down(cut)} of the responses were cut"
            remedy = f"raise rollout.max_new_tokens; {remedy}"
        return f"{reason}; {remedy}"

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row, "rollouts": self.rollouts, "tell_after": self.tell_after}

    def restore(self, state: dict[str, Any]) -> None:
        self.in_a_row, self.rollouts = int(state["in_a_row"]), int(state["rollouts"])
        self.tell_after = int(state["tell_after"])
