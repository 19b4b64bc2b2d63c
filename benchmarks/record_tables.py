"""What the tables of the docs are made with: a record's results, markdown, and how figures are rounded: towards the
miss, as sparroll.rounding says."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.rounding import rounded_down, rounded_up, with_interval

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def results(name: str, kind: str) -> Any:
    """What a record found."""
    return record(RESULTS / f"{name}.json", kind)["results"]


def record(path: Path, kind: str) -> Any:
    """A whole record, read once for as long as its file stays as it is. Nobody may change it: every caller gets the same
    one."""
    written = path.stat()
    return _read_once(path, kind, written.st_mtime_ns, written.st_size)


@cache
def _read_once(path: Path, kind: str, mtime_ns: int, size: int) -> Any:
    return records.read(path, kind)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def times(speedup: float) -> str:
    """How many times as fast."""
    return rounded_down(speedup, 2) + "x"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of what should be high."""
    if len(values) == 1:
        return rounded_down(values[0])
    return f"{rounded_down(statistics.mean(values))} +- {rounded_up(statistics.stdev(values))}"


def share_with_interval(of: dict[str, Any], towards: Callable[[float], int]) -> str:
    """A share of runs with its interval, rounded with math.ceil where it should be low and math.floor where high."""
    value, low, high = (towards(of[name] * 1000) / 10 for name in ("share", "low", "high"))
    return f"{value:.1f}% [{low:.1f}%, {high:.1f}%]"


def before_and_after(record: str) -> str:
    """A `sparroll distill` run: held-out tail, mean acceptance and KL before and after."""
    found = results(record, "distill")
    rows = []
    for name in ("before", "after"):
        of = found[name]
        interval = with_interval(of["q05"], of["q05_low"], of["q05_high"])
        rows.append([name, str(of["step"]), interval, rounded_down(of["mean"]), rounded_up(of["kl"])])
    return table(["adapter", "steps", "tail", "mean acceptance", "KL to dense"], rows)
