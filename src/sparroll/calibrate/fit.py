"""From measured tails (budget x length bin) to a schedule, which has for each bin the smallest budget whose lower
confidence bound meets the target. Pure arithmetic on a table; nothing here runs a model.

In each bin the lower bounds become a non-decreasing function of the budget (isotonic regression, weighted by tokens),
joined by straight lines in the logarithm of the budget. Measured curves are concave on this scale, so a line lies below
them, and an interpolated budget is rather too large than too small. Budgets are rounded up to whole units and never
fall with length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparroll.attention.selectors import Selector
from sparroll.calibrate.curve import Cell, Curve
from sparroll.calibrate.target import OutOfReach, Target, check_target, in_words, level, needed_tokens, target_table
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.table import bin_name
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule, Step

MIN_TOKENS = 400
"""With fewer tokens in a cell, its 5th percentile rests on fewer than twenty of them."""


@dataclass(frozen=True)
class FittedBin:
    """The budget that was chosen for one bin of context lengths, and the measurements behind it."""

    from_context_tokens: int
    to_context_tokens: int
    kv_budget_tokens: int | tuple[int, ...]
    """Several numbers are those of the schedule's layer groups."""
    measured: dict[str, Any] | None
    """{"value", "low", "high", "tokens", "rollouts"} at this budget, with `interpolated = true` if the budget lies
    between measured ones; None in a bin without data."""
    dense_ceiling: dict[str, Any] | None
    """The same statistic with dense rollouts; None if it was not measured."""

    @property
    def name(self) -> str:
        return bin_name(self.from_context_tokens, self.to_context_tokens)


@dataclass(frozen=True)
class Unmeasured:
    """A note about lengths without data, which says what they take."""

    said: str
    """The note up to the budget."""
    context_tokens: int
    """One of these lengths, whose budget it names."""
    source: str
    """Where the budget is from."""
    source_tokens: int | None = None
    """The source is told while the bin of this length has the budget that was fitted; None: always."""

    def note(self, schedule: Schedule, fitted: Schedule) -> str:
        """The note about `schedule`, in which budgets may be larger than in the fitted one."""
        budget = " / ".join(map(str, schedule.step_at(self.context_tokens).budgets))
        raised = self.source_tokens is not None and (
            schedule.step_at(self.source_tokens).kv_budget_tokens != fitted.step_at(self.source_tokens).kv_budget_tokens
        )
        return f"{self.said}{budget} tokens{'' if raised else self.source}"


@dataclass(frozen=True)
class FittedSchedule:
    """The schedule, the choice in each bin, and notes for the reader."""

    schedule: Schedule
    bins: tuple[FittedBin, ...]
    notes: tuple[str, ...]
    gaps: tuple[Unmeasured, ...] = ()
    """Those notes that name budgets of lengths without data."""

    def with_schedule(self, schedule: Schedule) -> FittedSchedule:
        """The same choice with another form of the schedule, whose budgets the notes then name."""
        return replace(self, schedule=schedule, notes=self.notes_under(schedule))

    def notes_under(self, schedule: Schedule) -> tuple[str, ...]:
        """The notes with the budgets of this schedule, which a verification may have raised."""
        now = {gap.note(self.schedule, self.schedule): gap.note(schedule, self.schedule) for gap in self.gaps}
        return tuple(now.get(note, note) for note in self.notes)


def fit_schedule(
    cells: Sequence[Cell],
    *,
    target: Target,
    selector: Selector,
    dense_layers: Sequence[int],
    estimator: str,
    quantile: float = 0.05,
    top_k: int | None = None,
    ceiling: Sequence[Cell] = (),
    least_budgets: Mapping[int, int] | None = None,
    min_tokens: int = MIN_TOKENS,
    min_rollouts: int = LEAST_ROLLOUTS,
    model: str | None = None,
    made_by: dict[str, Any] | None = None,
    name: str = "calibrated",
) -> FittedSchedule:
    """Fit a schedule to measured cells, which have the figures of the target's statistic (`target.cells_for`).

    ceiling: cells measured with dense rollouts, one per bin; their budget is ignored.  least_budgets: by the start of a
    bin, a budget that it has at least, even if less meets the target. A cell with fewer than
    `min_tokens` tokens or `min_rollouts` rollouts is left out. A bin without any cell left takes the budget of the next
    longer bin that has one. Bins beyond the longest measured one read the same share of the context as that one. So a
    length that nobody measured never reads less than the measurements support; `notes` names these bins.
    Raises UserError if the dense ceiling, or the largest budget, misses the target.
    """
    check_target(target)
    if not cells:
        raise UserError("there are no measured cells to fit")
    min_tokens = needed_tokens(target, min_tokens)
    needs = _Needs(target, min_tokens, min_rollouts, max(cell.kv_budget_tokens for cell in cells))
    ceilings = {cell.from_context_tokens: cell for cell in ceiling if needs.enough(cell)}
    needs.check_ceiling(list(ceilings.values()))
    counting = [cell for cell in cells if needs.enough(cell)]
    curves = curves_of(cells, counting, ceilings, selector)
    if not any(curve for _, curve in curves):
        raise too_little_data(cells, min_tokens, min_rollouts)
    bins, gaps = _walk(curves, ceilings, needs, selector, least_budgets or {})
    schedule = Schedule(
        steps=steps_of(bins),
        selector=selector,
        dense_layers=tuple(dense_layers),
        model=model,
        target=target_table(target, estimator, quantile, top_k) or None,
        made_by=made_by,
        name=name,
    )
    notes = tuple(gap.note(schedule, schedule) for gap in gaps)
    return FittedSchedule(schedule, tuple(bins), notes, tuple(gaps))


