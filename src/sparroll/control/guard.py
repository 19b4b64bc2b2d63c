"""Raises an alarm where the measured tail is surely under its target, where the share of impossible tokens is surely over
its limit (impossible_limit.py), or where the control group shows that sparse rollouts surely get less reward
(reward_gap.py). Noise alone should almost never raise one.

Evidence is pooled per length bin over the last `window_steps` measured steps under one schedule. A bin with fewer than
`least_tokens` tokens or 8 rollouts in this window is not tested alone but merged with its neighbours until they have as
many together (see TailWindow.groups). Where even all bins together have fewer, nothing can be tested, and an event says
so. An alarm is raised where the upper confidence bound of the 5th percentile of a bin, or of merged bins, is under the
target (estimator top_k_lower, clustered by rollouts, see mismatch/bootstrap.py). Bins whose tails all hold the target
hold it together, too, so merging raises no false alarm; a low tail among better ones is found later.

Every step tests every bin, which makes thousands of tests in a run, so each test is strict: all tests of one step
together may raise a false alarm with probability FALSE_ALARM_AT where every tail is exactly at the target, and with
FALSE_ALARM_ABOVE where every tail is a MARGIN above it, shared equally among them. The second one is what keeps a run
with few tokens a step quiet: there, a tail at the target and one a little above it look alike.
benchmarks/guard_simulation.py simulates how many runs have a false alarm, and how fast a low tail is found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.control.reward_gap import RewardGap
from sparroll.control.tail_window import TailWindow
from sparroll.control.watcher import Decision, StepEvidence, described
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.table import TailRow, bin_name
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule

_ALARMS = ("surely under", "surely over", "surely and by more")
"""An alarm's event has one of these, and no other event has."""
FALSE_ALARM_AT = 5e-3
"""Largest probability that a step raises an alarm although every bin's tail is exactly at the target."""
MARGIN = 0.01
FALSE_ALARM_ABOVE = 5e-6
"""The same where every tail is MARGIN or more above the target. In 1,000 steps that is at most one run in two hundred,
however few tokens a step has. With many tokens the first probability is the stricter one."""


def is_alarm(event: str) -> bool:
    """Whether this is what a guard says at an alarm, whatever it did then."""
    return any(words in event for words in _ALARMS)


def confidence_of(tests: int, false_alarm: float = FALSE_ALARM_AT) -> float:
    """Confidence of the two-sided interval whose upper end is the bound of one test, where so many tests share the
    probability of a false alarm."""
    return 1 - 2 * false_alarm / tests


def surely_low(window: TailWindow, starts: Sequence[int], tests: int, at_least: float) -> TailRow | None:
    """The tail of these bins together with its upper bound, if that is one of `tests` tests that find it surely low;
    otherwise None."""
    row = window.merged_row(starts, confidence_of(tests))
    if row is None or row.high >= at_least:
        return None
    stricter = window.merged_row(starts, confidence_of(tests, FALSE_ALARM_ABOVE))
    return row if stricter is not None and stricter.high < at_least + MARGIN else None


