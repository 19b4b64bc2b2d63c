"""Watches for steps in which the correction dropped everything, and stops a run that has nothing else: it would go on as if
the policy learned. What the correction drops, and why, is not its business."""

from __future__ import annotations

from sparroll.train.guard import Verdict
from sparroll.types import StepReport


class EmptySteps:
    """Steps in a row without a token in the loss. most: so many stop the run; 0: none does."""

    def __init__(self, most: int):
        self.most = most
        self.in_a_row = 0

    def watch(self, report: StepReport) -> Verdict:
        """One step's metrics. A step without any advantage neither counts nor clears while the correction keeps tokens: it
        trains nothing either, but that is the rewards' doing."""
        kept, rollouts = report["policy/kept_tokens"], report["policy/trained_rollouts"]
        if not rollouts and kept:
            return Verdict()
        if kept and report["policy/trained_tokens"]:
            self.in_a_row = 0
            return Verdict()
        self.in_a_row += 1
        reason = "the correction kept no token" + (" of a rollout with an advantage" if kept else "")
        if not self.most or self.in_a_row < self.most:
            return Verdict("warn", f"{reason}: the policy learned nothing")
        return Verdict(
            "stop",
            f"{reason} for {self.in_a_row} steps: stopped, since the policy learns nothing; raise the KV budget or choose a "
            "milder correction",
        )
