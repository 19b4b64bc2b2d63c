"""Decides whether the adapter of DistillSparse has become good enough for the next cheaper schedule. The evidence is a
replay: some of a step's rollouts are read again under that schedule. The replay itself is made in
train/distill/schedule_replay.py."""

from __future__ import annotations

from typing import Any

from sparroll.control.watcher import Decision, StepEvidence, described
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule


class CheaperSchedules:
    """The cheaper schedules in order, and how many replays in a row the next one has held the target."""

    name = "cheaper_schedules"

    def __init__(
        self, schedules: list[Schedule], at_least: float, *, every_steps: int, patience: int, least_tokens: int
    ):
        self.schedules, self.at_least, self.least_tokens = schedules, at_least, least_tokens
        self.every_steps, self.patience = every_steps, patience
        self.held = 0
        """Replays in a row in which the next schedule held the target."""
        self.switches = 0

    @property
    def may_switch_to(self) -> tuple[Schedule | None, ...]:
        return tuple(self.schedules)

    @property
    def following(self) -> Schedule | None:
        """The next cheaper schedule; None after the last one."""
        return self.schedules[self.switches] if self.switches < len(self.schedules) else None

    def due(self, step: int) -> bool:
        """Whether this step's evidence must include a replay."""
        return self.following is not None and step % self.every_steps == 0

    def watch(self, step: StepEvidence) -> Decision:
        """Decide by the worst bin's lower bound. A replay in which no bin counts changes nothing: it neither adds to
        the replays in a row nor starts them anew."""
        counted = [row for row in step.replay.rows if row.counts(self.least_tokens)] if step.replay else []
        if not counted:
            return Decision()
        assert self.following is not None, "a replay, and no cheaper schedule is left"
        assert step.schedule is not None, "a cheaper schedule than dense rollouts"
        low = min(row.low for row in counted)
        self.held = self.held + 1 if low >= self.at_least else 0
        report = {
            "distill/cheaper_q05_low": low,
            "distill/cheaper_q05": min(row.q05 for row in counted),
            "distill/cheaper_held": float(self.held),
        }
        if self.held < self.patience:
            return Decision(report=report)
        following = self.following
        reason = (
            f"with the adapter, the tail under {following.name} (worst bin, lower bound) is {rounded_down(low)}, at "
            f"least {self.at_least:.3f} in {self.held} measurements: {described(step.schedule)} -> "
            f"{described(following)}"
        )
        self.held, self.switches = 0, self.switches + 1
        return Decision("switch", (reason,), following, report)

    def state(self) -> dict[str, Any]:
        return {"held": self.held, "switches": self.switches}

    def restore(self, state: dict[str, Any]) -> None:
        self.held, self.switches = int(state["held"]), int(state["switches"])
