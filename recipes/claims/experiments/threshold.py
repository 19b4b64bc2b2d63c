"""Where does training begin to differ from dense? One calibrated schedule for each target, and runs under each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from claim_cells import Cell, Done, Place, Table
from claim_figures import difference, grouped, over_seeds
from claim_runs import MEASURE_SEED, opened, run_mean, scorer_of, trained
from claim_tasks import DENSE, ClaimTask, budget

from sparroll import records, tasks
from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.calibrate.run import calibrate
from sparroll.calibrate.target import OutOfReach
from sparroll.engines.prompt_encoder import PromptEncoder

NAME = "threshold"
ABOUT = "At which target of the 5th percentile does training begin to differ from training on dense rollouts?"


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    tasks = tasks[:1] if tasks[0].toy else tasks
    made = [Cell(f"{task.name}-calibration", {"task": task.name, "does": "calibrate"}) for task in tasks]
    for seed in seeds:
        for task in tasks:
            about = {"task": task.name, "does": "train"}
            made.append(Cell(f"{task.name}-dense-{seed}", about | {"target": None}, seed))
            for target in task.targets:
                needs = (f"{task.name}-calibration",)
                made.append(Cell(f"{task.name}-{target:.2f}-{seed}", about | {"target": target}, seed, needs))
    return made


def run(cell: Cell, place: Place) -> Table:
    if cell.config["does"] == "calibrate":
        return schedules(place)
    target, reading = cell.config["target"], DENSE
    if target is not None:
        found = place.result(cell.needs[0])[f"{target:.2f}"]
        if found["table"] is None:
            return {"left_out": found["why"]}
        reading = {"kind": "schedule", "table": found["table"]}
    correction = {"name": "none" if target is None else "tis"}
    return trained(place, reading, cell.seed, correction=correction)[1]


def schedules(place: Place) -> Table:
    """A schedule for each target, all from one sweep, verified by rollouts of their own. A target that no budget reaches
    has the reason in its place; any other error fails the cell, which the next call goes on with."""
    task, found = place.task, {}
    settings = MeasureSettings(
        max_new_tokens=task.max_new_tokens,
        mode="replay",
        samples=task.measure_samples,
        temperature=task.temperature,
        top_k=task.top_k,
        bin_tokens=task.bin_tokens,
    )
    asked = tasks.get(task.task).prompts("train", task.level, MEASURE_SEED, task.calibration_prompts)
    with opened(task, task.model, [budget(each) for each in task.budgets]) as engine:
        study = Study(engine, scorer_of(task, task.model), PromptEncoder(engine.tokenizer).ids(asked), settings)
        for target in task.targets:
            name = f"{target:.2f}"
            try:
                made = calibrate(
                    study,
                    out=place.folder / "sweep",
                    budgets=task.budgets,
                    target=target,
                    selector=task.selector,
                    dense_layers=task.dense_layers,
                    verify_rounds=task.verify_rounds,
                    # The papers' rule is about the percentile itself.
                    bound="value",
                    made_by=records.made_by("recipes/claims/run.py"),
                    name=name,
                    on_progress=place.on_progress,
                )
            except OutOfReach as error:
                found[name] = {"table": None, "why": str(error)}
                continue
            found[name] = {"table": replace(made.schedule, made_by=None).table(), "why": "", "notes": list(made.notes)}
    return found


def results(done: Sequence[Done]) -> Table:
    """A line per task and target; `begins_to_differ` is the highest target whose gain surely lies below that of dense
    rollouts."""
    runs = [each for each in done if each["does"] == "train" and "left_out" not in each.result]
    lines, begins = [], {}
    for task, mine in grouped(runs, lambda each: each["task"]).items():
        gains = {
            target: [each.result["accuracy_change"] for each in of] for target, of in grouped(mine, _target).items()
        }
        for target, of in grouped(mine, _target).items():
            against = None if target is None or None not in gains else difference(gains[None], gains[target])
            lines.append(
                {
                    "task": task,
                    "target": target,
                    "accuracy_change": over_seeds(gains[target]),
                    "against_dense": against,
                    "reward": over_seeds([run_mean(each.result, "reward/mean") for each in of]),
                    "tail": over_seeds([run_mean(each.result, "mismatch/acceptance_q05") for each in of]),
                    "worst_bin": over_seeds(
                        [run_mean(each.result, "mismatch/acceptance_q05_worst_bin") for each in of]
                    ),
                    "over_20_nats": over_seeds([run_mean(each.result, "claims/over_20_nats") for each in of]),
                    "kv_read_share": over_seeds([run_mean(each.result, "rollout/kv_read_share") for each in of]),
                }
            )
        below = [
            line["target"]
            for line in lines
            if line["task"] == task and line["against_dense"] and (line["against_dense"][2] or 0) < 0
        ]
        begins[task] = max(below, default=None)
    return {"lines": lines, "begins_to_differ": begins}


def _target(each: Done) -> float | None:
    return each["target"]
