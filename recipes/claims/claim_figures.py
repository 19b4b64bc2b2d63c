"""Figures over seeds and rows: means with Student's interval, differences, rank correlations with a bootstrap over rows.
Plain numbers in, plain tables out."""

# K rows, R bootstrap replicates

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

Interval = list[float | None]
"""[value, low, high], 95 %; low and high are None where there are too few values for an interval."""


def over_seeds(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Mean of one value a seed, with Student's 95 % interval from two seeds on; None without values.

    >>> over_seeds([0.1, 0.2, 0.3])
    {'mean': 0.2, 'low': -0.048, 'high': 0.448, 'seeds': [0.1, 0.2, 0.3]}
    """
    known = [float(value) for value in values if value is not None]
    if not known:
        return None
    mean, low, high = float(np.mean(known)), None, None
    if len(known) > 1:
        half = float(stats.t.ppf(0.975, len(known) - 1) * np.std(known, ddof=1) / len(known) ** 0.5)
        low, high = mean - half, mean + half
    return {"mean": mean, "low": low, "high": high, "seeds": known}


def difference(one: Sequence[float | None], other: Sequence[float | None]) -> Interval | None:
    """Mean of `other` minus mean of `one`, with Welch's 95 % interval; None where either has no value."""
    a, b = ([float(value) for value in values if value is not None] for values in (one, other))
    if not a or not b:
        return None
    value = float(np.mean(b) - np.mean(a))
    if min(len(a), len(b)) < 2:
        return [value, None, None]
    parts = [float(np.var(each, ddof=1)) / len(each) for each in (a, b)]
    if not sum(parts):
        return [value, value, value]
    freedom = sum(parts) ** 2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
    half = float(stats.t.ppf(0.975, freedom)) * sum(parts) ** 0.5
    return [value, value - half, value + half]


def rank_correlation(
    x_K: Sequence[float | None], y_K: Sequence[float | None], rows: Sequence[str], replicates: int = 2000, seed: int = 0
) -> Interval | None:
    """Spearman's correlation, with an interval from a bootstrap over rows: the runs of one row stay together. None with
    fewer than three values, or where one side is constant; no interval with fewer than five rows."""
    known = [place for place, (x, y) in enumerate(zip(x_K, y_K, strict=True)) if x is not None and y is not None]
    x, y = (np.array([values[place] for place in known], dtype=float) for values in (x_K, y_K))
    if len(known) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    named = [rows[place] for place in known]
    return _over_rows(lambda places: float(rank_correlations(x[places, None], y[places])[0]), named, replicates, seed)


def stronger_correlation(
    x_K: Sequence[float | None],
    base_K: Sequence[float | None],
    y_K: Sequence[float],
    rows: Sequence[str],
    replicates: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """How much higher the rank correlation of x with y is than that of `base`, over the same draws of whole rows. As for
    `rank_correlation`, None with fewer than three runs that have both or where a side is constant, and no interval with
    fewer than five rows."""
    known = [place for place, pair in enumerate(zip(x_K, base_K, strict=True)) if None not in pair]
    both = np.array([[x_K[place], base_K[place]] for place in known], dtype=float)
    y, named = np.array([y_K[place] for place in known]), [rows[place] for place in known]
    if len(known) < 3 or np.ptp(y) == 0 or (np.ptp(both, axis=0) == 0).any():
        return None
    return _over_rows(
        lambda places: float(np.subtract(*rank_correlations(both[places], y[places]))), named, replicates, seed
    )


def _over_rows(figure: Callable[[np.ndarray], float], rows: Sequence[str], replicates: int, seed: int) -> Interval:
    """A figure of the runs at some places: that of all runs, with an interval from a bootstrap over their rows; without one
    below five rows."""
    value = figure(np.arange(len(rows)))
    if len(set(rows)) < 5:
        return [value, None, None]
    drawn = [figure(places) for places in whole_rows(rows, replicates, np.random.default_rng(seed))]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return [value, float(low), float(high)]


def whole_rows(rows: Sequence[str], replicates: int, random: np.random.Generator) -> Iterator[np.ndarray]:
    """The places of a bootstrap's runs, for each replicate. rows: that of each run; the runs of one row stay together,
    because they are not independent."""
    members = [np.flatnonzero([each == row for each in rows]) for row in dict.fromkeys(rows)]
    for _ in range(replicates):
        yield np.concatenate([members[pick] for pick in random.integers(len(members), size=len(members))])


def rank_correlations(figures: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Spearman's correlation of each column of [runs, statistics] with [runs] gains; nan where a column is constant."""
    ranks = stats.rankdata(np.column_stack([figures, gains]), axis=0)
    ranks -= ranks.mean(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        ranks /= np.sqrt((ranks**2).sum(axis=0))
    return ranks[:, :-1].T @ ranks[:, -1]


def grouped(items: Sequence[Any], key: Any) -> dict[Any, list[Any]]:
    """The items by their key, in the order in which keys first appear."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def pick(table: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: table.get(name) for name in names}
