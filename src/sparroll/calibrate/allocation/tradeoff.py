"""From sweeps to the schedule whose KL (or another loss) is the smallest that a decode step of a given time allows, and to
the picture of both for every selector that was swept. Arithmetic on measurements; nothing here runs a model.

What a budget loses is taken from its sweep, bin by bin, as the fit takes the tail: the regression over budgets, weighted
by tokens. What it costs is what it adds to the predicted time of a step (plan/), weighted by how many of the dense
rollouts' decode steps are at these lengths. Where groups of layers were varied alone, what they lose is added up, which
only a verification of the whole can confirm. allocate.py chooses.
"""

# B bins, G groups of layers, O budgets measured in one of them, F figures: see wanted.FIGURES

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from sparroll.calibrate.allocation.allocate import Allocation, Frontier, Offer, OfferedBin, frontier
from sparroll.calibrate.allocation.swept_bins import Stretch, SweptBin, swept_bin
from sparroll.calibrate.allocation.wanted import LOW, TAIL, Point, Tradeoff, Wanted, selector_label
from sparroll.calibrate.bounds import holding, without_lists
from sparroll.calibrate.choice import Machine
from sparroll.calibrate.curve import Cell, Curve, cells_of
from sparroll.calibrate.fit import (
    FittedBin,
    FittedSchedule,
    curves_of,
    lacking,
    steps_of,
    too_little_data,
)
from sparroll.calibrate.measure import Measurement
from sparroll.calibrate.sweep import Sweep
from sparroll.calibrate.target import target_table
from sparroll.errors import UserError
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.step_reads import StepReads
from sparroll.rounding import percent_up, rounded_up
from sparroll.schedule import Schedule, Step

_SHOWN = 24
"""Choices of a selector in the picture."""
_TIME_TOLERANCE = 1e-3


def trade_off(
    sweeps: Sequence[Sweep], machine: Machine, wanted: Wanted, most_step_seconds: float | None = None, **about: Any
) -> Tradeoff:
    """The best schedule of these sweeps, each of which has its own selector.

    most_step_seconds: time of a decode step that the schedule may take; not for the objective "time".  about: model,
    made_by and name of the schedule. Raises the last sweep's error where none gives a schedule.
    """
    assert (most_step_seconds is None) == (wanted.objective == "time"), "time is the objective or the limit"
    # (what is to be small, the schedule, its point, its sweep)
    found: list[tuple[tuple[float, float], FittedSchedule, Point, Sweep]] = []
    points: list[Point] = []
    refused: list[str] = []
    error: UserError | None = None
    for sweep in sweeps:
        try:
            tried = _Tried(sweep, machine, wanted)
            points += tried.one_budget_points()
            fitted, point = tried.choice(most_step_seconds, about)
            # A fit may hold the target where the regression of the KL breaks a bound; the picture then lacks this line.
            with suppress(UserError) if most_step_seconds is None else nullcontext():
                points += tried.allocated_points()
        except UserError as problem:
            error = problem
            refused.append(f"{selector_label(sweep.selector)}: {problem.message}")
            continue
        order = (point.step_seconds, point.kl)
        if most_step_seconds is not None:
            order = (point.figures[wanted.column], point.step_seconds)
        found.append((order, fitted, point, sweep))
    if not found:
        assert error is not None, "there is a sweep"
        raise error
    _, fitted, point, sweep = min(found, key=lambda each: each[0])
    dense = point.step_seconds / point.step_time_share
    times = tuple(dict.fromkeys(machine.times_said(each.selector) for each in sweeps))
    made = Tradeoff(
        fitted,
        sweep,
        wanted,
        point,
        (*points, point),
        machine.hardware.name,
        dense,
        most_step_seconds,
        tuple(refused),
        times,
    )
    made_by = {**(fitted.schedule.made_by or {}), "chosen": made.said()}
    return replace(made, fitted=replace(fitted, schedule=replace(fitted.schedule, made_by=made_by)))


