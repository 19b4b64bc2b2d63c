"""Figures in sentences about checks of drafts, as they were timed and as a plan has them. Measures nothing; claims.py puts
them on the pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from check_times import WAITING_LOGIT_BYTES, timed_checks
from claim_words import Claims, Figures, bare, down, up
from claims_drafts import draft_budgets, draft_units
from record_tables import RESULTS, results
from render_drafts import called, speeds
from render_speed import WINDOW_PROFILE, moments_of, profiled_windows

from sparroll import records
from sparroll.calibrate.defaults import MOST_BUDGETS, PROMPTS, SAMPLES, SCORED_SHARE, VERIFY_ROUNDS
from sparroll.calibrate.effort.cost_ahead import Evaluation, cost_ahead
from sparroll.calibrate.measure import MeasureSettings
from sparroll.draft_check import DraftCheck
from sparroll.plan.check_rate import CheckRate
from sparroll.plan.check_time import ATTENTION_SHARE, LAYERS_SHARE, LOGIT_BYTES, scoring_seconds
from sparroll.plan.hardware import find_hardware
from sparroll.plan.model_shape import model_shape

LARGER_UNITS = "verified-rollouts-wide-budgets-qwen3-1.7b-h200"
UNITS_OF_384 = "verified-rollouts-wide-384-qwen3-1.7b-h200"
BOTH_BITS = "verified-rollouts-wide-512-qwen3-1.7b-h200"


def checked_speed() -> Figures:
    """Windows of 64 under the schedule of .86, by the share of windows that are cut, and with 65 rows."""
    cells = _windows_of_64("verified-rollouts-qwen3-1.7b-h200")
    figures = {"none": bare(down(cells[0]["of_unverified"], 3))}
    for name, cell in zip(("few", "many"), cells[1:], strict=True):
        figures[name] = bare(down(cell["of_unverified"], 3))
        figures[f"{name}_cut"] = up(100 * cell["cut_share"], 1)
    whole, (longer, *_) = cells[0], _windows_of_64("verified-rollouts-qwen3-1.7b-65-rows-h200")
    return figures | {
        "longer_ms": up(1e3 * longer["check_share"] * longer["seconds_per_window"]),
        "whole_ms": up(1e3 * whole["check_share"] * whole["seconds_per_window"]),
        "longer": bare(down(longer["of_unverified"], 3)),
    }


def _windows_of_64(name: str) -> list[dict[str, Any]]:
    """Of the record's batch under the schedule of .86, the share of drafts that were kept falling."""
    found = [
        cell
        for cell in results(name, "verified-rollouts")
        if cell["engine"] == "verified"
        and (cell["schedule"], cell.get("set"), cell["window_tokens"]) == ("qwen3-1.7b-0.86", "batch", 64)
    ]
    return sorted(found, key=lambda cell: -cell["kept_share_forced"])


def planned_checks() -> Figures:
    """Windows of 64 in vLLM, at a moment of the steady set, beside what a plan has for them."""
    of_record = [each for each in timed_checks() if each.record == LARGER_UNITS and each.cell["set"] == "steady"]
    _, timed, *_ = (each for each in of_record if each.cell["kept_share_forced"] > 0.9995)
    return {
        "requests": str(timed.batch),
        "context": f"{timed.context_tokens:,.0f}",
        "cut": up(100 * timed.cell["cut_share"], 1),
        "took_ms": up(1e3 * timed.seconds),
        "planned_ms": f"{1e3 * timed.planned():.0f}",
    }


def checked_runs() -> Figures:
    """Whole runs of the request sets, at the rate of cut windows that was forced and at the study's."""
    cells = results("verified-rollouts-sets-qwen3-1.7b-h200", "verified-rollouts")
    figures: dict[str, str] = {}
    for name, schedule in (("calibrated", "qwen3-1.7b-0.86"), ("fixed", "fixed-128")):
        for run in cells:
            if "moments" in run and (run["engine"], run.get("schedule")) == ("verified", schedule):
                figures[f"{name}_{run['set']}"] = down(run["of_dense"], 2)
                figures[f"{name}_{run['set']}_share"] = bare(down(run["of_unverified"], 3))
                figures[f"{name}_{run['set']}_cut"] = down(_at_cut_share_of_128(run, cells), 2)
    return figures | {"cut": up(100 * _cut_share_at_128(), 1)}


