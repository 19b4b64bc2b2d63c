"""Which recorded statistic says how well a run of the study trained? Rank correlations between what was logged during a run
and its change of dense accuracy, from the study's records. Trains nothing; it takes a minute on a CPU.

    python benchmarks/predictors.py --out benchmarks/results/predictors.json

Of each statistic there are two values a run: its mean over all steps, and its value in the first step, which is what a
calibration could have known. The correlation is Spearman's. Runs of one row of the study differ in nothing but the seed, so
they are not independent: intervals (95 %) come from a bootstrap that draws whole rows, with all their runs. `gained` is how
much stronger a correlation is than that of the 5th percentile, in the direction that a statistic should have, over the same
draws. Dense rows, and runs that were cut before their last step, are left out; runs that stopped themselves count as they
ended.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "claims"))

from claim_figures import rank_correlations, whole_rows
from record_tables import RESULTS, results
from render_study import AGAIN, CHECK_BUDGETS, CHECK_GRID, PAIRS, SMALL_UNITS, STUDIES, VERIFIED

from sparroll import files, records

KIND, STUDY = "predictors", "mismatch-study"
STATISTICS = {
    "5th percentile of acceptance": ("mismatch/acceptance_q05", 1),
    "the same, worst bin": ("mismatch/acceptance_q05_worst_bin", 1),
    "mean acceptance": ("mismatch/acceptance_mean", 1),
    "KL sparse to dense": ("mismatch/kl_sparse_to_dense", -1),
    "share of tokens more than 20 nats off": ("correction/clamped_share", -1),
    "largest weight before truncation": ("correction/weight_max_before", -1),
    "effective sample share before truncation": ("correction/effective_sample_share_before", 1),
    "reward of the sparse rollouts": ("reward/mean", 1),
    "share of the cache that is read": ("rollout/kv_read_share", 1),
}
"""Names of metrics, and whether much of it should go with good training (1) or bad (-1)."""
BASELINE = "5th percentile of acceptance"
WHEN: dict[str, Callable[[Sequence[float]], float]] = {
    "run_mean": statistics.mean,
    "first_step": lambda values: values[0],
}
"""The values of a run that are correlated."""
HIGH_TAIL = 0.78


@dataclass(frozen=True)
class Run:
    row: str
    gained: float
    """Change of dense accuracy from the first to the last evaluation."""
    values: dict[str, dict[str, float]]
    """By statistic, then by when."""


@dataclass(frozen=True)
class Selection:
    """Runs that are compared with each other: of records made with the same number of steps and the same learning rate."""

    name: str
    records: tuple[str, ...]
    keep: Callable[[Run], bool] = lambda run: True


def _fixed(run: Run) -> bool:
    return run.row.startswith(("fixed", "quantized"))


def _evicts(run: Run) -> bool:
    return "_kv-" in run.row


def _tail(run: Run) -> float:
    return run.values[BASELINE]["run_mean"]


SHORT, LONG = (STUDIES[25], AGAIN[25]), (STUDIES[60], AGAIN[60])
SELECTIONS = (
    Selection("25 steps", SHORT),
    Selection("25 steps, no eviction", SHORT, lambda run: not _evicts(run)),
    Selection(
        f"25 steps, no eviction, tails above {HIGH_TAIL}", SHORT, lambda r: not _evicts(r) and _tail(r) > HIGH_TAIL
    ),
    Selection("60 steps", LONG),
    Selection("60 steps, with small units", (*LONG, SMALL_UNITS, PAIRS)),
    Selection("60 steps, no fixed budget", LONG, lambda run: not _fixed(run)),
    Selection("60 steps, with checked drafts", (*LONG, VERIFIED, CHECK_GRID, CHECK_BUDGETS)),
)


def runs_of(record: dict[str, Any]) -> list[Run]:
    """The sparse runs of a study's results that were not cut."""
    found = []
    for run in record["runs"]:
        if run["row"] == "dense" or run["state"] != "finished":
            continue
        series = {
            name: [value for value in run["series"][metric] if value is not None]
            for name, (metric, _) in STATISTICS.items()
        }
        values = {name: {when: float(of(each)) for when, of in WHEN.items()} for name, each in series.items()}
        points = run["dense_accuracy"]
        found.append(Run(run["row"], points[-1][1] - points[0][1], values))
    return found


def correlate(runs: Sequence[Run], when: str, draws: int, random: np.random.Generator) -> dict[str, dict[str, Any]]:
    """Of each statistic: the correlation, its interval, and how much stronger it is than the baseline's."""
    names = list(STATISTICS)
    figures = np.array([[run.values[name][when] for name in names] for run in runs])
    gains = np.array([run.gained for run in runs])
    chosen = whole_rows([run.row for run in runs], draws, random)
    drawn = [rank_correlations(figures[places], gains[places]) for places in chosen]
    directions = np.array([direction for _, direction in STATISTICS.values()])
    base = names.index(BASELINE)
    once, many = rank_correlations(figures, gains), np.array(drawn)
    stronger = once * directions - (once * directions)[base]
    stronger_drawn = many * directions - (many * directions)[:, [base]]
    return {
        name: _interval(once[place], many[:, place]) | {"gained": _interval(stronger[place], stronger_drawn[:, place])}
        for place, name in enumerate(names)
    }


def _interval(value: float, drawn: np.ndarray) -> dict[str, float]:
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return {"value": float(value), "low": float(low), "high": float(high)}


def analyse(selection: Selection, draws: int, seed: int) -> dict[str, Any]:
    found = [run for name in selection.records for run in runs_of(results(name, STUDY))]
    runs = [run for run in found if selection.keep(run)]
    random = np.random.default_rng([seed, SELECTIONS.index(selection)])
    return {
        "selection": selection.name,
        "records": {name: files.sha256(RESULTS / f"{name}.json") for name in selection.records},
        "runs": len(runs),
        "rows": len({run.row for run in runs}),
        **{when: correlate(runs, when, draws, random) for when in WHEN},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap")
    parser.add_argument("--draws", type=int, default=10_000)
    options = parser.parse_args()
    began = time.perf_counter()
    found = []
    for selection in SELECTIONS:
        found.append(analyse(selection, options.draws, options.seed))
        print(f"{selection.name}: {found[-1]['runs']} runs in {found[-1]['rows']} rows", flush=True)
    config = {"draws": options.draws, "confidence": 0.95, "statistics": STATISTICS, "baseline": BASELINE}
    about = {"config": config, "seed": options.seed, "wall_seconds": time.perf_counter() - began}
    print(f"wrote {records.write(options.out, KIND, found, **about)}")


if __name__ == "__main__":
    main()
