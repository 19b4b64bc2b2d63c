"""Generates rollouts with a fitted schedule and checks that every bin meets the target. Budgets of bins that miss it
are raised, and the check is repeated.

The figures of the last round are reported as they are. They are never averaged over rounds or chosen among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots
from sparroll.calibrate.curve import Cell
from sparroll.calibrate.fit import MIN_TOKENS
from sparroll.calibrate.measure import Measurement, Study
from sparroll.calibrate.store import Store, measurement_table
from sparroll.calibrate.sweep import sweep_fingerprint
from sparroll.calibrate.target import Target, cells_for, in_words, level, needed_tokens
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.layer_groups import Proportions
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule, Step

Bound = Literal["value", "low"]


@dataclass(frozen=True)
class Verification:
    """The schedule after the last round, and what that round measured."""

    schedule: Schedule
    measurement: Measurement
    """What the last round measured with `schedule`."""
    met: bool
    """Whether every bin with enough data met the target in the last round, and there was one."""
    missed: tuple[str, ...]
    """Names of the bins that missed it."""
    rounds: tuple[Measurement, ...]
    notes: tuple[str, ...]
    bound: Bound
    """What had to meet the target."""

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "schedule": self.schedule.table(),
            "met": self.met,
            "missed": list(self.missed),
            "bound": self.bound,
            "notes": list(self.notes),
            "rounds": [measurement_table(each) for each in self.rounds],
        }


def verify(
    study: Study,
    schedule: Schedule,
    *,
    target: Target,
    notches: Sequence[int],
    out: Path | str,
    bound: Bound = "low",
    most_rounds: int = 4,
    bounds: BlindSpots = NO_BOUNDS,
    proportions: Proportions | None = None,
    min_tokens: int = MIN_TOKENS,
    min_rollouts: int = LEAST_ROLLOUTS,
    on_progress: OnProgress | None = None,
) -> Verification:
    """Measure `schedule` faithfully. If a bin misses the target, raise its budget to the next notch and measure again.

    notches: budgets in tokens, usually the sweep's grid. bound: what must meet the target, the measured quantile
    ("value") or the lower end of its interval ("low"). bounds: a bin that breaks one of them misses the target, too.
    proportions: those of the sweep; a group then goes to its number of times the next notch.
    Round k draws its rollouts with the seed settings.seed + 1 + k, so none of them took part in the fit. Ends when all
    bins meet the target, when no budget can be raised, or after `most_rounds`. Finished rounds are kept in `out` and not
    repeated.
    """
    store = Store(Path(out), sweep_fingerprint(study, schedule.selector, schedule.dense_layers, proportions))
    times = proportions.times if proportions else (1,) * len(schedule.groups)
    rounds: list[Measurement] = []
    notes: list[str] = []
    while True:
        measurement = _round(study, schedule, len(rounds), store, on_progress)
        rounds.append(measurement)
        judged = [cell for cell in cells_for(target, measurement, 0) if cell.counts(min_tokens, min_rollouts)]
        # A rare share needs more tokens than a bound does.
        cells = [cell for cell in judged if cell.counts(needed_tokens(target, min_tokens), min_rollouts)]
        # One that surely misses the target does so by however few tokens.
        low = {cell.name for cell in cells if getattr(cell, bound) < level(target)}
        low |= {cell.name for cell in judged if cell.high < level(target)}
        broken = {cell.name: bounds.broken(measurement, cell.from_context_tokens) for cell in judged}
        missed = [cell for cell in judged if cell.name in low or broken[cell.name]]
        raised = _raised(schedule, missed, notches, times) if len(rounds) < most_rounds else schedule
        notes += [
            _said(cell, len(rounds), target if cell.name in low else None, bound, broken[cell.name], schedule, raised)
            for cell in missed
        ]
        if raised.steps == schedule.steps:
            break
        schedule = raised
    names = tuple(cell.name for cell in missed)
    if not cells and not missed:
        notes.append(
            f"round {len(rounds)}: no length could be judged: each has fewer than "
            f"{needed_tokens(target, min_tokens):,} tokens or {min_rollouts} rollouts; take more prompts or samples"
        )
    met = bool(cells) and not missed
    return Verification(_with_figures(schedule, cells), measurement, met, names, tuple(rounds), tuple(notes), bound)


def _round(study: Study, schedule: Schedule, number: int, store: Store, on_progress: OnProgress | None) -> Measurement:
    name, seed = f"verify-{number}", study.settings.seed + 1 + number
    found = store.load(name)
    # A round that was kept for another schedule belongs to another fit.
    if found is None or found.schedule is None or not _same(found.schedule, schedule) or found.seed != seed:
        found = study.measure(schedule, mode="faithful", seed=seed, on_progress=on_progress)
        store.save(name, found)
    return found


def _same(one: Schedule, other: Schedule) -> bool:
    return one.plain_budgets() == other.plain_budgets() and one.check == other.check


def _raised(schedule: Schedule, missed: Sequence[Cell], notches: Sequence[int], times: Sequence[int]) -> Schedule:
    """The schedule with the next notch in each bin that missed, for every group of layers its number of times of it, and at
    least as much in the longer bins that read as much before."""
    raised = schedule
    for cell in missed:
        start, end = cell.from_context_tokens, cell.to_context_tokens
        before = _budgets(schedule, schedule.step_at(start))
        after = [
            min((many * notch for notch in notches if many * notch > budget and budget < end - 1), default=budget)
            for budget, many in zip(before, times, strict=True)
        ]
        if after != before:
            raised = _at_least(raised, start, before, after)
    return raised


def _budgets(schedule: Schedule, step: Step) -> list[int]:
    """The budgets of a step, one for each group of layers."""
    return [step.of_group(place).budgets[0] for place in range(len(schedule.groups))]


def _at_least(schedule: Schedule, start: int, before: Sequence[int], after: Sequence[int]) -> Schedule:
    """The schedule with at least the budgets `after` from `start` on, where it had at least those of `before`. Raised
    steps lose the figures of their old budgets."""
    steps = list(schedule.steps)
    if all(step.from_context_tokens != start for step in steps):
        steps.append(Step(start, schedule.step_at(start).kv_budget_tokens))
        steps.sort(key=lambda step: step.from_context_tokens)
    lifted = []
    for step in steps:
        own = _budgets(schedule, step)
        new = [
            max(budget, high) if step.from_context_tokens >= start and budget >= low else budget
            for budget, low, high in zip(own, before, after, strict=True)
        ]
        lifted.append(step if new == own else Step(step.from_context_tokens, _written(new)))
    return replace(schedule, steps=tuple(lifted))


def _written(budgets: Sequence[int]) -> int | tuple[int, ...]:
    return budgets[0] if len(budgets) == 1 else tuple(budgets)


def _with_figures(schedule: Schedule, cells: Sequence[Cell]) -> Schedule:
    """The schedule with the figures that were measured with it. A step without data keeps the figures of the fit."""
    found = {cell.from_context_tokens: cell.summary() | {"verified": True} for cell in cells}
    starts = sorted({*found, *(step.from_context_tokens for step in schedule.steps)})
    kept = {step.from_context_tokens: step.measured for step in schedule.steps}
    steps = (
        Step(start, schedule.step_at(start).kv_budget_tokens, found.get(start, kept.get(start))) for start in starts
    )
    return replace(schedule, steps=tuple(steps))


def _said(
    cell: Cell, number: int, target: Target, bound: Bound, broken: list[str], before: Schedule, after: Schedule
) -> str:
    """Why a bin missed. target: what its figure misses; None where it only breaks a bound."""
    budgets = [schedule.step_at(cell.from_context_tokens).budgets for schedule in (before, after)]
    was, then = (" / ".join(map(str, each)) for each in budgets)
    then = f"raised to {then}" if budgets[1] != budgets[0] else "not raised further"
    if target is None:
        return f"round {number}: {cell.name} has {' and '.join(broken)} at {was} tokens, which breaks a bound; {then}"
    if isinstance(target, ImpossibleLimit):
        end = "a share" if bound == "value" else "an upper bound of the share"
        figure = " and ".join([f"{end} of {1 - getattr(cell, bound):.2g}", *broken])
        return f"round {number}: {cell.name} has {figure} at {was} tokens, over {in_words(target)}; {then}"
    figure = " and ".join([f"{bound} {getattr(cell, bound):.4f}", *broken])
    return f"round {number}: {cell.name} has {figure} at {was} tokens, the target is {target}; {then}"
