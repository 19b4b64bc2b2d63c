"""A run's rounds of sampling: what all processes measured becomes one tail, its metrics, and the watchers' decision about
the next schedule. Every process sees the same and decides the same. No TRL, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparroll.control.watcher import StepEvidence, Watcher, refuse_two_hands, restore_all, states_of
from sparroll.integrations.tail import State, dense_ceiling_report, merged, step_report
from sparroll.integrations.trl.process_step import ProcessStep, checked_report, counts_report, ran_report, spent_report
from sparroll.integrations.trl.settings import SparseSetup, in_trls_words
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule
from sparroll.types import StepReport


@dataclass
class WatchedRound:
    """What a round's metrics are, and what the watchers said."""

    report: StepReport
    events: list[str] = field(default_factory=list)


class SamplingRounds:
    """The schedule in force and the watchers, over all rounds of a run. A round is one batch of rollouts; TRL takes
    `steps_per_generation * num_iterations / gradient_accumulation_steps` optimizer steps on it, usually one.

    >>> rounds = SamplingRounds(setup)
    >>> watched = rounds.complete(process_steps, policy_report)      # rounds.schedule is that of the next round
    """

    def __init__(self, setup: SparseSetup):
        self.setup = setup
        self.watchers: tuple[Watcher, ...] = setup.watchers()
        refuse_two_hands(self.watchers)
        self.schedule: Schedule | None = setup.first_schedule()
        self.checks_drafts = setup.capacity().check is not None
        """Whether the engine is started with a check of its drafts, so that it cannot re-score."""
        self.done = 0
        self.ceiling: StepReport = {}
        self.stopped = ""
        """Why the run is to end; empty while it may go on."""

    @property
    def ceiling_prompts(self) -> int:
        """On how many prompts of the next round the dense ceiling is to be measured. Where drafts are checked there is no
        re-scoring, and their acceptance needs no ceiling: it is exact."""
        mismatch = self.setup.config.mismatch
        if self.schedule is None or self.checks_drafts:
            return 0
        regular = bool(mismatch.ceiling_every_steps and self.done % mismatch.ceiling_every_steps == 0)
        return mismatch.ceiling_prompts if regular or not self.ceiling else 0

    def measured_ceiling(self, states: Iterable[State]) -> None:
        """Take over the dense ceiling that an evaluation has measured; nothing where it measured none."""
        self.ceiling = dense_ceiling_report(merged(states), self.done) or self.ceiling

    def complete(self, steps: Sequence[ProcessStep], policy: StepReport, seconds: float | None = None) -> WatchedRound:
        """Merge what the processes measured, show it to the watchers, and take the next schedule.

        policy: the metrics of the corrected batch.  seconds: how long the round before took, from begin to begin.
        """
        self.done += 1
        mismatch = self.setup.config.mismatch
        estimators = {each.estimator for each in steps if each.counts.measured}
        assert len(estimators) <= 1, f"processes measured by {estimators}, which makes no common tail"
        tail = merged(each.state for each in steps)
        ceilings = merged(each.ceiling for each in steps if each.ceiling is not None)
        self.ceiling = dense_ceiling_report(ceilings, self.done - 1) or self.ceiling
        report = dict(policy)
        report |= step_report(tail, mismatch.least_tokens, *estimators)
        report |= self.ceiling
        report |= counts_report(steps, seconds)
        report |= ran_report(steps) | checked_report(steps, self.schedule) | spent_report(steps)
        nothing = TailStatistics(bin_tokens=mismatch.bin_tokens)
        evidence = StepEvidence(self.done, self.schedule, self.schedule is None, tail or nothing, dict(report))
        watched = WatchedRound(report)
        for watcher in self.watchers:
            if tail is None and watcher.name != "empty_steps":
                # Nothing was measured, so there is nothing to decide by.
                continue
            decision = watcher.watch(evidence)
            watched.report |= decision.report
            said = [in_trls_words(line) for line in decision.events]
            watched.events += said
            if decision.action == "stop":
                self.stopped = "; ".join(filter(None, [self.stopped, *said]))
            elif decision.action == "switch":
                self.schedule = decision.schedule
        return watched

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: plain data, and tensors under "watchers"."""
        return {
            "settings": self.setup.table(),
            "rounds": self.done,
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
        self.done = int(state["rounds"])
        self.ceiling, self.stopped = dict(state["ceiling"]), str(state["stopped"])
        restore_all(self.watchers, state["watchers"])