def _at_cut_share_of_128(run: dict[str, Any], cells: list[dict[str, Any]]) -> float:
    """What the run would be of dense attention with as many windows cut as in the study with 128 tokens."""
    drafted = statistics.mean(cell["drafted_per_kept"] for cell in moments_of(run, cells))
    more = CheckRate.of_cut_share(_cut_share_at_128(), run["window_tokens"]).drafted_per_kept
    return float(run["of_dense"] * drafted / more)


def checked_runs_today(device: str, schedule: str) -> Figures:
    """Whole runs of 1.7B under a schedule with a check, with the kernels of today."""
    cells = results(f"verified-rollouts-wide-qwen3-1.7b-{device}", "verified-rollouts")
    figures: dict[str, str] = {}
    for run in cells:
        if "moments" in run and (run["engine"], run.get("schedule")) == ("verified", schedule):
            figures[run["set"]] = down(run["of_dense"], 2)
            figures[f"{run['set']}_cut"] = down(_at_cut_share_of_128(run, cells), 2)
    return figures


def checked_runs_h100() -> Figures:
    """128 tokens everywhere."""
    return checked_runs_today("h100", "fixed-128")


def checked_units_h100() -> Figures:
    """Small units, of which layers 0 and 1 read 512 tokens."""
    return checked_runs_today("h100", "wide-128")


def checked_units_h200() -> Figures:
    """Small units on an H200: at about the share of cut windows that their drafts have in the study, and at that of pages
    there; and what the record says of units whose drafts the study takes back."""
    cells = results("verified-rollouts-wide-qwen3-1.7b-h200", "verified-rollouts")
    runs = [run for run in cells if "moments" in run and run.get("schedule") == "wide-128-4x4"]
    figures: dict[str, str] = {}
    for run in runs:
        if run["engine"] == "verified":
            name = f"{run['set']}_{'few' if run['kept_share_forced'] > 0.999 else 'many'}"
            figures[name] = down(run["of_dense"], 2)
            figures[f"{name}_cut"] = up(100 * statistics.mean(cell["cut_share"] for cell in moments_of(run, cells)), 1)
    larger = {
        run["set"]: run["of_dense"]
        for run in cells
        if "moments" in run and (run["engine"], run.get("schedule")) == ("sparse", "wide-128-8x4")
    }
    small = {run["set"]: run["of_dense"] for run in runs if run["engine"] == "sparse"}
    return figures | {
        "small": down(small["steady"], 2),
        "larger": down(larger["steady"], 2),
        **{key: draft_units()[key] for key in ("cut", "larger_cut", "units", "dense")},
    }


def checked_larger_units_h200() -> Figures:
    """Small units with larger budgets on an H200, with verdicts that wait for nothing, at the two shares of cut windows that
    were forced."""
    return _forced_runs(LARGER_UNITS)


def checked_384_h200() -> Figures:
    """The same with 384 tokens, in a later call."""
    return _forced_runs(UNITS_OF_384)


def checked_half_the_bits_h200() -> Figures:
    """512 tokens in units of 2 and of 4 bits, in one call."""
    return _forced_runs(BOTH_BITS)


def beside_fastest_dense() -> Figures:
    """Checked drafts of each budget beside the fastest dense runs of all calls."""
    return {f"{each}_{name}": down(speed, 2) for (name, each), speed in speeds().items()}


def checked_profiled_h200() -> Figures:
    """512 tokens in units of 2 bits, at the moments that were profiled, and where the time goes there."""
    profiles = profiled_windows()
    products = [profile["drafts"]["groups_ms"]["GEMM"] / profile["drafts"]["kernel_ms"] for profile in profiles]
    return _forced_runs(WINDOW_PROFILE) | {"products": f"{100 * statistics.mean(products):.0f}"}


