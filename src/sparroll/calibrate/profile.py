"""How far sparse decoding is from dense for given budgets or schedules: tails, Beta fits, correlation with length, and
the dense ceiling beside them. Chooses nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparroll.attention.selectors import PageMean, Selector
from sparroll.calibrate.measure import Measurement, OnProgress, Study, digest
from sparroll.calibrate.store import Store, measurement_table
from sparroll.calibrate.sweep import fingerprint
from sparroll.errors import UserError
from sparroll.mismatch import BetaFit
from sparroll.schedule import Schedule


@dataclass(frozen=True)
class BinFit:
    """A Beta fit of one bin's tokens, or of all of them."""

    from_context_tokens: int | None
    """None: all tokens."""
    beta: BetaFit | None
    why_not: str = ""
    """Why there is no fit."""


@dataclass(frozen=True)
class Entry:
    """One schedule's figures."""

    measurement: Measurement
    fits: tuple[BinFit, ...]
    """The first is of all tokens."""

    def table(self) -> dict[str, Any]:
        """Plain data."""
        return {**measurement_table(self.measurement), "beta": [dataclasses.asdict(fit) for fit in self.fits]}


@dataclass(frozen=True)
class Profile:
    """The dense ceiling, and an entry per schedule in the order asked for."""

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

    selector and dense_layers belong to the fixed budgets; a schedule brings its own. With `out`, each finished
    measurement is kept in that folder and not repeated when the same profile is asked for again.
    """
    if not schedules:
        raise UserError("there is nothing to profile", "give at least one budget or schedule")
    loaded = [_schedule(each, selector or PageMean(), dense_layers) for each in schedules]
    for schedule in loaded:
        schedule.check_layers(study.layers)
    store = Store(out, fingerprint(study, selector or PageMean(), dense_layers)) if out is not None else None
    parts = 1 + len(loaded)
    ceiling = _ceiling(study, store, _part(on_progress, 0, parts))
    entries = [
        _entry(_measured(study, schedule, store, _part(on_progress, number, parts)))
        for number, schedule in enumerate(loaded, start=1)
    ]
    return Profile(_entry(ceiling), tuple(entries))


def _ceiling(study: Study, store: Store | None, on_progress: OnProgress | None) -> Measurement:
    if store is None:
        return study.ceiling(on_progress)
    if study.rollouts is None:
        study.rollouts = store.load_rollouts()
    found = store.load("dense")
    if found is None:
        store.save_rollouts(study.dense_rollouts(on_progress))
        found = study.ceiling(on_progress)
        store.save("dense", found)
    return found


def _measured(study: Study, schedule: Schedule, store: Store | None, on_progress: OnProgress | None) -> Measurement:
    if store is None:
        return study.measure(schedule, on_progress=on_progress)
    name = f"{schedule.name}-{digest(schedule.table())}"
    found = store.load(name)
    if found is None:
        found = study.measure(schedule, on_progress=on_progress)
        store.save(name, found)
    return found


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


def _part(on_progress: OnProgress | None, number: int, parts: int) -> OnProgress | None:
    """The share of one progress that part `number` of `parts` takes, in hundredths of a part."""
    if on_progress is None:
        return None
    return lambda done, total, text: on_progress(100 * number + 100 * done // max(total, 1), 100 * parts, text)
