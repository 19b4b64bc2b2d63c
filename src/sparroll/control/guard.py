"""Raises an alarm where the measured tail is surely under its target. Noise alone should almost never raise one.

Evidence is pooled per length bin over the last `window_steps` steps under one schedule. A bin is tested once it has
`least_tokens` tokens from 8 rollouts. An alarm is raised where the upper confidence bound of a bin's 5th percentile
(estimator top_k_lower, clustered by rollouts, see mismatch/bootstrap.py) is under the target. Every step tests every
bin, which makes thousands of tests in a run, so each test is strict: all bins of one step together may raise a false
alarm with probability FALSE_ALARM_A_STEP, shared equally among them. benchmarks/guard_simulation.py simulates how many
runs have a false alarm, and how fast a low tail is found.
"""

from __future__ import annotations

from typing import Any, Literal

from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import Decision, StepEvidence
from sparroll.mismatch.table import TailRow
from sparroll.schedule import Schedule

FALSE_ALARM_A_STEP = 5e-3
"""Largest probability that a step raises an alarm although every bin's tail is exactly at the target."""


def confidence_of(bins: int) -> float:
    """Confidence of the two-sided interval whose upper end is a bin's bound, for the number of bins that are tested."""
    return 1 - 2 * FALSE_ALARM_A_STEP / bins


class Guard:
    """Holds the tail of the last steps, and how many of the stricter schedules the run has already switched to."""

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
        """Schedules to go on with at alarms, one after the other; None among them is dense. After the last one,
        `action` applies."""
        self.window = TailWindow(window_steps)
        self.budgets: list[list[int]] = []
        """[from_context_tokens, kv_budget_tokens] of each step of the schedule that the window's evidence was sampled
        under."""
        self.quiet_until = 0
        """No alarm before this step. It keeps a warning from being repeated every step: the next one has to wait until
        the window is full of later steps."""
        self.switches = 0

    @property
    def may_switch_to(self) -> tuple[Schedule | None, ...]:
        return self.stricter

    def notice(self, dense: bool) -> list[str]:
        """An event for the start of a run whose sparse rollouts the guard cannot watch, because it has no target."""
        if self.action == "off" or self.at_least is not None or dense:
            return []
        return [
            "the guard watches nothing: there is no target for the tail; give one with guard.at_least, for example 0.86, or "
            'set guard.action = "off"'
        ]

    def watch(self, step: StepEvidence) -> Decision:
        """Test the window with this step's tail in it. Dense rollouts are not tested."""
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
        """Clear the window where the schedule has changed: evidence of two schedules is not pooled."""
        steps = schedule.steps if schedule else ()
        budgets = [[each.from_context_tokens, each.kv_budget_tokens] for each in steps]
        if budgets != self.budgets:
            self.window.clear()
        self.budgets = budgets

    def _surely_low(self, at_least: float) -> TailRow | None:
        """The bin with the lowest upper bound, or None where no bound is under the target."""
        rows = [row for start in self.window.starts if (row := self.window.row(start)) is not None]
        tested = [row for row in rows if row.counts(self.least_tokens)]
        # An upper bound is never under the percentile itself, so bins whose percentile is at the target need no bound.
        starts = [row.from_context_tokens for row in tested if row.q05 < at_least]
        bounds = [self.window.row(start, confidence=confidence_of(len(tested))) for start in starts]
        return min((row for row in bounds if row and row.high < at_least), key=lambda row: row.high, default=None)

    def _respond(self, reason: str, step: StepEvidence) -> Decision:
        """Switch to the next stricter schedule as long as there is one; after that do what `action` says."""
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
