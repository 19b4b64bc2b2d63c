"""Figures in sentences about training the tiny model, the guard and the control group. Measures nothing; claims.py puts
them on the pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import published_corrections
import render_control
from claim_words import Claims, Figures, bare, down, up
from record_tables import RESULTS, results
from scipy import stats

from sparroll import records
from sparroll.calibrate.defaults import CHECKED_KL_AT_MOST
from sparroll.rounding import rounded_down, rounded_up

HALF = ("half", "thin_half")
"""Of impossible-simulation.json: runs whose shares are half of the limit."""


def tiny_adapter() -> Figures:
    found = results("distill-tiny", "distill")
    before, after = found["before"]["q05"], found["after"]["q05"]
    return {
        "closed": down(100 * (after - before) / (1 - before)),
        "read": up(100 * found["kv_read_share"]),
        "ceiling": bare(down(found["dense_ceiling_q05"], 3)),
        "before": bare(down(before, 2)),
        "after": bare(down(after, 2)),
    }


def tails_apart() -> Figures:
    """Two rows of tiny-reasoner's whose tails and gains are in opposite order."""
    lines = results("claims-predicts-training-cpu", "claims-predicts-training")["rows"]
    rows = {line["row"]: line for line in lines if line["task"] == "remarks"}
    few, pages = rows["quest-96"], rows["pages-160"]
    return {
        "few_tail": bare(down(few["q05"]["mean"], 3)),
        "lost": bare(up(-few["accuracy_change"]["mean"], 3)),
        "pages_tail": bare(down(pages["q05"]["mean"], 3)),
        "gained": bare(down(pages["accuracy_change"]["mean"], 3)),
    }


def old_and_sparse() -> Figures:
    """The acceptance that age and sparsity take together, of the sum of what each takes alone."""
    parts = {}
    for name, hardware in (("tiny", "cpu"), ("study", "h100")):
        record = results(f"claims-staleness-{hardware}", "claims-staleness")
        together = published_corrections.staleness_adds([record])[0].estimate
        assert together is not None, f"{name}: a record that was cut"
        parts[name] = bare(rounded_down(together.value, 2))
    return parts


def sixty_steps() -> Figures:
    """Rank correlations of run means with the change of dense accuracy."""
    (found,) = (each for each in results("predictors", "predictors") if each["selection"] == "60 steps")
    names = {
        "share": "share of tokens more than 20 nats off",
        "kl": "KL sparse to dense",
        "mean": "mean acceptance",
        "tail": "5th percentile of acceptance",
    }
    figures = {"runs": str(found["runs"]), "rows": str(found["rows"])}
    for key, name in names.items():
        of = found["run_mean"][name]
        ends = {"": f"{of['value']:+.2f}", "_low": rounded_down(of["low"], 2, True)}
        ends["_high"] = rounded_up(of["high"], 2, True)
        figures |= {f"{key}{end}": text for end, text in ends.items()}
    return figures


def checked_kl() -> Figures:
    """The default bound, and the KL under the budget whose rollouts solved fewer problems."""
    rows = results("mismatch-study-checks-h200", "study-checks")["rows"]
    (worse,) = (row["kl"] for row in rows if row["sampler"] == "verified-64-64-0.01")
    return {
        "bound": bare(f"{CHECKED_KL_AT_MOST:g}"),
        "worse": bare(down(worse, 3)),
    }


def checked_budgets() -> Figures:
    """The largest measured budget of the tiny model's calibrations, without a check and with one."""
    plain, checked = (results(f"calibration-{name}tiny-cpu", "calibration") for name in ("", "checked-"))
    measured = [
        {row["from_context_tokens"]: row["kv_budget_tokens"] for row in each["rows"] if row["q05"] is not None}
        for each in (plain, checked)
    ]
    largest = max(measured[0].values())
    (everywhere,) = set(measured[1].values())
    read = [each["verification"]["rounds"][-1]["kv_read_share"] for each in (plain, checked)]
    assert everywhere < largest, "a check that saves nothing"
    return {
        "plain": str(largest),
        "start": str(min(start for start, budget in measured[0].items() if budget == largest)),
        "checked": str(everywhere),
        "read": up(100 * read[1]),
        "read_plain": up(100 * read[0]),
    }


