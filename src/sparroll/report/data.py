"""What a report shows, as plain data. Reads no files and draws nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sparroll.calibrate.fit import MIN_TOKENS
from sparroll.mismatch.table import TailRow


def thin(row: TailRow) -> bool:
    """Whether a bin has too little data to say anything. Calibration leaves such bins out as well."""
    return not row.counts(MIN_TOKENS)


@dataclass(frozen=True)
class TailCurve:
    """One line of the tail plot."""

    name: str
    kind: Literal["budget", "schedule", "ceiling"]
    points: tuple[TailRow, ...]
    kv_budget_tokens: int | None = None


@dataclass(frozen=True)
class AccuracyPoint:
    """Dense accuracy after a step, with its 95 % interval."""

    step: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TrainingRun:
    """What one RL run logged, by step."""

    name: str
    steps: tuple[int, ...]
    reward: tuple[float, ...]
    tail_q05: tuple[float | None, ...]
    kv_read_share: tuple[float, ...]
    accuracy: tuple[AccuracyPoint, ...]
    rollouts: str = ""
    """What its rollouts read, in words."""
    events: tuple[str, ...] = ()


@dataclass(frozen=True)
class Provenance:
    """Which record a part of the report comes from."""

    what: str
    file: str
    record: dict[str, Any]


@dataclass(frozen=True)
class ReportData:
    """Everything on the page. A part that is empty, because the folder has no such results, is left out."""

    title: str
    model: str = ""
    target: float | None = None
    estimator: str = ""
    quantile: float = 0.05
    curves: tuple[TailCurve, ...] = ()
    schedule: dict[str, Any] | None = None
    schedule_name: str = ""
    notes: tuple[str, ...] = ()
    plans: tuple[dict[str, Any], ...] = ()
    runs: tuple[TrainingRun, ...] = ()
    evaluations: tuple[dict[str, Any], ...] = ()
    """Results of `sparroll evaluate`, as in their records."""
    facts: dict[str, str] = field(default_factory=dict)
    """Short figures for the top of the page, by name."""
    provenance: tuple[Provenance, ...] = ()
