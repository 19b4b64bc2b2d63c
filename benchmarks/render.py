"""The tables of README.md and of the docs, and the figures in their sentences, from the records in benchmarks/results.
Measures nothing.

python benchmarks/render.py            # tables between <!-- table: NAME --> and <!-- end -->; sentences: see claims.py
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from typing import Any

import render_cells
import render_claims
import render_control
import render_drafts
import render_fine
import render_heads
import render_math
import render_pages
import render_speed
import render_study
import render_trainers
import render_ways
from claims import CLAIMS, write_figures
from record_tables import RESULTS, ROOT, before_and_after, results, share_with_interval, spread, table, times
from render_speed import PAPER_SPEEDUP, SIZES

from sparroll import records
from sparroll.rounding import percent_down, percent_up, rounded_down, rounded_up, with_interval


def plans() -> str:
    rows = []
    for size in SIZES:
        plan = results(f"plan-qwen3-{size}", "plan")
        model = plan["model"]["name"]
        share, speedup = percent_up(plan["kv_read_share"]), times(plan["speedup"])
        rows.append([model, plan["schedule"], share, speedup, times(PAPER_SPEEDUP[size])])
    return table(["model", "schedule", "KV read", "planned, H200", "measured in the paper"], rows)


def quickstart_tail() -> str:
    rows = [
        [
            f"from {row['from_context_tokens']}",
            str(row["kv_budget_tokens"]),
            f"{rounded_down(row['q05'])} (low {rounded_down(row['q05_low'])})",
            rounded_down(row["dense_ceiling_q05"]),
        ]
        for row in results("quickstart-seed-0", "quickstart")["tail"]
    ]
    return table(["context tokens", "KV budget", "tail", "dense ceiling"], rows)


def quickstart_runs() -> str:
    """One line a run: the mean over seeds, and the standard deviation between them."""
    seeds = [records.read(path, "quickstart")["results"] for path in sorted(RESULTS.glob("quickstart-seed-*.json"))]
    rows = []
    for name in seeds[0]["runs"]:
        runs = [seed["runs"][name] for seed in seeds]
        figures = [spread([run[key] for run in runs]) for key in ("reward_first", "reward_last")]
        figures += [spread([run[key] for run in runs]) for key in ("dense_accuracy_first", "dense_accuracy_last")]
        rows.append([name, *figures, rounded_down(min(run["tail_q05_min"] for run in runs))])
    head = [
        "rollouts",
        "reward, first steps",
        "last steps",
        "dense accuracy before",
        "after",
        "lowest tail of any step, all lengths together",
    ]
    return table(head, rows)


def replay() -> str:
    rows = []
    for row in results("replay", "replay")["rows"]:
        tails = [
            with_interval(row[f"{mode}_q05"], row[f"{mode}_low"], row[f"{mode}_high"])
            for mode in ("faithful", "replay")
        ]
        difference = rounded_up(row["replay_q05"] - row["faithful_q05"], sign=True)
        rows.append([str(row["kv_budget_tokens"]), f"from {row['from_context_tokens']}", *tails, difference])
    return table(["KV budget", "context tokens", "faithful", "replay", "replay - faithful"], rows)


def checked_budgets() -> str:
    """Two calibrations of the tiny model, without a check and with one, beside each other by length."""
    found = [results(f"calibration-{name}tiny-cpu", "calibration") for name in ("", "checked-")]
    by_start = [{row["from_context_tokens"]: row for row in each["rows"]} for each in found]
    kls = [
        {bin["from_context_tokens"]: bin["kl"] for bin in each["verification"]["rounds"][-1]["divergence"]["bins"]}
        for each in found
    ]
    rows = []
    for start in sorted({*by_start[0], *by_start[1]}):
        cells = []
        for own, kl in zip(by_start, kls, strict=True):
            row = own.get(start)
            if row is None or row["q05"] is None:
                cells = []
                break
            figures = f"{rounded_down(row['q05'])} (low {rounded_down(row['q05_low'])})", rounded_up(kl[start], 4)
            cells += [str(row["kv_budget_tokens"]), *figures]
        if cells:
            rows.append([f"from {start}", *cells])
    ways = "without a check", "with a check"
    return table(["context tokens", *(f"{name}, {way}" for way in ways for name in ("KV budget", "tail", "KL"))], rows)


def decode() -> str:
    rows = []
    for name, machine in (("hf-decode-cpu", "2 CPU cores, fp32"), ("hf-decode-h200", "H200, bf16")):
        if not (RESULTS / f"{name}.json").exists():
            continue
        found = results(name, "hf-decode")
        steps = found["step"]["step_seconds"]
        for mode in ("dense", "sparse"):
            towards = rounded_down if mode == "dense" else rounded_up
            rows.append([machine, mode, *(towards(1000 * seconds, 2) for seconds in steps[mode])])
    contexts = results("hf-decode-cpu", "hf-decode")["step"]["contexts"]
    return table(["machine", "step, ms", *(f"{context // 1024}K" for context in contexts)], rows)


def rl_grid() -> str:
    """One line a schedule and correction: the mean over seeds, and the standard deviation between them."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in sorted(results("rl-grid-tiny", "rl-grid"), key=lambda run: (run["schedule"], run["correction"])):
        groups.setdefault((run["schedule"], run["correction"]), []).append(run)
    rows = []
    for (schedule, correction), runs in groups.items():
        before, after = ([run["dense_accuracy"][end] for run in runs] for end in (0, -1))
        reward = [statistics.mean(run["reward"][-5:]) for run in runs]
        read = statistics.mean(statistics.mean(run["kv_read_share"]) for run in runs)
        figures = [spread(values) for values in (before, after, reward)]
        rows.append([schedule, correction, str(len(runs)), *figures, percent_up(read)])
    head = ["schedule", "correction", "seeds", "dense accuracy before", "after", "reward, last 5 steps", "KV read"]
    return table(head, rows)


