"""How far sparse decoding is from dense for given budgets or schedules: tails, Beta fits, correlation with length, and
the dense ceiling. Chooses no budget.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparroll.attention.selectors import PageMean, Selector
from sparroll.calibrate.fit import MIN_TOKENS
from sparroll.calibrate.measure import Measurement, Study, check_percentiles, digest
from sparroll.calibrate.store import Store, fingerprint, measured_all, measurement_table
from sparroll.errors import UserError
from sparroll.locks import locked
from sparroll.mismatch import BetaFit
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.progress import OnProgress, Stages
from sparroll.schedule import Schedule


@dataclass(frozen=True)
class BinFit:
    """A Beta fit of the tokens of one bin, or of all tokens."""

    from_context_tokens: int | None
    """Start of the bin; None for a fit of all tokens."""
    beta: BetaFit | None
    why_not: str = ""
    """Why there is no fit."""


@dataclass(frozen=True)
class Entry:
    """The figures of one schedule."""

    measurement: Measurement
    fits: tuple[BinFit, ...]
    """One of all tokens, then one for each bin."""

    @property
    def too_little(self) -> str | None:
        """That there are too few tokens or rollouts to say anything of the tail; None where there are enough in all."""
        row = self.measurement.tail().overall
        if row.counts(MIN_TOKENS):
            return None
        return (
            f"too little for a tail: {row.tokens:,} tokens of {row.rollouts:,} rollouts, and it takes {MIN_TOKENS} of "
            f"{LEAST_ROLLOUTS}"
        )

    def table(self) -> dict[str, Any]:
        """Plain data."""
        return {**measurement_table(self.measurement), "beta": [dataclasses.asdict(fit) for fit in self.fits]}


@dataclass(frozen=True)
class Profile:
    """The dense ceiling, and an entry for each schedule in the given order."""

    ceiling: Entry
    entries: tuple[Entry, ...]

    def table(self) -> dict[str, Any]:
        """Plain data for printing, plotting and JSON."""
        return {"dense_ceiling": self.ceiling.table(), "schedules": [entry.table() for entry in self.entries]}


def profile(
    study: Study,
    schedules: Sequence[int | str | Path | Schedule],
    *,
    selector: Selector | None = None,
    dense_layers: tuple[int, ...] = (0, 1),
    out: Path | str | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """Measure each of `schedules` (fixed budgets in tokens, preset names, files or Schedules) and the dense ceiling.

    selector and dense_layers are for the fixed budgets; a schedule has its own. If `out` is given, finished
    measurements are kept in that folder, and an interrupted profile continues from them. Other settings are refused in
    the same folder.
    """
    if not schedules:
        raise UserError("there is nothing to profile", "give at least one budget or schedule")
    check_percentiles(study.settings)
    loaded = [_schedule(each, selector or PageMean(), dense_layers) for each in schedules]
    for schedule in loaded:
        schedule.check_layers(study.layers)
    stages = Stages(on_progress, 1 + len(loaded))
    with nullcontext() if out is None else locked(out, "sparroll profile"):
        store = None if out is None else Store(out, fingerprint(study))
        progress = stages.next("dense ceiling")
        ceiling = study.ceiling(progress) if store is None else store.ceiling(study, progress)
        # The digest tells apart two schedules with the same name, and a file before and after an edit.
        names = [f"{schedule.name.replace('/', '-')}-{digest(schedule.table())}" for schedule in loaded]
        measured = measured_all(study, dict(zip(names, loaded, strict=True)), stages, store)
    stages.end()
    return Profile(_entry(ceiling), tuple(_entry(measured[name]) for name in names))


def _schedule(schedule: int | str | Path | Schedule, selector: Selector, dense_layers: tuple[int, ...]) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, int):
        return Schedule.fixed(schedule, selector, dense_layers)
    return Schedule.load(schedule)


def _entry(measurement: Measurement) -> Entry:
    starts = [row.from_context_tokens for row in measurement.tail().rows]
    return Entry(measurement, tuple(_fit(measurement, start) for start in (None, *starts)))


def _fit(measurement: Measurement, start: int | None) -> BinFit:
    try:
        return BinFit(start, measurement.statistics.beta(start))
    except UserError as error:
        return BinFit(start, None, error.message)
