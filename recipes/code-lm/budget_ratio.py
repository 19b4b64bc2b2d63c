"""How many times fewer tokens a rule reads than the published one for the same statistic. Arithmetic on measured cells;
measures nothing. A rule whose layers read differently has the ratio of its cells' budget (see cells.WIDE).

A ratio is read off two curves of a statistic against budget, page means on one side and a rule on the other: the
published budget divided by the rule's budget with the same value. Between budgets, log(budget) is interpolated linearly
in log(1 - q05) or log(KL), in which the curves are nearly straight. Intervals come from resampled sequences, the same for
both curves (cell_files.interval).
"""

# W weightings of the sequences, M budgets

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
from cell_files import Measured, interval, resamplings
from cells import PUBLISHED, Cell, Rule

from sparroll.errors import UserError

STATISTICS = ("q05", "kl_sparse_to_dense")
LEAST_SHARE, MOST_SHARE = 1 / 16, 1 / 2
"""Published budgets at which ratios are taken, as shares of a bin's shortest context: the published schedules read
between a sixteenth and a half."""
LEAST_TAIL = 0.5
"""Least 5th percentile of page means at such a budget. Nobody samples from rollouts that are further off, and where both
curves lie on the ground, no budgets are equal."""
FLOOR = 1e-9


@dataclass(frozen=True)
class Ratio:
    """Budgets at one equal value of a statistic."""

    rule: str
    statistic: str
    from_context_tokens: int
    published_budget: int
    ratio: float
    low: float | None
    high: float | None
    """Ends of the interval; None where too few sequences reach the bin."""
    bound: str | None = None
    """"at least": the rule's smallest budget is already better; "at most": its largest is still worse."""


def straight(name: str, value: np.ndarray) -> np.ndarray:
    """The statistic on a scale that rises with the budget, nearly linearly in its logarithm."""
    return -np.log(np.maximum(1 - value if name == "q05" else value, FLOOR))


def equal_budget(value_W: np.ndarray, budgets_M: np.ndarray, curve_MW: np.ndarray) -> np.ndarray:
    """[W] the budget at which a curve [M, W] (on the scale of `straight`) has the value, at most its largest budget and
    at least its smallest. A curve that dips counts as flat there."""
    rising_MW = np.maximum.accumulate(curve_MW, axis=0)
    found = [np.interp(value, rising, np.log(budgets_M)) for value, rising in zip(value_W, rising_MW.T, strict=True)]
    return np.exp(np.array(found))


def ratios(measured: Mapping[Cell, Measured], bins: tuple[int, ...]) -> list[Ratio]:
    """Of all rules, in all bins, at all published budgets within the bounds above that the rule was measured up to."""
    weights_WN = resamplings(len(next(iter(measured.values())).counts_NBC))

    @cache
    def value(cell: Cell, statistic: str, place: int) -> np.ndarray:
        return measured[cell].statistic(statistic, weights_WN, place).numpy()

    found = []
    published = sorted((cell for cell in measured if cell.rule == PUBLISHED), key=lambda cell: cell.budget)
    for rule in dict.fromkeys(cell.rule for cell in measured if cell.rule != PUBLISHED):
        budgets = sorted(cell.budget for cell in measured if cell.rule == rule)
        for statistic in STATISTICS:
            for place, begin in enumerate(bins[:-1]):
                least, most = LEAST_SHARE * begin, min(MOST_SHARE * begin, max(budgets))
                curve_MW = straight(
                    statistic, np.array([value(Cell(rule, each), statistic, place) for each in budgets])
                )
                for cell in published:
                    if least <= cell.budget <= most and value(cell, "q05", place)[0] >= LEAST_TAIL:
                        value_W = straight(statistic, value(cell, statistic, place))
                        reached = measured[cell].reached(place)
                        found.append(_ratio(rule, statistic, begin, cell.budget, value_W, budgets, curve_MW, reached))
    return found


def _ratio(
    rule: Rule,
    statistic: str,
    begin: int,
    published: int,
    value_W: np.ndarray,
    budgets: list[int],
    curve_MW: np.ndarray,
    sequences: int,
) -> Ratio:
    ratio_W = published / equal_budget(value_W, np.array(budgets), curve_MW)
    better, worse = value_W[0] < curve_MW[0, 0], value_W[0] > curve_MW[:, 0].max()
    low, high = interval(ratio_W, sequences, least=0.0)
    bound = "at least" if better else "at most" if worse else None
    return Ratio(rule.name, statistic, begin, published, round(float(ratio_W[0]), 4), low, high, bound)


