"""Sparse-RL: what its budget and its epsilon do, and whether a policy that was trained on sparse rollouts decodes better
under sparse inference."""

from __future__ import annotations

from collections.abc import Sequence

from claim_cells import Cell, Done, Place, Table
from claim_figures import difference, grouped, over_seeds
from claim_runs import accuracy, last_checkpoint, opened, run_mean, trained
from claim_tasks import DENSE, ClaimTask, Reading, budget, evicting

NAME = "sparse-rl"
ABOUT = (
    "How do Sparse-RL's rejections and gains depend on budget and epsilon, and is its policy more robust when sparse?"
)
EPSILONS = (1e-5, 1e-4, 1e-3)
PUBLISHED = 1e-4


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    """Dense rollouts; R-KV at every budget with the published epsilon; every epsilon at the middle budget; and the
    published pages, which drop nothing, with the same correction."""
    made = []
    for seed in seeds:
        for task in tasks[-1:] if tasks[0].toy else tasks:
            for name, reading, epsilon in kinds(task):
                about = {"task": task.name, "kind": name, "reading": reading, "epsilon": epsilon}
                made.append(Cell(f"{task.name}-{name}-{seed}", about, seed))
    return made


def kinds(task: ClaimTask) -> list[tuple[str, Reading, float | None]]:
    """(name, reading, epsilon) of each run."""
    kept = [evicting(task, "r_kv", each) for each in task.kept_tokens]
    middle = kept[len(kept) // 2]
    if task.toy:
        return [("r_kv", middle, EPSILONS[0])]
    made: list[tuple[str, Reading, float | None]] = [("dense", DENSE, None)]
    made += [(f"r_kv-{each['budget_tokens']}", each, PUBLISHED) for each in kept]
    made += [(f"r_kv-{middle['budget_tokens']}-{eps:g}", middle, eps) for eps in EPSILONS if eps != PUBLISHED]
    made += [(f"r_kv-{middle['budget_tokens']}-none", middle, None)]
    made += [(f"pages-{each}", budget(each), PUBLISHED) for each in (task.low_budget, task.middle_budget)]
    return made


def samplers(task: ClaimTask) -> dict[str, Reading]:
    """What every trained policy is decoded with."""
    budgets = () if task.toy else (task.middle_budget, task.low_budget)
    found = {"dense": DENSE} | {f"pages-{each}": budget(each) for each in budgets}
    return found | {f"r_kv-{each}": evicting(task, "r_kv", each) for each in task.kept_tokens}


def run(cell: Cell, place: Place) -> Table:
    epsilon = cell.config["epsilon"]
    correction = {"name": "none"} if epsilon is None else {"name": "sparse_rl", "veto_below": epsilon}
    # A correction that drops everything says something, too: the run goes on.
    _, figures = trained(
        place, cell.config["reading"], cell.seed, correction=correction, guard={"action": "off", "empty_steps": 0}
    )
    task, wanted = place.task, samplers(place.task)
    rows = {}
    with opened(task, last_checkpoint(place) / "model", list(wanted.values())) as engine:
        for sampler, reading in wanted.items():
            key = f"after-{sampler}"
            rows[key] = place.part(key, lambda reading=reading: accuracy(engine, task, reading, cell.seed))
    return figures | {"accuracy": rows}


def results(done: Sequence[Done]) -> Table:
    """A line per run with its rejections and its gain, and one per run and sampler with the accuracy of the trained policy
    under it, less that of the policy that was trained on dense rollouts."""
    lines, under = [], []
    for (task, kind), of in grouped(done, lambda each: (each["task"], each["kind"])).items():
        dense = [each for each in done if (each["task"], each["kind"]) == (task, "dense")]
        names = {"vetoed_share": "correction/vetoed_sequence_share", "masked_share": "correction/masked_token_share"}
        names |= {"reward": "reward/mean", "kl": "mismatch/kl_sparse_to_dense", "tail": "mismatch/acceptance_q05"}
        names |= {"kv_saved_share": "compression/kv_saved_share"}
        lines.append(
            {"task": task, "kind": kind, "reading": of[0]["reading"], "epsilon": of[0]["epsilon"]}
            | {"accuracy_change": over_seeds([each.result["accuracy_change"] for each in of])}
            | {name: over_seeds([run_mean(each.result, metric) for each in of]) for name, metric in names.items()}
        )
        # Cells of an earlier version hold accuracies before training, too.
        for sampler in dict.fromkeys(key for each in of for key in each.result["accuracy"] if key.startswith("after")):
            values = [each.result["accuracy"][sampler]["value"] for each in of]
            of_dense = [each.result["accuracy"][sampler]["value"] for each in dense]
            about = {"task": task, "trained_on": kind, "decoded_with": sampler.removeprefix("after-")}
            against = None if kind == "dense" else difference(of_dense, values)
            under.append(about | {"accuracy": over_seeds(values), "against_trained_on_dense": against})
    return {"lines": lines, "accuracy": under}
