"""Figures in sentences about the study. Measures nothing; claims.py puts them on the pages."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import published_figures
from claim_words import Claims, Figures, bare, down, up
from claims_speed import training_step
from record_tables import RESULTS, results
from render_study import (
    PAIRS,
    SMALL_UNITS,
    STUDIES,
    gained,
    row_worst_bin,
)

from sparroll import records
from sparroll.rounding import rounded_down

KIND = "mismatch-study"
FIXED_AND_CORRECTED = ("fixed-tis", "fixed-icepop", "fixed-sparse_rl", "fixed-jackpot")
ROLLOUTS = 64
"""Of a step."""


def gain(change: float) -> str:
    """A change of accuracy as sentences have it: +.207."""
    return bare(rounded_down(change, sign=True))


def study(steps: int) -> dict[str, Any]:
    return results(STUDIES[steps], KIND)


def runs_of(steps: int, row: str) -> list[dict[str, Any]]:
    return [run for run in study(steps)["runs"] if run["row"] == row]


def row_of(steps: int, row: str) -> dict[str, Any]:
    return next(line for line in study(steps)["table"] if line["row"] == row)


def changes(steps: int, row: str) -> list[float]:
    """Change of dense accuracy of each seed that went to its end."""
    return [gained(run) for run in runs_of(steps, row) if run["state"] == "finished" and not run["stopped"]]


def series(steps: int, row: str, name: str) -> list[list[float]]:
    """A metric's values of each seed, without the steps that have none."""
    return [[value for value in run["series"][name] if value is not None] for run in runs_of(steps, row)]


def mean_of(steps: int, row: str, name: str, part: slice = slice(None)) -> float:
    return statistics.mean(statistics.mean(values[part]) for values in series(steps, row, name))


def means(steps: int, row: str) -> float:
    return statistics.mean(changes(steps, row))


FIRST, LAST = slice(0, 5), slice(-5, None)


def under_pairs() -> Figures:
    """What runs of 60 steps under units of 2 tokens without a dense layer gained, beside pages and dense rollouts."""
    row, others = (PAIRS, "quantized-160-wide"), {"pages": (SMALL_UNITS, "uniform"), "dense": (STUDIES[60], "dense")}
    said = {}
    for name, (record, of) in {"pairs": row, **others}.items():
        said[name] = bare(down(published_figures.change(record, of).value, 3))
        said[f"read_{name}"] = up(100 * statistics.mean(published_figures.over(record, of, "rollout/kv_read_share")))
    for name, (record, of) in others.items():
        beyond = published_figures.difference(*row, of, record)
        said |= {
            f"from_{name}": gain(beyond.value),
            f"low_{name}": bare(down(beyond.low, 3)),
            f"high_{name}": bare(up(beyond.high, 4)),
            f"less_than_{name}": bare(up(-beyond.value, 3)),
        }
    return said


def sixty_steps() -> Figures:
    targets = {name: f"calibrated-0.{name}" for name in ("75", "86", "92")}
    figures = {f"at_{name}": gain(means(60, row)) for name, row in targets.items()}
    figures |= {f"read_{name}": up(100 * row_of(60, row)["kv_read_share"]["mean"]) for name, row in targets.items()}
    fixed = changes(60, "fixed-none") + changes(60, "fixed-tis")
    calibrated = [change for row in targets.values() for change in changes(60, row)]
    seeds = {"dense": changes(60, "dense"), "fixed": fixed, "calibrated": calibrated}
    for name, found in seeds.items():
        figures |= {f"{name}_low": gain(min(found)), f"{name}_high": gain(max(found))}
    read = "rollout/kv_read_share"
    return figures | {
        "dense": gain(means(60, "dense")),
        "bare_dense": bare(down(means(60, "dense"), 3)),
        "controller": gain(means(60, "controller-safe-start")),
        "bare_controller": bare(down(means(60, "controller-safe-start"), 3)),
        "bare_75": bare(down(means(60, targets["75"]), 3)),
        "bare_92": bare(down(means(60, targets["92"]), 3)),
        "lost": bare(up(-means(60, "fixed-tis"), 3)),
        "read_first": up(100 * mean_of(60, "controller-safe-start", read, FIRST)),
        "read_last": up(100 * mean_of(60, "controller-safe-start", read, LAST)),
        "kl_last": bare(up(mean_of(60, "controller-safe-start", "mismatch/kl_sparse_to_dense", LAST), 3)),
        "kl_92_last": bare(up(mean_of(60, targets["92"], "mismatch/kl_sparse_to_dense", LAST), 3)),
        "distill": gain(means(60, "distill-kl")),
        "distill_reward": bare(down(mean_of(60, "distill-kl", "reward/mean", LAST), 2)),
        "reward_75": bare(down(mean_of(60, targets["75"], "reward/mean", LAST), 2)),
        "fixed_reward": bare(down(mean_of(60, "fixed-none", "reward/mean", LAST), 2)),
        "fixed_reward_first": bare(up(mean_of(60, "fixed-none", "reward/mean", FIRST), 2)),
    }


