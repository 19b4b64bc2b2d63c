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

from sparroll import records

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "recipes" / "claims")]

from claim_cells import Cell, Done  # noqa: E402
from claim_tasks import ClaimTask, claim_tasks  # noqa: E402
from experiments import NAMES, experiment  # noqa: E402
from experiments.sparse_rl import samplers  # noqa: E402

Table = dict[str, Any]
FULL = {task.name: task for task in claim_tasks(Path("out"), "cuda", None, toy=False)}
KNOWN = {"reproduced": 0.01, "refuted": 0.01, "undecided": 0.5}
"""How far seeds lie apart where a figure asks for this verdict."""


@pytest.fixture(scope="module")
def claims() -> Iterator[dict[str, Any]]:
    """Those that an experiment is for, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        found = importlib.import_module("render_claims").every_claim()
        patch.setattr(sys.modules["published_experiments"], "DRAWS", 60)
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


# -- figures with known verdicts -----------------------------------------------------------------------------------------


def seeds(mean: float, apart: float, count: int = 3) -> Table:
    values = [mean + apart * place for place in (-1, 0, 1)][:count]
    ends = {"low": mean - 2 * apart, "high": mean + 2 * apart} if count > 1 else {"low": None, "high": None}
    return {"mean": mean, "seeds": values} | ends


def around(mean: float, apart: float) -> list[float]:
    return [mean, mean - apart, mean + apart]


Figures = Callable[[str, str, float, int], Table]
"""(task, verdict, distance of seeds, number of seeds) -> results of one task."""


def lines(good: Table, bad: Table, *names: str, **more: Any) -> Figures:
    """Lines whose runs gained so much, by kind. names: the columns of a kind."""

    def made(task: str, verdict: str, apart: float, count: int) -> Table:
        rows = good if verdict == "reproduced" else bad
        found = []
        for kind, mean in rows.items():
            about = dict(zip(names, kind if len(names) > 1 else (kind,), strict=True))
            found.append({"task": task, "accuracy_change": seeds(mean, apart, count)} | about | more)
        return {"lines": found}

    return made


def held(good: Table, bad: Table) -> Figures:
    """Lines and cells of `threshold`, whose runs had the tails that they were to have."""
    plain = lines(good, bad, "target")

    def made(task: str, verdict: str, apart: float, count: int) -> Table:
        found = plain(task, verdict, apart, count)
        return found | {"cells": [with_tail(task, line["target"], line["target"] or 0.98) for line in found["lines"]]}

    return made


def with_tail(task: str, target: float | None, tail: float | None) -> Table:
    """A cell of `threshold`; the other bin's tail is higher, and its lowest step lower."""
    series = {"a": [tail, tail], "b": [0.1, 2.0]}
    steps = {f"mismatch/acceptance_q05/{name}": values for name, values in series.items()} if tail else {}
    return {"config": {"task": task, "target": target}, "results": {"steps": steps}}


def sparse_rl(good: Table, bad: Table, **more: Any) -> Figures:
    """Lines of that experiment; what they read and their epsilon follow from their names."""
    plain = lines(good, bad, "kind")

    def made(task: str, verdict: str, apart: float, count: int) -> Table:
        found = plain(task, verdict, apart, count)["lines"]
        for line in found:
            name, _, rest = line["kind"].partition("-")
            kept, _, ending = rest.partition("-")
            evicts = {"kind": "compression", "budget_tokens": int(kept)} if name == "r_kv" else {"kind": "budget"}
            line["reading"] = {"kind": "dense"} if name == "dense" else evicts
            line["epsilon"] = None if name == "dense" or ending == "none" else float(ending or 1e-4)
            line |= {"vetoed_share": seeds(0.1, 0.01), "kv_saved_share": seeds(0.4, 0.01)} | more
        return {"lines": found, "accuracy": []}

    return made


def rejecting(task: str, verdict: str, apart: float, count: int) -> Table:
    """The larger budget trains well and the smaller badly; the rejected share says so, or the opposite, or nothing."""
    found = sparse_rl({"dense": 0.1, "r_kv-96": -0.1, "r_kv-192": 0.12}, {}, accuracy=[])(task, "reproduced", 0.01, 3)
    for line, share in zip(found["lines"][1:], (0.3, 0.05), strict=True):
        told = share if verdict == "reproduced" else 0.35 - share
        line["vetoed_share"] = seeds(told, apart, count)
    return found


def decoded(task: str, verdict: str, apart: float, count: int) -> Table:
    """The policy of sparse rollouts is as good under dense decoding, and loses little or much under eviction."""
    found = sparse_rl({"dense": 0.1, "r_kv-192": 0.1, "r_kv-192-none": 0.1}, {})(task, "reproduced", apart, count)
    kept = {"reproduced": 0.45, "refuted": 0.05}.get(verdict, 0.3)
    under = {("dense", "dense"): 0.5, ("dense", "r_kv-192"): 0.3, ("r_kv-192", "dense"): 0.5, ("r_kv-192",) * 2: kept}
    # Only what is decoded sparsely moves with the seed, so that differences do.
    found["accuracy"] = [
        {"task": task, "trained_on": on, "decoded_with": with_}
        | {"accuracy": seeds(value, apart if with_ != "dense" else 0.0, count)}
        for (on, with_), value in under.items()
    ]
    return found


