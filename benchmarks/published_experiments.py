"""What the experiments of recipes/claims say of a claim: from the results of their records to parts with estimates and
rules. Measures nothing.

Each function takes the results of all records of its experiment, say one a machine. Where an experiment ran, its figures
take the place of those of older records.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from published_claims import Part
from published_rules import Estimate, as_good, below, inside

Results = Sequence[Mapping[str, Any]]
SAME = 0.015
"""Most that the published tail moved over a run."""
USABLE_TAIL = 0.6
"""A tail below this trains nothing; the published comparison is at .75 to .82."""


def estimate(of: Sequence[Any] | Mapping[str, Any]) -> Estimate:
    """Of [value, low, high] or a table with mean, low and high; without ends, as with one seed, the value alone."""
    value, low, high = (of["mean"], of["low"], of["high"]) if isinstance(of, Mapping) else of
    return Estimate(value, value if low is None else low, value if high is None else high)


def _lines(found: Results) -> list[Mapping[str, Any]]:
    return [line for each in found for line in each["lines"]]


def trains_like_dense(found: Results) -> Sequence[Part]:
    """`threshold`: what the schedule for .86 gained beyond dense rollouts, for each task."""
    return [
        Part(f"{line['task']}, .86 beyond dense", estimate(line["against_dense"]), as_good(), sign=True)
        for line in _lines(found)
        if line["target"] == 0.86 and line["against_dense"]
    ]


def too_low_collapses(found: Results) -> Sequence[Part]:
    """`threshold`: .80 beyond dense rollouts, and what .75 gained in itself."""
    parts = []
    for line in _lines(found):
        if line["target"] == 0.75:
            parts.append(Part(f"{line['task']}, .75", estimate(line["accuracy_change"]), below(0), sign=True))
        if line["target"] == 0.8 and line["against_dense"]:
            label = f"{line['task']}, .80 beyond dense"
            parts.append(Part(label, estimate(line["against_dense"]), below(0), sign=True))
    return parts


def same_at_every_iteration(found: Results) -> Sequence[Part]:
    """`over-iterations`: of each task and kind of rollouts, the budget whose tail moved most by the last step."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for each in found:
        last: dict[tuple[str, str], int] = {}
        for line in each["over_seeds"]:
            key = (line["task"], line["rollouts"])
            last[key] = max(last.get(key, 0), line["step"])
        for line in each["over_seeds"]:
            key = (line["task"], line["rollouts"])
            if line["step"] == last[key] and line["q05_moved"]:
                groups.setdefault(key, []).append(line)
    parts = []
    for (task, rollouts), lines in groups.items():
        most = max(lines, key=lambda line: abs(line["q05_moved"]["mean"]))
        label = f"{task}, {rollouts} rollouts, the budget that moved most ({most['budget']} tokens)"
        parts.append(Part(label, estimate(most["q05_moved"]), inside(-SAME, SAME), sign=True))
    return parts


def smaller_pages_are_better(found: Results) -> Sequence[Part]:
    """`page-size`: how far the tail of larger pages lies from that of pages of 16 tokens at the same eFLOPs, which is
    interpolated; means over budgets, apart for costs at which pages of 16 have a tail that anybody would train with. The
    budgets' errors are taken as independent. Budgets that read so much that nothing is left out say nothing."""
    curves: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    dense: dict[str, float] = {}
    for line in _lines(found):
        if line["selector"] is None:
            dense[line["task"]] = estimate(line["statistics"]["q05"]).value
        elif line["selector"]["kind"] == "page_mean":
            curves.setdefault(line["task"], {}).setdefault(line["selector"]["page_tokens"], []).append(line)
    parts = []
    for task, by_page in curves.items():
        for page in sorted(page for page in by_page if page > 16 and 16 in by_page):
            sparse = [line for line in by_page[page] if estimate(line["statistics"]["q05"]).high < dense[task]]
            for name, from_tail, to_tail in (("above", USABLE_TAIL, 1.0), ("below", 0.0, USABLE_TAIL)):
                apart = _apart(sparse, by_page[16], from_tail, to_tail)
                label = f"{task}, pages of {page} beyond 16, tails {name} {USABLE_TAIL:.1f}".replace(" 0.", " .")
                parts += [] if apart is None else [Part(label, apart, below(0), sign=True)]
    return parts


def _apart(
    ours: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], from_tail: float, to_tail: float
) -> Estimate | None:
    """Mean difference of the tails where the base's costs reach and its tail lies between these; None where there are no
    such costs."""
    base = sorted(base, key=lambda line: line["eflops"])
    costs = [line["eflops"] for line in base]
    ends = list(zip(*(_ends(estimate(line["statistics"]["q05"])) for line in base), strict=True))
    differences, variances = [], []
    for line in ours:
        if costs[0] <= line["eflops"] <= costs[-1]:
            there = [float(np.interp(line["eflops"], costs, values)) for values in ends]
            mine = estimate(line["statistics"]["q05"])
            if from_tail <= there[0] < to_tail:
                differences.append(mine.value - there[0])
                variances.append(((mine.high - mine.low) / 2) ** 2 + ((there[2] - there[1]) / 2) ** 2)
    if not differences:
        return None
    mean, half = float(np.mean(differences)), math.sqrt(sum(variances)) / len(differences)
    return Estimate(mean, mean - half, mean + half)


def _ends(of: Estimate) -> tuple[float, float, float]:
    return of.value, of.low, of.high