def _forced_runs(name: str) -> Figures:
    cells = results(name, "verified-rollouts")
    runs = [run for run in cells if "moments" in run and run["engine"] == "verified"]
    kept = sorted({run["kept_share_forced"] for run in runs})
    figures: dict[str, str] = {}
    for share, many in zip(kept, ("_many", ""), strict=True):
        forced = [run for run in runs if run["kept_share_forced"] == share]
        for run in forced:
            _, tokens, units = run["schedule"].split("-")
            figures[f"{run['set']}_{called(tokens, units)}{many}"] = down(run["of_dense"], 2)
        cuts = [statistics.mean(cell["cut_share"] for cell in moments_of(run, cells)) for run in forced]
        figures |= {f"cut_least{many}": up(100 * min(cuts), 1), f"cut_most{many}": up(100 * max(cuts), 1)}
    return figures


def _cut_share_at_128() -> float:
    """Of the study's runs with 128 tokens everywhere."""
    runs = results("mismatch-study-verified-rollouts-60-steps-h200", "mismatch-study")["runs"]
    shares = [share for run in runs if run["row"] == "fixed-verified" for share in run["series"]["check/cut_share"]]
    return statistics.mean(shares)


def checked_step() -> Figures:
    """A whole training step on checked rollouts beside one on unchecked ones."""
    last = {row["case"]: row["steps"][-1] for row in results("training-step-verified-h200", "training-step")}
    sparse, verified = last["sparse"], last["verified"]
    other = {row["case"]: row["steps"][-1] for row in results("training-step-h200", "training-step")}["sparse"]
    return {
        "cut": up(100 * verified["cut_share"], 1),
        "verified_rollouts": up(verified["rollout_seconds"], 1),
        "sparse_rollouts": up(sparse["rollout_seconds"], 1),
        "checks": up(verified["check_seconds"], 1),
        "sparse_measuring": up(sparse["measure_seconds"], 1),
        "other_measuring": up(other["measure_seconds"], 1),
        "verified_measuring": up(verified["measure_seconds"], 1),
        "sparse": down(sparse["step_seconds"] - sparse["measure_seconds"], 1),
        "verified": up(verified["step_seconds"] - verified["measure_seconds"], 1),
    }


def check_constants() -> Figures:
    """The constants of a planned check, and how far it is from all that were measured."""
    found = timed_checks()
    own = [each for each in found if not each.waited]
    return {
        "attention": f"{100 * ATTENTION_SHARE:.0f}",
        "layers": f"{100 * LAYERS_SHARE:.0f}",
        "bytes": f"{LOGIT_BYTES:.0f}",
        "error": up(100 * max(abs(each.error) for each in own), 1),
        "own": str(len(own)),
        "waiting": str(len(found) - len(own)),
        "waiting_bytes": f"{WAITING_LOGIT_BYTES:.0f}",
        "waiting_error": up(100 * max(abs(each.error) for each in found if each.waited)),
        "least": str(min(each.rows for each in found)),
        "most": str(max(each.rows for each in found)),
        "least_requests": str(min(each.batch for each in found)),
        "most_requests": str(max(each.batch for each in found)),
        "shortest": f"{min(each.context_tokens for each in found):,.0f}",
        "longest": f"{max(each.context_tokens for each in found):,.0f}",
    }


def planned_scoring() -> Figures:
    """The scoring pass of a whole step beside what a plan has for it."""
    record = records.read(RESULTS / "training-step-h200.json", "training-step")
    asked = record["config"]
    responses, tokens = asked["prompts"] * asked["samples"], asked["response_tokens"]
    planned = scoring_seconds(model_shape("Qwen3-1.7B"), find_hardware("H200"), responses * tokens, tokens / 2)
    took = next(row for row in record["results"] if row["case"] == "sparse")["steps"][-1]["score_seconds"]
    return {
        "responses": str(responses),
        "tokens": f"{tokens:,}",
        "planned": down(planned, 1),
        "took": up(took, 1),
    }


