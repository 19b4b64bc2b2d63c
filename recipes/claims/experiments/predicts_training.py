"""Which statistic predicts training? Runs whose budgets and selectors are spread so that the statistics come apart, and
the shape of the acceptance's distribution by budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from claim_cells import Cell, Done, Place, Table
from claim_figures import grouped, over_seeds, rank_correlation, stronger_correlation
from claim_runs import first_step, opened, run_mean, sampled, scorer_of, tokens_of, trained
from claim_tasks import DENSE, ClaimTask, Reading, budget, evicting
from claim_tokens import NATS, intervals

from sparroll.attention.selectors import PageMean, QuantizedMean, Quest, Streaming
from sparroll.errors import UserError
from sparroll.mismatch.beta import fit_beta

NAME = "predicts-training"
ABOUT = "Which statistic of the mismatch, in the first step or over the run, orders runs by what they gain?"
STATISTICS = {
    **{name: (f"claims/{name}", 1) for name in ("q01", "q05", "q10", "mean", "cvar01", "cvar05", "nearly_one_share")},
    **{name: (f"claims/{name}", -1) for name in ("kl", "skew", *(f"over_{nats}_nats" for nats in NATS))},
    "worst_bin_q05": ("mismatch/acceptance_q05_worst_bin", 1),
    "reward_of_rollouts": ("reward/mean", 1),
    "reward_gap": ("control/reward_gap", -1),
    "kv_read_share": ("rollout/kv_read_share", 1),
}
"""Metrics, and whether much of them should go with good training (1) or bad (-1)."""
WHEN = {"first_step": first_step, "run_mean": run_mean}
"""The values of a run that are correlated: what a calibration could know, and what a run saw."""
CONTROL_SHARE = 1 / 16


def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
    """Shapes of the acceptance, which are measured once whatever seeds are asked for, and a run per seed, task and row."""
    made = []
    tasks = tasks[-1:] if tasks[0].toy else tasks
    for task in tasks:
        for tokens in task.budgets[:1] if task.toy else task.budgets:
            about = {"task": task.name, "does": "shape", "reading": budget(tokens)}
            made.append(Cell(f"{task.name}-shape-{tokens}", about))
    for seed in seeds:
        for task in tasks:
            for row, reading in rows(task).items():
                about = {"task": task.name, "does": "train", "row": row, "reading": reading}
                made.append(Cell(f"{task.name}-{row}-{seed}", about, seed))
    return made


def rows(task: ClaimTask) -> dict[str, Reading]:
    """What rollouts read, by name. Pages miss a little everywhere; eviction and windows lose few tokens for good, and so
    have fine percentiles and impossible tokens; small units are the other way round."""
    if task.toy:
        return {"pages": budget(task.middle_budget)}
    ends = task.ends(task.page_tokens)
    low, middle = task.low_budget, task.middle_budget
    made = {f"pages-{tokens}": budget(tokens) for tokens in task.budgets[:-1]}
    large = PageMean(**task.ends(4 * task.page_tokens))
    for name, of_tokens in (("units", 4), ("pairs", 2)):
        units = QuantizedMean(**task.ends(of_tokens), bits=of_tokens)
        made |= {f"{name}-{tokens}": budget(tokens, units) for tokens in (low, middle)}
    whole = middle // large.page_tokens * large.page_tokens
    made |= {f"large-pages-{whole}": budget(whole, large)}
    made |= {f"quest-{tokens}": budget(tokens, Quest(**ends)) for tokens in (low, middle)}
    made |= {f"window-{middle}": budget(middle, Streaming(**ends))}
    for policy in ("r_kv", "snap_kv"):
        made |= {f"{policy}-{kept}": evicting(task, policy, kept) for kept in task.kept_tokens[-2:]}
    return {"dense": DENSE} | made


def run(cell: Cell, place: Place) -> Table:
    if cell.config["does"] == "shape":
        return shape(place, cell.config["reading"], cell.seed)
    reading = cell.config["reading"]
    sparse = reading["kind"] == "budget"
    rollout = {"control_share": 0.25 if place.task.toy else CONTROL_SHARE} if sparse else {}
    correction = {"name": "none" if reading == DENSE else "tis"}
    return trained(place, reading, cell.seed, correction=correction, rollout=rollout)[1]


def shape(place: Place, reading: Reading, seed: int) -> Table:
    """The distribution of the acceptance under a budget: skew, share above .999, and a Beta fit of the rest."""
    task = place.task
    scorer = scorer_of(task, task.model)
    with opened(task, task.model, [reading]) as engine:
        tokens = tokens_of(scorer, task, sampled(engine, task, reading, seed))
    try:
        fit = asdict(fit_beta(torch.from_numpy(tokens.acceptance_N)))
    except UserError as error:
        fit = {"why": str(error)}
    return {"statistics": intervals(tokens), "beta": fit}


def results(done: Sequence[Done]) -> Table:
    """Spearman's rank correlation of each statistic with the change of dense accuracy, per task, without dense rows, and
    how much stronger it is than that of the 5th percentile; intervals are a bootstrap over rows. Also of the runs that
    evict nothing, and of those whose 5th percentile looks fine, where it has less to tell apart."""
    runs = [each for each in done if each["does"] == "train"]
    correlations, table = [], []
    for task, of in grouped(runs, lambda each: each["task"]).items():
        for row, mine in grouped(of, lambda each: each["row"]).items():
            line = {"task": task, "row": row}
            line["accuracy_change"] = over_seeds([each.result["accuracy_change"] for each in mine])
            for name, (metric, _) in STATISTICS.items():
                line[name] = over_seeds([run_mean(each.result, metric) for each in mine])
            table.append(line)
        sparse = [each for each in of if each["reading"] != DENSE]
        fine = [each for each in sparse if (run_mean(each.result, "claims/q05") or 0) > 0.78]
        reading = [each for each in sparse if each["reading"]["kind"] != "compression"]
        for among, chosen in (("all", sparse), ("no eviction", reading), ("5th percentile above .78", fine)):
            for name in STATISTICS:
                about = {"task": task, "among": among, "statistic": name}
                correlations.append(about | _ranked(chosen, name))
    shapes = [
        {"task": each["task"], "budget": each["reading"]["kv_budget_tokens"], **each.result}
        for each in done
        if each["does"] == "shape"
    ]
    return {"correlations": correlations, "rows": table, "shapes": shapes}


def _ranked(chosen: Sequence[Done], name: str) -> Table:
    """A statistic's correlation with the change of accuracy, [value, low, high]; how much stronger it is than that of the
    5th percentile, in the direction that it should have; and how many runs have both."""
    gained, rows = [each.result["accuracy_change"] for each in chosen], [each["row"] for each in chosen]
    (metric, direction), (base, _) = STATISTICS[name], STATISTICS["q05"]
    made: Table = {}
    for when, value in WHEN.items():
        ours, theirs = ([value(each.result, of) for each in chosen] for of in (metric, base))
        made["runs"] = sum(None not in pair for pair in zip(ours, theirs, strict=True))
        made[when] = rank_correlation(ours, gained, rows)
        signed = [None if each is None else direction * each for each in ours]
        made[f"{when}_beyond_q05"] = stronger_correlation(signed, theirs, gained, rows)
    return made
