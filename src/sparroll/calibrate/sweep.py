"""Measures the tail at every budget of a grid, and the dense ceiling. It can be resumed: each finished budget is a file
and is not measured again. Where the engine's batch has room, several budgets are sampled together. Fitting is in fit.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparroll.attention.selectors import PageMean, Selector
from sparroll.calibrate.check_figures import CheckFigures
from sparroll.calibrate.curve import Cell
from sparroll.calibrate.fit import MIN_TOKENS, FittedSchedule, fit_schedule
from sparroll.calibrate.measure import Measurement, MeasureSettings, Study, check_measurable, digest
from sparroll.calibrate.store import Store, fingerprint, measured_all, measurement_table
from sparroll.calibrate.target import Target, cells_for
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.layer_groups import LayerGroups, Proportions
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.progress import OnProgress, Stages
from sparroll.schedule import Schedule, Step, check_budget

ACCEPTANCE = 0.86
"""Any target of the acceptance: its value does not change the figures of a cell."""
PUBLISHED_PAGES = (32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""The paper's grid, in pages of 16 tokens."""


@dataclass(frozen=True)
class Sweep:
    """All measurements: the dense ceiling, and one for each budget in rising order."""

    settings: MeasureSettings
    selector: Selector
    dense_layers: tuple[int, ...]
    ceiling: Measurement
    measurements: tuple[Measurement, ...]
    check: DraftCheck | None = None
    """How the drafts of all measurements but the ceiling were checked."""
    proportions: Proportions | None = None
    """Groups of layers that read so many times the budget; None: all sparse layers read the same."""
    layer_groups: LayerGroups = ()
    """Groups of layers that were varied alone; empty: all layers had the same budget."""
    alone: tuple[tuple[Measurement, ...], ...] = ()
    """For each of these groups the measurements of its smaller budgets, in rising order, in which all other groups had
    the largest one. `measurements` then is that of the largest budget in all of them."""

    @property
    def budgets(self) -> list[int]:
        return [_budget(each) for each in self.measurements]

    @property
    def grid(self) -> list[int]:
        """All budgets that were measured, in rising order; where groups were varied alone, in every one of them."""
        return sorted({*self.budgets, *(_budget(each) for own in self.alone for each in own)})

    def parts(self, layers: int) -> list[tuple[int, list[Cell]]]:
        """(Number of layers, cells) of what was varied in a model of that many layers: the groups, or all sparse
        layers."""
        if not self.layer_groups:
            return [(layers - len(self.dense_layers), self.cells())]
        return [
            (len(group), [*(cell for each in own for cell in self.cells_of(each)), *self.cells()])
            for group, own in zip(self.layer_groups, self.alone, strict=True)
        ]

    @property
    def sampled(self) -> tuple[Measurement, ...]:
        """The measurements of all budgets, those of groups of layers included; without the dense ceiling."""
        return (*self.measurements, *(each for own in self.alone for each in own))

    def cells(self, target: Target = ACCEPTANCE) -> list[Cell]:
        """The cells (budget x bin) that `fit_schedule` takes, with the figures of the target's statistic."""
        return [cell for each in self.measurements for cell in self.cells_of(each, target)]

    @staticmethod
    def cells_of(measurement: Measurement, target: Target = ACCEPTANCE) -> list[Cell]:
        """Those of one of its measurements."""
        return cells_for(target, measurement, _budget(measurement))

    def ceiling_cells(self, target: Target = ACCEPTANCE) -> list[Cell]:
        """The cells of the dense ceiling; their budget means nothing."""
        return cells_for(target, self.ceiling, 0)

    def fit(
        self,
        target: Target,
        *,
        min_tokens: int = MIN_TOKENS,
        min_rollouts: int = LEAST_ROLLOUTS,
        least_budgets: Mapping[int, int] | None = None,
        model: str | None = None,
        made_by: dict[str, Any] | None = None,
        name: str = "calibrated",
    ) -> FittedSchedule:
        """The cheapest schedule that meets the target; see `fit_schedule`. It has the sweep's check and proportions."""
        fitted = fit_schedule(
            self.cells(target),
            target=target,
            selector=self.selector,
            dense_layers=self.dense_layers,
            estimator=self.settings.estimator,
            quantile=self.settings.quantile,
            top_k=self.settings.list_tokens or None,
            ceiling=self.ceiling_cells(target),
            least_budgets=least_budgets,
            min_tokens=min_tokens,
            min_rollouts=min_rollouts,
            model=model,
            made_by=made_by,
            name=name,
        )
        schedule = replace(fitted.schedule, check=self.check).in_proportion(self.proportions)
        return fitted.with_schedule(schedule)

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "settings": self.settings.table(),
            "selector": self.selector.table(),
            "dense_layers": list(self.dense_layers),
            **({"check": self.check.table()} if self.check else {}),
            **({"proportions": self.proportions.table()} if self.proportions else {}),
            "dense_ceiling": measurement_table(self.ceiling),
            "budgets": [{"kv_budget_tokens": _budget(each), **measurement_table(each)} for each in self.measurements],
            **({"layer_groups": self._groups_table()} if self.layer_groups else {}),
        }

    def _groups_table(self) -> list[dict[str, Any]]:
        return [
            {
                "layers": list(group),
                "budgets": [{"kv_budget_tokens": _budget(each), **measurement_table(each)} for each in own],
            }
            for group, own in zip(self.layer_groups, self.alone, strict=True)
        ]