def scored_tokens() -> Figures:
    """The time of scoring passes and checks beside that of the rollouts whose tokens they score."""
    passes, checks = [], []
    for name in ("training-step", "training-step-verified"):
        for case in results(f"{name}-h200", "training-step"):
            for step in case["steps"]:
                spent = step.get("check_seconds") or 0.0
                if spent:
                    checks.append(spent / (step["rollout_seconds"] - spent))
                else:
                    passes.append(step["score_seconds"] / step["rollout_seconds"])
    return {
        "least": bare(down(min(passes), 2)),
        "most": bare(up(max(passes), 2)),
        "checks": bare(f"{statistics.median(checks):.2f}"),
        "counted": bare(f"{SCORED_SHARE:g}"),
    }


def default_cost() -> Figures:
    """Of a calibration with the defaults, in percent of an evaluation."""

    def share(checks: Sequence[DraftCheck]) -> str:
        settings = MeasureSettings(max_new_tokens=1024, samples=SAMPLES)
        about = {"budgets": MOST_BUDGETS, "verify_rounds": VERIFY_ROUNDS, "checks": checks}
        return up(100 * cost_ahead(settings, PROMPTS, Evaluation.parse(None, 1024), **about).share)

    return {
        "budgets": str(MOST_BUDGETS),
        "rounds": str(VERIFY_ROUNDS),
        "rollouts": str(PROMPTS * SAMPLES),
        "share": share([]),
        "checked": share([DraftCheck()]),
    }