def impossible_limit() -> Figures:
    """The case with the most false alarms."""
    found = [each[size] for each in results("impossible-simulation", "impossible-simulation") for size in HALF]
    worst = max(found, key=lambda of: of["high"])
    assert len({each["runs"] for each in found}) == 1, "cases with different numbers of runs"
    alarms, runs = str(worst["alarms"]), f"{worst['runs']:,}"
    return {"cases": str(len(found)), "runs": runs, "alarms": alarms, "most": up(100 * worst["high"], 1)}


def rl_grid() -> Figures:
    runs = results("rl-grid-tiny", "rl-grid")

    def of(schedule: str) -> list[dict[str, Any]]:
        return [run for run in runs if run["schedule"] == schedule]

    after = {name: [run["dense_accuracy"][-1] for run in of(name)] for name in ("dense", "calibrated")}
    dense, calibrated = (statistics.mean(after[name]) for name in ("dense", "calibrated"))
    reward = {
        name: statistics.mean(statistics.mean(run["reward"][-5:]) for run in of(name))
        for name in ("dense", "fixed-128")
    }
    # Of each accuracy from its held-out prompts, then of the difference of two means.
    error = max((share * (1 - share) / 256) ** 0.5 for share in after["dense"] + after["calibrated"])
    return {
        "difference": bare(up(dense - calibrated, 3)),
        "error": bare(up(error * (1 / len(after["dense"]) + 1 / len(after["calibrated"])) ** 0.5, 3)),
        "one": up(error, 3),
        "lost": up(100 * (1 - reward["fixed-128"] / reward["dense"])),
    }


def quickstart() -> Figures:
    record = records.read(RESULTS / "quickstart-seed-0.json", "quickstart")
    prompts = record["config"]["train"]["evaluate"]["prompts"]
    ends = [run[f"dense_accuracy_{end}"] for run in record["results"]["runs"].values() for end in ("first", "last")]
    error = max((share * (1 - share) / prompts) ** 0.5 for share in ends)
    return {
        "seconds": up(record["wall_seconds"]),
        "prompts": str(prompts),
        "error": up(error, 3),
        "bare_error": bare(up(error, 3)),
    }


def guard() -> Figures:
    """Runs with the tail above the target, and how many of them raised an alarm."""
    found = results("guard-simulation", "guard-simulation")
    at_target = [case["at"] for case in found if case["at"]]
    shares = [100 * case["alarms"] / case["runs"] for case in at_target]
    counts = {
        f"{name}_{what}": f"{sum(case[which][what] for case in found):,}"
        for name, which in (("all", "above"), ("thin", "thin_above"))
        for what in ("runs", "alarms")
    }
    return counts | {"at_target": down(min(shares))}


def control_group() -> Figures:
    """Runs without a gap that found one, and how many of their rollouts were dense."""
    cases = render_control.part("false_alarms")
    without, uneven = ([case for case in cases if (case["world"] == "uneven") is kind] for kind in (False, True))
    runs = sum(case["alarm"]["runs"] for case in without)
    figures = {
        "runs": f"{runs:,}",
        "uneven_runs": f"{sum(case['alarm']['runs'] for case in uneven):,}",
        "uneven_alarm": str(sum(case["alarm"]["hits"] for case in uneven)),
    }
    for event in ("sure", "alarm"):
        hits = sum(case[event]["hits"] for case in without)
        bound = stats.binomtest(hits, runs, alternative="less").proportion_ci().high
        figures |= {event: str(hits), f"{event}_most": up(100 * bound, 2)}
    default = [case for case in without if case["share"] < case["share_first"]]
    dense = [case["dense_share"] for case in default if case["rollouts"] == 128]
    small = max(case["dense_share"] for case in default if case["rollouts"] == 32)
    figures |= {"dense_least": down(100 * min(dense), 1), "dense_most": up(100 * max(dense), 1)}
    return figures | {"dense_32": up(100 * small, 1)}


def gap_found() -> Figures:
    """How soon there is an alarm about a gap of .1, with 128 rollouts a step."""
    alarms = {
        (case["share"], case["share_first"], case["late"]): case["alarm"]
        for case in render_control.part("found")
        if (case["rollouts"], case["gap"]) == (128, 0.1)
    }
    within = {key: down(100 * alarm["within_30_steps"]["share"]) for key, alarm in alarms.items()}
    return {
        "first": within[1 / 32, 1 / 4, False],
        "late": up(alarms[1 / 32, 1 / 4, True]["median_steps"]),
        "constant": up(alarms[1 / 32, 1 / 32, True]["median_steps"]),
        "quarter": within[1 / 4, 1 / 4, True],
    }


