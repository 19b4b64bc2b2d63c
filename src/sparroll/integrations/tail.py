"""From what replicas measured in a step to one tail and its metrics. Pure functions; nothing here measures or decides."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.step_metrics import ESTIMATOR, ceiling_report, tail_report
from sparroll.types import StepReport

State = dict[str, Tensor]
"""What `TailStatistics.packed_state` or `state` returns."""


def merged(states: Iterable[State]) -> TailStatistics | None:
    """The statistics of all replicas together, equal to the last bit to those of one replica that measured everything.
    None where no replica measured a token.

    Raises UserError for states with different settings. Rollout ids must differ between replicas and steps.
    """
    total: TailStatistics | None = None
    for state in states:
        statistics = TailStatistics.from_state(state)
        if total is None:
            total = statistics
        else:
            total.merge(statistics)
    return total if total is not None and total.tokens else None


def step_report(statistics: TailStatistics | None, least_tokens: int, estimator: str = ESTIMATOR) -> StepReport:
    """The metrics `mismatch/...` of a step's sparse rollouts, by the names of our own loop (docs/metrics.md). Nothing
    where nothing was measured. least_tokens: tokens that a bin needs to be the worst one.  estimator: "exact" where
    drafts were checked."""
    return {} if statistics is None else tail_report(statistics.table(estimator), least_tokens)


def dense_ceiling_report(statistics: TailStatistics | None, step: int) -> StepReport:
    """The same of dense rollouts: `mismatch/dense_ceiling...`, with the step that they were measured in."""
    return {} if statistics is None else ceiling_report(statistics.table(ESTIMATOR), step)
