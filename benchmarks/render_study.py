"""The tables of docs/study.md, from the study's records. Measures nothing; render.py writes them."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from published_figures import worst_bin
from record_tables import RESULTS, before_and_after, results, table
from scipy import special

from sparroll import records
from sparroll.rounding import percent_down, percent_up, rounded_down, rounded_up


def gain(change: float) -> str:
    """A change of accuracy, which should be high."""
    return rounded_down(change, sign=True)


FORMS: dict[str, Callable[[float], str]] = {
    "reward_last": lambda reward: rounded_down(reward, 2),
    "kl": rounded_up,
    "masked_share": lambda share: percent_up(share, 1),
    "response_tokens": "{:.0f}".format,
    "kv_read_share": percent_up,
}
"""How figures of the table are written; the others are rounded down to three decimals."""


STUDIES = {25: "mismatch-study-h200", 60: "mismatch-study-60-steps-h200"}
"""The records of the study by the steps of its runs."""
DEFECTS = {"distill": "with a defect"}
"""Rows whose runs say nothing of what they are named after: one token could outweigh a whole step of the loss."""
AGAIN = {25: "mismatch-study-published-loss-h200", 60: "mismatch-study-published-loss-60-steps-h200"}
"""The records of those rows without the defect, and of what ran beside them, by steps."""

VERIFIED = "mismatch-study-verified-rollouts-60-steps-h200"
"""The record of the rows that check their drafts, which ran later than the others of 60 steps."""
CHECK_GRID = "mismatch-study-check-grid-60-steps-h200"
"""128 tokens everywhere with checks of other windows and floors."""
CHECK_BUDGETS = "mismatch-study-check-budgets-60-steps-h200"
"""Larger budgets everywhere, and units in few bits, with the usual check."""
DRAFTS = "mismatch-study-draft-4x4-60-steps-h200"
"""Units of 4 tokens without a dense layer, with the usual check."""
DRAFT_BUDGETS = {
    "quantized-4x4-256-wide-verified": (
        "mismatch-study-draft-4x4-256-60-steps-h200",
        "mismatch-study-draft-4x4-256-more-seeds-60-steps-h200",
    ),
    "quantized-4x4-384-wide-verified": ("mismatch-study-draft-4x4-384-60-steps-h200",),
    "quantized-4x4-512-wide-verified": (
        "mismatch-study-draft-4x4-512-60-steps-h200",
        "mismatch-study-draft-4x4-512-more-seeds-60-steps-h200",
    ),
    "quantized-4x2-512-wide-verified": ("mismatch-study-draft-4x2-512-60-steps-h200",),
}
"""Rows of the same with larger budgets, the last one with half the bits, and their records: six seeds each."""
MORE_DENSE = "mismatch-study-draft-4x4-512-more-seeds-60-steps-h200"
"""This record has three more seeds of dense rollouts, too. Those of the later record of 256 tokens were cut by the clock."""
DRAFT_UNITS = "mismatch-study-draft-units-60-steps-h200"
"""An earlier call of that row, and units of 8 tokens, all cut by the clock before their last evaluation."""
SMALL_UNITS = "mismatch-study-units-60-steps-h100"
"""Pages beside small units in few bits: with the tail of the pages, and with as many tokens. No drafts are checked."""
PAIRS = "mismatch-study-pairs-h100"
"""Units of 2 tokens in 2 bits."""
CONTROL = "mismatch-study-control-h200"
"""Rows with a control group."""
FIRST_BIN = "mismatch/acceptance_q05/3840-4096"
"""Of the contexts that a response begins with."""
STUDY_CHECKS, TINY_CHECKS = "mismatch-study-checks-h200", "tiny-reasoner-checks-cpu"
"""What checks do to one policy that does not train, on the study's model and on tiny-reasoner."""
UNIT_CHECKS = "mismatch-study-checks-units-h200"
"""The same on the study's model, for drafts in small units."""


def study_frozen() -> str:
    """The same for the study's model."""
    return before_and_after("mismatch-study-distill-h200")


