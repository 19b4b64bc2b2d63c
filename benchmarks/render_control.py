"""The tables of docs/control-group.md, from the record of benchmarks/control_group_simulation.py. Measures nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from record_tables import RESULTS, results, share_with_interval, table

from sparroll import records
from sparroll.rounding import percent_up

NAME, KIND = "control-group-simulation", "control-group-simulation"


def part(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = results(NAME, KIND)[name]
    return rows


def config() -> dict[str, Any]:
    found: dict[str, Any] = records.read(RESULTS / f"{NAME}.json", KIND)["config"]
    return found


def false_alarms() -> str:
    """Runs of 1,000 steps without a gap, by what is sampled and how."""
    rows = []
    for case in part("false_alarms"):
        figures = [share_with_interval(case[event], math.ceil) for event in ("sure", "alarm")]
        rows.append([config()["worlds"][case["world"]], _shape(case), _share(case), *figures])
    return table(["prompts", "a step", "share", "surely a difference, runs", "alarm, runs"], rows)


def found() -> str:
    """Steps until a gap from the first step on is seen."""
    return _found(late=False)


def found_late() -> str:
    """The same for a gap that begins after step 100."""
    return _found(late=True)


def _found(late: bool) -> str:
    cases: dict[tuple[str, int], dict[float, dict[str, Any]]] = {}
    for case in part("found"):
        shown = _is_default(case) or case["rollouts"] in (128, 1024)
        if case["late"] == late and shown:
            cases.setdefault((_share(case), case["rollouts"]), {})[case["gap"]] = case
    rows = []
    for (share, rollouts), gaps in cases.items():
        figures = [_steps(gaps[gap]["sure"]) for gap in (0.05, 0.1, 0.2)]
        figures += [_steps(gaps[gap]["alarm"]) for gap in (0.1, 0.2)]
        dense = _dense_share(gaps[0.1])
        rows.append([share, f"{rollouts:,}", *figures, percent_up(dense, 1), percent_up(extra_reading(dense), 1)])
    head = ["share", "rollouts a step", "sure: .05", ".1", ".2", "alarm: .1", ".2", "dense rollouts", "extra reading"]
    return table(head, rows)


def worlds() -> str:
    """Steps until a gap of .1 is seen, by how difficult the prompts are."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in part("worlds"):
        row = rows.setdefault((config()["worlds"][case["world"]], _shape(case)), [])
        row += [_steps(case[event]) for event in ("sure", "alarm")]
    head = ["prompts", "a step", "from step 1: sure", "alarm", "from step 101: sure", "alarm"]
    return table(head, [[*name, *row] for name, row in rows.items()])


def smaller() -> str:
    """Runs of 1,000 steps with a gap that is tolerated."""
    rows = []
    for case in part("smaller"):
        figures = [share_with_interval(case[event], math.ceil) for event in ("sure", "alarm")]
        gap = f"{case['gap']:g}".removeprefix("0")
        rows.append([config()["worlds"][case["world"]], gap, *figures, percent_up(case["dense_share"], 1)])
    return table(["prompts", "gap", "surely a difference, runs", "alarm, runs", "dense rollouts"], rows)


def first_steps() -> str:
    """A gap of .1 from the first step on, by how large the share is over how many first steps."""
    rows = []
    for case in part("first"):
        alarm = case["alarm"]
        within = share_with_interval(alarm["within_30_steps"], math.floor)
        rows.append([str(Fraction(case["share_first"])), str(case["first_steps"]), _steps(alarm), within])
    return table(["larger share", "first steps", "alarm after steps", "alarm in 30 steps"], rows)


def extra_reading(dense_share: float) -> float:
    """What dense rollouts read beyond sparse ones, as a share of what a step of sparse ones alone reads."""
    read: float = config()["read_share"]
    return dense_share * (1 - read) / read


def _is_default(case: dict[str, Any]) -> bool:
    defaults = config()["defaults"]
    return all(case[name] == defaults[name] for name in ("share", "share_first", "first_steps"))


def _dense_share(case: dict[str, Any]) -> float:
    """Over 1,000 steps without a gap."""
    if case["share"] == case["share_first"]:
        return float(case["share"])
    alike = [
        row["dense_share"]
        for row in part("false_alarms")
        if row["world"] == "all"
        and all(row[name] == case[name] for name in ("share", "share_first", "rollouts", "samples"))
    ]
    return float(alike[0])


def _share(case: dict[str, Any]) -> str:
    return "default" if _is_default(case) else f"{Fraction(case['share'])} in all steps"


def _shape(case: dict[str, Any]) -> str:
    return f"{case['prompts']} x {case['samples']}"


def _steps(delay: dict[str, Any]) -> str:
    """Median and 95 % of the runs."""
    ends = [delay[name] for name in ("median_steps", "q95_steps")]
    return " / ".join("never" if end is None else f"{math.ceil(end):,}" for end in ends)


TABLES: dict[str, Callable[[], str]] = {
    "control-false-alarms": false_alarms,
    "control-found": found,
    "control-found-late": found_late,
    "control-worlds": worlds,
    "control-smaller": smaller,
    "control-first-steps": first_steps,
}
