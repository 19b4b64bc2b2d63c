"""The driver's side of a step: when the dense ceiling is due, and what several updates between two weight syncs report. Pure
Python; no verl, no Ray, no engine. What becomes of a step's measurements is in ../watched.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparroll.integrations.measured import EngineStep
from sparroll.integrations.verl.settings import SparseSettings
from sparroll.integrations.watched import WatchedStep, WatchedSteps
from sparroll.types import StepReport


class Steps(WatchedSteps):
    """The schedule in force and the watchers, over all steps of a run.

    >>> steps = Steps(settings)
    >>> watched = steps.complete(7, engine_steps, report)     # steps.schedule is that of step 8
    """

    def __init__(self, settings: SparseSettings):
        super().__init__(settings)
        self.settings = settings
        self.news = settings.events()
        """Events that the next completed step reports."""

    def complete(self, number: int, replicas: Sequence[EngineStep], policy: StepReport) -> WatchedStep:
        """`watch` step `number`. policy: with the metrics of loss_fields.CorrectedFields."""
        watched = self.watch(number, replicas, policy)
        watched.events, self.news = self.news + watched.events, []
        return watched

    @property
    def reported_ceiling(self) -> StepReport:
        """Nothing while the rollouts are dense: their own tail is the ceiling."""
        return self.ceiling if self.schedule is not None else {}

    def ceiling_due(self, number: int) -> bool:
        """Whether the dense ceiling is to be measured after this step."""
        every = self.settings.config.mismatch.ceiling_every_steps
        if self.control_shows_ceiling:
            return False
        return self.schedule is not None and (not self.ceiling or bool(every and number % every == 0))

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.news = []


def average(reports: Sequence[StepReport]) -> StepReport:
    """One report of several updates between two weight syncs: sums of what is counted in `policy/`, the largest of
    what is a maximum, and means of the rest."""
    names = dict.fromkeys(name for report in reports for name in report)
    found = {name: [report[name] for report in reports if name in report] for name in names}
    return {name: _together(name, values) for name, values in found.items()}


def _together(name: str, values: Sequence[float]) -> float:
    if name.startswith("policy/"):
        return sum(values)
    return max(values) if name.removesuffix("_before").endswith("_max") else sum(values) / len(values)
