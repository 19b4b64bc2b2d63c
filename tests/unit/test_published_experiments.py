"""What reads the records of recipes/claims for docs/claims.md: each claim gets every verdict from figures that ask for it, a
run that was cut decides nothing it did not see, and the experiments write what is read."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from claim_worlds import FIGURES, KNOWN, Table, around, figures_of, with_tail
from sparroll import records

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "recipes" / "claims")]

from claim_cells import Cell, Done  # noqa: E402
from claim_tasks import ClaimTask, claim_tasks  # noqa: E402
from experiments import NAMES, experiment  # noqa: E402
from experiments.sparse_rl import samplers  # noqa: E402

FULL = {task.name: task for task in claim_tasks(Path("out"), "cuda", None, toy=False)}


@pytest.fixture(scope="module")
def claims() -> Iterator[dict[str, Any]]:
    """Those that an experiment is for, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        found = importlib.import_module("render_claims").every_claim()
        yield {claim.name: claim for claim in found if claim.experiment}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: dict[str, Any]) -> Path:
    """Of records, in place of the real ones."""
    monkeypatch.setattr(sys.modules["published_claims"], "RESULTS", tmp_path)
    return tmp_path


def write(folder: Path, name: str, results: Table, tasks: tuple[str, ...] = ("table-sums", "remarks")) -> None:
    config = {"toy": False, "seeds": [0, 1, 2], "tasks": {task: {} for task in tasks}}
    whole = {"cells": [], "missing": []} | results
    records.write(folder / f"claims-{name}-h200.json", f"claims-{name}", whole, config=config)


def verdict_of(claim: Any, folder: Path, results: Table) -> str:
    write(folder, claim.experiment, results)
    return claim.verdict()


def test_every_claim_with_an_experiment_is_tested_here(claims: dict[str, Any]) -> None:
    assert set(FIGURES) == set(claims)


@pytest.mark.parametrize("name", FIGURES)
def test_a_claim_gets_every_verdict_from_figures_that_ask_for_it(
    name: str, claims: dict[str, Any], folder: Path
) -> None:
    claim = claims[name]
    assert claim.verdict() == "not run yet"
    for verdict in KNOWN:
        results = figures_of(claim, ("table-sums", verdict), ("remarks", verdict))
        assert verdict_of(claim, folder, results) == verdict, claim.row()[3]
    mixed = figures_of(claim, ("table-sums", "reproduced"), ("remarks", "refuted"))
    assert verdict_of(claim, folder, mixed) == "partly", claim.row()[3]
    cells = claim.row()
    assert "table-sums" in cells[3] and "remarks" in cells[3] and "tiny-reasoner" in cells[4]
    assert cells[5] == f"`claims-{claim.experiment}-h200`" and claim.rules()[1].count(": ") >= 2
    assert claim.sources()[1] == [f"python recipes/claims/run.py --out runs/claims --only {claim.experiment}"]


@pytest.mark.parametrize("name", FIGURES)
def test_one_seed_decides_nothing(name: str, claims: dict[str, Any], folder: Path) -> None:
    claim = claims[name]
    if name in ("page-size", "rejection-tells-the-budget"):
        pytest.skip("prompts are drawn there, and dense rollouts have their seeds")
    results = figures_of(claim, ("remarks", "refuted"), count=1)
    assert verdict_of(claim, folder, results) == "undecided", claim.row()[3]
    assert "(no interval)" in claim.row()[3]


def test_what_a_cut_run_did_not_come_to_keeps_a_claim_from_being_reproduced(
    claims: dict[str, Any], folder: Path
) -> None:
    claim = claims["0.80-drifts"]
    results = figures_of(claim, ("remarks", "reproduced"))
    results["lines"] = [line for line in results["lines"] if line["target"] != 0.8]
    results["cells"] = [cell for cell in results["cells"] if cell["config"]["target"] != 0.8]
    results["missing"] = ["a", "b", "c"]
    assert verdict_of(claim, folder, results) == "partly"
    assert claim.row()[3].endswith("remarks, .80: not run yet")
    assert claim.row()[5] == "`claims-threshold-h200` (2 of 5 cells)"
    results["cells"].append({"config": {"task": "remarks", "target": 0.8}, "results": {"left_out": "too high"}})
    assert verdict_of(claim, folder, results) == "partly"
    assert claim.row()[3].endswith("remarks, .80: no schedule holds it")