def replay() -> Figures:
    """By how much replay flatters the tail, where the tail is within .04 of .86."""
    rows = [row for row in results("replay", "replay")["rows"] if abs(row["faithful_q05"] - 0.86) < 0.04]
    off = [row["replay_q05"] - row["faithful_q05"] for row in rows]
    return {"least": bare(up(min(off), 2)), "most": bare(up(max(off), 2))}


PAGES: Mapping[str, Claims] = {
    "README.md": {
        "an accuracy is over {prompts} problems (standard error about {bare_error})": quickstart,
    },
    "docs/results.md": {
        "without the installation: {seconds} s.": quickstart,
        "Each is over {prompts} held-out prompts, with a standard error of about {error}": quickstart,
        "An adapter closes {closed} % of the tiny model's gap to a tail of 1.": tiny_adapter,
        "pages of 4 ({read} % of the cache read)": tiny_adapter,
        "the dense ceiling is {ceiling} (`distill-tiny.json`)": tiny_adapter,
        "256 held-out prompts make a standard error of about {one} per accuracy.": rl_grid,
        "the difference of their means is {difference}, its standard error {error}.": rl_grid,
        "The fixed budget loses {lost} % of the reward": rl_grid,
    },
    "docs/training.md": {
        "In the worst of {cases} cases {alarms} of {runs} simulated runs of 1,000 steps at half of the limit raised an "
        "alarm, so at most {most} % of such runs do (95 %)": impossible_limit,
        "What this means: {all_alarms} of the {all_runs} runs with the tail .01 above the target raised an alarm": guard,
        "Of these {thin_runs} runs with the tail .01 above the target {thin_alarms} raised an alarm.": guard,
        "an alarm in at least {at_target} of 100 runs (correlation .1)": guard,
    },
    "docs/control-group.md": {
        "have {dense_least} % to {dense_most} % dense rollouts, and steps of 32 rollouts {dense_32} %": control_group,
        "{alarm} of the {runs} runs in which decoding makes no difference raised an alarm (at most {alarm_most} % with "
        "95 % confidence), and {sure} were sure of one (at most {sure_most} %)": control_group,
        "{uneven_alarm} of these {uneven_runs} runs did": control_group,
        "raises an alarm within 30 steps in {first} % of runs. One that begins later takes {late} steps in the median. "
        "With 1/32 in all steps it would take {constant}:": gap_found,
        "A quarter of all rollouts in all steps finds a late gap of .1 within 30 steps in {quarter} % of": gap_found,
    },
    "docs/claims.md": {
        "With Quest and a budget of 96 tokens tiny-reasoner's accuracy fell by {lost} although the tail was {few_tail}. "
        "With pages and 160 tokens, whose tail was {pages_tail}, it rose by {gained}.": tails_apart,
    },
    "docs/study.md": {
        "[A tiny model's tail](results.md#an-adapter-for-sparse-rollouts) went from {before} to {after}.": tiny_adapter,
    },
    "docs/calibration.md": {
        "**The KL of what is kept is at most {bound}** at every length": checked_kl,
        "With {worse}, under 64 tokens everywhere, checked rollouts": checked_kl,
        "Without a check the tail asks for {plain} tokens from {start} on, and with one {checked} do at every "
        "length.": checked_budgets,
        "rollouts read {read} % of the cache instead of {read_plain} %.": checked_budgets,
        "Near 0.86 it is too high by {least} to {most} here.": replay,
        "In the 60-step runs of the [study](study.md) ({runs} runs of {rows} schedules) the rank correlation with the "
        "change of dense accuracy is {share} [{share_low}, {share_high}] for the share of sampled tokens more than 20 nats "
        "off, {kl} [{kl_low}, {kl_high}] for the KL, {mean} [{mean_low}, {mean_high}] for the mean acceptance and {tail} "
        "[{tail_low}, {tail_high}] for the 5th percentile.": sixty_steps,
    },
}
