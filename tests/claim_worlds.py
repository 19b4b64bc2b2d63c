"""Made-up results of the experiments in recipes/claims, in which each claim's figures ask for a verdict that is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Table = dict[str, Any]
KNOWN = {"reproduced": 0.01, "refuted": 0.01, "undecided": 0.5}
"""How far seeds lie apart where a figure asks for this verdict."""


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


def correlated(
    statistic: str, good: list[float], bad: list[float], open_: list[float], figure: str = "run_mean"
) -> Figures:
    def made(task: str, verdict: str, apart: float, count: int) -> Table:
        of = {"reproduced": good, "refuted": bad}.get(verdict, open_)
        of = of if count > 1 else [of[0], None, None]
        about = {"task": task, "among": "all", "statistic": statistic, "runs": 9}
        return {"correlations": [about | {figure: of}, about | {"among": "fine", figure: around(0, 9)}]}

    return made


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
    "tail-beats-mean": correlated(
        "mean", around(-0.2, 0.1), around(0.2, 0.1), around(0.0, 0.1), "run_mean_beyond_q05"
    ),
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