def sweep(
    study: Study,
    *,
    out: Path | str,
    budgets: Sequence[int],
    selector: Selector | None = None,
    dense_layers: tuple[int, ...] = (0, 1),
    check: DraftCheck | None = None,
    proportions: Proportions | None = None,
    on_ceiling: Callable[[Measurement], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Sweep:
    """Measure `budgets` (tokens) and the dense ceiling into the folder `out`.

    check: how the dense policy checks what is drafted under each budget; the dense ceiling is that of dense rollouts.
    proportions: groups of layers that read so many times each of the budgets.
    on_ceiling: called with the dense ceiling before the first budget is measured; what it raises ends the sweep there.

    A second call with the same settings continues where the first was interrupted, and may add budgets and checks.
    Another model, other prompts or other settings are refused. A budget that is as large as the longest context of the
    study is dense by construction and is not run. Raises UserError for the estimator "sampled", whose percentiles mean
    nothing.
    """
    selector = selector or PageMean()
    grid = _grid(study, budgets, selector, dense_layers)
    schedules = [_fixed(budget, selector, dense_layers, check).in_proportion(proportions) for budget in grid]
    schedules[0].check_layers(study.layers)
    check_measurable(schedules[0], study.settings)
    store = Store(out, sweep_fingerprint(study, selector, dense_layers, proportions))
    stages = Stages(on_progress, 1 + len(grid))
    ceiling = store.ceiling(study, stages.next("dense ceiling"))
    if on_ceiling is not None:
        on_ceiling(ceiling)
    asked = {budget_name(budget, check): schedule for budget, schedule in zip(grid, schedules, strict=True)}
    measurements = _measured(study, store, asked, ceiling, stages)
    stages.end()
    return Sweep(study.settings, selector, dense_layers, ceiling, tuple(measurements), check, proportions)


def _measured(
    study: Study, store: Store, asked: Mapping[str, Schedule], ceiling: Measurement, stages: Stages
) -> list[Measurement]:
    """As `measured_all`; the measurement of a schedule that reads every context whole is that of the ceiling."""
    longest = _longest_context(study)
    whole = {name for name, schedule in asked.items() if min(schedule.steps[0].budgets) >= longest}
    found = measured_all(study, {name: asked[name] for name in asked if name not in whole}, stages, store)
    for name in whole:
        stages.next(f"{asked[name].name}, which reads everything")
        nothing = asked[name].check and CheckFigures.of_dense(ceiling.tail())
        dense = partial(replace, ceiling, schedule=asked[name], mode="dense", wall_seconds=0.0, checked=nothing)
        found[name] = store.measured(name, dense)
    return [found[name] for name in asked]


def sweep_groups(
    study: Study,
    *,
    out: Path | str,
    budgets: Sequence[int],
    layer_groups: LayerGroups,
    selector: Selector | None = None,
    dense_layers: tuple[int, ...] = (0, 1),
    on_ceiling: Callable[[Measurement], None] | None = None,
    on_progress: OnProgress | None = None,
) -> Sweep:
    """Measure every group of layers alone under each of `budgets` but the largest, which the other groups have meanwhile,
    and the largest in all of them. For the rest see `sweep`."""
    selector = selector or PageMean()
    grid = _grid(study, budgets, selector, dense_layers)
    if len(grid) < 2:
        raise UserError(f"groups of layers need a grid of two budgets or more, got {grid}", "give smaller budgets, too")
    largest = grid[-1]
    schedules = [
        [_one_group(budget, largest, place, selector, dense_layers, layer_groups) for budget in grid[:-1]]
        for place in range(len(layer_groups))
    ]
    schedules[0][0].check_layers(study.layers)
    store = Store(out, sweep_fingerprint(study, selector, dense_layers))
    stages = Stages(on_progress, 1 + len(layer_groups) * (len(grid) - 1))
    whole = sweep(
        study,
        out=out,
        budgets=[largest],
        selector=selector,
        dense_layers=dense_layers,
        on_ceiling=on_ceiling,
        on_progress=stages.next(f"budget {largest}"),
    )
    asked = {
        f"{budget_name(budget)}-layers-{digest([group, largest])}": schedule
        for group, own in zip(layer_groups, schedules, strict=True)
        for budget, schedule in zip(grid, own, strict=False)
    }
    measured = _measured(study, store, asked, whole.ceiling, stages)
    stages.end()
    each = len(grid) - 1
    alone = tuple(tuple(measured[each * place : each * (place + 1)]) for place in range(len(layer_groups)))
    return replace(whole, layer_groups=layer_groups, alone=alone)


def _one_group(
    budget: int,
    others: int,
    place: int,
    selector: Selector,
    dense_layers: tuple[int, ...],
    layer_groups: LayerGroups,
) -> Schedule:
    """`budget` in one group and `others` in all others, at every length."""
    budgets = tuple(budget if number == place else others for number in range(len(layer_groups)))
    name = f"fixed-{budget}-in-group-{place}"
    return Schedule((Step(0, budgets),), selector, dense_layers, layer_groups=layer_groups, name=name)


def sweep_budget(
    study: Study,
    budget: int,
    *,
    out: Path | str,
    selector: Selector | None = None,
    dense_layers: tuple[int, ...] = (0, 1),
    check: DraftCheck | None = None,
    on_progress: OnProgress | None = None,
) -> Measurement:
    """Measure one budget of a faithful sweep into the folder `out`, without the dense ceiling. For processes that share
    a grid.

    `sweep` finds the measurement there. Raises UserError for a replay, which needs the dense rollouts of a sweep.
    """
    if study.settings.mode != "faithful":
        raise UserError("a budget can be measured alone only in faithful mode", "use sweep for a replay")
    selector = selector or PageMean()
    (budget,) = _grid(study, [budget], selector, dense_layers)
    store = Store(out, sweep_fingerprint(study, selector, dense_layers), shared=True)
    schedule = _fixed(budget, selector, dense_layers, check)
    return store.measured(budget_name(budget, check), partial(study.measure, schedule, on_progress=on_progress))


def budget_name(budget: int, check: DraftCheck | None = None) -> str:
    """Name of a budget's files in the sweep's folder."""
    return f"budget-{budget:06d}{_check_name(check, '-check-{}-{!r}')}"


def _check_name(check: DraftCheck | None, form: str) -> str:
    return form.format(check.window_tokens, check.floor) if check else ""


def _fixed(budget: int, selector: Selector, dense_layers: tuple[int, ...], check: DraftCheck | None) -> Schedule:
    schedule = Schedule.fixed(budget, selector, dense_layers)
    return schedule.checked(check.window_tokens, check.floor) if check else schedule


def sweep_fingerprint(
    study: Study, selector: Selector, dense_layers: tuple[int, ...], proportions: Proportions | None = None
) -> dict[str, Any]:
    """What must be the same when a sweep is resumed."""
    found = {"selector": selector.table(), "dense_layers": list(dense_layers)}
    return found | ({"proportions": proportions.table()} if proportions else {}) | fingerprint(study)


def _grid(study: Study, budgets: Sequence[int], selector: Selector, dense_layers: tuple[int, ...]) -> list[int]:
    if study.settings.estimator == "sampled":
        raise UserError("a schedule cannot be fitted to the estimator 'sampled'", "use top_k_lower or exact")
    if not budgets:
        raise UserError("the budget grid is empty", "give at least one budget in tokens")
    for budget in budgets:
        check_budget(budget, selector)
    Schedule.fixed(max(budgets), selector, dense_layers).check_layers(study.layers)
    return sorted(set(budgets))


def _longest_context(study: Study) -> int:
    """The longest context that any decode step of the study can have."""
    rollouts = study.dense_rollouts()
    if study.settings.mode == "replay":
        return max(int(rollout.context_tokens[-1]) for rollout in rollouts)
    return max(len(rollout.prompt_ids) for rollout in rollouts) + study.settings.max_new_tokens - 1


def _budget(measurement: Measurement) -> int:
    """That of the group of layers which reads least: the one that is varied, or the one that the proportions count by."""
    assert measurement.schedule is not None, "a swept measurement has a schedule"
    return min(measurement.schedule.steps[0].budgets)