def test_a_schedule_is_judged_by_the_tail_that_its_runs_had(claims: dict[str, Any], folder: Path) -> None:
    high, low = claims["0.86-suffices"], claims["0.80-drifts"]
    results = figures_of(high, ("table-sums", "reproduced"), ("remarks", "refuted"))

    def verdicts(tail: float | None) -> tuple[str, str]:
        results["cells"][-1] = with_tail("remarks", 0.86, tail)
        return verdict_of(high, folder, results), verdict_of(low, folder, results)

    # Between .825 and .86 a tail is neither that of .80 nor that of .86.
    assert verdicts(0.853) == ("partly", "not run yet")
    assert high.row()[3].endswith("remarks, .86 beyond dense: its runs had another tail")
    assert verdicts(0.79)[1] == "partly"
    assert "remarks, target .86 (worst bin .790), beyond dense: -0.2" in low.row()[3]
    for tail, drifts in ((0.775, True), (0.825, True), (0.826, False)):
        verdicts(tail)
        assert (f"(worst bin {tail}), beyond dense".replace(" 0.", " .") in low.row()[3]) is drifts
    assert verdicts(None)[1] == "not run yet"
    assert verdicts(0.774)[1] == "partly"
    assert "remarks, target .86 (worst bin .774), change: -0.1" in low.row()[3]


# -- the experiments write what is read ----------------------------------------------------------------------------------

Q05 = 0.9
STEPS = {
    "mismatch/acceptance_q05": Q05, "mismatch/acceptance_q05_worst_bin": 0.8, "mismatch/acceptance_q05/0-100": 0.9,
    "reward/mean": 0.5, "correction/vetoed_sequence_share": 0.3, "correction/accepted_mass_calibration": 1.01,
    "compression/kv_saved_share": 0.4, "staleness/acceptance_mean_sparse_to_dense": 0.9, "control/reward_gap": 0.1,
    "staleness/acceptance_mean_dense_to_now": 0.8, "staleness/acceptance_mean_sparse_to_now": 0.7,
}  # fmt: skip
STATISTICS = ("mean", "q01", "q05", "q10", "cvar01", "cvar05", "kl", "nearly_one_share", "skew")
OVER = tuple(f"over_{nats}_nats" for nats in (2, 5, 10, 20))


def level(cell: Cell) -> float:
    """How much a cell's run reads, from 0 to 1; what it gains rises with it."""
    reading, task = cell.config["reading"], FULL[cell.config["task"]]
    tokens = reading.get("kv_budget_tokens", reading.get("budget_tokens", task.budgets[-1]))
    return tokens / task.budgets[-1]


def trained(cell: Cell, gained: float) -> Table:
    figures = {name: [value] * 6 for name, value in STEPS.items()}
    figures |= {f"claims/{name}": [gained + 0.001 * place] * 6 for place, name in enumerate((*STATISTICS, *OVER))}
    gained += (cell.seed - 1) / 1000
    points = [[0, 0.5, 0.4, 0.6], [60, 0.5 + gained, 0.4, 0.6]]
    return {"dense_accuracy": points, "accuracy_change": gained, "steps": figures, "seconds": {}}


def measured(value: float) -> Table:
    return {name: around(value, 0.001) for name in (*STATISTICS, *OVER)} | {"skew": around(-2, 0.1)}


def result_of(name: str, cell: Cell) -> Table:
    """Made up, in the form that the experiment's `run` returns."""
    task, config = FULL[cell.config["task"]], cell.config
    if name == "page-size":
        selector = config["selector"]
        budgets = [64, 128, 256] if selector else [None]
        rows = [(tokens, (tokens or 640) / 640, selector["page_tokens"] if selector else 0) for tokens in budgets]
        return {
            "rows": [
                {"budget": tokens, "eflops": share, "decode_seconds": 1.0, "engine": "vllm"}
                | {"statistics": measured(share - page / 1000)}
                for tokens, share, page in rows
            ]
        }
    if config.get("does") == "shape":
        return {"statistics": measured(0.5), "beta": {"a": 2.0, "b": 0.5, "weight": 0.5, "ks": 0.03, "values": 999}}
    if config.get("does") == "measure":
        return {"rows": [{"budget": None, "statistics": measured(0.9), "bins": {}}]}
    if config.get("does") == "calibrate":
        return {f"{target:.2f}": {"table": None, "why": "made up"} for target in task.targets}
    if name == "threshold":
        tail, run = config["target"] or 0.98, trained(cell, config["target"] or 1.0)
        return run | {"steps": run["steps"] | {"mismatch/acceptance_q05/0-100": [tail] * 6}}
    gained = level(cell) if "reading" in config else 0.5
    return trained(cell, gained) | ADDED.get(name, lambda task, cell: {})(task, cell)


def checkpoints(task: ClaimTask, cell: Cell) -> Table:
    about = {
        "bins": {},
        "statistics": measured(0.9),
        "value": dict.fromkeys(("q05", "q01", "mean", "over_10_nats", "kl")),
    }
    rows = []
    for step in (0, 30, 60):
        for tokens in task.budgets:
            value = dict.fromkeys(about["value"], 0.9 + step / 600 + cell.seed / 1e4 * step / 60)
            drawn = {name: [of] * 20 for name, of in value.items()}
            rows.append(about | {"step": step, "budget": tokens, "value": value, "replicates": drawn})
    return {"rows": rows}


