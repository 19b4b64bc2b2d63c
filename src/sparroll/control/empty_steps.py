"""Watches for steps in which nothing was left to train on. A run of only such steps would go on as if the policy
learned, so several of them in a row stop it. What is dropped is decided elsewhere: by the correction, the rewards and
dynamic sampling."""

from __future__ import annotations

from typing import Any

from sparroll.control.watcher import Decision, StepEvidence
from sparroll.schedule import Schedule
from sparroll.types import StepReport


class EmptySteps:
    """Counts steps in a row without a token in the loss. most: this many of them stop the run; 0: it is never
    stopped."""

    name = "empty_steps"
    may_switch_to: tuple[Schedule | None, ...] = ()

    def __init__(self, most: int):
        self.most = most
        self.in_a_row = 0

    def watch(self, step: StepEvidence) -> Decision:
        """Decide by the step's metrics. A step in which every advantage is 0 trains nothing either, but the rewards are
        the cause. While the correction keeps tokens, such a step neither counts nor starts the count anew, unless
        dynamic sampling searched for other prompts: then it counts."""
        report = step.report
        kept, rollouts = report["policy/kept_tokens"], report["policy/trained_rollouts"]
        searched = report.get("groups/kept") == 0
        if not rollouts and kept and not searched:
            return Decision()
        if kept and rollouts and report["policy/trained_tokens"] and not searched:
            self.in_a_row = 0
            return Decision()
        self.in_a_row += 1
        reason, remedy = _why(report)
        if not self.most or self.in_a_row < self.most:
            return Decision("warn", (f"{reason}: the policy learned nothing",))
        said = f"{reason} for {self.in_a_row} steps: stopped, since the policy learns nothing; {remedy}"
        return Decision("stop", (said,))

    def state(self) -> dict[str, Any]:
        return {"in_a_row": self.in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self.in_a_row = int(state["in_a_row"])


def _why(report: StepReport) -> tuple[str, str]:
    """-> (what left nothing to train on, what to do about it)"""
    if report.get("groups/kept") == 0:
        sampled, rounds = int(report["groups/sampled"]), int(report["groups/rounds"])
        reason = f"dynamic sampling found no prompt whose rollouts differ in reward ({sampled} in {rounds} rounds)"
        return reason, "choose prompts that the policy solves now and then, or raise rollout.dynamic_sampling_rounds"
    kept = " of a rollout with an advantage" if report["policy/kept_tokens"] else ""
    remedy = "raise the KV budget or choose a milder correction"
    if report.get("policy/left_out_rollouts"):
        return (
            f"the correction and reward.leave_out_truncated kept no token{kept}",
            f"raise rollout.max_new_tokens, {remedy}",
        )
    return f"the correction kept no token{kept}", remedy
