"""DistillSparse with the published loss, and with the KL over top-k lists: the tail by bin before and after, also under
schedules that the adapter was not trained under."""

from __future__ import annotations

from collections.abc import Sequence

from claim_cells import Cell, Done, Place, Table
from claim_figures import difference, grouped, over_seeds
from claim_runs import last_checkpoint, opened, run_mean, sampled, scorer_of, tokens_of, trained
from claim_tasks import ClaimTask, Reading, budget
from claim_tokens import intervals, paired_difference

from sparroll.engines.adapter import Adapter
from sparroll.engines.base import Engine
from sparroll.engines.make import DTYPES
from sparroll.engines.scoring import Scorer

NAME = "distil-loss"
ABOUT = "Does the published loss of DistillSparse raise the tail, does the KL over lists, and under which schedules?"
LARGER_BUDGET = "none, larger budget"
"""No adapter, and rollouts with the next larger budget: what an adapter is to make up for."""
LOSSES: dict[str, Table | None] = {
    "none": None,
    LARGER_BUDGET: None,
    "published": {"objective": "ppo_kl", "kl": "k3"},
    "published with lists": {"objective": "ppo_kl", "kl": "top_k"},
    "kl": {"objective": "kl", "kl": "top_k"},
}
ADAPTER_LR = 1e-3


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    made = []
    for seed in seeds:
        for task in tasks[-1:] if tasks[0].toy else tasks:
            for loss in ("published",) if task.toy else LOSSES:
                tokens = larger_budget(task) if loss == LARGER_BUDGET else task.middle_budget
                about = {"task": task.name, "loss": loss, "reading": budget(tokens)}
                made.append(Cell(f"{task.name}-{loss.replace(',', '').replace(' ', '-')}-{seed}", about, seed))
    return made


def others(task: ClaimTask) -> list[int]:
    """The schedule of the run, a cheaper and a dearer one."""
    return [task.middle_budget, task.low_budget, *(() if task.toy else (larger_budget(task),))]


def larger_budget(task: ClaimTask) -> int:
    return next(each for each in task.budgets if each > task.middle_budget)


def run(cell: Cell, place: Place) -> Table:
    """A run with the adapter beside the policy. Then the final policy's rollouts with and without the adapter, both
    against the final policy with full attention."""
    task, loss = place.task, LOSSES[cell.config["loss"]]
    distill = {} if loss is None else {"distill": loss | {"lr": ADAPTER_LR}}
    _, figures = trained(place, cell.config["reading"], cell.seed, correction={"name": "tis"}, **distill)
    found = last_checkpoint(place)
    model = str(found / "model")
    scorer, readings = scorer_of(task, model), [budget(each) for each in others(task)]
    with opened(task, model, readings) as engine:
        adapter = None if loss is None else Adapter.load(scorer.model, found / "adapter")
        rows = [measured(engine, scorer, task, reading, adapter, cell.seed) for reading in readings]
    return figures | {"rows": rows}


def measured(
    engine: Engine, scorer: Scorer, task: ClaimTask, reading: Reading, adapter: Adapter | None, seed: int
) -> Table:
    """Statistics without the adapter and with it, over all lengths and by bin, and what it changes, paired by prompt."""
    engine.load_weights(scorer.model, engine.weight_version + 1)
    without = tokens_of(scorer, task, sampled(engine, task, reading, seed))
    found = {
        "budget": reading["kv_budget_tokens"],
        "without": intervals(without),
        "without_bins": {start: intervals(each)["q05"] for start, each in without.bins(task.bin_tokens).items()},
    }
    if adapter is None:
        return found
    engine.load_weights(adapter.merged(DTYPES[task.dtype]), engine.weight_version + 1)
    with_it = tokens_of(scorer, task, sampled(engine, task, reading, seed))
    return found | {
        "with": intervals(with_it),
        "with_bins": {start: intervals(each)["q05"] for start, each in with_it.bins(task.bin_tokens).items()},
        "change": {name: paired_difference(without, with_it, name) for name in ("q05", "mean", "over_10_nats", "kl")},
    }


def results(done: Sequence[Done]) -> Table:
    """A line per task and loss, and one per task, loss and schedule with what the adapter changes under it."""
    lines, schedules = [], []
    for (task, loss), of in grouped(done, lambda each: (each["task"], each["loss"])).items():
        plain = [each.result["accuracy_change"] for each in done if (each["task"], each["loss"]) == (task, "none")]
        gains = [each.result["accuracy_change"] for each in of]
        lines.append(
            {
                "task": task,
                "loss": loss,
                "accuracy_change": over_seeds(gains),
                "against_no_adapter": difference(plain, gains),
                "reward": over_seeds([run_mean(each.result, "reward/mean") for each in of]),
                "tail_first_steps": over_seeds([_mean_of(each.result, slice(None, 5)) for each in of]),
                "tail_last_steps": over_seeds([_mean_of(each.result, slice(-5, None)) for each in of]),
                "bins_first_and_last": _bins(of),
            }
        )
        for budget_tokens in dict.fromkeys(row["budget"] for each in of for row in each.result["rows"]):
            rows = [row for each in of for row in each.result["rows"] if row["budget"] == budget_tokens]
            about = {"task": task, "loss": loss, "budget": budget_tokens}
            about["trained_under"] = of[0]["reading"]["kv_budget_tokens"] == budget_tokens
            about["without"] = over_seeds([row["without"]["q05"][0] for row in rows])
            if "change" in rows[0]:
                about |= {
                    f"{name}_change": over_seeds([row["change"][name][0] for row in rows]) for name in rows[0]["change"]
                }
            schedules.append(about)
    return {"lines": lines, "schedules": schedules}


def _mean_of(result: Table, steps: slice, name: str = "mismatch/acceptance_q05") -> float | None:
    known = [value for value in result["steps"].get(name, [])[steps] if value is not None]
    return sum(known) / len(known) if known else None


def _bins(of: Sequence[Done]) -> Table:
    """Of each length bin: its tail in the first five and in the last five steps."""
    prefix = "mismatch/acceptance_q05/"
    names = dict.fromkeys(name for each in of for name in each.result["steps"] if name.startswith(prefix))
    return {
        name.removeprefix(prefix): [
            over_seeds([_mean_of(each.result, steps, name) for each in of])
            for steps in (slice(None, 5), slice(-5, None))
        ]
        for name in names
    }
