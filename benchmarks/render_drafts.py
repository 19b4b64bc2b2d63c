"""Checked drafts in units of 4 tokens without a dense layer, by budget and bits: how fast they are, and what training on
them gains. Reads records and measures nothing."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from claim_words import bare
from claims_study import KIND, gain, runs_of
from record_tables import results, table, times
from render_study import DRAFT_BUDGETS, MORE_DENSE, gained

from sparroll.rounding import rounded_down, rounded_up

CALLS = (
    "verified-rollouts-wide-budgets-qwen3-1.7b-h200",
    "verified-rollouts-wide-384-qwen3-1.7b-h200",
    "verified-rollouts-wide-512-qwen3-1.7b-h200",
)
"""Each has dense rollouts of its own, at the same moments."""
SETS = ("drained", "steady")


@dataclass(frozen=True)
class Training:
    """The study's runs on such rollouts beside dense ones with the same seeds."""

    runs: dict[int, dict[str, Any]]
    dense: dict[int, dict[str, Any]]

    @property
    def gains(self) -> list[float]:
        return [gained(run) for run in self.runs.values()]

    @property
    def ahead(self) -> list[float]:
        """The last dense accuracy less that of dense rollouts, by seed: all runs start from the same model."""
        return [_last_accuracy(run) - _last_accuracy(self.dense[seed]) for seed, run in self.runs.items()]

    @property
    def standard_error(self) -> float:
        """Of the mean of `ahead`."""
        return statistics.stdev(self.ahead) / math.sqrt(len(self.ahead))

    def mean(self, name: str) -> float:
        """Of a series, over all steps of all runs."""
        return statistics.mean(value for run in self.runs.values() for value in run["series"][name])


def _last_accuracy(run: dict[str, Any]) -> float:
    return float(run["dense_accuracy"][-1][1])


def dense_runs() -> dict[int, dict[str, Any]]:
    """By seed."""
    more = results(MORE_DENSE, KIND)["runs"]
    return {run["seed"]: run for run in (*runs_of(60, "dense"), *more) if run["row"] == "dense"}


def trained() -> dict[str, Training]:
    """By what a row is called here."""
    dense, found = dense_runs(), {}
    for row, names in DRAFT_BUDGETS.items():
        runs = {run["seed"]: run for name in names for run in results(name, KIND)["runs"] if run["row"] == row}
        assert len(runs) == 6 and runs.keys() == dense.keys(), f"six seeds of {row} and of dense rollouts"
        _, units, tokens, *_ = row.split("-")
        found[called(tokens, units)] = Training(runs, dense)
    return found


def called(tokens: str, units: str) -> str:
    """512, or 512_4x2 where units are not 4 x 4."""
    return tokens if units == "4x4" else f"{tokens}_{units}"


def speeds() -> dict[tuple[str, str], float]:
    """(Name as in `trained`, set): tokens per second of the slowest call / those of dense rollouts in the fastest one, with
    the larger share of kept drafts. Dense steps differ by 2 % between calls, and no budget shall gain by its call."""
    dense: dict[str, float] = {}
    checked: dict[tuple[str, str], float] = {}
    for name in CALLS:
        runs = [run for run in results(name, "verified-rollouts") if "moments" in run]
        kept = max(run.get("kept_share_forced", 0.0) for run in runs)
        for run in runs:
            rate = run["tokens_per_second"]
            if run["engine"] == "dense":
                dense[run["set"]] = max(rate, dense.get(run["set"], 0.0))
            elif run["kept_share_forced"] == kept:
                _, tokens, units = run["schedule"].split("-")
                key = called(tokens, units), run["set"]
                checked[key] = min(rate, checked.get(key, math.inf))
    return {key: rate / dense[key[1]] for key, rate in checked.items()}


def checked_drafts() -> str:
    """Speed and training of each budget, side by side."""
    fast, rows = speeds(), []
    for name, training in sorted(trained().items(), key=lambda each: fast[each[0], "steady"]):
        tokens, _, units = name.partition("_")
        mean = rounded_down(statistics.mean(training.ahead), sign=True)
        ahead = f"{bare(mean)} +- {bare(rounded_up(training.standard_error))}"
        bits = (units or "4x4").partition("x")[2]
        speed = [times(fast[name, each]) for each in SETS]
        rows.append([tokens, f"{4 * int(tokens):,}", bits, *speed, gain(statistics.mean(training.gains)), ahead])
    head = [
        "KV budget",
        "of layers 0 and 1",
        "bits",
        "drained",
        "steady",
        "gained",
        "last accuracy beside dense rollouts",
    ]
    return table(head, rows)