def with_verification(
    made: Tradeoff, machine: Machine, schedule: Schedule, measurement: Measurement
) -> tuple[Tradeoff, Schedule]:
    """The trade-off with the point that a verification measured, and the verified schedule, which says it, too."""
    counting = [
        cell
        for cell in cells_of(measurement.tail(), 0)
        if cell.counts(made.wanted.min_tokens, made.wanted.min_rollouts)
    ]
    if measurement.divergence is None or not counting:
        return made, schedule
    overall, planned = measurement.divergence.overall(), machine.plan(schedule)
    tails = 1 - min(cell.value for cell in counting), 1 - min(cell.low for cell in counting)
    seconds, dense = planned.sparse.seconds, planned.dense.seconds
    figures = (overall.kl, *overall.over_nats, *tails)
    point = Point(made.point.selector, "verified", seconds, seconds / dense, figures, _budgets(schedule))
    said = f"KL {rounded_up(point.kl, 5)} at {percent_up(point.step_time_share, 1)} of a dense step's predicted time"
    made_by = {**(schedule.made_by or {}), "verified": said}
    return replace(made, verified=point), replace(schedule, made_by=made_by)


def _budgets(schedule: Schedule) -> tuple[tuple[int, Any], ...]:
    return tuple((step.from_context_tokens, step.kv_budget_tokens) for step in schedule.steps)