def kept_accuracy(task: str, verdict: str, apart: float, count: int) -> Table:
    found = sparse_rl({"dense": 0.1, "r_kv-192": 0.1}, {})(task, "reproduced", apart, count)
    values = {"dense": 0.5, "r_kv-192": 0.52 if verdict == "reproduced" else 0.3}
    found["accuracy"] = [
        {"task": task, "trained_on": on, "decoded_with": "dense", "accuracy": seeds(value, apart, count)}
        for on, value in values.items()
    ]
    return found


def moved(task: str, verdict: str, apart: float, count: int) -> Table:
    far = {"reproduced": 0.001, "refuted": 0.05}.get(verdict, 0.0)
    of = seeds(far, 0.002 if verdict != "undecided" else apart, count)
    return {"over_seeds": [{"task": task, "rollouts": "sparse", "step": 60, "budget": 96, "q05_moved": of}]}


def pages(task: str, verdict: str, apart: float, count: int) -> Table:
    """A page of 32 tokens below or above pages of 16 at the same cost. Its bootstrap has no ends where it has few prompts,
    and then nobody knows whether anything was left out."""
    tail, half = 0.7 if verdict == "reproduced" else 0.8, 0.01 if verdict != "undecided" else 0.15
    rows = [(None, 9.0, 0.98, 0.001), (16, 1.0, 0.7, 0.01), (16, 3.0, 0.8, 0.01), (32, 2.0, tail, half)]
    return {
        "lines": [
            {"task": task, "selector": page and {"kind": "page_mean", "page_tokens": page}, "eflops": cost}
            | {"statistics": {"q05": around(value, ends)}}
            for page, cost, value, ends in rows
        ]
    }


def adapted(loss: str) -> Figures:
    def made(task: str, verdict: str, apart: float, count: int) -> Table:
        changed = seeds(0.06 if verdict == "reproduced" else -0.06, apart, count)
        about = {"task": task, "loss": loss, "trained_under": True, "q05_change": changed}
        other = about | {"trained_under": False, "q05_change": seeds(9.0, 0.0)}
        return {"schedules": [other, about, {"task": task, "loss": "none", "trained_under": True}]}

    return made


def correlated(statistic: str, good: list[float], bad: list[float], open_: list[float]) -> Figures:
    def made(task: str, verdict: str, apart: float, count: int) -> Table:
        of = {"reproduced": good, "refuted": bad}.get(verdict, open_)
        of = of if count > 1 else [of[0], None, None]
        about = {"task": task, "among": "all", "statistic": statistic, "runs": 9}
        return {"correlations": [about | {"run_mean": of}, about | {"among": "fine", "run_mean": around(0, 9)}]}

    return made


def ordered(task: str, verdict: str, apart: float, count: int) -> Table:
    """Eight rows: the tail orders them and the mean does not, or the other way round, or both do."""
    rising, mixed = list(range(8)), [3, 6, 1, 4, 7, 0, 5, 2]
    tails, means = {"reproduced": (rising, mixed), "refuted": (mixed, rising)}.get(verdict, (rising, rising))
    rows = range(8) if count > 1 else range(4)
    cells = [
        {"config": {"task": task, "does": "train", "row": f"row {n}"}, "seed": 0}
        | {
            "results": {
                "accuracy_change": n / 100,
                "steps": {"claims/q05": [tails[n]], "claims/mean": [means[n], None]},
            }
        }
        for n in rows
    ]
    dense = {
        "config": {"task": task, "does": "train", "row": "dense"},
        "results": {"accuracy_change": 9.0, "steps": {}},
    }
    return {"cells": [*cells, dense], "correlations": [{"task": task}]}


def humps(task: str, verdict: str, apart: float, count: int) -> Table:
    skew, share, ks = {"reproduced": (-2.0, 0.5, 0.03), "refuted": (2.0, 0.97, 0.3)}.get(verdict, (0.0, 0.8, 0.0))
    half = 0.01 if verdict != "undecided" else 0.2
    ends = (lambda value: around(value, half)) if count > 1 else (lambda value: [value, None, None])
    shape = {"task": task, "statistics": {"skew": ends(skew), "nearly_one_share": ends(share)}}
    far = {"task": task, "statistics": {"skew": around(9, 0), "nearly_one_share": around(0, 0)}, "beta": {"ks": 1.0}}
    beta = {"ks": ks} if verdict != "undecided" and count > 1 else {"why": "too few values below 0.999"}
    return {"shapes": [far | {"budget": 640}, shape | {"budget": 192, "beta": beta}, far | {"budget": 64}]}


