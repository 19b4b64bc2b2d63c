"""Raises an alarm where the measured tail is surely under its target, and never for what noise may have done.

Evidence is pooled per length bin over the last `window_steps` steps under one schedule. A bin is tested with `least_tokens`
tokens from 8 rollouts. There is an alarm where the upper confidence bound of a bin's 5th percentile (estimator top_k_lower,
clustered by rollouts, see mismatch/bootstrap.py) is under the target. Every step is a test of every bin, thousands in a run,
so each test is strict: all bins of one step together may be wrong with probability FALSE_ALARM_A_STEP, shared out equally.
How often that is wrong over a run, and how fast a low tail is found, is simulated in benchmarks/guard_simulation.py.
"""

from __future__ import annotations

from typing import Any, Literal

from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import Decision, StepEvidence
from sparroll.mismatch.table import TailRow
from sparroll.schedule import Schedule

FALSE_ALARM_A_STEP = 5e-3
"""Largest probability that a step raises an alarm although every bin's tail is at the target exactly."""


def confidence_of(bins: int) -> float:
    """Of the two-sided interval whose upper end is a bin's bound, where so many bins are tested."""
    return 1 - 2 * FALSE_ALARM_A_STEP / bins


class Guard:
    """The tail of the last steps, and how far down the list of stricter schedules the run has come."""

    name = "guard"

    def __init__(
        self,
        action: Literal["off", "warn", "stop"],
        at_least: float | None,
        window_steps: int = 10,
        stricter: tuple[Schedule | None, ...] = (),
        least_tokens: int = 200,
    ):
        self.action, self.at_least, self.least_tokens = action, at_least, least_tokens
        self.stricter = stricter
        """Schedules to go on with, one after the other; None among them is dense. After the last one `action` counts."""
        self.window = TailWindow(window_steps)
        self.budgets: list[list[int]] = []
        """[from_context_tokens, kv_budget_tokens] of the schedule that the window is of."""
        self.quiet_until = 0
        """After a warning the next one comes when the window is full of later steps, or it would come every step."""
        self.switches = 0

    @property
    def may_switch_to(self) -> tuple[Schedule | None, ...]:
        return self.stricter

    def notice(self, dense: bool) -> list[str]:
        """An event for the start of a run whose sparse rollouts it cannot watch, for want of a target."""
        if self.action == "off" or self.at_least is not None or dense:
            return []
        return [
            "the guard watches nothing: there is no target for the tail; give one with guard.at_least, for example 0.86, or "
            'set guard.action = "off"'
        ]

    def watch(self, step: StepEvidence) -> Decision:
        """Dense rollouts are not watched."""
        if self.action == "off" or self.at_least is None or step.dense:
            return Decision()
        self._start_anew_under_another(step.schedule)
        self.window.add(step.step, step.tail)
        low = self._surely_low(self.at_least) if step.step >= self.quiet_until else None
        if low is None:
            return Decision()
        first = self.window.evidence[0][0]
        reason = (
            f"the tail (5th percentile of the acceptance) at {low.name} is {low.q05:.3f}, surely under {self.at_least:.3f}: "
            f"upper bound {low.high:.3f} by {low.tokens} tokens of {low.rollouts} rollouts (steps {first} to {step.step})"
        )
        self.window.clear()
        return self._respond(reason, step)

    def _start_anew_under_another(self, schedule: Schedule | None) -> None:
        """Evidence of two schedules is not pooled."""
        steps = schedule.steps if schedule else ()
        budgets = [[each.from_context_tokens, each.kv_budget_tokens] for each in steps]
        if budgets != self.budgets:
            self.window.clear()
        self.budgets = budgets

    def _surely_low(self, at_least: float) -> TailRow | None:
        """The bin with the lowest upper bound, where that is under the target."""
        rows = [row for start in self.window.starts if (row := self.window.row(start)) is not None]
        tested = [row for row in rows if row.counts(self.least_tokens)]
        # A bound is never under the percentile itself, so most bins need none.
        starts = [row.from_context_tokens for row in tested if row.q05 < at_least]
        bounds = [self.window.row(start, confidence=confidence_of(len(tested))) for start in starts]
        return min((row for row in bounds if row and row.high < at_least), key=lambda row: row.high, default=None)

    def _respond(self, reason: str, step: StepEvidence) -> Decision:
        """The next stricter schedule, as long as there is one; then what `action` says."""
        if self.stricter:
            assert step.schedule is not None, "only a schedule has stricter ones"
            if self.switches < len(self.stricter):
                following = self.stricter[self.switches]
                self.switches += 1
                name = following.name if following else "dense"
                return Decision("switch", (f"{reason}: {step.schedule.name} -> {name}",), following)
            reason = f"{reason}, and no stricter schedule is left after {step.schedule.name}"
        if self.action == "stop":
            return Decision("stop", (f"{reason}: stopped",))
        self.quiet_until = step.step + self.window.steps
        return Decision("warn", (reason,))

    def state(self) -> dict[str, Any]:
        plain = {"budgets": self.budgets, "quiet_until": self.quiet_until, "switches": self.switches}
        return plain | self.window.state()

    def restore(self, state: dict[str, Any]) -> None:
        plain = ("budgets", "quiet_until", "switches")
        self.budgets, self.quiet_until, self.switches = (state[name] for name in plain)
        self.window.restore({name: value for name, value in state.items() if name not in plain})