class Guard:
    """Holds the tail of the last steps, what the control group shows, where there is one, and how many of the stricter
    schedules the run has already switched to."""

    name = "guard"

    def __init__(
        self,
        action: Literal["off", "warn", "stop"],
        at_least: float | None,
        window_steps: int = 10,
        stricter: tuple[Schedule | None, ...] = (),
        least_tokens: int = 200,
        reward_gap: RewardGap | None = None,
        impossible: ImpossibleLimit | None = None,
    ):
        self.reward_gap, self.impossible = reward_gap, impossible
        self.action, self.at_least, self.least_tokens = action, at_least, least_tokens
        self.stricter = stricter
        """Schedules to go on with at alarms, one after the other; None among them is dense. After the last one,
        `action` applies."""
        self.window = TailWindow(window_steps)
        self.budgets: list[list[Any]] = []
        """Schedule.plain_budgets() of the schedule that the window's evidence was sampled under."""
        self.quiet_until = 0
        """No alarm about the tail before this step. It keeps a warning from being repeated every step: the next one has
        to wait until the window is full of later steps."""
        self.blind_until = 0
        """Before this step it is not said again that nothing can be tested."""
        self.switches = 0

    @property
    def may_switch_to(self) -> tuple[Schedule | None, ...]:
        return self.stricter

    @property
    def has_target(self) -> bool:
        """Whether there is a target for the tail, or a limit for impossible tokens."""
        return self.at_least is not None or self.impossible is not None

    def notice(self, dense: bool) -> list[str]:
        """An event for the start of a run whose sparse rollouts the guard cannot watch, or only by their rewards, because it
        has no target."""
        if self.action == "off" or self.has_target or dense:
            return []
        watches_gap = self.reward_gap is not None and self.reward_gap.settings.reward_gap is not None
        watched, leave = ("the reward alone", "") if watches_gap else ("nothing", ', or set guard.action = "off"')
        return [
            f"the guard watches {watched}: there is no target for the tail; give one with guard.at_least, for example 0.86, "
            f"or guard.impossible_at_most, for example 1e-4{leave}"
        ]

    def watch(self, step: StepEvidence) -> Decision:
        """Test the tail and the control group, each with this step in its window. Dense rollouts are not tested."""
        decision = self._watch_tail(step)
        gap = self.reward_gap
        if gap is None or step.pairs is None or step.dense:
            return decision
        name = None if step.schedule is None else step.schedule.name
        report, reason = gap.observe(step.step, name, step.pairs, alarms=self.action != "off")
        if reason and decision.action in ("switch", "stop"):
            decision = replace(decision, events=(*decision.events, reason))
        elif reason:
            response = self._respond(reason, step)
            decision = replace(response, events=(*decision.events, *response.events))
        elif self.action != "off" and decision.action in ("none", "warn") and (said := gap.why_no_alarm(step.step)):
            decision = replace(decision, action="warn", events=(*decision.events, said))
        if decision.action == "switch":
            # Two schedules may have one name.
            gap.start_anew(step.step)
        return replace(decision, report=report)

    def _watch_tail(self, step: StepEvidence) -> Decision:
        if self.action == "off" or not self.has_target or step.dense:
            return Decision()
        if self.impossible is not None:
            self.impossible.check_counted(step.tail, "the guard")
        self._start_anew_under_another(step.schedule)
        self.window.add(step.step, step.tail)
        if step.step < self.quiet_until or not self.window.starts:
            return Decision()
        tails = self.window.groups(self.least_tokens) if self.at_least is not None else []
        shares = self.impossible.groups(self.window, self.least_tokens) if self.impossible is not None else []
        tests = len(tails) + len(shares)
        if not tests:
            return self._blind(step.step)
        reasons = [self._low_tail(tails, tests, step), self._many_impossible(shares, tests, step)]
        reason = "; ".join(filter(None, reasons))
        if not reason:
            return Decision()
        self.window.clear()
        decision = self._respond(reason, step)
        if decision.action == "warn":
            self.quiet_until = step.step + self.window.steps
        return decision

    def _low_tail(self, groups: list[list[int]], tests: int, step: StepEvidence) -> str:
        """Why a tail is an alarm: the one with the lowest upper bound; empty where none is."""
        if self.at_least is None:
            return ""
        found = [(surely_low(self.window, starts, tests, self.at_least), starts) for starts in groups]
        low = [(row, starts) for row, starts in found if row is not None]
        if not low:
            return ""
        row, starts = min(low, key=lambda each: each[0].high)
        reason = (
            f"the tail (5th percentile of the acceptance) at {_where(row.name, starts)} is {row.q05:.3f}, surely under "
            f"{self.at_least:.3f}: upper bound {row.high:.3f} by {row.tokens} tokens of {row.rollouts} rollouts "
            f"({self._since(step)})"
        )
        ceiling = step.report.get("mismatch/dense_ceiling_q05", math.inf)
        if ceiling < self.at_least:
            reason += (
                f"; dense rollouts have {rounded_down(ceiling)} and miss it, too: no schedule can hold this target"
            )
        return reason

    def _many_impossible(self, groups: list[list[int]], tests: int, step: StepEvidence) -> str:
        """Why a share of impossible tokens is an alarm: the one with the highest lower bound; empty where none is."""
        limit = self.impossible
        if limit is None:
            return ""
        sure = confidence_of(tests), confidence_of(tests, FALSE_ALARM_ABOVE)
        found = [(limit.surely_exceeded(self.window, starts, *sure), starts) for starts in groups]
        high = [(share, starts) for share, starts in found if share is not None]
        if not high:
            return ""
        share, starts = max(high, key=lambda each: each[0].low)
        name = bin_name(starts[0], starts[-1] + self.window.bin_tokens)
        reason = (
            f"the share of sampled tokens more than {limit.nats} nats off at {_where(name, starts)} is {share.value:.2g}, "
            f"surely over {limit.at_most:g}: lower bound {share.low:.2g} by {share.events} of {share.tokens} tokens of "
            f"{self.window.amount(starts)[1]} rollouts ({self._since(step)})"
        )
        ceiling = step.report.get(f"mismatch/dense_ceiling_impossible_share_{limit.nats}", 0.0)
        if ceiling > limit.at_most:
            reason += f"; dense rollouts have {ceiling:.2g} and miss it, too: no schedule can hold this target"
        return reason

    def _since(self, step: StepEvidence) -> str:
        return f"steps {self.window.evidence[0][0]} to {step.step}"

    def _start_anew_under_another(self, schedule: Schedule | None) -> None:
        """Clear the window where the schedule has changed: evidence of two schedules is not pooled."""
        budgets = schedule.plain_budgets() if schedule else []
        if budgets != self.budgets:
            self.window.clear()
        self.budgets = budgets

    def _blind(self, step: int) -> Decision:
        """Say that all bins together have too little data for a test; again after a whole window of such steps."""
        if step < self.blind_until:
            return Decision()
        self.blind_until = step + self.window.steps
        tokens, rollouts = self.window.amount(self.window.starts)
        seen = len(self.window.evidence)
        needed = math.ceil(seen * max(self.least_tokens / tokens, LEAST_ROLLOUTS / rollouts))
        if needed <= self.window.steps:
            outlook = f"the first test comes after about {needed} such steps"
        else:
            outlook = (
                f"at this rate no test ever comes, because guard.window_steps = {self.window.steps}; --set "
                f"guard.window_steps={needed}, sample more rollouts a step, or lower mismatch.least_tokens"
            )
        return Decision(
            "warn",
            (
                f"the guard cannot test the tail yet: all lengths together have {tokens} tokens of {rollouts} rollouts so "
                f"far, and a test needs {self.least_tokens} tokens of {LEAST_ROLLOUTS} rollouts; {outlook}",
            ),
        )

    def _respond(self, reason: str, step: StepEvidence) -> Decision:
        """Switch to the next stricter schedule as long as there is one; after that do what `action` says."""
        if self.stricter:
            assert step.schedule is not None, "only a schedule has stricter ones"
            if self.switches < len(self.stricter):
                following = self.stricter[self.switches]
                self.switches += 1
                # The next one may have the same budgets and differ in the check of its drafts.
                self.window.clear()
                moved = f"{described(step.schedule)} -> {described(following)}"
                return Decision("switch", (f"{reason}: {moved}",), following)
            reason = f"{reason}, and no stricter schedule is left after {step.schedule.name}"
        if self.action == "stop":
            return Decision("stop", (f"{reason}: stopped",))
        return Decision("warn", (reason,))

    def state(self) -> dict[str, Any]:
        gap = {} if self.reward_gap is None else {_GAP: self.reward_gap.state()}
        return {name: getattr(self, name) for name in _PLAIN} | gap | self.window.state()

    def restore(self, state: dict[str, Any]) -> None:
        for name in _PLAIN:
            setattr(self, name, state[name])
        if self.reward_gap is not None:
            self.reward_gap.restore(state[_GAP])
        self.window.restore({name: value for name, value in state.items() if name not in (*_PLAIN, _GAP)})


def _where(name: str, starts: Sequence[int]) -> str:
    """The bins of a test in an event."""
    return name if len(starts) == 1 else f"{name} ({len(starts)} bins together, which alone have too few tokens)"


_PLAIN = ("budgets", "quiet_until", "blind_until", "switches")
"""The parts of the state that are plain data, by the names of their attributes."""
_GAP = "reward_gap"
"""The name of the control group's part of the state."""