def stale(task: str, verdict: str, apart: float, count: int) -> Table:
    """Both together lose as much as the two alone, or the larger of them; corrected apart is better, or worse."""
    gains = {("sparse", 0, "now"): 0.1, ("sparse", 4, "now"): 0.0}
    apart_gain = ("sparse", 4, "sampler")
    made = lines(gains | {apart_gain: 0.1}, gains | {apart_gain: -0.1}, "rollouts", "rollouts_behind_steps", "dense_of")
    found = made(task, verdict, apart, count)
    both = 0.2 if verdict == "refuted" else 0.3
    lost = {"sparse_to_dense": 0.1, "dense_to_now": 0.2, "sparse_to_now": both}
    for line in found["lines"]:
        line |= {f"acceptance_mean_{pair}": seeds(1 - of, 0.0, count) for pair, of in lost.items()}
        line["acceptance_mean_sparse_to_now"] = seeds(1 - both, 0.1 * (verdict == "undecided"), count)
    return found


def calibrated(task: str, verdict: str, apart: float, count: int) -> Table:
    factor = seeds(1.01 if verdict == "reproduced" else 1.4, apart if verdict == "undecided" else 0.001, count)
    return {"lines": [{"task": task, "kind": "union", "accepted_mass_calibration": factor}]}


JACKPOT, KIND = {"tis": 0.0, "same Z for all": 0.0, "engine's list": 0.0}, "kind"
FIGURES: dict[str, Figures] = {
    "0.86-suffices": held({None: 0.1, 0.86: 0.12}, {None: 0.1, 0.86: -0.1}),
    "0.80-drifts": held({None: 0.1, 0.75: -0.1, 0.8: -0.1}, {None: 0.1, 0.75: 0.1, 0.8: 0.2}),
    "same-at-every-iteration": moved,
    "page-size": pages,
    "published-loss-raises-tail": adapted("published"),
    "an-adapter-raises-tail": adapted("kl"),
    "adapter-trains-as-well": lines(
        {"kl": 0.1, "none, larger budget": 0.09}, {"kl": 0.0, "none, larger budget": 0.1}, "loss"
    ),
    "tail-predicts": correlated("q05", around(0.7, 0.2), around(-0.7, 0.2), around(0.1, 0.5)),
    "mean-does-not": correlated("mean", around(0.0, 0.2), around(0.7, 0.2), around(0.3, 0.4)),
    "tail-beats-mean": ordered,
    "two-humps": humps,
    "eviction-collapses": sparse_rl({"dense": 0.1, "r_kv-192-none": -0.1}, {"dense": 0.0, "r_kv-192-none": 0.1}),
    "eviction-with-correction-trains": kept_accuracy,
    "memory-saved": sparse_rl({"dense": 0.1, "r_kv-192": 0.12}, {"dense": 0.1, "r_kv-192": -0.1}),
    "correction-helps": sparse_rl({"r_kv-192": 0.1, "r_kv-192-none": 0.0}, {"r_kv-192": 0.0, "r_kv-192-none": 0.1}),
    "rejection-tells-the-budget": rejecting,
    "budget-of-512": sparse_rl(
        {"dense": 0.1, "r_kv-96": -0.1, "r_kv-192": 0.12, "r_kv-192-none": 0.0},
        {"dense": 0.1, "r_kv-96": 0.2, "r_kv-192": -0.1, "r_kv-192-none": 0.0},
    ),
    "epsilon": sparse_rl(
        {"r_kv-192": 0.1, "r_kv-192-1e-05": 0.1, "r_kv-192-0.001": 0.1},
        {"r_kv-192": 0.1, "r_kv-192-1e-05": -0.1, "r_kv-192-0.001": 0.3},
    ),
    "robust-to-sparsity": decoded,
    "jackpot-beats-tis": lines(JACKPOT | {"union": 0.1}, JACKPOT | {"union": -0.1}, KIND),
    "z-matters": lines(JACKPOT | {"union": 0.1}, JACKPOT | {"union": -0.1}, KIND),
    "top-20-suffices": calibrated,
    "staleness-adds": stale,
    "quantised-sampler": lines(
        {("dense", None): 0.1, ("dense", "int8"): 0.12, ("sparse", "int8"): -0.9},
        {("dense", None): 0.1, ("dense", "int8"): -0.1, ("sparse", "int8"): 0.9},
        "attention", "form",
    ),
}  # fmt: skip
"""Of every claim that an experiment is for."""


def figures_of(claim: Any, *verdicts: tuple[str, str], count: int = 3) -> Table:
    """Results in which each task's figures ask for a verdict."""
    merged: Table = {}
    for task, verdict in verdicts:
        apart = KNOWN[verdict] if claim.name not in ("epsilon",) or verdict != "reproduced" else 0.005
        for name, values in FIGURES[claim.name](task, verdict, apart, count).items():
            merged.setdefault(name, []).extend(values)
    return merged


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
                {"budget": tokens, "eflops": share, "decode_seconds": 1.0, "statistics": measured(share - page / 1000)}
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
    monkeypatch.setattr(module, "rank_correlation", partial(module.rank_correlation, replicates=4))


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
