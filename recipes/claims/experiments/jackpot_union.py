"""Does Jackpot's Z matter? The mass over the engine's list, over the union of both lists, and the same for every token."""

from __future__ import annotations

from collections.abc import Sequence

from claim_cells import Cell, Done, Place, Table
from claim_figures import difference, grouped, over_seeds
from claim_runs import run_mean, trained
from claim_tasks import ClaimTask, budget

NAME = "jackpot-union"
ABOUT = "Does it matter to training over which tokens Jackpot's Z is summed, and whether there is one at all?"
KINDS: dict[str, Table] = {
    "union": {"whole_union": True},
    "engine's list": {},
    "short union": {"whole_union": True, "top_k": 2},
    "short list": {"top_k": 2},
    "same Z for all": {"mass": "step"},
    "tis": {"correction": "tis"},
}
"""What differs from Jackpot with lists of 20 tokens of the engine's own."""


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    return [
        Cell(
            f"{task.name}-{kind.replace(' ', '-').replace(chr(39), '')}-{seed}",
            {"task": task.name, "kind": kind, "reading": budget(task.middle_budget), **KINDS[kind]},
            seed,
        )
        for seed in seeds
        for task in (tasks[-1:] if tasks[0].toy else tasks)
        for kind in (["short union"] if task.toy else KINDS)
    ]


def run(cell: Cell, place: Place) -> Table:
    config = cell.config
    correction = {"name": config.get("correction", "jackpot")}
    if "mass" in config:
        correction["mass"] = config["mass"]
    rollout = {"top_k": config.get("top_k", place.task.top_k)}
    union = {"whole_union": config.get("whole_union", False)}
    return trained(place, config["reading"], cell.seed, correction=correction, rollout=rollout, train=union)[1]


def results(done: Sequence[Done]) -> Table:
    """A line per task and kind. `unlisted_mass` is what the calibration has to make up for: the share that was kept less
    the mean mass, over the share."""
    lines = []
    for (task, kind), of in grouped(done, lambda each: (each["task"], each["kind"])).items():
        union = [each for each in done if (each["task"], each["kind"]) == (task, "union")]
        gains = [each.result["accuracy_change"] for each in of]
        metrics = ("accepted_mass_mean", "accepted_mass_calibration", "whole_union_share", "masked_token_share")
        lines.append(
            {"task": task, "kind": kind, "accuracy_change": over_seeds(gains)}
            | {"against_union": difference([each.result["accuracy_change"] for each in union], gains)}
            | {"reward": over_seeds([run_mean(each.result, "reward/mean") for each in of])}
            | {name: over_seeds([run_mean(each.result, f"correction/{name}") for each in of]) for name in metrics}
            | {"unlisted_mass": over_seeds([_unlisted(each.result) for each in of])}
        )
    return {"lines": lines}


def _unlisted(result: Table) -> float | None:
    calibration = run_mean(result, "correction/accepted_mass_calibration")
    return None if not calibration else 1 - 1 / calibration