def schedules(task: ClaimTask, cell: Cell) -> Table:
    of = {"budget": cell.config["reading"]["kv_budget_tokens"], "without": measured(0.8)}
    if not cell.config["loss"].startswith("none"):
        change = around(0.05 + cell.seed / 1000, 0.01)
        of |= {"with": measured(0.85), "change": dict.fromkeys(("q05", "mean", "over_10_nats", "kl"), change)}
    return {"rows": [of]}


def robust(task: ClaimTask, cell: Cell) -> Table:
    own = 0.1 if cell.config["kind"] != "dense" else 0.0
    value = {sampler: 0.5 + cell.seed / 1000 * (sampler == "dense") for sampler in samplers(task)}
    value |= {sampler: of + own for sampler, of in value.items() if sampler != "dense"}
    return {"accuracy": {f"after-{sampler}": {"value": of} for sampler, of in value.items()}}


ADDED: dict[str, Callable[[ClaimTask, Cell], Table]] = {
    "over-iterations": checkpoints,
    "distil-loss": schedules,
    "sparse-rl": robust,
}

VERDICTS = {
    "threshold": {"0.86-suffices": "partly", "0.80-drifts": "partly"},
    "over-iterations": {"same-at-every-iteration": "refuted"},
    "page-size": {"page-size": "reproduced"},
    "staleness": {"staleness-adds": "partly"},
    "distil-loss": {
        "published-loss-raises-tail": "reproduced",
        "an-adapter-raises-tail": "reproduced",
        "adapter-trains-as-well": "refuted",
    },
    "sparse-rl": {
        "eviction-collapses": "refuted",
        "eviction-with-correction-trains": "reproduced",
        "memory-saved": "refuted",
        "correction-helps": "undecided",
        "rejection-tells-the-budget": "reproduced",
        "budget-of-512": "partly",
        "epsilon": "reproduced",
        "robust-to-sparsity": "reproduced",
    },
    "predicts-training": {
        "tail-predicts": "reproduced",
        "mean-does-not": "refuted",
        "tail-beats-mean": "undecided",
        "two-humps": "reproduced",
    },
    "jackpot-union": {"jackpot-beats-tis": "undecided", "z-matters": "undecided", "top-20-suffices": "reproduced"},
    "quantised-sampler": {"quantised-sampler": "reproduced"},
}
"""What the made-up results come to."""


def recorded(name: str, cells: list[Cell], finished: list[Cell]) -> Table:
    """The results of a record, as recipes/claims/claim_cells.py makes them."""
    done = [Done(cell, result_of(name, cell)) for cell in finished]
    rows = [{"cell": each.cell.name, "config": each.cell.config, "results": each.result} for each in done]
    missing = [cell.name for cell in cells if cell not in finished]
    return {**experiment(name).results(done), "cells": rows, "missing": missing}


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("experiments.predicts_training")
    for name in ("rank_correlation", "stronger_correlation"):
        monkeypatch.setattr(module, name, partial(getattr(module, name), replicates=4))


@pytest.mark.parametrize("name", NAMES)
def test_a_finished_record_of_the_experiment_needs_no_further_code(
    name: str, claims: dict[str, Any], folder: Path, few_draws: None
) -> None:
    cells = experiment(name).cells(list(FULL.values()), [0, 1, 2])
    write(folder, name, recorded(name, cells, cells))
    mine = {claim.name: claim for claim in claims.values() if claim.experiment == name}
    assert {claim.name: claim.verdict() for claim in mine.values()} == VERDICTS[name]
    for claim in mine.values():
        seen = claim.row()[3]
        assert "not run yet" not in seen, f"{claim.name}: {seen}"
        assert all(task in seen for task in FULL) or name == "page-size"


@pytest.mark.parametrize("name", NAMES)
def test_a_record_that_was_cut_anywhere_is_rendered(
    name: str, claims: dict[str, Any], folder: Path, few_draws: None
) -> None:
    cells = experiment(name).cells(list(FULL.values()), [0, 1, 2])
    for finished in (cells[:1], cells[:2], cells[: len(cells) // 3], cells[-2:], cells[1::2]):
        write(folder, name, recorded(name, cells, finished))
        for claim in (claim for claim in claims.values() if claim.experiment == name):
            told = f"`claims-{name}-h200` ({len(finished)} of {len(cells)} cells)"
            assert claim.row()[5] in (told, f"`claims-{name}-h200`: not in this verdict")
            assert claim.verdict() == "not run yet" or claim.rules()
