"""The measured tail of one length bin as a non-decreasing function of the budget. Looks at one bin by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from sparroll.mismatch.divergence import BinDivergence, Divergence
from sparroll.mismatch.table import TailFigures, TailRow, TailTable


@dataclass(frozen=True)
class Cell(TailFigures):
    """The tail measured in one length bin under one fixed budget.

    >>> Cell(kv_budget_tokens=1024, from_context_tokens=2000, to_context_tokens=4000, value=0.864, low=0.859, high=0.868,
    ...      tokens=81_234, rollouts=512)
    """

    kv_budget_tokens: int
    from_context_tokens: int
    to_context_tokens: int
    """Exclusive."""
    value: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    tokens: int
    rollouts: int
    divergence: BinDivergence | None = None
    """KL and impossible tokens; None where they were not measured."""
    impossible_nats: int | None = None
    """Where set, the figures are 1 minus the share of tokens that are more than this off; see target.py."""

    def summary(self) -> dict[str, Any]:
        """The figures that a schedule file keeps."""
        figures = _plain(self.value, self.low, self.high, self.impossible_nats)
        return {**figures, "tokens": self.tokens, "rollouts": self.rollouts}

    @staticmethod
    def of(row: TailRow, kv_budget_tokens: int, divergence: BinDivergence | None = None) -> Cell:
        """A row of a tail table that was measured under this budget."""
        bin = row.from_context_tokens, row.to_context_tokens
        return Cell(kv_budget_tokens, *bin, row.value, row.low, row.high, row.tokens, row.rollouts, divergence)


def cells_of(table: TailTable, kv_budget_tokens: int, divergence: Divergence | None = None) -> list[Cell]:
    """A tail table, measured under one fixed budget, as cells."""
    of_bins = divergence.bins() if divergence is not None else {}
    return [Cell.of(row, kv_budget_tokens, of_bins.get(row.from_context_tokens)) for row in table.rows]


def _plain(value: float, low: float, high: float, impossible_nats: int | None) -> dict[str, float]:
    """Figures as a file has them: of an acceptance to six digits behind the point, of a share to four digits in all."""
    if impossible_nats is None:
        return {"value": round(value, 6), "low": round(low, 6), "high": round(high, 6)}
    shares = {"value": 1 - value, "low": 1 - high, "high": 1 - low}
    return {name: float(f"{share:.4g}") for name, share in shares.items()}


@dataclass(frozen=True)
class Curve:
    """The budgets measured in one bin, in rising order, with lines between them."""

    points: tuple[Cell, ...]
    unit_tokens: int
    dense_from: int
    """The smallest budget that reads every context of the bin completely."""

    @staticmethod
    def through(cells: Sequence[Cell], ceiling: Cell | None, end: int, unit_tokens: int) -> Curve:
        """The curve through the cells of one bin, which ends before `end`. Cells whose budget reads every context
        completely become one dense point. It takes the figures of the dense ceiling, if that was measured."""
        longest = end - 1
        dense_from = -(-longest // unit_tokens) * unit_tokens
        points = sorted((c for c in cells if c.kv_budget_tokens < longest), key=lambda cell: cell.kv_budget_tokens)
        whole = [cell for cell in cells if cell.kv_budget_tokens >= longest]
        if whole:
            points.append(replace(ceiling or max(whole, key=lambda cell: cell.tokens), kv_budget_tokens=dense_from))
        return Curve(tuple(points), unit_tokens, dense_from)

    def reaches(self, kv_budget_tokens: int) -> bool:
        """Whether that budget, or one that reads every context of the bin completely, was measured in this bin."""
        return self.points[-1].kv_budget_tokens >= min(kv_budget_tokens, self.dense_from)

    def cheapest(self, target: float, floor: int) -> int | None:
        """The smallest budget of whole units, at least `floor`, whose lower bound meets the target; None if none does.

        The measured budget at the upper end of a segment must meet the target with its own lower bound, too, and not
        only with that of the regression. If `floor` is larger than all budgets that do, the result is `floor`, because
        the regression never falls with the budget.
        """
        fitted = self._fitted("low")
        meeting = [i for i, low in enumerate(self.lows()) if low >= target]
        for index in meeting:
            budget = max(floor, self._crossing(index, fitted, target))
            if budget <= self.points[index].kv_budget_tokens:
                return budget
        return floor if meeting else None

    def lows(self) -> np.ndarray:
        """The lower bound that counts at each measured budget: its own, or that of the regression if it is lower."""
        return np.minimum([cell.low for cell in self.points], self._fitted("low"))

    def values(self) -> np.ndarray:
        """The tail at each measured budget, which never falls with the budget."""
        return self._fitted("value")

    def falling(self, figures: Sequence[float]) -> np.ndarray:
        """A figure of each measured budget that never rises with the budget, such as the KL."""
        tokens = np.array([cell.tokens for cell in self.points], dtype=np.float64)
        return isotonic_regression(np.array(figures, dtype=np.float64), weights=tokens, increasing=False).x

    def measured(self, kv_budget_tokens: int) -> dict[str, Any]:
        """The figures at a budget. Between measured budgets they are interpolated, and marked with `interpolated`."""
        for cell in self.points:
            if cell.kv_budget_tokens == min(kv_budget_tokens, self.dense_from):
                return cell.summary() | ({"dense": True} if kv_budget_tokens >= self.dense_from else {})
        below = [cell for cell in self.points if cell.kv_budget_tokens < kv_budget_tokens]
        above = [cell for cell in self.points if cell.kv_budget_tokens > kv_budget_tokens]
        if not above:
            return below[-1].summary() | {"at_kv_budget_tokens": below[-1].kv_budget_tokens}
        if not below:
            return above[0].summary() | {"at_kv_budget_tokens": above[0].kv_budget_tokens}
        logs = [math.log(cell.kv_budget_tokens) for cell in self.points]
        at = math.log(kv_budget_tokens)
        value, low, high = (float(np.interp(at, logs, self._fitted(name))) for name in ("value", "low", "high"))
        figures = _plain(value, low, high, self.points[0].impossible_nats)
        tokens = min(below[-1].tokens, above[0].tokens)
        rollouts = min(below[-1].rollouts, above[0].rollouts)
        return {**figures, "tokens": tokens, "rollouts": rollouts, "interpolated": True}

    def _fitted(self, name: str) -> np.ndarray:
        raw = np.array([getattr(cell, name) for cell in self.points], dtype=np.float64)
        return isotonic_regression(raw, weights=np.array([cell.tokens for cell in self.points], dtype=np.float64)).x

    def _crossing(self, index: int, fitted: np.ndarray, target: float) -> int:
        """The budget, in whole units, at which the line that ends at point `index` reaches the target."""
        at = self.points[index].kv_budget_tokens
        if index == 0:
            return at
        before = self.points[index - 1].kv_budget_tokens
        if fitted[index - 1] >= target:
            return before if self.points[index - 1].low >= target else at
        share = (target - fitted[index - 1]) / (fitted[index] - fitted[index - 1])
        budget = before * (at / before) ** share
        return min(at, math.ceil(budget / self.unit_tokens - 1e-9) * self.unit_tokens)