def sparse_training() -> str:
    rows = []
    for row in results("sparse-training-h200", "sparse-training")["layer"]:
        took = [rounded_up(row[name], 1) for name in ("choose_ms", "sparse_forward_ms")]
        took += [rounded_down(row["dense_forward_ms"], 1)]
        took += [rounded_up(row["sparse_both_ms"], 1), rounded_down(row["dense_both_ms"], 1)]
        shares = [percent_up(row[name]) for name in ("read_share", "loaded_share")]
        rows.append([f"{row['tokens']:,}", row["queries"], *shares, *took])
    head = ["tokens", "queries", "read", "loaded", "choice", "sparse forward", "flash forward", "both ways, sparse"]
    return table([*head, "both ways, flash"], rows)


def sparse_training_model() -> str:
    """Training passes of the whole model: the policy's, and the adapter's under both kinds of attention."""
    rows = []
    for found in results("sparse-training-h200", "sparse-training")["model"]:
        for name, what in (
            ("policy", "policy, dense"),
            ("adapter_dense", "adapter, dense"),
            ("adapter", "adapter, sparse"),
        ):
            of = found[name]
            figures = [
                *(rounded_up(of[key], 2) for key in ("forward_seconds", "both_seconds")),
                rounded_up(of["peak_gib"], 1),
            ]
            rows.append([f"{found['tokens']:,}", what, *figures])
    return table(["tokens", "what is trained", "forward, s", "with backward, s", "peak memory, GiB"], rows)


TRAINING_STEPS = ("training-step-h200", "training-step-verified-h200")
"""Records of whole steps. Cases are compared with those of their own record alone."""


def training_step() -> str:
    """Seconds of each finished case's last step, and how much faster it is than the dense and the sparse one. A first
    step, which compiles and measures the ceiling, says nothing of the others."""
    rows = [
        line
        for name in TRAINING_STEPS
        if (RESULTS / f"{name}.json").exists()
        for line in _steps_of(results(name, "training-step"))
    ]
    head = ["case", "what", "rollouts, s", "scoring, s", "update, s", "adapter, s", "step, s", "of dense", "of sparse"]
    return table(head, rows)


