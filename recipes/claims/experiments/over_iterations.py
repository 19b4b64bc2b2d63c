"""Does the statistic depend on the iteration? The tail by budget, at the start, the middle and the end of one run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from claim_cells import Cell, Done, Place, Table
from claim_figures import over_seeds
from claim_runs import opened, sampled, scorer_of, tokens_of, trained
from claim_tasks import DENSE, ClaimTask, Reading, budget
from claim_tokens import REPLICATES, Tokens, intervals, replicate_statistics, statistics

NAME = "over-iterations"
ABOUT = "Is the tail of a budget the same at steps 0, 30 and 60 of one run?"
COMPARED = ("q05", "q01", "mean", "over_10_nats", "kl")


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    wanted = tasks[:1] if tasks[0].toy else tasks
    return [
        Cell(f"{task.name}-{name}-{seed}", {"task": task.name, "rollouts": name, "reading": reading}, seed)
        for seed in seeds
        for task in wanted
        for name, reading in (("dense", DENSE), ("sparse", budget(task.middle_budget)))
        if not (task.toy and name == "dense")
    ]


def run(cell: Cell, place: Place) -> Table:
    """A run whose checkpoints stay, and then the tail of every budget with the weights of each."""
    task, reading = place.task, cell.config["reading"]
    every = task.steps // 2
    correction = {"name": "none" if reading == DENSE else "tis"}
    _, figures = trained(place, reading, cell.seed, correction=correction, checkpoint={"every_steps": every, "keep": 3})
    rows: list[Table] = []
    for step in (0, every, task.steps):
        folder = place.folder / "run" / "checkpoints" / f"step-{step:06d}" / "model"
        model = folder if step else task.model
        rows += place.part(f"step-{step}", lambda model=model, step=step: tails(task, str(model), step))
    return figures | {"rows": rows}


def tails(task: ClaimTask, model: str, step: int) -> list[Table]:
    """Of each budget: the statistics over all lengths and by bin, and those of resampled prompts, which are the same
    prompts at every step."""
    readings: list[Reading] = [budget(each) for each in task.budgets]
    scorer, rows = scorer_of(task, model), []
    with opened(task, model, readings) as engine:
        for reading in readings:
            tokens = tokens_of(scorer, task, sampled(engine, task, reading))
            rows.append({"step": step, "budget": reading["kv_budget_tokens"]} | _figures(tokens, task))
    return rows


def _figures(tokens: Tokens, task: ClaimTask) -> Table:
    drawn = replicate_statistics(tokens, replicates=REPLICATES)
    return {
        "statistics": intervals(tokens),
        "bins": {start: intervals(each)["q05"] for start, each in tokens.bins(task.bin_tokens).items()},
        "bin_tokens": {start: len(each.acceptance_N) for start, each in tokens.bins(task.bin_tokens).items()},
        "replicates": {name: [round(each[name], 6) for each in drawn] for name in COMPARED},
        "value": {name: statistics(tokens)[name] for name in COMPARED},
    }


def results(done: Sequence[Done]) -> Table:
    """For each run and budget, how far the figures of the middle and of the end lie from those at the start; paired over
    prompts."""
    lines = []
    for each in done:
        rows = each.result["rows"]
        start = {row["budget"]: row for row in rows if row["step"] == 0}
        for row in rows:
            before = start[row["budget"]]
            moved: Table = {}
            for name in COMPARED if row["step"] else ():
                drawn = np.subtract(row["replicates"][name], before["replicates"][name])
                whole = row["statistics"][name][1] is not None
                ends = [float(end) for end in np.quantile(drawn, [0.025, 0.975])] if whole else [None, None]
                moved[name] = [row["value"][name] - before["value"][name], *ends]
            about = {"task": each["task"], "rollouts": each["rollouts"], "seed": each.cell.seed}
            lines.append(
                about | {name: row[name] for name in ("step", "budget", "statistics", "bins")} | {"moved": moved}
            )
    keys = dict.fromkeys(
        (line["task"], line["rollouts"], line["step"], line["budget"]) for line in lines if line["step"]
    )
    over = [
        dict(zip(("task", "rollouts", "step", "budget"), key, strict=True))
        | {
            f"{name}_moved": over_seeds(
                [
                    line["moved"][name][0]
                    for line in lines
                    if (line["task"], line["rollouts"], line["step"], line["budget"]) == key
                ]
            )
            for name in COMPARED
        }
        for key in keys
    ]
    return {"lines": lines, "over_seeds": over}
