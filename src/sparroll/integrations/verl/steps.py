"""The driver's side of a step: what all replicas measured becomes one tail, its metrics, and the watchers' decisions about
the next schedule. Pure Python and tensors; no verl, no Ray, no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparroll.control.watcher import StepEvidence, Watcher, refuse_two_hands, restore_all, states_of
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.rescoring import RescoringCounts
from sparroll.integrations.tail import State, dense_ceiling_report, merged, step_report
from sparroll.integrations.verl.settings import SparseSettings, in_verls_words
from sparroll.integrations.verl.tap import CheckedSums
from sparroll.mismatch import TailStatistics
from sparroll.schedule import Schedule
from sparroll.types import StepReport


@dataclass
class ReplicaStep:
    """What one replica measured and counted since it was last asked."""

    state: State
    """TailStatistics.state()."""
    counts: RescoringCounts
    estimator: str
    ran: dict[str, Any]
    """The table of an EngineReport: what the replica's attention ran."""
    checked: CheckedSums


@dataclass
class Decided:
    """What the watchers said after a step."""

    report: StepReport
    events: list[str] = field(default_factory=list)
    stopped: str = ""
    """Why the run is to end; empty while it may go on."""


class Steps:
    """The schedule in force and the watchers, over all steps of a run.

    >>> steps = Steps(settings)
    >>> decided = steps.complete(7, replica_steps, report)     # steps.schedule is that of step 8
    """

    def __init__(self, settings: SparseSettings):
        self.settings = settings
        self.watchers: tuple[Watcher, ...] = settings.watchers()
        refuse_two_hands(self.watchers)
        self.schedule: Schedule | None = settings.first_schedule()
        self.ceiling: StepReport = {}
        self.stopped = ""
        self.news = settings.events()
        """Events that the next completed step reports."""

    def complete(self, number: int, replicas: Sequence[ReplicaStep], policy: StepReport) -> Decided:
        """Merge what the replicas measured in step `number`, show it to the watchers, and take the next schedule.

        policy: the step's metrics of the corrected batch, with those of loss_fields.CorrectedFields.
        """
        mismatch = self.settings.config.mismatch
        estimators = {each.estimator for each in replicas if each.counts.measured}
        assert len(estimators) <= 1, f"replicas measured by {estimators}, which makes no common tail"
        tail = merged(each.state for each in replicas)
        report = dict(policy)
        report |= step_report(tail, mismatch.least_tokens, *estimators)
        report |= self.ceiling if self.schedule is not None else {}
        report |= rescoring_counts(replicas).report()
        report |= ran_report(replicas, self.schedule) | checked_report(replicas, self.schedule)
        nothing = TailStatistics(bin_tokens=mismatch.bin_tokens)
        dense = self.schedule is None
        evidence = StepEvidence(number, self.schedule, dense, tail or nothing, dict(report))
        decided = Decided(report, self.news)
        self.news = []
        for watcher in self.watchers:
            if tail is None and watcher.name != "empty_steps":
                # Nothing was measured, so there is nothing to decide by.
                continue
            decision = watcher.watch(evidence)
            report |= decision.report
            decided.events += [in_verls_words(line) for line in decision.events]
            if decision.action == "stop":
                self.stopped = "; ".join(filter(None, [self.stopped, *map(in_verls_words, decision.events)]))
            elif decision.action == "switch":
                self.schedule = decision.schedule
        decided.stopped = self.stopped
        return decided

    def ceiling_due(self, number: int) -> bool:
        """Whether the dense ceiling is to be measured after this step."""
        every = self.settings.config.mismatch.ceiling_every_steps
        return self.schedule is not None and (not self.ceiling or bool(every and number % every == 0))

    def measured_ceiling(self, states: Sequence[State], number: int) -> None:
        """Keep the dense ceiling; the next steps report it."""
        self.ceiling = dense_ceiling_report(merged(states), number) or self.ceiling

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
        self.news = []


def rescoring_counts(replicas: Sequence[ReplicaStep]) -> RescoringCounts:
    total = RescoringCounts()
    for each in replicas:
        total.add(each.counts)
    return total


def ran_report(replicas: Sequence[ReplicaStep], schedule: Schedule | None, name: str = "rollout") -> StepReport:
    """Which attention ran, summed over all replicas. Steps are those of one layer: the first one that the schedule lets
    be sparse."""
    reports = [EngineReport.from_table(each.ran) for each in replicas]
    sums = [each.read_and_context_tokens for each in reports]
    read, context = sum(each[0] for each in sums), sum(each[1] for each in sums)
    dense_layers = set(schedule.dense_layers) if schedule else set()
    layers = [
        next((layer for number, layer in enumerate(each.layers) if number not in dense_layers), each.layers[-1])
        for each in reports
    ]
    return {
        f"{name}/kv_read_share": read / context if context else 1.0,
        f"{name}/sparse_steps": float(sum(each.sparse_steps for each in layers)),
        f"{name}/dense_steps": float(sum(each.dense_steps for each in layers)),
        f"{name}/preemptions": float(sum(each.preemptions for each in reports)),
    }


def checked_report(replicas: Sequence[ReplicaStep], schedule: Schedule | None) -> StepReport:
    """Metrics of the dense checks of drafts, by the names of our own loop; empty where no drafts are checked."""
    if schedule is None or schedule.check is None:
        return {}
    total = CheckedSums()
    for each in replicas:
        total.add(each.checked)
    if not total.tokens:
        return {}
    return {
        "check/window_tokens": float(schedule.check.window_tokens),
        "check/floor": schedule.check.floor,
        "check/windows": float(total.checks.windows),
        "check/cut_share": total.checks.cut_share,
        "check/drafted_per_kept": total.checks.drafted_per_kept,
        "check/draft_acceptance_mean": total.draft_acceptance / total.tokens,
        "check/over_2_nats_share": total.far_tokens / total.tokens,
        "check/largest_nats": total.largest_nats,
        "time/check_seconds": max(float(each.ran["check_seconds"]) for each in replicas),
    }


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What ran between two tables of an engine's counters, which only grow."""
    return {name: _less(before.get(name), value) for name, value in now.items()}


def _less(before: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return since(before or {}, now)
    if isinstance(now, list):
        return [_less(was, value) for was, value in zip(before or [None] * len(now), now, strict=True)]
    if isinstance(now, (int, float)) and not isinstance(now, bool) and isinstance(before, (int, float)):
        return now - before
    if dataclasses.is_dataclass(now) and not isinstance(now, type):
        return type(now)(**since(vars(before), vars(now))) if before is not None else now
    return now


def average(reports: Sequence[StepReport]) -> StepReport:
    """One report of several updates between two weight syncs: sums of what is counted in `policy/`, means of the rest."""
    names = dict.fromkeys(name for report in reports for name in report)
    found = {name: [report[name] for report in reports if name in report] for name in names}
    return {
        name: sum(values) if name.startswith("policy/") else sum(values) / len(values) for name, values in found.items()
    }


def probe_of_replica(probe_rollouts: int | None, replicas: int) -> int | None:
    """How many rollouts each replica re-scores, so that all together re-score at least as many as asked."""
    return None if probe_rollouts is None else -(-probe_rollouts // replicas)