def _label(row: str) -> str:
    return f"`{row}`, {DEFECTS[row]}" if row in DEFECTS else f"`{row}`"


def _again(steps: int) -> dict[str, Any]:
    """The study's rows that were run again without their defect; no rows where nobody has."""
    name = AGAIN[steps]
    return results(name, "mismatch-study") if (RESULTS / f"{name}.json").exists() else {"table": [], "runs": []}


STUDY_HEAD = [
    "row", "seeds", "change of dense accuracy", "reward of its rollouts", "tail", "in the worst bin", "KL", "tokens masked",
    "response tokens", "KV read",
]  # fmt: skip


def study() -> str:
    """A line for each row of the study."""
    found = results("mismatch-study-h200", "mismatch-study")
    rows = [_study_line(found, row, _label(row["row"])) for row in found["table"]]
    again = _again(25)
    rows += [_study_line(again, row, f"`{row['row']}`, again") for row in again["table"]]
    return table(STUDY_HEAD, rows)


def _study_line(found: dict[str, Any], row: dict[str, Any], label: str) -> list[str]:
    names = ("reward_last", "tail_last", "worst_tail_last", "kl", "masked_share", "response_tokens", "kv_read_share")
    if _whole_runs(found, row["row"]):
        change = row["accuracy_change"]
        between = f" ({gain(change['low'])} to {gain(change['high'])})" if row["seeds"] > 1 else ""
        stopped = sum(run["row"] == row["row"] and bool(run["stopped"]) for run in found["runs"])
        gained = gain(change["mean"]) + between + (f"; {stopped} more stopped early" if stopped else "")
    else:
        gained = _how_it_ended(found, row)
    return [label, str(row["seeds"]), gained, *_means(row, names)]


def _whole_runs(found: dict[str, Any], row: str) -> list[dict[str, Any]]:
    """The row's runs that went to their last step."""
    return [run for run in found["runs"] if run["row"] == row and run["state"] == "finished" and not run["stopped"]]


def _how_it_ended(found: dict[str, Any], row: dict[str, Any]) -> str:
    """Of a row without whole runs: what became of the run that came furthest."""
    runs = [run for run in found["runs"] if run["row"] == row["row"]]
    if any(run["stopped"] for run in runs):
        return f"stopped itself by step {row['steps']}"
    last = max(runs, key=lambda run: run["steps"])
    return f"{last['state']} at step {last['steps']}" if last["steps"] else last["state"]