def _steps_of(found: list[dict[str, Any]]) -> list[list[str]]:
    finished = [row for row in found if row["state"] == "finished" and row["steps"][-1]["step"] > 1]
    last = {row["case"]: row["steps"][-1] for row in finished}
    rows = []
    for row in found:
        case, schedule = row["case"], row["schedule"].rpartition("-")[2]
        what = schedule if row["correction"] == "none" else f"{schedule}, {row['correction'].upper()}"
        what += (", adapter" if row["distill"] else "") + (", checked" if row.get("verified") else "")
        took, speedups = ["", "", "", "", row["state"]], ["", ""]
        if case in last:
            parts = [last[case].get(f"{name}_seconds") for name in ("rollout", "score", "update", "distill", "step")]
            towards = rounded_down if case == "dense" else rounded_up
            # A step on checked rollouts has no scoring pass, and its seconds are those of a glance.
            took = ["" if seconds is None or seconds < 0.05 else towards(seconds, 1) for seconds in parts]
            speedups = [
                times(last[other]["step_seconds"] / last[case]["step_seconds"]) if other in last else ""
                for other in ("dense", "sparse")
            ]
        rows.append([f"`{case}`", what, *took, *speedups])
    return rows


def distilled() -> str:
    """An adapter's effect on prompts that it was not trained on."""
    return before_and_after("distill-tiny")


def eviction() -> str:
    """Bytes of the cache above the budget, and milliseconds of a step."""
    rows = []
    found = results("eviction-h200", "eviction")["runs"]
    longest = max(run["new_tokens"] for run in found)
    for run in found:
        if run["new_tokens"] < longest:
            continue
        policy = run["policy"]
        peaks = [rounded_up(run[kind] / 2**20, 0) for kind in ("peak_kv_bytes", "allocator_peak_bytes")]
        name = f"`{policy['kind']}`, {policy['budget_tokens']} tokens" if policy else "dense"
        rows.append([name, *peaks, percent_down(run["kv_saved_share"]), rounded_up(1000 * run["seconds_per_step"], 1)])
    return table(["policy", "peak of the cache, MiB", "peak of the allocator, MiB", "saved", "ms a step"], rows)


def controlled() -> str:
    """The controller's runs in groups of steps: share of bins at the target, and of the cache that is read."""
    found = records.read(ROOT / "benchmarks" / "results" / "controller-tiny.json", "controller-run")
    target, swap, rows = found["config"]["target"], found["config"]["steps"] // 2, []
    for start in found["config"]["starts"]:
        steps = [step for run in found["results"] if run["start"] == start for step in run["steps"]]
        for first, last in ((1, 2), (3, 5), (6, swap), (swap + 1, swap + 3), (swap + 4, 2 * swap)):
            those = [step for step in steps if first <= step["step"] <= last]
            bins = [
                (s["mismatch/acceptance_q05"][b], s["mismatch/tokens"][b]) for s in those for b in s["mismatch/tokens"]
            ]
            held = sum(tokens for q05, tokens in bins if q05 >= target) / sum(tokens for _, tokens in bins)
            read = statistics.mean(step["rollout/kv_read_share"] for step in those)
            rows.append([str(start), f"{first} to {last}", percent_down(held), percent_up(read)])
    return table(["start, tokens", "steps", "tokens in bins at the target", "KV read"], rows)


def guard() -> str:
    """False alarms and detections of the guard in simulated runs, with exact intervals."""
    rows = []
    for case in results("guard-simulation", "guard-simulation"):
        found, old = case["fallen"], case["old_rule"]
        shape = [*_guard_case(case), f"{case['design_effect']:.2f}"]
        figures = [
            share_with_interval(case["above"], math.ceil),
            share_with_interval(found, math.floor),
            _median_steps(found),
        ]
        rows.append([*shape, *figures, percent_down(old["steps_below"]), percent_down(old["share"])])
    head = ["shape", "correlation", "design effect", "false alarms, runs", "fall found in 10 steps", "median steps"]
    return table([*head, "old rule: steps under", "old rule: false alarms, runs"], rows)


