"""What the experiments of recipes/claims say of Sparrow's claims: from the results of their records to parts with estimates
and rules. Measures nothing. published_corrections.py has the experiments on corrections.

Each function takes the results of all records of its experiment, say one a machine. What a run that was cut did not come to
is a part without an estimate. Intervals of changes of dense accuracy take one standard deviation between seeds for all rows
of a record and task (`Gains`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from published_claims import Part
from published_figures import around, pooled, worst_bin
from published_rules import Estimate, Rule, above, as_good, at_most, below, inside, uncorrelated

from sparroll.rounding import rounded_down

Results = Sequence[Mapping[str, Any]]
SAME = 0.015
"""Most that the published tail moved over a run."""
USABLE_TAIL = 0.6
"""A tail below this trains nothing; the published comparison is at .75 to .82."""
ENOUGH = 0.86
"""Published: a tail from here on trains like dense rollouts."""
LOST, DRIFTING = 0.775, 0.825
"""Published: a tail of .75 collapses, and one of .80 drifts. One below the first of these counts as .75, and one from there
to the second as .80."""
RAISED = 0.035
"""Least that the published adapter raised the tail in most bins."""
NEARLY_ONE, KS = 0.547, 0.029
"""Published share of tokens above .999 at a budget of 512 tokens, and distance of the rest to its Beta."""
LARGER_BUDGET = "none, larger budget"
"""The kind of run of `distil-loss` without an adapter, whose rollouts read more."""


@dataclass(frozen=True)
class Gains:
    """What each kind of run on one task gained, a value a seed."""

    by_kind: Mapping[Hashable, Sequence[float]]

    def of(self, kind: Hashable) -> Estimate | None:
        """None where there is no such run."""
        values = self.by_kind.get(kind, ())
        return around(statistics.mean(values), 1 / len(values), *self._spread()) if values else None

    def beyond(self, kind: Hashable, other: Hashable) -> Estimate | None:
        """How much more it gained than the other kind; None where either has no run."""
        ours, theirs = (self.by_kind.get(each, ()) for each in (kind, other))
        if not ours or not theirs:
            return None
        mean = statistics.mean(ours) - statistics.mean(theirs)
        return around(mean, 1 / len(ours) + 1 / len(theirs), *self._spread())

    def _spread(self) -> tuple[float, int]:
        return pooled(self.by_kind.values())


def gains(lines: Sequence[Mapping[str, Any]], *names: str) -> dict[str, Gains]:
    """Of each task; a kind is what its lines have under these names, one of them alone as it is."""
    found: dict[str, dict[Hashable, Sequence[float]]] = {}
    for line in lines:
        kind = tuple(line[name] for name in names)
        values = line["accuracy_change"]["seeds"] if line["accuracy_change"] else []
        found.setdefault(line["task"], {})[kind if len(names) > 1 else kind[0]] = values
    return {task: Gains(of) for task, of in found.items()}


def estimate(of: Sequence[Any] | Mapping[str, Any] | None) -> Estimate | None:
    """Of [value, low, high] or a table with mean, low and high, which has no ends with one seed; None without a value."""
    if of is None:
        return None
    value, low, high = (of["mean"], of["low"], of["high"]) if isinstance(of, Mapping) else of
    return Estimate.unrepeated(value) if low is None or high is None else Estimate(value, low, high)


def lines_of(found: Results) -> list[Mapping[str, Any]]:
    return [line for each in found for line in each["lines"]]


def trains_like_dense(found: Results) -> Sequence[Part]:
    """`threshold`: what schedules gained beyond dense rollouts, for each task and each that held .86 where its tail is
    lowest."""
    parts = []
    for each in found:
        for task, of in gains(each["lines"], "target").items():
            held = held_tails(each, task)
            enough = [target for target, tail in held.items() if tail >= ENOUGH]
            parts += [_beyond_dense(task, of, target, held[target], as_good()) for target in enough]
            if not enough:
                parts.append(
                    Part(f"{task}, .86 beyond dense", None, as_good(), sign=True, missing=_why(each, task, 0.86))
                )
    return parts


def too_low_collapses(found: Results) -> Sequence[Part]:
    """`threshold`: what schedules gained beyond dense rollouts whose tail was near .80 where it is lowest, and in themselves
    where it was nearer to .75, or lower."""
    parts = []
    for each in found:
        for task, of in gains(each["lines"], "target").items():
            held = held_tails(each, task)
            drifting = [target for target, tail in held.items() if LOST <= tail <= DRIFTING]
            lost = [target for target, tail in held.items() if tail < LOST]
            for target in lost:
                label = f"{_with_tail(task, target, held[target])}, change"
                parts.append(Part(label, of.of(target), below(0), sign=True))
            parts += [_beyond_dense(task, of, target, held[target], below(0)) for target in drifting]
            for near, target in ((lost, 0.75), (drifting, 0.8)):
                if not near:
                    label = f"{task}, {target:.2f}".replace(" 0.", " .")
                    parts.append(Part(label, None, below(0), sign=True, missing=_why(each, task, target)))
    return parts


def held_tails(found: Mapping[str, Any], task: str) -> dict[float, float]:
    """Of each target: the 5th percentile that its runs had in the length bin where it is lowest, as of the study's rows."""
    runs: dict[float, list[Mapping[str, Any]]] = {}
    for cell in found["cells"]:
        if cell["config"]["task"] == task and cell["config"].get("target") is not None:
            runs.setdefault(cell["config"]["target"], []).append(cell["results"].get("steps", {}))
    return {target: statistics.mean(tails) for target, of in runs.items() if (tails := worst_bin(of))}