PAGES: Mapping[str, Claims] = {
    "README.md": {
        "Rollouts of Qwen3-1.7B's shape are {drained_512} to {steady_512} times as fast as dense ones, checks included. "
        "With two bits they are {drained_512_4x2} to {steady_512_4x2} times as fast": beside_fastest_dense,
    },
    "docs/results.md": {
        "128 tokens everywhere with a check are {drained} times as fast as dense attention on the drained set and {steady} "
        "times on the steady one (": checked_runs_h100,
        "At the study's rate of cut windows that would be about {drained_cut} and {steady_cut} times.": checked_runs_h100,
        "small units of 128 tokens and 512 in layers 0 and 1, makes it {drained} (drained) and {steady} (steady) in the "
        "same record; at the study's rate that would be about {drained_cut} (drained) and {steady_cut} (steady).": (
            checked_units_h100
        ),
        "On an H200 `wide-128-4x4`, which is that schedule, is {drained_few} times as fast as dense attention on the "
        "drained set with {drained_few_cut} % of the windows cut, and {steady_few} times on the steady one with "
        "{steady_few_cut} %": checked_units_h200,
        "runs under such drafts had {cut} % of the windows cut, and gained {units} in dense accuracy where dense rollouts "
        "gained {dense}": checked_units_h200,
        "At the rate of pages there ({drained_many_cut} and {steady_many_cut} %) it is {drained_many} and {steady_many} "
        "times.": checked_units_h200,
        "`wide-512-4x4` (2,048 in layers 0 and 1) is {drained_512} times as fast as dense attention on the drained set and "
        "{steady_512} times on the steady one, and `wide-256-4x4` (1,024) {drained_256} and {steady_256} times, with "
        "{cut_least} to {cut_most} % of the windows cut": checked_larger_units_h200,
        "With {cut_least_many} to {cut_most_many} % of them cut it is {drained_512_many}, {steady_512_many}, "
        "{drained_256_many} and {steady_256_many} times.": checked_larger_units_h200,
        "`wide-384-4x4` (1,536) is {drained_384} times as fast on the drained set and {steady_384} times on the steady one "
        "with {cut_least} to {cut_most} % of the windows cut, and {drained_384_many} and {steady_384_many} times with "
        "{cut_least_many} to {cut_most_many} %": checked_384_h200,
        "It is {drained_512_4x2} times as fast as dense attention on the drained set and {steady_512_4x2} times on the "
        "steady one, where `wide-512-4x4` is {drained_512} and {steady_512} times at the same moments and in the same "
        "call": checked_half_the_bits_h200,
        "With {cut_least_many} to {cut_most_many} % of the windows cut, `wide-512-4x2` is {drained_512_4x2_many} and "
        "{steady_512_4x2_many} times as fast, and `wide-512-4x4` {drained_512_many} and {steady_512_many} times.": (
            checked_half_the_bits_h200
        ),
        "Beside the fastest dense runs of the three calls `wide-512-4x2` is {drained_512_4x2} and {steady_512_4x2} times as "
        "fast": beside_fastest_dense,
        "`wide-512-4x2` is {steady_512_4x2} times as fast there": checked_profiled_h200,
        "Of the drafts' time {products} % go into matrix products": checked_profiled_h200,
        "decode {larger} instead of {small} times as fast on the steady set without a check, but in the study "
        "{larger_cut} % of their windows are cut": checked_units_h200,
        "the schedule of .86 with a check is {calibrated_drained} times as fast as dense attention on the drained set and "
        "{calibrated_steady} times on the steady one": checked_runs,
        "{fixed_drained} and {fixed_steady} times. With {cut} % of the windows cut, which is the study's rate with 128 "
        "tokens, that would be about {fixed_drained_cut} and {fixed_steady_cut} times.": checked_runs,
        "{cut} % of the windows cut (`training-step-verified-h200.json`). Rollouts take {verified_rollouts} instead of "
        "{sparse_rollouts} s, of which the checks are {checks}, and": checked_step,
        "took {sparse_measuring} s of that sparse step ({other_measuring} s of the other one), perhaps because both shared "
        "the host's cores, and {verified_measuring} s of the checked one. Without it the steps are {sparse} and {verified} "
        "s.": checked_step,
        "a check took {longer_ms} ms instead of {whole_ms}, and with nothing taken back {longer} of the unverified tokens "
        "were left instead of {none}": checked_speed,
    },
    "docs/verified-rollouts.md": {
        "Whole runs of many requests keep {calibrated_drained_share} where requests end one by one, and "
        "{calibrated_steady_share} where new ones always follow.": checked_runs,
        "dense rollouts gained {dense}. The last column": draft_budgets,
        "takes {verified} s with checks and {sparse} s without them, measuring left out": checked_step,
        "keep [{none} of the tokens per second](results.md#verified-rollouts) if nothing is taken back, {few} if {few_cut} "
        "% of the windows are cut (about the study's rate), and {many} if {many_cut} % are": checked_speed,
    },
    "docs/plan.md": {
        "A check of {requests} requests of {context} tokens on average (Qwen3-1.7B's shape, {cut} % of the windows cut) "
        "took {took_ms} ms where the plan has {planned_ms} (": planned_checks,
        "For {responses} responses of {tokens} tokens the plan has {planned} s where the trainer took {took} "
        "s": planned_scoring,
        "The arithmetic of attention is at {attention} % of the data sheet's rate, and that of the layers at {layers} "
        "%.": check_constants,
        "the bytes come from {own} checks of four records": check_constants,
        "The other {waiting} checks waited": check_constants,
        "with {waiting_bytes} bytes in the place of {bytes} the plan is at most {waiting_error} % off them": (
            check_constants
        ),
        "and with its own at most {error} % off the {own} that did not wait.": check_constants,
        "| logits and the rule | {bytes} bytes of memory traffic": check_constants,
        "{least_requests} to {most_requests} requests, contexts of {shortest} to {longest} tokens, windows of "
        "{most}.": check_constants,
    },
    "docs/calibration.md": {
        "A scored token counts {counted} of a sampled one: a scoring pass took {least} to {most} of the time of the "
        "rollouts, and checks {checks}": scored_tokens,
        "The default 1 + {budgets} + {rounds} sets of {rollouts} rollouts cost {share} % of an evaluation at any length; "
        "with one check of drafts, {checked} %.": default_cost,
    },
}