def _means(row: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Figures of a row of the study; empty where it has none."""
    means = {name: row[name]["mean"] for name in names if row.get(name)}
    made = {name: FORMS.get(name, rounded_down)(mean) for name, mean in means.items()}
    return [made.get(name, "") for name in names]


def study_longer() -> str:
    """The rows that were trained for 60 steps: change of dense accuracy half way and at the end."""
    found = results("mismatch-study-60-steps-h200", "mismatch-study")
    names, rows, again = ("reward_last", "tail_last", "worst_tail_last", "kl", "kv_read_share"), [], _again(60)
    lines = [(found, row, _label(row["row"])) for row in found["table"]]
    lines += [(again, row, f"`{row['row']}`, again") for row in again["table"]]
    for study, row, label in lines:
        runs = [run["dense_accuracy"] for run in _whole_runs(study, row["row"])]
        half, whole = ([run[place][1] - run[0][1] for run in runs] for place in (1, 2))
        changes = [f"{gain(statistics.mean(of))} ({gain(min(of))} to {gain(max(of))})" for of in (half, whole) if of]
        changes = changes or ["", _how_it_ended(study, row)]
        rows.append([label, *changes, *_means(row, names)])
    steps = max(([point[0] for point in run["dense_accuracy"]] for run in found["runs"]), key=len)
    changes = [f"change of dense accuracy, step {step}" for step in steps[1:]]
    return table(["row", *changes, "reward of its rollouts", "tail", "in the worst bin", "KL", "KV read"], rows)


def study_small_units() -> str:
    """Pages and small units that ran beside each other, and units of 2 tokens, as the table of all rows has them."""
    records = (results(SMALL_UNITS, "mismatch-study"), results(PAIRS, "mismatch-study"))
    return table(
        STUDY_HEAD, [_study_line(found, row, _label(row["row"])) for found in records for row in found["table"]]
    )


def study_verified_rollouts() -> str:
    """The rows that check their drafts, each beside the same budgets without a check, and dense rollouts."""
    before, after = results(STUDIES[60], "mismatch-study"), results(VERIFIED, "mismatch-study")
    pairs = [("fixed-tis", "fixed-verified")]
    pairs += [(name, f"{name}-verified") for name in ("calibrated-0.75", "calibrated-0.86")]
    rows = [_verified_line(before, "dense")]
    for plain, checked in pairs:
        rows += [_verified_line(before, plain), _verified_line(after, checked)]
        if checked == "fixed-verified" and (RESULTS / f"{CHECK_GRID}.json").exists():
            grid = results(CHECK_GRID, "mismatch-study")
            rows += [_verified_line(grid, line["row"]) for line in grid["table"] if _whole_runs(grid, line["row"])]
    for record in (CHECK_BUDGETS, DRAFTS, *itertools.chain(*DRAFT_BUDGETS.values())):
        if (RESULTS / f"{record}.json").exists():
            found = results(record, "mismatch-study")
            rows += [_verified_line(found, line["row"]) for line in found["table"] if _whole_runs(found, line["row"])]
    head = ["row", "change of dense accuracy", "reward of its rollouts", "tail", "KL", "KV read"]
    return table([*head, "windows cut", "drafted per kept", "most nats off"], rows)


def gained(run: dict[str, Any]) -> float:
    """Change of dense accuracy from before the first step to behind the last one of a whole run."""
    assert run["state"] == "finished", "a whole run"
    return float(run["dense_accuracy"][-1][1] - run["dense_accuracy"][0][1])


def _verified_line(found: dict[str, Any], name: str) -> list[str]:
    row = next(line for line in found["table"] if line["row"] == name)
    runs = _whole_runs(found, name)
    changes = [gained(run) for run in runs]
    change = f"{gain(statistics.mean(changes))} ({gain(min(changes))} to {gain(max(changes))})"
    checks = ["", "", ""]
    if "check/cut_share" in runs[0]["series"]:
        cut, drafted, nats = (
            [value for run in runs for value in run["series"][f"check/{part}"]]
            for part in ("cut_share", "drafted_per_kept", "largest_nats")
        )
        checks = [
            percent_up(statistics.mean(cut), 1),
            rounded_up(statistics.mean(drafted), 2),
            rounded_up(max(nats), 2),
        ]
    seeds = [run["seed"] for run in runs]
    label = f"`{name}`" if min(seeds) == 0 else f"`{name}`, seeds {min(seeds)} to {max(seeds)}"
    return [label, change, *_means(row, ("reward_last", "tail_last", "kl", "kv_read_share")), *checks]


def study_uniform() -> str:
    """One budget at every length beside the calibrated schedule that reads as much, over the steps that all runs have."""
    found = results("mismatch-study-60-steps-h200", "mismatch-study")
    about = {"calibrated-0.86": "128, then 1,072 and 1,248 tokens", "uniform": "800 tokens"}
    runs = {name: [run for run in found["runs"] if run["row"] == name] for name in about}
    steps = min(run["steps"] for each in runs.values() for run in each)
    names: dict[str, Callable[[float], str]] = {
        "rollout/kv_read_share": percent_up,
        FIRST_BIN: rounded_down,
        "mismatch/acceptance_q05/4096-4352": rounded_down,
        "mismatch/acceptance_mean": rounded_down,
        "mismatch/kl_sparse_to_dense": rounded_up,
        "reward/mean": FORMS["reward_last"],
    }
    rows = []
    for name, what in about.items():
        means = [
            statistics.mean(value for run in runs[name] for value in run["series"][each][:steps]) for each in names
        ]
        figures = [form(mean) for form, mean in zip(names.values(), means, strict=True)]
        rows.append([f"`{name}`: {what}", *figures])
    head = ["KV read", "tail, 3,840 to 4,096", "4,096 to 4,352", "mean acceptance", "KL", "reward"]
    return table([f"row, steps 1 to {steps}", *head], rows)


def study_control() -> str:
    """What the tail and what the control group say of each row; nothing without a record."""
    if not (RESULTS / f"{CONTROL}.json").exists():
        return ""
    found = results(CONTROL, "mismatch-study")
    lines = []
    for name in dict.fromkeys(run["row"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["row"] == name and run["series"].get("control/step_reward_gap")]
        if runs:
            series = [_known(runs, each) for each in (_TAIL, FIRST_BIN)]
            tails = [rounded_down(statistics.mean(each)) if each else "" for each in series]
            gap = mean_with_interval(_known(runs, "control/step_reward_gap"))
            steps = ", ".join(str(run["steps"]) for run in runs)
            lines.append([f"`{name}`", *tails, gap, *first_alarms(runs), steps])
    head = ["row", "tail", "tail, 3,840 to 4,096", "reward gap over the run", "alarm at step, median", "of each seed"]
    return table([*head, "steps run"], lines)


_TAIL = "mismatch/acceptance_q05"


def _known(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A series of all steps of these runs, without the steps that have no figure."""
    return [value for run in runs for value in run["series"].get(name, []) if value is not None]


def mean_with_interval(steps: Sequence[float]) -> str:
    """The mean of the steps' reward gaps with its 95 % interval, Student's t over steps. The control group's own window
    begins anew with each alarm, so after a run it says nothing of the steps before the last one."""
    mean = statistics.mean(steps)
    if len(steps) < 2:
        return rounded_up(mean)
    reach = float(special.stdtrit(len(steps) - 1, 0.975)) * statistics.stdev(steps) / math.sqrt(len(steps))
    return f"{rounded_up(mean)} [{rounded_up(mean - reach)}, {rounded_up(mean + reach)}]"


def first_alarms(runs: Sequence[dict[str, Any]]) -> list[str]:
    """The step of the first alarm about the reward gap: the median of the seeds, and each."""
    first = [min(run["reward_gap_alarms"], default=math.inf) for run in runs]
    said = ["none" if step == math.inf else f"{step:g}" for step in (statistics.median(first), *first)]
    return [said[0], ", ".join(said[1:])]


def study_targets() -> str:
    """Did the calibrated schedules hold their targets? The worst bin of each: as replay measured it, in the runs under
    it, and in rollouts that were sampled to verify it, where that was done."""
    studies = {steps: results(name, "mismatch-study") for steps, name in STUDIES.items()}
    checked = _verified()
    rows = []
    for name, made in studies[25]["calibration"].items():
        target = made["schedule"]["target"]["at_least"]
        replayed = min(step["measured"]["value"] for step in made["schedule"]["steps"] if step.get("measured"))
        tails = [row_worst_bin(found, name) for found in studies.values()]
        tails += [checked[name]] if checked else []
        missed = any(tail is not None and tail < target for tail in tails)
        figures = ["" if tail is None else rounded_down(tail) for tail in (replayed, *tails)]
        rows.append([f"`{name}`", f"{target:.2f}", *figures, "no" if missed else "yes"])
    head = ["schedule", "target", "worst bin in replay", *(f"in its runs of {steps} steps" for steps in studies)]
    return table([*head, *(["sampled to verify it"] if checked else []), "held"], rows)


def row_worst_bin(found: dict[str, Any], row: str) -> float | None:
    """Tail of the length bin in which the row's is lowest, mean over its steps and seeds; None without a run."""
    tails = worst_bin(run["series"] for run in _whole_runs(found, row))
    return statistics.mean(tails) if tails else None


def _verified() -> dict[str, float]:
    """Worst bin of each schedule in rollouts of its own, before any budget was raised; empty where nobody sampled them."""
    if not (RESULTS / "mismatch-study-verified-h200.json").exists():
        return {}
    found = results("mismatch-study-verified-h200", "study-verification")["schedules"]
    return {each["schedule"]: min(cell["value"] for cell in each["rounds"][0]["bins"]) for each in found}


def study_distilled() -> str:
    """Tail in groups of five steps, mean over the seeds that got there, under one schedule with and without an adapter."""
    found = records.read(RESULTS / "mismatch-study-h200.json", "mismatch-study")
    starts, rows = range(0, found["config"]["steps"] - 4, 5), []
    again = _again(25)
    lines = [(_label(name), name, found["results"]) for name in ("calibrated-0.75", "distill", "distill-kl")]
    lines += [(f"`{row['row']}`, again", row["row"], again) for row in again["table"]]
    for label, name, of in lines:
        runs = [run for run in of["runs"] if run["row"] == name]
        tails = [run["series"].get("mismatch/acceptance_q05", []) for run in runs]
        groups = [[tail[start : start + 5] for tail in tails if len(tail) >= start + 5] for start in starts]
        means = [
            rounded_down(statistics.mean(value for part in group for value in part)) if group else ""
            for group in groups
        ]
        rows.append([label, *means])
    return table(["tail, steps", *(f"{start + 1} to {start + 5}" for start in starts)], rows)


def study_eviction() -> str:
    rows = []
    for run in results("mismatch-study-eviction-cpu", "study-eviction")["runs"]:
        policy = run["policy"]
        name = [f"`{policy['kind']}`", f"{policy['budget_tokens']:,}"] if policy else ["dense", ""]
        rows.append([*name, percent_down(run["kv_saved_share"]), rounded_down(run["solved_share"], 2)])
    return table(["policy", "tokens that stay", "KV memory saved", "problems solved"], rows)


def study_checks() -> str:
    return _checks(STUDY_CHECKS, "the study's model")


def tiny_checks() -> str:
    return _checks(TINY_CHECKS, "tiny-reasoner")


def _checks(name: str, model: str) -> str:
    """What checks of drafts do to a policy, with a sentence on how it was measured; nothing without a record."""
    if not (RESULTS / f"{name}.json").exists():
        return ""
    record = records.read(RESULTS / f"{name}.json", "study-checks")
    asked, found = record["config"], record["results"]["rows"]
    rows = []
    for row in found:
        error = rounded_up(row["reward_standard_error"], 3)
        off = [rounded_up(row["kl"], 4), *(_small_share(row[f"over_{nats}_nats_share"]) for nats in (2, 10, 20))]
        taken_back = ["", ""]
        if row["window_tokens"] is not None:
            taken_back = [percent_up(row["cut_share"]), rounded_up(row["drafted_per_kept"], 2)]
        rows.append(
            [
                _sampler(row),
                f"{rounded_down(row['reward'])} +- {error}",
                *off,
                rounded_up(row["largest_nats"], 1),
                *taken_back,
                rounded_down(row["draft_acceptance_q05"], 2),
            ]
        )
    said = textwrap.fill(
        f"Measured with {model} (`recipes/mismatch-study/study_checks.py`, `{asked['task']}` level {asked['level']}, "
        f"temperature {asked['temperature']:g}, {asked['problems']} held-out problems, HFEngine in {asked['dtype']}, "
        f"`{name}.json`). "
        "The reward has its standard error; the tail is the 5th percentile of the drafts' acceptance, before any check.",
        width=120,
        break_long_words=False,
        break_on_hyphens=False,
    )
    head = [
        "sampler",
        "reward",
        "KL",
        "> 2 nats off",
        "> 10",
        "> 20",
        "most",
        "windows cut",
        "drafted per kept",
        "tail",
    ]
    return f"\n{said}\n\n{table(head, rows)}"


def _small_share(share: float) -> str:
    """Two digits, rounded up."""
    if share == 0:
        return "0"
    power = math.floor(math.log10(share)) - 1
    return f"{math.ceil(share / 10**power - 1e-9) * 10**power:.1e}"


def _sampler(row: dict[str, Any]) -> str:
    if row["kv_budget_tokens"] is None:
        return "dense"
    if row["window_tokens"] is None:
        return f"sparse, {row['kv_budget_tokens']} tokens"
    return f"verified, {row['kv_budget_tokens']} tokens, windows of {row['window_tokens']}, floor {row['floor']:g}"
