"""Do sparsity and staleness add, and does a correction that takes in one of them alone help?"""

from __future__ import annotations

from collections.abc import Sequence

from claim_cells import Cell, Done, Place, Table
from claim_figures import difference, grouped, over_seeds
from claim_runs import run_mean, trained
from claim_tasks import DENSE, ClaimTask, budget

NAME = "staleness"
ABOUT = (
    "Do the mismatches of sparse and of older rollouts add, and does it help to correct for each of them separately?"
)
PAIRS = ("sparse_to_dense", "dense_to_now", "sparse_to_now")
BEHIND = (0, 1, 2, 4)


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    """Dense and sparse rollouts of each age. What is older than 0 once with the correction on both mismatches and once on
    sparsity alone."""
    made = []
    for seed in seeds:
        for task in tasks[-1:] if tasks[0].toy else tasks:
            for rollouts, reading in (("dense", DENSE), ("sparse", budget(task.middle_budget))):
                for behind in BEHIND:
                    for dense_of in ("now", "sampler") if behind else ("now",):
                        if task.toy and (rollouts, behind, dense_of) != ("sparse", 1, "sampler"):
                            continue
                        about = {"task": task.name, "rollouts": rollouts, "reading": reading}
                        about |= {"rollouts_behind_steps": behind, "dense_of": dense_of}
                        made.append(Cell(f"{task.name}-{rollouts}-{behind}-{dense_of}-{seed}", about, seed))
    return made


def run(cell: Cell, place: Place) -> Table:
    older = {name: cell.config[name] for name in ("rollouts_behind_steps", "dense_of")}
    return trained(place, cell.config["reading"], cell.seed, train=older, correction={"name": "tis"})[1]


def results(done: Sequence[Done]) -> Table:
    """A line per task, rollouts, age and correction. `more_than_sum` is the lost acceptance of both together minus the sum
    of the two alone: 0 where they add."""
    lines = []
    keys = ("task", "rollouts", "rollouts_behind_steps", "dense_of")
    kinds = grouped(done, lambda each: tuple(each[key] for key in keys))
    for kind, of in kinds.items():
        fresh = kinds.get((*kind[:2], 0, "now"), [])
        dense = kinds.get((kind[0], "dense", 0, "now"), [])
        line = dict(zip(keys, kind, strict=True))
        line |= {
            "accuracy_change": over_seeds([each.result["accuracy_change"] for each in of]),
            "against_fresh": difference(_gains(fresh), _gains(of)),
            "against_fresh_dense": difference(_gains(dense), _gains(of)),
            "reward": over_seeds([run_mean(each.result, "reward/mean") for each in of]),
            "clipped_share": over_seeds([run_mean(each.result, "policy/clipped_share") for each in of]),
        }
        for pair in PAIRS if kind[2] else ():
            for figure in ("acceptance_mean", "acceptance_q05", "kl"):
                name = f"{figure}_{pair}"
                line[name] = over_seeds([run_mean(each.result, f"staleness/{name}") for each in of])
        if kind[2]:
            line["more_than_sum"] = over_seeds([_more_than_sum(each.result) for each in of])
        lines.append(line)
    return {"lines": lines}


def _gains(of: Sequence[Done]) -> list[float]:
    return [each.result["accuracy_change"] for each in of]


def _more_than_sum(result: Table) -> float | None:
    lost = [run_mean(result, f"staleness/acceptance_mean_{pair}") for pair in PAIRS]
    sparse, stale, both = (None if value is None else 1 - value for value in lost)
    return None if sparse is None or stale is None or both is None else both - sparse - stale
