"""What a sweep says of one bin: the figures of every budget that was measured in it, and the contexts that the bin's budget
rules. Knows no time and chooses nothing."""

# G groups of layers, O budgets measured in one of them, F figures: see wanted.FIGURES

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparroll.attention.selectors import Selector
from sparroll.calibrate.allocation.wanted import FIGURES
from sparroll.calibrate.curve import Curve
from sparroll.mismatch.table import bin_name


@dataclass(frozen=True)
class Stretch:
    """Contexts that a bin's budget rules, times a scale: its own, and those of bins without data."""

    start: int
    end: int
    scale: float = 1.0

    def budget(self, kv_budget_tokens: int, unit_tokens: int) -> int:
        return math.ceil(kv_budget_tokens * self.scale / unit_tokens - 1e-9) * unit_tokens


@dataclass(frozen=True)
class SweptBin:
    """What was measured in one bin, for every group of layers."""

    start: int
    end: int
    weight: float
    """Its share of the tokens."""
    base_F: np.ndarray
    """Figures that the changes of all groups are added to."""
    budgets: tuple[tuple[int, ...], ...]
    """[G][O]"""
    changes: tuple[np.ndarray, ...]
    """[G][O, F]"""
    curves: tuple[Curve, ...]
    stretches: tuple[Stretch, ...] = ()

    @property
    def name(self) -> str:
        return bin_name(self.start, self.end)

    def reaches(self, kv_budget_tokens: int) -> bool:
        """Whether that budget was measured here in every group."""
        return all(curve.reaches(kv_budget_tokens) for curve in self.curves)

    def holds(self, limits: Sequence[tuple[str, int, float]]) -> bool:
        """Whether the largest budgets hold every bound."""
        best_F = self.base_F + sum(change[-1] for change in self.changes)
        return all(best_F[column] <= most + 1e-12 for _, column, most in limits)

    def figures(self, budgets: Sequence[int]) -> np.ndarray:
        """[F] under one budget for each group."""
        places = [own.index(budget) for own, budget in zip(self.budgets, budgets, strict=True)]
        return self.base_F + sum(change[place] for change, place in zip(self.changes, places, strict=True))

    def changes_at(self, kv_budget_tokens: int) -> np.ndarray:
        """[F] that the same budget in every group changes, on lines between the measured ones."""
        total_F = np.zeros(len(FIGURES))
        for own, changes_OF in zip(self.budgets, self.changes, strict=True):
            at = math.log(min(kv_budget_tokens, own[-1]))
            total_F += [np.interp(at, np.log(own), column) for column in changes_OF.T]
        return total_F


def swept_bin(start: int, end: int, weight: float, curves: Sequence[Curve], selector: Selector) -> SweptBin:
    """One curve of all layers, or one for each group that was varied alone while the others had the largest budget."""
    figures = [_curve_figures(curve) for curve in curves]
    budgets = tuple(
        tuple(max(cell.kv_budget_tokens, selector.least_budget_tokens) for cell in curve.points) for curve in curves
    )
    if len(curves) == 1:
        return SweptBin(start, end, weight, np.zeros(len(FIGURES)), budgets, tuple(figures), tuple(curves))
    base_F = np.stack([each[-1] for each in figures]).max(0)
    return SweptBin(start, end, weight, base_F, budgets, tuple(each - each[-1] for each in figures), tuple(curves))


def _curve_figures(curve: Curve) -> np.ndarray:
    """[O, F] of the measured budgets, none of which rises with the budget."""
    found = []
    for cell in curve.points:
        assert cell.divergence is not None, "the estimator has top-k lists"
        found.append((cell.divergence.kl, *cell.divergence.over_nats))
    columns = [curve.falling(column) for column in zip(*found, strict=True)]
    return np.stack([*columns, 1 - curve.values(), 1 - curve.lows()], axis=1)