def dense_rollouts_exceed(limit: ImpossibleLimit, cell: Cell) -> OutOfReach:
    """The error where dense rollouts have too many impossible tokens themselves."""
    return OutOfReach(
        f"dense rollouts have a share of {1 - cell.value:.2g} at {cell.name}, above {in_words(limit)}: engine and trainer "
        "differ by more than any budget can repair",
        "raise the limit, or raise the engine's precision",
    )


def too_little_data(cells: Sequence[Cell], min_tokens: int, min_rollouts: int) -> UserError:
    """The error where no cell has enough tokens and rollouts to be fitted."""
    best = max(cells, key=lambda cell: (cell.rollouts, cell.tokens))
    return UserError(
        f"no bin can be fitted: a cell needs {min_tokens} tokens from {min_rollouts} rollouts, and the fullest one has "
        f"{best.tokens} from {best.rollouts}",
        "take more prompts, more samples or wider bins",
    )


def curves_of(
    cells: Sequence[Cell], counting: Sequence[Cell], ceilings: Mapping[int, Cell], selector: Selector
) -> list[tuple[tuple[int, int], Curve | None]]:
    """Every bin from 0 to the longest one that has a cell, with its curve through the cells that count, or None if there
    is none. ceilings: the dense ceiling by the start of a bin."""
    width = _bin_tokens([*cells, *ceilings.values()])
    curves = []
    for start in range(0, max(cell.from_context_tokens for cell in cells) + 1, width):
        here = [cell for cell in counting if cell.from_context_tokens == start]
        curve = Curve.through(here, ceilings.get(start), start + width, selector.unit_tokens) if here else None
        curves.append(((start, start + width), curve))
    return curves


def _walk(
    curves: Sequence[tuple[tuple[int, int], Curve | None]],
    ceilings: dict[int, Cell],
    needs: _Needs,
    selector: Selector,
    least_budgets: Mapping[int, int],
) -> tuple[list[FittedBin], list[Unmeasured]]:
    """Choose the budgets bin by bin; they never fall. A bin without data waits for the next one with data."""
    bins: list[FittedBin] = []
    waiting: list[FittedBin] = []
    gaps: list[Unmeasured] = []
    floor = selector.least_budget_tokens
    for (start, end), curve in curves:
        floor = max(floor, least_budgets.get(start, 0))
        cheapest = curve.cheapest(level(needs.target), floor) if curve else None
        if curve and cheapest is None and curve.reaches(needs.largest):
            raise needs.missed(curve, bin_name(start, end), ceilings.get(start))
        measured = curve.measured(cheapest) if curve and cheapest is not None else None
        found = FittedBin(start, end, cheapest or 0, measured, ceilings[start].summary() if start in ceilings else None)
        if cheapest is None:
            waiting.append(found)
            continue
        if waiting:
            start, source = waiting[0].from_context_tokens, f", those of {found.name}"
            gaps.append(Unmeasured(needs.lacking(waiting, ""), start, source, found.from_context_tokens))
        bins += [*(replace(skipped, kv_budget_tokens=cheapest) for skipped in waiting), found]
        floor, waiting = cheapest, []
    if not bins:
        raise UserError(
            f"no bin has enough data at the largest budget, {needs.largest} tokens, and smaller ones miss the target",
            "take more prompts, more samples or wider bins",
        )
    last = bins[-1]
    for skipped in waiting:
        # The same share of the context as in the longest measured bin, in whole units.
        assert isinstance(last.kv_budget_tokens, int), "a fit knows no groups of layers"
        share_tokens = last.kv_budget_tokens * skipped.to_context_tokens / last.to_context_tokens
        whole_tokens = math.ceil(share_tokens / selector.unit_tokens) * selector.unit_tokens
        least = least_budgets.get(skipped.from_context_tokens, 0)
        assert isinstance(bins[-1].kv_budget_tokens, int)
        bins.append(replace(skipped, kv_budget_tokens=max(whole_tokens, least, bins[-1].kv_budget_tokens)))
    if waiting:
        bounded = ", or what the bounds need" if any(least_budgets.values()) else ""
        share = f"the share of the context read in {last.name}{bounded}"
        start = waiting[-1].from_context_tokens
        gaps.append(Unmeasured(needs.lacking(waiting, "up to "), start, f", {share}", start))
    beyond = f"contexts from {curves[-1][0][1]} on were not measured; they take the "
    gaps.append(Unmeasured(beyond, bins[-1].from_context_tokens, f" of {bins[-1].name}"))
    return bins, gaps