def uniform() -> Figures:
    """The same budget everywhere beside the schedule that reads as much, over the steps that all runs have."""
    rows = ("uniform", "calibrated-0.86")
    steps = min(run["steps"] for row in rows for run in runs_of(60, row))
    found = {
        (row, name): mean_of(60, row, name, slice(0, steps))
        for row in rows
        for name in ("reward/mean", "mismatch/kl_sparse_to_dense")
    }
    reward, kl = (
        (found["uniform", name] / found["calibrated-0.86", name])
        for name in ("reward/mean", "mismatch/kl_sparse_to_dense")
    )
    return {"reward": down(reward, 1), "kl": up(100 * kl)}


def corrections() -> Figures:
    fixed_tails = [row_of(25, row)["tail_last"]["mean"] for row in FIXED_AND_CORRECTED]
    at_86 = ("calibrated-0.86", *(f"calibrated-0.86-{name}" for name in ("none", "icepop", "sparse_rl", "jackpot")))
    of_86 = [means(25, row) for row in at_86]
    tis, sparse_rl = changes(25, "calibrated-0.86"), changes(25, "calibrated-0.86-sparse_rl")
    return {
        "fixed_tail": bare(down(min(fixed_tails), 2)),
        "tail": bare(down(min(row_of(25, row)["tail_last"]["mean"] for row in at_86), 2)),
        "least": gain(min(of_86)),
        "most": gain(max(of_86)),
        "sparse_rl_low": gain(min(sparse_rl)),
        "sparse_rl_high": gain(max(sparse_rl)),
        "tis_low": gain(min(tis)),
        "tis_high": gain(max(tis)),
        "veto_fixed": up(100 * row_of(25, "fixed-sparse_rl")["masked_share"]["mean"]),
        "veto": up(100 * row_of(25, "calibrated-0.86-sparse_rl")["masked_share"]["mean"]),
    }


def adapters_elsewhere(record: str) -> Figures:
    """What adapters that learnt by the KL over lists change in the tail, under three budgets."""
    found = results(record, "claims-distil-loss")
    rows = [row for row in found["schedules"] if row["loss"] == "kl"]
    (own,) = (row for row in rows if row["trained_under"])
    cheaper, dearer = sorted((row for row in rows if not row["trained_under"]), key=lambda row: row["budget"])
    about = {"own": own, "cheaper": cheaper, "dearer": dearer}
    return {
        **{f"{name}_tokens": str(row["budget"]) for name, row in about.items()},
        **{f"{name}_tail": bare(down(row["without"]["mean"], 2)) for name, row in about.items()},
        **{f"{name}_change": gain(row["q05_change"]["mean"]) for name, row in about.items()},
        **{f"{name}_low": gain(row["q05_change"]["low"]) for name, row in about.items()},
        **{f"{name}_high": gain(row["q05_change"]["high"]) for name, row in about.items()},
    }


