"""Figures with intervals out of the study's records, for docs/claims.md. Measures nothing.

Intervals of changes of dense accuracy are Student's t with one standard deviation for all rows of a record: that between the
seeds of a row, pooled over rows, since three seeds alone say little of their spread. Intervals of other means are Student's
t over the runs themselves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from published_rules import Estimate
from record_tables import results
from scipy import stats

KIND = "mismatch-study"
FIRST, LAST = slice(0, 5), slice(-5, None)
"""Steps of a run."""


def runs_of(record: str, row: str, whole: bool = True) -> list[dict[str, Any]]:
    """A row's runs; `whole`: those that went to their last step."""
    runs = [run for run in results(record, KIND)["runs"] if run["row"] == row]
    return [run for run in runs if not whole or (run["state"] == "finished" and not run["stopped"])]


def change(record: str, *rows: str) -> Estimate:
    """Change of dense accuracy, mean over all runs of these rows."""
    found = [value for row in rows for value in _changes(record, row)]
    return _around(statistics.mean(found), 1 / len(found), [record])


def difference(record: str, row: str, than: str, other: str | None = None) -> Estimate:
    """How much more dense accuracy a row gained than another, which may be of another record."""
    other = other or record
    ours, theirs = _changes(record, row), _changes(other, than)
    mean = statistics.mean(ours) - statistics.mean(theirs)
    return _around(mean, 1 / len(ours) + 1 / len(theirs), sorted({record, other}))


def final_difference(record: str, row: str, than: str) -> tuple[Estimate, float]:
    """(How much higher a row's dense accuracy ends than another's, the mean at which that one ends)."""
    rows = {run["row"] for run in results(record, KIND)["runs"]}
    final = {each: [run["dense_accuracy"][-1][1] for run in runs_of(record, each)] for each in rows}
    ours, theirs = final[row], final[than]
    mean, end = statistics.mean(ours) - statistics.mean(theirs), statistics.mean(theirs)
    return around(mean, 1 / len(ours) + 1 / len(theirs), *pooled(final.values())), end


def share_of(hits: int, of: int) -> Estimate:
    """With Wilson's interval."""
    interval = stats.binomtest(hits, of).proportion_ci(method="wilson")
    return Estimate(hits / of, float(interval.low), float(interval.high))


def _changes(record: str, row: str) -> list[float]:
    ends = [run["dense_accuracy"] for run in runs_of(record, row)]
    return [points[-1][1] - points[0][1] for points in ends]


def _around(mean: float, inverse_runs: float, of: Sequence[str]) -> Estimate:
    return around(mean, inverse_runs, *pooled_deviation(of))


def around(mean: float, inverse_runs: float, spread: float, freedom: int) -> Estimate:
    """Student's interval of a mean. inverse_runs: its variance in units of that of a run; spread: standard deviation of a
    run, which has so many degrees of freedom. Without any there is no interval."""
    if not freedom:
        return Estimate.unrepeated(mean)
    half = float(stats.t.ppf(0.975, freedom)) * spread * math.sqrt(inverse_runs)
    return Estimate(mean, mean - half, mean + half)


def pooled_deviation(of: Sequence[str]) -> tuple[float, int]:
    """`pooled` over all rows of these records of the study."""
    rows = {(record, run["row"]) for record in of for run in results(record, KIND)["runs"]}
    return pooled([_changes(*each) for each in sorted(rows)])


def pooled(rows: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Standard deviation between the values of a row, and its degrees of freedom. A row with one value says nothing."""
    known = [values for values in rows if len(values) > 1]
    freedom = sum(len(values) - 1 for values in known)
    squares = sum(statistics.variance(values) * (len(values) - 1) for values in known)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def mean_of(values: Sequence[float]) -> Estimate:
    """Of independent runs."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return Estimate.unrepeated(mean)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


def less(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Mean of ours minus mean of theirs, with Welch's interval."""
    variances = [statistics.variance(of) / len(of) for of in (ours, theirs)]
    freedom = sum(variances) ** 2 / sum(v**2 / (len(of) - 1) for v, of in zip(variances, (ours, theirs), strict=True))
    mean = statistics.mean(ours) - statistics.mean(theirs)
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(variances))
    return Estimate(mean, mean - half, mean + half)


def over(record: str, row: str, metric: str, steps: slice = slice(None), whole: bool = True) -> list[float]:
    """Mean over steps of a metric, of each run that has it."""
    found = []
    for run in runs_of(record, row, whole):
        values = [value for value in run["series"].get(metric, [])[steps] if value is not None]
        if values:
            found.append(statistics.mean(values))
    return found


def shift(record: str, row: str, metric: str) -> Estimate:
    """Last five steps minus the first five, mean over runs."""
    first, last = (over(record, row, metric, steps) for steps in (FIRST, LAST))
    return mean_of([after - before for before, after in zip(first, last, strict=True)])


def worst_bin_of(record: str, row: str) -> list[float]:
    """Tail of the length bin in which the row's is lowest, of each run, over its steps."""
    return worst_bin([run["series"] for run in runs_of(record, row)])


def worst_bin(series: Iterable[Mapping[str, Sequence[float | None]]]) -> list[float]:
    """Tail of the length bin in which that of all runs is lowest, of each run that has it, over its steps; empty without a
    bin. series: of each run, by metric."""
    tails: dict[str, list[float]] = {}
    for run in series:
        for name, values in run.items():
            known = [value for value in values if value is not None]
            if name.startswith("mismatch/acceptance_q05/") and known:
                tails.setdefault(name, []).append(statistics.mean(known))
    return min(tails.values(), key=statistics.mean, default=[])
