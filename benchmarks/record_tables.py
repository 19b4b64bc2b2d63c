"""What the tables of the docs are made with: a record's results, markdown, and how figures are rounded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.rounding import rounded_down, with_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str, kind: str) -> Any:
    return records.read(RESULTS / f"{name}.json", kind)["results"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{statistics.mean(values):.3f} +- {statistics.stdev(values):.3f}"


def before_and_after(record: str) -> str:
    """A `sparroll distill` run: held-out tail, mean acceptance and KL before and after."""
    found = results(record, "distill")
    rows = []
    for name in ("before", "after"):
        of = found[name]
        interval = with_interval(of["q05"], of["q05_low"], of["q05_high"])
        rows.append([name, str(of["step"]), interval, rounded_down(of["mean"]), f"{of['kl']:.3f}"])
    return table(["adapter", "steps", "tail", "mean acceptance", "KL to dense"], rows)