class _Tried:
    """One sweep: its bins, what they cost, and the choices that hold the bounds."""

    def __init__(self, sweep: Sweep, machine: Machine, wanted: Wanted):
        if not sweep.settings.list_tokens:
            raise without_lists(sweep.settings.estimator)
        self.sweep, self.machine, self.wanted = sweep, machine, wanted
        self.label = selector_label(sweep.selector)
        self.batch = 0
        self.parts = sweep.parts(machine.shape.layers)
        """(Number of layers, cells) of everything that has budgets of its own."""
        self.ceilings = {each.from_context_tokens: each for each in sweep.ceiling_cells() if self._counts(each)}
        self.bins, self.notes = self._bins()
        self._front: Frontier | None = None
        self._fixed_seconds = 0.0

    def _counts(self, cell: Cell) -> bool:
        return cell.counts(self.wanted.min_tokens, self.wanted.min_rollouts)

    # -- what was measured --------------------------------------------------------------------------------------------

    def _bins(self) -> tuple[list[SweptBin], list[str]]:
        """The bins with data, each with the contexts that its budget rules, and notes about the others."""
        limits, cells = self.wanted.limits(), [cell for _, cells in self.parts for cell in cells]
        of_bins = self._curves(cells)
        if not any(of_bins.values()):
            raise too_little_data(cells, self.wanted.min_tokens, self.wanted.min_rollouts)
        tokens = {cell.from_context_tokens: cell.tokens for cell in (*cells, *self.sweep.ceiling_cells())}
        found: list[SweptBin] = []
        waiting: list[Stretch] = []
        notes: list[str] = []
        for (start, end), curves in of_bins.items():
            here = Stretch(start, end)
            made = swept_bin(start, end, float(tokens[start]), curves, self.sweep.selector) if curves else None
            if made is None or (not made.holds(limits) and not made.reaches(max(self.sweep.budgets))):
                waiting.append(here)
                continue
            if waiting:
                notes.append(self._lacking(waiting, f"the budget of {made.name}"))
            found.append(replace(made, stretches=(*waiting, here)))
            waiting = []
        if not found:
            raise UserError(
                f"no bin has enough data at the largest budget, {max(self.sweep.budgets)} tokens, and smaller ones miss "
                "the target",
                "take more prompts, more samples or wider bins",
            )
        last = found[-1]
        if waiting:
            notes.append(self._lacking(waiting, f"the share of the context read in {last.name}"))
            longer = (replace(each, scale=each.end / last.end) for each in waiting)
            found[-1] = replace(last, stretches=(*last.stretches, *longer))
        of_each = " in each group of layers" if len(self.sweep.layer_groups) > 1 else ""
        longest = max(end for _, end in of_bins)
        notes.append(f"contexts from {longest} on were not measured; they take the largest budget of any bin{of_each}")
        whole = sum(each.weight for each in found)
        return [replace(each, weight=each.weight / whole) for each in found], notes

    def _curves(self, cells: list[Cell]) -> dict[tuple[int, int], list[Curve]]:
        """For every bin from 0 on the curves of all parts, or none where one of them has too little data."""
        of_parts = [
            dict(curves_of(own, [each for each in own if self._counts(each)], self.ceilings, self.sweep.selector))
            for _, own in self.parts
        ]
        found = {}
        for where in sorted({where for curves in of_parts for where in curves}):
            here = [curves.get(where) for curves in of_parts]
            found[where] = [curve for curve in here if curve is not None] if all(here) else []
        return found

    def _lacking(self, waiting: Sequence[Stretch], budget: str) -> str:
        least = self.wanted.min_tokens, self.wanted.min_rollouts
        return lacking(waiting[0].start, waiting[-1].end, budget, *least)

    # -- what it costs ------------------------------------------------------------------------------------------------

    def _added_seconds(self, stretches: Sequence[Stretch], layers: int, kv_budget_tokens: int) -> float:
        """What the reads of some sparse layers add to a step of the batch, with this budget in these contexts."""
        mix, selector = self.machine.lengths, self.sweep.selector
        kernels = self.machine.kernels_of(selector)
        contexts, total = np.ceil(mix.tokens), 0.0
        for each in stretches:
            inside = (contexts >= each.start) & (contexts < each.end)
            part = LengthMix(mix.text, mix.tokens[inside], mix.weights[inside])
            budget = Schedule.fixed(each.budget(kv_budget_tokens, selector.unit_tokens), selector, dense_layers=())
            reads = StepReads(self.machine.shape, budget, self.machine.element_bytes)
            if len(part.tokens) and kernels is not None:
                total += layers * kernels.added_seconds(selector, reads.load(budget, part, self.batch), mix)
            elif len(part.tokens):
                tokens = sum(reads.layer_sums(part)) * layers / self.machine.shape.layers
                total += self.batch * tokens * reads.token_bytes / self._bytes_per_second
        return total

    @property
    def _bytes_per_second(self) -> float:
        if self.machine.time_model is not None:
            return self.machine.time_model.cache_bytes_per_second
        if self.machine.kernels is not None:
            return self.machine.kernels.dense_bytes_per_second
        return self.machine.hardware.bandwidth_bytes_per_second

    def front(self) -> Frontier:
        """All choices that hold the bounds and are not beaten."""
        if self._front is not None:
            return self._front
        limits = self.wanted.limits()
        self.batch = self.machine.plan(Schedule.fixed(self.sweep.budgets[-1], self.sweep.selector, ())).batch
        offered = []
        for each in self.bins:
            groups = tuple(
                tuple(
                    Offer(
                        budget,
                        self._added_seconds(each.stretches, layers, budget),
                        each.weight * float(change_F[self.wanted.column]),
                        tuple(float(change_F[column]) for _, column, _ in limits),
                    )
                    for budget, change_F in zip(budgets, changes, strict=True)
                )
                for (layers, _), budgets, changes in zip(self.parts, each.budgets, each.changes, strict=True)
            )
            room = tuple(most - float(each.base_F[column]) for _, column, most in limits)
            offered.append(OfferedBin(each.name, groups, room))
        front = frontier(offered, [name for name, _, _ in limits])
        # At the slowest choice a step is the least likely to be bound by its arithmetic, which no budget changes much.
        slowest = front[len(front) - 1]
        self._fixed_seconds = self.machine.plan(self._schedule(slowest)).sparse.seconds - slowest.seconds
        self._front = front
        return front

    # -- what follows -------------------------------------------------------------------------------------------------

    def choice(self, most_step_seconds: float | None, about: Mapping[str, Any]) -> tuple[FittedSchedule, Point]:
        """The best schedule in that time, or without a limit the cheapest one that holds the bounds, as `fit` has it."""
        wanted = self.wanted
        if most_step_seconds is None:
            least: dict[str, Any] = {"min_tokens": wanted.min_tokens, "min_rollouts": wanted.min_rollouts}
            held = wanted.bounds.least_budgets(self.sweep, **least)
            fitted = self.sweep.fit(wanted.target, least_budgets=held, **least, **about)
            return holding(fitted, wanted.bounds), self._point_of(fitted.schedule)
        front = self.front()
        left = most_step_seconds - self._fixed_seconds
        if left < front.seconds_N[0] * (1 - 1e-9):
            raise self._too_slow(front[0], most_step_seconds)
        best = front.within(left)
        fitted = self._fitted(best, about)
        point = self._point(best, "chosen")
        if point.step_seconds > most_step_seconds * (1 + _TIME_TOLERANCE):
            raise UserError(
                f"a step takes {rounded_up(1e3 * point.step_seconds, 3)} ms whatever it reads, because its arithmetic does, "
                f"and {rounded_up(1e3 * most_step_seconds, 3)} ms is the most",
                "allow more time; budgets do not shorten a step that arithmetic bounds",
            )
        return holding(fitted, wanted.bounds), point

    def _too_slow(self, fastest: Allocation, most_step_seconds: float) -> UserError:
        need, dense = fastest.seconds + self._fixed_seconds, self._dense_seconds()
        if need >= dense:
            return UserError(
                f"no schedule that holds the target and every bound is faster than a dense step on "
                f"{self.machine.hardware.name}: the fastest one takes {percent_up(need / dense, 1)} of its time",
                "measure longer contexts (--max-new-tokens) or smaller budgets, or ask for less: a lower target",
            )
        return UserError(
            f"{most_step_seconds / dense:.1%} of a dense step's time is too little: to hold the target and every bound, a "
            f"step takes {percent_up(need / dense, 1)} ({rounded_up(1e3 * need, 3)} ms of {1e3 * dense:.3f} on "
            f"{self.machine.hardware.name})",
            f"allow that share, {rounded_up(need / dense, 3)}, or ask for less: a lower target, a larger share of "
            "impossible tokens",
        )

    def _dense_seconds(self) -> float:
        return self.machine.plan(Schedule.fixed(self.sweep.budgets[-1], self.sweep.selector, ())).dense.seconds

    def _fitted(self, allocation: Allocation, about: Mapping[str, Any]) -> FittedSchedule:
        settings, bins = self.sweep.settings, self._fitted_bins(allocation)
        target = target_table(self.wanted.target, settings.estimator, settings.quantile, settings.list_tokens)
        schedule = replace(self._schedule(allocation), target=target, **about)
        return FittedSchedule(schedule, tuple(bins), tuple(self.notes))

    def _fitted_bins(self, allocation: Allocation) -> list[FittedBin]:
        unit, found = self.sweep.selector.unit_tokens, []
        for each, budgets in zip(self.bins, allocation.budgets, strict=True):
            for stretch in each.stretches:
                # Nobody measured a combination of groups yet.
                own = stretch.start == each.start and len(budgets) == 1
                measured = each.curves[0].measured(budgets[0]) if own else None
                ceiling = self.ceilings.get(stretch.start)
                summary = ceiling.summary() if ceiling else None
                here = tuple(stretch.budget(budget, unit) for budget in budgets)
                found.append(
                    FittedBin(stretch.start, stretch.end, here if len(here) > 1 else here[0], measured, summary)
                )
        return found

    def _schedule(self, allocation: Allocation) -> Schedule:
        bins = self._fitted_bins(allocation)
        steps = steps_of(bins)
        # Budgets may fall with length, and the last one may be small because its bin is easy.
        largest = tuple(max(column) for column in zip(*(step.budgets for step in steps), strict=True))
        if largest != steps[-1].budgets:
            steps = (*steps, Step(bins[-1].to_context_tokens, largest if len(largest) > 1 else largest[0]))
        groups = self.sweep.layer_groups if len(self.sweep.layer_groups) > 1 else ()
        return Schedule(steps, self.sweep.selector, self.sweep.dense_layers, layer_groups=groups)

    def one_budget_points(self) -> list[Point]:
        """Each measured budget at every length, in all groups of layers alike. With groups, what each loses alone is added
        up, as for the choices."""
        points = []
        for budget in self.sweep.grid:
            schedule = Schedule.fixed(budget, self.sweep.selector, self.sweep.dense_layers)
            points.append(self._point_of(schedule, "one budget"))
        return points

    def allocated_points(self) -> list[Point]:
        """The best choices for times from the least on."""
        return [self._point(each, "allocated") for each in self.front().spread(_SHOWN)]

    def _point(self, allocation: Allocation, how: Literal["allocated", "chosen"]) -> Point:
        figures = [each.figures(own) for each, own in zip(self.bins, allocation.budgets, strict=True)]
        return self._drawn(self._schedule(allocation), how, figures)

    def _point_of(self, schedule: Schedule, how: Literal["one budget", "chosen"] = "chosen") -> Point:
        """A schedule whose budgets may lie between measured ones."""
        figures = []
        for each in self.bins:
            figures.append(each.base_F + each.changes_at(schedule.kv_budget_tokens(each.start)))
        return self._drawn(schedule, how, figures)

    def _drawn(
        self, schedule: Schedule, how: Literal["one budget", "allocated", "chosen"], figures: Sequence[np.ndarray]
    ) -> Point:
        of_bins_BF = np.stack(figures)
        means_F = np.array([each.weight for each in self.bins]) @ of_bins_BF
        # What groups lose alone may add up to more than there is.
        means_F[[TAIL, LOW]] = of_bins_BF[:, [TAIL, LOW]].max(0).clip(max=1.0)
        planned = self.machine.plan(schedule)
        seconds, dense = planned.sparse.seconds, planned.dense.seconds
        return Point(self.label, how, seconds, seconds / dense, tuple(means_F.tolist()), _budgets(schedule))