def adapters() -> Figures:
    tails = series(25, "distill-kl", "mismatch/acceptance_q05")
    ratios = []
    for name in ("mismatch-study-pilot-h200", *STUDIES.values()):
        for run in results(name, KIND)["runs"]:
            if "time/distill_seconds" in run["series"]:
                both = (
                    statistics.mean(value for value in run["series"][f"time/{part}_seconds"] if value is not None)
                    for part in ("distill", "update")
                )
                ratios.append(next(both) / next(both))
    jumps = [kl for values in series(25, "distill", "distill/kl") for kl in values if kl > 1]
    steps = sum(len(values) for values in series(25, "distill", "distill/kl"))
    return {
        "before": bare(down(statistics.mean(statistics.mean(values[:5]) for values in tails), 3)),
        "after": bare(down(statistics.mean(statistics.mean(values[10:15]) for values in tails), 3)),
        "least": up(min(ratios), 1),
        "most": up(max(ratios), 1),
        "jumps": str(len(jumps)),
        "steps": str(steps),
        "largest": f"{round(max(jumps), -3):,.0f}",
        "on_1_7b": training_step()["adapter"],
    }


def shortest_bin() -> Figures:
    """The bin of the prompts' last tokens: every calibrated schedule reads the least there."""
    made = study(25)["calibration"]["calibrated-0.86"]["schedule"]["steps"][1]["measured"]
    budgets = {
        row: min(value for values in series(60, row, "controller/budget_tokens/3840-4096") for value in values)
        for row in ("controller", "controller-safe-start")
    }
    return {
        "tail": bare(down(made["value"], 2)),
        "tokens": str(made["tokens"] // made["rollouts"]),
        "least": f"{budgets['controller']:.0f}",
        "safe_least": f"{budgets['controller-safe-start']:,.0f}",
    }


def eviction() -> Figures:
    snap = series(25, "snap_kv-3584-none", "reward/mean")
    little = [row for row in (line["row"] for line in study(25)["table"]) if "-1024-" in row]
    whole_runs = [values for row in little for values in series(25, row, "reward/mean") if len(values) == 25]
    saved = results("mismatch-study-eviction-cpu", "study-eviction")["runs"]
    by_budget = {run["policy"]["budget_tokens"]: run["kv_saved_share"] for run in saved if run["policy"]}
    right = round(sum(map(sum, snap)) * ROLLOUTS)
    rollouts = sum(map(len, snap)) * ROLLOUTS
    row = row_of(25, "snap_kv-3584-none")
    return {
        "right": str(right),
        "rollouts": f"{rollouts:,}",
        "per_thousand": down(1000 * right / rollouts),
        "tail": bare(down(row["tail_last"]["mean"], 2)),
        "mean": bare(down(mean_of(25, "snap_kv-3584-none", "mismatch/acceptance_mean"), 3)),
        "mean_2": bare(down(mean_of(25, "snap_kv-3584-none", "mismatch/acceptance_mean"), 2)),
        "kl": bare(up(row["kl"]["mean"], 2)),
        "freed": down(100 * by_budget[3584]),
        "freed_most": down(100 * by_budget[1024]),
        "right_little": {0: "no", 1: "one"}.get(round(sum(map(sum, whole_runs)) * ROLLOUTS), "several"),
        "rollouts_little": f"{sum(map(len, whole_runs)) * ROLLOUTS:,}",
        "r_kv": bare(down(row_of(25, "r_kv-3584-none")["accuracy_after"]["mean"], 2)),
        "r_kv_veto": bare(down(row_of(25, "r_kv-3584-sparse_rl")["accuracy_after"]["mean"], 2)),
        "dense": bare(down(row_of(25, "dense")["accuracy_after"]["mean"], 2)),
    }


def pilot_seconds() -> Figures:
    """Medians over steps of each of the pilot's runs."""
    runs = results("mismatch-study-pilot-h200", KIND)["runs"]

    def seconds(part: str, of: Iterable[dict[str, Any]]) -> list[float]:
        name = f"time/{part}_seconds"
        return [statistics.median(run["series"][name]) for run in of if name in run["series"]]

    others = [run for run in runs if not run["row"].startswith("distill")]
    fixed = [run for run in runs if run["row"].startswith("fixed")]
    return {
        "rollouts_least": up(min(seconds("rollout", runs)), 1),
        "rollouts_most": up(max(seconds("rollout", runs)), 1),
        "step_least": down(min(seconds("step", others)), 1),
        "step_most": up(max(seconds("step", others)), 1),
        "dense_update": up(max(seconds("update", [run for run in runs if run["row"] == "dense"])), 1),
        "fixed_least": bare(up(min(seconds("update", fixed)), 1)),
        "fixed_most": bare(up(max(seconds("update", fixed)), 1)),
        "distill": up(max(seconds("distill", runs)), 1),
    }


def targets() -> Figures:
    """What the schedules that miss their targets have in their worst bins."""
    return {
        f"at_{target}_in_{steps}": bare(down(row_worst_bin(study(steps), f"calibrated-0.{target}") or 0.0, 3))
        for target in ("86", "92")
        for steps in STUDIES
    }


def worst() -> Figures:
    """The largest losses of any run and of any row, and what the fixed rows read."""
    rows = [line["row"] for line in study(25)["table"] if changes(25, line["row"])]
    return {
        "run": bare(up(-min(change for row in rows for change in changes(25, row)), 3)),
        "row": bare(up(-min(means(25, row) for row in rows), 3)),
        "read": up(100 * row_of(25, "fixed-tis")["kv_read_share"]["mean"]),
    }


def prompts() -> Figures:
    record = records.read(RESULTS / "mismatch-study-h200.json", KIND)["config"]
    return {"prompts": str(record["calibration_prompts"]), "samples": str(record["calibration_samples"])}


PAGES: Mapping[str, Claims] = {
    "README.md": {
        "60 steps with dense rollouts raised the accuracy by {bare_dense}, the online controller with {read_last} to "
        "{read_first} % of the cache by {bare_controller}, and calibrated schedules with {read_75} to {read_92} % of it by "
        "{bare_75} to {bare_92}. A small fixed budget lost {lost}.": sixty_steps,
    },
    "docs/concepts.md": {
        "a bin with a tail of {tail} cost more than longer ones": shortest_bin,
        "[eviction](compression.md) had a tail of {tail} with {per_thousand} right answers in 1,000": eviction,
    },
    "docs/compression.md": {
        "had a 5th percentile of {tail}, a mean acceptance of {mean_2} and {per_thousand} right answers in 1,000": eviction,
    },
    "docs/distill.md": {
        "contexts of 4,400 tokens) it took {least} to {most} times as long as the policy's update": adapters,
        "{jumps} steps of {steps} had one.": adapters,
        "adapters that learnt with {own_tokens} tokens changed the tail by {cheaper_change} with {cheaper_tokens} tokens "
        "(from {cheaper_tail}), by {own_change} with {own_tokens} (from {own_tail}; three seeds, {own_low} to {own_high}) "
        "and by {dearer_change} with {dearer_tokens} (from {dearer_tail})": partial(
            adapters_elsewhere, "claims-distil-loss-cpu"
        ),
        "those that learnt with {own_tokens} tokens changed the tail by {cheaper_change} with {cheaper_tokens} tokens "
        "(from {cheaper_tail}; three seeds, {cheaper_low} to {cheaper_high}), by {own_change} with {own_tokens} (from "
        "{own_tail}; {own_low} to {own_high}) and by {dearer_change} with {dearer_tokens} (from {dearer_tail}; {dearer_low} "
        "to {dearer_high})": partial(adapters_elsewhere, "claims-distil-loss-h200"),
    },
    "docs/results.md": {
        "gained {less_than_dense} less than dense rollouts in 60 steps, [{low_dense}, {high_dense}] from them over three "
        "seeds, at {read_pairs} % of the reading, and {less_than_pages} less than pages that read {read_pages} "
        "%": under_pairs,
    },
    "docs/study.md": {
        "rollouts read {read_pairs} % of the cache. In 60 steps their policy gained {pairs} in accuracy, that of pages "
        "{pages} while it read {read_pages} %, and that of dense rollouts {dense}. The difference is {from_pages} "
        "[{low_pages}, {high_pages}] from pages and {from_dense} [{low_dense}, {high_dense}] from dense "
        "rollouts": under_pairs,
        "It came nearest to dense rollouts: {controller} dense accuracy in [60 steps](#sixty-steps) (dense {dense}), "
        "rewards like theirs, at {read_first} % of the cache in the first steps and {read_last} % in the last.": sixty_steps,
        "every seed of a calibrated schedule ({calibrated_low} to {calibrated_high}) lies above every seed of 128 tokens "
        "everywhere ({fixed_low} to {fixed_high}) and below every seed of dense rollouts ({dense_low} to {dense_high}). "
        "Schedules of .75, .86 and .92 read {read_75}, {read_86} and {read_92} % of the cache for {at_75}, {at_86} and "
        "{at_92}": sixty_steps,
        "The worst bin of .86 had {at_86_in_25} in the runs of 25 steps and {at_86_in_60} in those of 60, that of .92 "
        "{at_92_in_25} and {at_92_in_60}": targets,
        "made by replaying {prompts} prompts with {samples} dense rollouts each": prompts,
        "had {reward} times the reward and {kl} % of the KL of the schedule calibrated to .86": uniform,
        "**No correction repaired a tail of {fixed_tail}.**": corrections,
        "**At a tail of {tail} it hardly matters which one you take**: these four and none gained {least} to {most}. Only "
        "Sparse-RL ({sparse_rl_low} to {sparse_rl_high}) lies under TIS ({tis_low} to {tis_high}) with all its "
        "seeds.": corrections,
        "the reward rose from {fixed_reward_first} to {fixed_reward}.": sixty_steps,
        "raises the tail without reading more**: from {before} to {after} in 15 steps": adapters,
        "In 60 steps the reward was {distill_reward} instead of {reward_75} and the gain {distill} instead of {at_75}. The "
        "schedule of .86 gained {at_86} with {read_86} instead of {read_75} % of the cache": sixty_steps,
        "([{on_1_7b} times on a 1.7B shape](results.md#a-whole-training-step), {least} to {most} times on this small "
        "model": adapters,
        "it drops {veto_fixed} % of the tokens, in some steps all, and at .87 still {veto} %": corrections,
        "so a response's first {tokens} tokens lie in the bin of 3,840 to 4,096. There 128 tokens already have a tail of "
        "{tail}, more than any target here": shortest_bin,
        "The controller that began at 128 tokens even went down to {least}.": shortest_bin,
        "The controller with the safe start never went below {safe_least} tokens in any bin": shortest_bin,
        "at {read_last} % of the cache its KL was {kl_last}, while that of the schedule of .92, which reads {read_92} %, "
        "was {kl_92_last}.": sixty_steps,
        "SnapKV at 3,584 tokens had a tail of {tail} and solved next to nothing ({right} of {rollouts} rollouts). Its mean "
        "acceptance of {mean} lies below": eviction,
        "Only the KL of {kl} says that something is wrong.": eviction,
        "rollouts took {rollouts_least} to {rollouts_most} s of a step of {step_least} to {step_most} s in every "
        "row": pilot_seconds,
        "Rows differ by their updates (dense {dense_update} s, 128 tokens {fixed_least} to {fixed_most} s": pilot_seconds,
        "and by DistillSparse's update ({distill} s more)": pilot_seconds,
        "in {jumps} of its {steps} steps it jumped from .05 to between 1 and {largest}.": adapters,
        "R-KV may free {freed} % of the cache and SnapKV none. With 1,024 tokens left ({freed_most} % freed)": eviction,
        "of {rollouts_little} was right in 25 steps": eviction,
        "With 3,584 left ({freed} % freed), R-KV ends": eviction,
        "(accuracy {r_kv} and {r_kv_veto}, dense {dense})": eviction,
        "Sparse attention reads {read} % of the cache in the fixed rows": worst,
        "Nothing collapsed outright: the worst run lost {run}, the worst row {row}.": worst,
    },
}
