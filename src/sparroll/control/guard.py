"""Watches the measured tail against its target and decides what to do when it stays below. It measures nothing and switches
nothing itself: the loop carries out what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sparroll.schedule import Schedule

Action = Literal["none", "warn", "stop", "switch"]


@dataclass(frozen=True)
class Verdict:
    """What to do, and why in words. `schedule` only with "switch"; None is dense."""

    action: Action = "none"
    reason: str = ""
    schedule: Schedule | None = None


class Guard:
    """The tail of the last steps, and how far down the list of stricter schedules the run has come."""

    def __init__(
        self,
        action: Literal["off", "warn", "stop", "stricter"],
        at_least: float | None,
        window_steps: int,
        stricter: list[Schedule | None],
    ):
        self.action = action
        self.at_least = at_least
        self.window_steps = window_steps
        self.stricter = stricter
        """None in the list is dense."""
        self.low_steps = 0
        """Steps in a row with the tail under the target."""
        self.switches = 0

    def notice(self, dense: bool) -> list[str]:
        """An event for the start of a run whose sparse rollouts it cannot watch, for want of a target."""
        if self.action == "off" or self.at_least is not None or dense:
            return []
        return [
            "the guard watches nothing: there is no target for the tail; give one with guard.at_least, for example 0.86, or "
            'set guard.action = "off"'
        ]

    def watch(self, tail_q05: float | None, schedule: Schedule | None, dense: bool | None = None) -> Verdict:
        """One step's worst-bin 5th percentile (None: no bin had enough tokens, which neither clears nor counts).

        dense: whether the rollouts were; without it, whether there is no schedule. Dense rollouts are not watched.
        """
        dense = schedule is None if dense is None else dense
        if self.action == "off" or self.at_least is None or tail_q05 is None or dense:
            return Verdict()
        self.low_steps = self.low_steps + 1 if tail_q05 < self.at_least else 0
        if self.low_steps < self.window_steps:
            return Verdict()
        reason = (
            f"the tail (5th percentile of the acceptance, worst bin) is {tail_q05:.3f}, under {self.at_least:.3f} "
            f"for {self.low_steps} steps"
        )
        self.low_steps = 0
        return self._respond(reason, schedule)

    def _respond(self, reason: str, schedule: Schedule | None) -> Verdict:
        if self.action == "stop":
            return Verdict("stop", f"{reason}: stopped")
        if self.action == "warn":
            return Verdict("warn", reason)
        assert schedule is not None, "only a schedule has stricter ones"
        if self.switches >= len(self.stricter):
            return Verdict("warn", f"{reason}, and no stricter schedule is left after {schedule.name}")
        following = self.stricter[self.switches]
        self.switches += 1
        name = following.name if following else "dense"
        return Verdict("switch", f"{reason}: {schedule.name} -> {name}", following)

    def state(self) -> dict[str, Any]:
        return {"low_steps": self.low_steps, "switches": self.switches}

    def restore(self, state: dict[str, Any]) -> None:
        self.low_steps, self.switches = int(state["low_steps"]), int(state["switches"])