def in_words(row: Ratio) -> str:
    """The ratio, with its interval where it has one.

    >>> in_words(Ratio("quantized_mean-4x4", "q05", 2048, 512, 3.19, 2.83, 3.5))
    '3.19 (2.83 to 3.50)'
    """
    return f"{row.ratio:.2f}" + ("" if row.low is None else f" ({row.low:.2f} to {row.high:.2f})")


def smallest(found: list[Ratio], rule: str) -> Ratio | None:
    """The row of a rule with the smallest ratio, over bins, statistics, budgets and whatever models the rows are of. Rows
    that only bound a ratio from below say nothing about the smallest; None where there are no others."""
    told = [row for row in found if row.rule == rule and row.bound != "at least"]
    return min(told, key=lambda row: row.ratio, default=None)


@dataclass(frozen=True)
class RatioCurve:
    """One model's ratios of one statistic in a bin, by which share of the context the published budget is."""

    from_context_tokens: int
    shares: tuple[float, ...]
    """Of the bin's mean context, rising."""
    ratios: tuple[float, ...]

    @property
    def measured_up_to(self) -> float:
        """The largest share that was measured; beyond it the ratio lies on a line to 1 at the whole context."""
        return self.shares[-2]

    def at(self, share: float) -> float:
        """Linear in log(share). Below what was measured it is the ratio of the smallest share."""
        return float(np.interp(math.log(share), np.log(self.shares), self.ratios))


@dataclass(frozen=True)
class SmallestRatio:
    """The smallest ratio of a rule over models and statistics, at a context and a published budget. Small units gain most
    where little of a long context is read, and nothing where all of it is.

    Each model speaks with its bin of the longest contexts that are not longer, or with its first one.
    """

    models: tuple[tuple[RatioCurve, ...], ...]
    """The curves of each model and statistic, by rising contexts."""
    measured_up_to: tuple[float, ...]
    """Of each model, the share of its longest contexts up to which both rules were measured."""

    @staticmethod
    def of(models: Iterable[tuple[Sequence[Ratio], Sequence[int]]], rule: str) -> SmallestRatio:
        """From the rows and the bins' edges of each model. A row that bounds its ratio from below counts only where the bin
        has no others. Raises UserError for one that bounds it from above."""
        found: list[tuple[RatioCurve, ...]] = []
        shares = []
        for rows, edges in models:
            ends, its = dict(pairwise(edges)), []
            for statistic in STATISTICS:
                mine = [row for row in rows if (row.rule, row.statistic) == (rule, statistic)]
                by_bin: dict[int, list[Ratio]] = {}
                for row in sorted(mine, key=lambda row: (row.from_context_tokens, row.published_budget)):
                    by_bin.setdefault(row.from_context_tokens, []).append(row)
                if by_bin:
                    its.append(tuple(_curve(begin, ends[begin], of) for begin, of in by_bin.items()))
            if its:
                found += its
                shares.append(min(curves[-1].measured_up_to for curves in its))
        assert found, f"no model has a ratio of {rule}"
        return SmallestRatio(tuple(found), tuple(shares))

    def at(self, context_tokens: int, published_budget: int) -> float:
        def curve(of: tuple[RatioCurve, ...]) -> RatioCurve:
            return [each for each in of if each.from_context_tokens <= context_tokens or each is of[0]][-1]

        return min(curve(of).at(published_budget / context_tokens) for of in self.models)


def _curve(begin: int, end: int, rows: list[Ratio]) -> RatioCurve:
    """A bin's statistics are of all its tokens, so they stand for its mean context. Where all of a context is read, both
    rules read it: the ratio is 1 there without a measurement."""
    worse = [row for row in rows if row.bound == "at most"]
    if worse:
        raise UserError(
            f"with its largest budget {worse[0].rule} is still worse than {worse[0].published_budget:,} published tokens "
            f"from {begin:,} on: its ratio is only bounded",
            "measure larger budgets, or take another --rule",
        )
    told = [row for row in rows if row.bound is None] or rows
    points = [*((2 * row.published_budget / (begin + end), row.ratio) for row in told), (1.0, 1.0)]
    shares, ratios = zip(*points, strict=True)
    return RatioCurve(begin, shares, ratios)