def _beyond_dense(task: str, of: Gains, target: float, tail: float, rule: Rule) -> Part:
    return Part(f"{_with_tail(task, target, tail)}, beyond dense", of.beyond(target, None), rule, sign=True)


def _with_tail(task: str, target: float, tail: float) -> str:
    """What a schedule was to hold, and the tail that it had where it is lowest."""
    return f"{task}, target {target:.2f} (worst bin {rounded_down(tail)})".replace(" 0.", " .")


def _why(found: Mapping[str, Any], task: str, target: float) -> str:
    """Why no run had such a tail: no schedule holds the target, nobody came to it yet, or its runs had another tail."""
    cells = [
        cell for cell in found["cells"] if (cell["config"]["task"], cell["config"].get("target")) == (task, target)
    ]
    if any("left_out" in cell["results"] for cell in cells):
        return "no schedule holds it"
    return "its runs had another tail" if target in held_tails(found, task) else "not run yet"


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


def published_loss_raises(found: Results) -> Sequence[Part]:
    """`distil-loss`: what the adapter changes in the final policy's tail, under the schedule that it was trained under."""
    return _raised(found, "published", "the published loss", above(RAISED))


def an_adapter_raises(found: Results) -> Sequence[Part]:
    """`distil-loss`: the same with the KL over lists."""
    return _raised(found, "kl", "KL over lists", above(0))


def _raised(found: Results, loss: str, name: str, rule: Any) -> list[Part]:
    parts = []
    for each in found:
        for task in dict.fromkeys(line["task"] for line in each["schedules"]):
            about = {"task": task, "loss": loss, "trained_under": True}
            rows = [row for row in each["schedules"] if {key: row[key] for key in about} == about]
            changed = estimate(rows[0].get("q05_change")) if rows else None
            parts.append(Part(f"{task}, {name}", changed, rule, sign=True))
    return parts


def adapter_trains(found: Results) -> Sequence[Part]:
    """`distil-loss`: a budget with an adapter, beyond the next larger one without."""
    return [
        Part(f"{task}, an adapter beyond the next larger budget", of.beyond("kl", LARGER_BUDGET), as_good(), sign=True)
        for each in found
        for task, of in gains(each["lines"], "loss").items()
    ]


def tail_predicts(found: Results) -> Sequence[Part]:
    """`predicts-training`: rank correlation of the run's mean with what it gained, over sparse rows, for each task."""
    return [_correlation(each, task, "q05", above(0)) for each in found for task in _ranked_tasks(each)]


def mean_does_not(found: Results) -> Sequence[Part]:
    return [_correlation(each, task, "mean", uncorrelated()) for each in found for task in _ranked_tasks(each)]


def tail_is_better(found: Results) -> Sequence[Part]:
    """How much stronger the correlation of the 5th percentile is than the mean's, over the same draws of whole rows."""
    parts = []
    for each in found:
        for task in _ranked_tasks(each):
            beyond = estimate(_correlated(each, task, "mean")["run_mean_beyond_q05"])
            of_tail = None if beyond is None else -beyond
            parts.append(Part(f"{task}, tail's beyond the mean's", of_tail, above(0), 2, sign=True))
    return parts


def _ranked_tasks(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(line["task"] for line in found["correlations"]))


def _correlation(found: Mapping[str, Any], task: str, statistic: str, rule: Any) -> Part:
    line = _correlated(found, task, statistic)
    return Part(f"{task}, {line['runs']} runs", estimate(line["run_mean"]), rule, 2, sign=True)


def _correlated(found: Mapping[str, Any], task: str, statistic: str) -> Mapping[str, Any]:
    about = {"task": task, "among": "all", "statistic": statistic}
    (line,) = [line for line in found["correlations"] if {key: line[key] for key in about} == about]
    return line


def two_humps(found: Results) -> Sequence[Part]:
    """`predicts-training`: of each task, the budget in the middle of those that were measured."""
    parts = []
    for each in found:
        for task in dict.fromkeys(shape["task"] for shape in each["shapes"]):
            shapes = sorted((shape for shape in each["shapes"] if shape["task"] == task), key=lambda of: of["budget"])
            middle = shapes[len(shapes) // 2]
            label, of = f"{task}, {middle['budget']} tokens", middle["statistics"]
            share = inside(round(NEARLY_ONE / 2, 3), round(1.5 * NEARLY_ONE, 3))
            distance = Estimate.single(middle["beta"]["ks"]) if "ks" in middle["beta"] else None
            parts += [
                Part(f"{label}, skewness", estimate(of["skew"]), below(0), 2, sign=True),
                Part(f"{label}, share above .999", estimate(of["nearly_one_share"]), share),
                Part(
                    f"{label}, KS distance of the rest",
                    distance,
                    at_most(2 * KS),
                    missing="too few tokens for a fit",
                ),
            ]
    return parts


def smaller_pages_are_better(found: Results) -> Sequence[Part]:
    """`page-size`: how far the tail of larger pages lies from that of pages of 16 tokens at the same eFLOPs, which is
    interpolated; means over budgets, apart for costs at which pages of 16 have a tail that anybody would train with. The
    budgets' errors are taken as independent. Budgets that read so much that nothing is left out say nothing."""
    curves: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    dense: dict[str, float] = {}
    for line in lines_of(found):
        if line["selector"] is None:
            dense[line["task"]] = estimate(line["statistics"]["q05"]).value
        elif line["selector"]["kind"] == "page_mean":
            curves.setdefault(line["task"], {}).setdefault(line["selector"]["page_tokens"], []).append(line)
    parts = []
    for task, by_page in curves.items():
        if task not in dense:
            continue
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
