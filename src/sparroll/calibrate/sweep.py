"""Measure the tail at every budget of a grid, and the dense ceiling. Resumable: a finished budget is a file, and is not
measured again. Fits nothing (see fit.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparroll.attention.selectors import PageMean, Selector
from sparroll.calibrate.curve import Cell, cells_of
from sparroll.calibrate.fit import MIN_ROLLOUTS, MIN_TOKENS, FittedSchedule, fit_schedule
from sparroll.calibrate.measure import Measurement, MeasureSettings, OnProgress, Study, digest
from sparroll.calibrate.store import Store, measurement_table
from sparroll.errors import UserError
from sparroll.schedule import Schedule, check_budget

PUBLISHED_PAGES = (32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""The paper's grid, in pages of 16 tokens."""


@dataclass(frozen=True)
class Sweep:
    """Everything measured: the dense ceiling, and one measurement per budget in rising order."""

    settings: MeasureSettings
    selector: Selector
    dense_layers: tuple[int, ...]
    ceiling: Measurement
    measurements: tuple[Measurement, ...]

    @property
    def budgets(self) -> list[int]:
        return [_budget(each) for each in self.measurements]

    def cells(self) -> list[Cell]:
        """Budget x bin, as `fit_schedule` takes them."""
        return [cell for each in self.measurements for cell in cells_of(each.tail(), _budget(each))]

    def fit(
        self,
        target: float,
        *,
        min_tokens: int = MIN_TOKENS,
        min_rollouts: int = MIN_ROLLOUTS,
        model: str | None = None,
        made_by: dict[str, Any] | None = None,
        name: str = "calibrated",
    ) -> FittedSchedule:
        """The cheapest schedule that holds the target; see `fit_schedule`."""
        return fit_schedule(
            self.cells(),
            target=target,
            selector=self.selector,
            dense_layers=self.dense_layers,
            estimator=self.settings.estimator,
            quantile=self.settings.quantile,
            top_k=self.settings.list_tokens or None,
            ceiling=cells_of(self.ceiling.tail(), 0),
            min_tokens=min_tokens,
            min_rollouts=min_rollouts,
            model=model,
            made_by=made_by,
            name=name,
        )

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "settings": self.settings.table(),
            "selector": self.selector.table(),
            "dense_layers": list(self.dense_layers),
            "dense_ceiling": measurement_table(self.ceiling),
            "budgets": [{"kv_budget_tokens": _budget(each), **measurement_table(each)} for each in self.measurements],
        }


def sweep(
    study: Study,
    *,
    out: Path | str,
    budgets: Sequence[int],
    selector: Selector | None = None,
    dense_layers: tuple[int, ...] = (0, 1),
    on_progress: OnProgress | None = None,
) -> Sweep:
    """Measure `budgets` (tokens) and the dense ceiling into the folder `out`.

    Run again with the same settings, it takes up where it was interrupted; more budgets may be added. Another model,
    other prompts or settings are refused. A budget that holds every context of the study is dense by construction and
    is not run. Raises UserError for the estimator "sampled", whose percentiles mean nothing.
    """
    selector = selector or PageMean()
    grid = _grid(study, budgets, selector, dense_layers)
    store = Store(out, fingerprint(study, selector, dense_layers))
    report = _Cells(on_progress, 1 + len(grid))
    ceiling = _ceiling(study, store, report)
    longest = _longest_context(study, store)
    measurements = []
    for budget in grid:
        schedule = Schedule.fixed(budget, selector, dense_layers)
        progress = report.next(f"budget {budget}")
        name = f"budget-{budget:06d}"
        found = store.load(name)
        if found is None:
            dense = budget >= longest
            found = _as_dense(ceiling, schedule) if dense else study.measure(schedule, on_progress=progress)
            store.save(name, found)
        measurements.append(found)
    report.end()
    return Sweep(study.settings, selector, dense_layers, ceiling, tuple(measurements))


def _grid(study: Study, budgets: Sequence[int], selector: Selector, dense_layers: tuple[int, ...]) -> list[int]:
    if study.settings.estimator == "sampled":
        raise UserError("a schedule cannot be fitted to the estimator 'sampled'", "use top_k_lower or exact")
    if not budgets:
        raise UserError("the budget grid is empty", "give at least one budget in tokens")
    for budget in budgets:
        check_budget(budget, selector)
    Schedule.fixed(max(budgets), selector, dense_layers).check_layers(study.layers)
    return sorted(set(budgets))


def _ceiling(study: Study, store: Store, report: _Cells) -> Measurement:
    if study.rollouts is None:
        study.rollouts = store.load_rollouts()
    progress = report.next("dense ceiling")
    found = store.load("dense")
    if found is None:
        store.save_rollouts(study.dense_rollouts(progress))
        found = study.ceiling(progress)
        store.save("dense", found)
    return found


def _longest_context(study: Study, store: Store) -> int:
    """The longest context that any decode step of the study can have."""
    rollouts = study.dense_rollouts()
    if study.settings.mode == "replay":
        return max(int(rollout.context_tokens[-1]) for rollout in rollouts)
    return max(len(rollout.prompt_ids) for rollout in rollouts) + study.settings.max_new_tokens - 1


def _as_dense(ceiling: Measurement, schedule: Schedule) -> Measurement:
    return replace(ceiling, schedule=schedule, mode="dense", wall_seconds=0.0)


def _budget(measurement: Measurement) -> int:
    assert measurement.schedule is not None, "a swept measurement has a schedule"
    return measurement.schedule.steps[0].kv_budget_tokens


def fingerprint(study: Study, selector: Selector, dense_layers: tuple[int, ...]) -> dict[str, Any]:
    """What a resumed sweep must share with the interrupted one."""
    return {
        **study.settings.table(),
        "selector": selector.table(),
        "dense_layers": list(dense_layers),
        "prompts": digest([prompt if isinstance(prompt, str) else list(prompt) for prompt in study.prompts]),
        "rollouts": study.given_rollouts,
        "weights": weights_digest(study.scorer.model),
    }


def weights_digest(model: nn.Module) -> str:
    """A short name for a model's weights: names, shapes and up to 64 evenly spaced values of every tensor."""
    parts = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        places = (
            torch.linspace(0, max(len(flat) - 1, 0), min(64, len(flat)), dtype=torch.float64).long().to(flat.device)
        )
        parts.update(f"{name}{list(tensor.shape)}{flat[places].double().tolist()}".encode())
    return parts.hexdigest()[:16]


class _Cells:
    """One progress over the cells of a sweep, in hundredths of a cell."""

    def __init__(self, on_progress: OnProgress | None, cells: int):
        self._report, self._total, self._begun = on_progress or (lambda *_: None), 100 * cells, -100

    def next(self, what: str) -> Callable[[int, int, str], None]:
        self._begun += 100
        begun = self._begun
        self._report(begun, self._total, what)
        return lambda done, total, text: self._report(
            begun + 100 * done // max(total, 1), self._total, f"{what}: {text}"
        )

    def end(self) -> None:
        self._report(self._total, self._total, "done")