@dataclass(frozen=True)
class _Needs:
    """How much data a cell needs, which target a budget must meet, and the errors and notes if they do not."""

    target: Target
    min_tokens: int
    min_rollouts: int
    largest: int
    """Largest budget of the sweep."""

    def enough(self, cell: Cell) -> bool:
        return cell.counts(self.min_tokens, self.min_rollouts)

    def check_ceiling(self, ceilings: Sequence[Cell]) -> None:
        for cell in ceilings:
            if cell.value < level(self.target) and isinstance(self.target, ImpossibleLimit):
                raise dense_rollouts_exceed(self.target, cell)
            if cell.value < level(self.target):
                lowest = rounded_down(min(each.value for each in ceilings))
                raise OutOfReach(
                    f"the dense ceiling at {cell.name} is {rounded_down(cell.value)}, below the target of {self.target}: "
                    "even dense rollouts miss it. Engine and trainer differ, or too much of the probability is on tokens "
                    "that the estimator does not count",
                    f"lower the target to {lowest} or less, raise the engine's precision, or lower the temperature",
                )

    def missed(self, curve: Curve, where: str, ceiling: Cell | None) -> OutOfReach:
        best = max(curve.points, key=lambda cell: cell.low)
        if isinstance(self.target, ImpossibleLimit):
            return OutOfReach(
                f"no budget meets {in_words(self.target)} at {where}: the least upper bound is {1 - best.low:.2g} (share "
                f"{1 - best.value:.2g}, {best.tokens} tokens) at {best.kv_budget_tokens} tokens",
                "measure larger budgets, take more rollouts if the share itself meets the limit, or raise the limit",
            )
        dense = f"; dense rollouts reach {rounded_down(ceiling.value)}" if ceiling else ""
        return OutOfReach(
            f"no budget meets the target of {self.target} at {where}: the best lower bound is {rounded_down(best.low)} "
            f"(value {rounded_down(best.value)}) at {best.kv_budget_tokens} tokens{dense}",
            "measure larger budgets, take more rollouts if the value itself meets the target, or lower the target",
        )

    def lacking(self, bins: Sequence[FittedBin], budget: str) -> str:
        return lacking(
            bins[0].from_context_tokens, bins[-1].to_context_tokens, budget, self.min_tokens, self.min_rollouts
        )


def lacking(start: int, end: int, budget: str, min_tokens: int, min_rollouts: int) -> str:
    """The note about bins without data, and what they take."""
    return (
        f"{bin_name(start, end)}: fewer than {min_tokens} tokens or {min_rollouts} rollouts at the budgets that matter, so "
        f"it takes {budget}"
    )


def _bin_tokens(cells: Sequence[Cell]) -> int:
    widths = {cell.to_context_tokens - cell.from_context_tokens for cell in cells}
    width = widths.pop()
    if widths or width <= 0 or any(cell.from_context_tokens % width for cell in cells):
        raise UserError("the cells must share one bin width and start at its multiples", "fit cells of one sweep")
    return width


def steps_of(bins: Sequence[FittedBin]) -> tuple[Step, ...]:
    """One step for each bin with data, and one wherever the budget changes."""
    steps: list[Step] = []
    for found in bins:
        if steps and found.measured is None and steps[-1].kv_budget_tokens == found.kv_budget_tokens:
            continue
        steps.append(Step(found.from_context_tokens, found.kv_budget_tokens, found.measured))
    return tuple(steps)
