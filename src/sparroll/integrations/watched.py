"""The steps of another trainer's run: what all engines measured becomes one tail, its metrics, and the watchers' decision
about the next schedule. Every process that sees the same decides the same. No framework, no engine; when a dense ceiling is
due, and what a step is, each integration says itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparroll.control.watcher import StepEvidence, Watcher, refuse_two_hands, restore_all, states_of
from sparroll.integrations.measured import EngineStep, checked_report, ran_report, rescoring_report
from sparroll.integrations.settings import CommonSettings
from sparroll.integrations.tail import State, dense_ceiling_report, merged, step_report
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.threads import one_thread
from sparroll.schedule import Schedule
from sparroll.types import StepReport


@dataclass
class WatchedStep:
    """What a step's metrics are, and what the watchers said."""

    report: StepReport
    events: list[str] = field(default_factory=list)
    stopped: str = ""
    """Why the run is to end; empty while it may go on."""


class WatchedSteps:
    """The schedule in force and the watchers, over all steps of a run."""

    def __init__(self, settings: CommonSettings):
        self.watchers: tuple[Watcher, ...] = settings.watchers()
        refuse_two_hands(self.watchers)
        self.schedule: Schedule | None = settings.first_schedule()
        self.ceiling: StepReport = {}
        self.stopped = ""
        """Why the run is to end; empty while it may go on."""
        self._settings = settings

    def measured_ceiling(self, states: Iterable[State], step: int) -> None:
        """Keep the dense ceiling that was measured in this step; the next steps report it. Without a measured token, the
        one before stays."""
        self.ceiling = dense_ceiling_report(merged(states), step) or self.ceiling

    @property
    def reported_ceiling(self) -> StepReport:
        """The dense ceiling that a step reports beside its tail."""
        return self.ceiling

    @one_thread()
    def watch(
        self, number: int, steps: Sequence[EngineStep], policy: StepReport, seconds: float | None = None
    ) -> WatchedStep:
        """Merge what the engines measured in step `number`, show it to the watchers, and take the next schedule.

        policy: the metrics of the corrected batch.  seconds: how long all of the step took, where that is known.
        """
        mismatch = self._settings.config.mismatch
        estimators = {each.estimator for each in steps if each.counts.measured}
        assert len(estimators) <= 1, f"engines measured by {estimators}, which makes no common tail"
        tail = merged(each.state for each in steps)
        self.measured_ceiling((each.ceiling for each in steps if each.ceiling is not None), number - 1)
        report = policy | step_report(tail, mismatch.least_tokens, *estimators) | self.reported_ceiling
        report |= rescoring_report(steps, seconds) | ran_report(steps) | checked_report(steps, self.schedule)
        nothing = TailStatistics(bin_tokens=mismatch.bin_tokens)
        evidence = StepEvidence(number, self.schedule, self.schedule is None, tail or nothing, dict(report))
        watched = WatchedStep(report)
        for watcher in self.watchers:
            if tail is None and watcher.name != "empty_steps":
                # Nothing was measured, so there is nothing to decide by.
                continue
            decision = watcher.watch(evidence)
            watched.report |= decision.report
            said = [self._settings.in_their_words(line) for line in decision.events]
            watched.events += said
            if decision.action == "stop":
                self.stopped = "; ".join(filter(None, [self.stopped, *said]))
            elif decision.action == "switch":
                self.schedule = decision.schedule
        watched.stopped = self.stopped
        return watched

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: plain data, and tensors under "watchers"."""
        return {
            "schedule": None if self.schedule is None else self.schedule.inline(),
            "ceiling": dict(self.ceiling),
            "stopped": self.stopped,
            "watchers": states_of(self.watchers),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state()` returned."""
        inline = state["schedule"]
        # It was checked, or forced, when the run began.
        self.schedule = None if inline is None else Schedule.load(inline, force=True)
        self.ceiling, self.stopped = dict(state["ceiling"]), str(state["stopped"])
        restore_all(self.watchers, state["watchers"])