def guard_merged() -> str:
    """The same for runs with so few tokens that bins are merged."""
    rows = []
    for case in results("guard-simulation", "guard-simulation"):
        above, found = case["thin_above"], case["thin_fallen"]
        figures = [share_with_interval(above, math.ceil), share_with_interval(found, math.floor), _median_steps(found)]
        rows.append([*_guard_case(case), *figures])
    return table(["shape", "correlation", "false alarms, runs", "fall found in 10 steps", "median steps"], rows)


def _guard_case(case: dict[str, Any]) -> list[str]:
    return [f"budget {case['shape']}", f"{case['correlation']:g}"]


def _median_steps(found: dict[str, Any]) -> str:
    return "-" if found["median_steps"] is None else rounded_up(found["median_steps"], 0)


def caveats() -> str:
    """What records say against themselves: a line for each caveat, with the records that have it."""
    found: dict[str, list[str]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        caveat = records.read(path).get("caveat")
        if caveat:
            found.setdefault(caveat, []).append(f"`{path.stem}`")
    return table(["records", "what they cannot show"], [[", ".join(names), caveat] for caveat, names in found.items()])


TABLES: dict[str, Callable[[], str]] = {
    "guard": guard,
    "guard-merged": guard_merged,
    "plans": plans,
    "quickstart-tail": quickstart_tail,
    "quickstart-runs": quickstart_runs,
    "replay": replay,
    "checked-budgets": checked_budgets,
    "decode": decode,
    "rl-grid": rl_grid,
    "rollouts": render_speed.rollouts,
    "interpolated": render_speed.interpolated,
    "whole-runs": render_speed.whole_runs,
    "within-budget": render_speed.within_budget,
    "verified-rollouts": render_speed.verified_rollouts,
    "verified-runs": render_speed.verified_runs,
    "window-profile": render_speed.window_profile,
    "checked-drafts": render_drafts.checked_drafts,
    "steady-goals": render_speed.steady_goals,
    "decode-steps": render_speed.decode_steps,
    "short-steps": render_speed.short_steps,
    "kernels": render_speed.kernels,
    "distilled": distilled,
    "sparse-training": sparse_training,
    "eviction": eviction,
    "sparse-training-model": sparse_training_model,
    "training-step": training_step,
    "study": render_study.study,
    "study-longer": render_study.study_longer,
    "study-verified": render_study.study_verified_rollouts,
    "study-units": render_study.study_small_units,
    "study-distilled": render_study.study_distilled,
    "study-frozen": render_study.study_frozen,
    "study-eviction": render_study.study_eviction,
    "study-checks": render_study.study_checks,
    "tiny-checks": render_study.tiny_checks,
    "study-uniform": render_study.study_uniform,
    "study-control": render_study.study_control,
    "study-targets": render_study.study_targets,
    "controlled": controlled,
    "caveats": caveats,
    "math-first-sight": render_math.first_sight,
    "math-first-sight-families": render_math.first_sight_families,
    "math-now": render_math.now,
    "math-misjudged": render_math.misjudged,
    **render_control.TABLES,
    **render_fine.TABLES,
    **render_cells.TABLES,
    **render_heads.TABLES,
    **render_claims.TABLES,
    **render_pages.TABLES,
    **render_trainers.TABLES,
    **render_ways.TABLES,
}


def render(page: str, text: str) -> str:
    """A page, by its path in the repository, with each marked table and each figure in a sentence made anew."""

    def made(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    text = re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", made, text, flags=re.S)
    return write_figures(page, text)


def pages() -> list[str]:
    """Those with a marked table or a claim."""
    found = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))}
    marked = {name for name, path in found.items() if "<!-- table: " in path.read_text(encoding="utf-8")}
    return sorted(marked | {claim.page for claim in CLAIMS})


if __name__ == "__main__":
    for name in pages():
        path = ROOT / name
        path.write_text(render(name, path.read_text(encoding="utf-8")), encoding="utf-8")
