"""The tables of README.md and of the docs, from the records in benchmarks/results. Measures nothing.

python benchmarks/render.py            # writes them between <!-- table: NAME --> and <!-- end -->
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from typing import Any

import render_math
import render_study
from record_tables import RESULTS, ROOT, before_and_after, results, spread, table

from sparroll import records
from sparroll.rounding import rounded_down, with_interval

PAGES = tuple(
    ROOT / name
    for name in (
        "README.md",
        "docs/results.md",
        "docs/calibration.md",
        "docs/compression.md",
        "docs/controller.md",
        "docs/training.md",
        "docs/study.md",
        "docs/math.md",
    )
)
MEASURED_IN_THE_PAPER = {"Qwen3-1.7B": 2.21, "Qwen3-4B": 2.41, "Qwen3-8B": 2.06, "Qwen3-14B": 1.49}
"""Rollout speed-ups with the 0.86 presets on an H200 (Sparrow, arXiv 2606.08446)."""


def plans() -> str:
    rows = []
    for size in ("1.7b", "4b", "8b", "14b"):
        plan = results(f"plan-qwen3-{size}", "plan")
        model = plan["model"]["name"]
        share, speedup = f"{plan['kv_read_share']:.0%}", f"{plan['speedup']:.2f}x"
        rows.append([model, plan["schedule"], share, speedup, f"{MEASURED_IN_THE_PAPER[model]:.2f}x"])
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
        difference = f"{row['replay_q05'] - row['faithful_q05']:+.3f}"
        rows.append([str(row["kv_budget_tokens"]), f"from {row['from_context_tokens']}", *tails, difference])
    return table(["KV budget", "context tokens", "faithful", "replay", "replay - faithful"], rows)


def decode() -> str:
    rows = []
    for name, machine in (("hf-decode-cpu", "2 CPU cores, fp32"), ("hf-decode-h200", "H200, bf16")):
        if not (RESULTS / f"{name}.json").exists():
            continue
        found = results(name, "hf-decode")
        steps = found["step"]["step_seconds"]
        for mode in ("dense", "sparse"):
            rows.append([machine, mode, *(f"{1000 * seconds:.2f}" for seconds in steps[mode])])
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
        rows.append([schedule, correction, str(len(runs)), *figures, f"{read:.0%}"])
    head = ["schedule", "correction", "seeds", "dense accuracy before", "after", "reward, last 5 steps", "KV read"]
    return table(head, rows)


SIZES = ("1.7b", "4b", "8b", "14b")
REQUEST_SETS = ("drained", "steady")


def rollout_records() -> list[tuple[str, str, dict[str, Any]]]:
    """(size, request set, results) of what was measured."""
    return [
        (size, request_set, results(f"rollout-qwen3-{size}-{request_set}-h200", "rollout"))
        for size in SIZES
        for request_set in REQUEST_SETS
        if (RESULTS / f"rollout-qwen3-{size}-{request_set}-h200.json").exists()
    ]


def rollouts() -> str:
    """Sparse against stock vLLM, a line per model and request set that was measured."""
    measured = rollout_records()
    fitted = any("attainable_share_fit" in found for *_, found in measured)
    rows = []
    for size, request_set, found in measured:
        paper = MEASURED_IN_THE_PAPER[f"Qwen3-{size.upper()}"]
        row = [
            f"Qwen3-{size.upper()}",
            request_set,
            f"{found['dense_tokens_per_second']:,.0f}",
            f"{found['sparse_tokens_per_second']:,.0f}",
            f"{found['speedup']:.2f}x",
            f"{found['attainable_speedup']:.2f}x",
            f"{found['attainable_share']:.0%}",
        ]
        if fitted and "attainable_share_fit" in found:
            row += [f"{found['attainable_speedup_fit']:.2f}x", f"{found['attainable_share_fit']:.0%}"]
        elif fitted:
            row += ["", ""]
        rows.append([*row, f"{paper:.2f}x" if request_set == "drained" else ""])
    head = ["model", "requests", "dense, tokens/s", "sparse", "speed-up", "attainable", "share of it"]
    return table([*head, *(["attainable, fitted", "share of it"] if fitted else []), "paper"], rows)


def whole_runs() -> str:
    """The windows' estimate beside a whole run of the same, shorter requests."""
    rows = []
    for size, _, found in rollout_records():
        whole = found.get("whole_run")
        if whole is None:
            continue
        for engine in ("dense", "sparse"):
            of = whole[engine]
            seconds = [f"{of[key]:.2f}" for key in ("seconds", "estimated_seconds")]
            error = f"{of['relative_error']:+.1%}"
            rows.append([f"Qwen3-{size.upper()}", engine, f"{whole['scale']:g}", *seconds, error])
    return table(["model", "engine", "scale of lengths", "run, s", "windows say, s", "error"], rows)


def profiles() -> str:
    """Milliseconds of a step by what the kernels do, dense / sparse / what the sparse one's bytes take."""
    records_found = [
        results(f"profile-qwen3-{size}-{request_set}-h200", "profile-step")
        for size in SIZES
        for request_set in REQUEST_SETS
        if (RESULTS / f"profile-qwen3-{size}-{request_set}-h200.json").exists()
    ]
    groups: dict[str, None] = {}
    for found in records_found:
        groups |= dict.fromkeys([*found["sparse"]["groups_ms"], *found["dense"]["groups_ms"]])
    rows = []
    for group in [*(group for group in groups if group != "idle, host"), *(["idle, host"] if groups else [])]:
        row = [group]
        for found in records_found:
            of = [found[engine]["groups_ms"].get(group) for engine in ("dense", "sparse")]
            of.append(found["floors_ms"]["sparse"].get(group))
            row.append(" / ".join("-" if ms is None else f"{ms:.2f}" for ms in of) if any(of) else "")
        rows.append(row)
    if records_found:
        rows.append(
            [
                "step",
                *(f"{found['dense']['wall_ms']:.2f} / {found['sparse']['wall_ms']:.2f}" for found in records_found),
            ]
        )
    heads = [f"{found['model'].title()} {found['request_set']}, {found['batch']} requests" for found in records_found]
    return table(["ms per step", *heads], rows)


def decode_cells() -> dict[tuple[int, int, str], float]:
    """(batch, context, engine) -> milliseconds of a step, where it was measured."""
    return {
        (cell["batch"], cell["context_tokens"], cell["engine"]): 1e3 * statistics.median(cell["seconds"])
        for cell in results("decode-step-qwen3-1.7b-h200", "decode-step")
        if "seconds" in cell
    }


def decode_steps() -> str:
    """Milliseconds of one decode step in vLLM, dense / sparse."""
    cells = decode_cells()
    contexts = sorted({context for _, context, _ in cells})
    rows = []
    for batch in sorted({batch for batch, _, _ in cells}):
        row = [str(batch)]
        for context in contexts:
            times = [cells.get((batch, context, engine)) for engine in ("dense", "triton")]
            row.append("" if None in times else "{:.2f} / {:.2f}".format(*times))
        rows.append(row)
    return table(["batch", *(f"{context:,}" for context in contexts)], rows)


def short_steps() -> str:
    """The shortest context of the decode steps, where sparse mode has least to gain: what it costs there."""
    cells = decode_cells()
    shortest = min(context for _, context, _ in cells)
    rows = []
    for batch in sorted({batch for batch, _, _ in cells}):
        times = [cells.get((batch, shortest, engine)) for engine in ("dense", "triton")]
        if None not in times:
            dense, sparse = times
            rows.append([str(batch), f"{dense:.3f}", f"{sparse:.3f}", f"{sparse / dense - 1:+.1%}"])
    return table([f"batch, {shortest:,} tokens each", "dense, ms", "sparse, ms", "difference"], rows)


def kernels() -> str:
    """Microseconds of each kernel beside the time that its bytes take at copy bandwidth."""
    rows = []
    for row in results("kernels-h200", "kernels")["rows"]:
        if row["context_tokens"] not in ("30000", "93 mixed"):
            continue
        budget = row.get("kv_budget_tokens")
        requests = "32 of 30,000 tokens" if row["context_tokens"] == "30000" else "93 of mixed lengths"
        times = [f"{row['graph_us']:.1f}", f"{row['floor_us']:.1f}"]
        rows.append([requests, row["kernel"], str(budget or ""), *times])
    return table(["requests", "kernel", "KV budget", "time, us", "floor, us"], rows)


def sparse_training() -> str:
    rows = []
    for row in results("sparse-training-h200", "sparse-training")["layer"]:
        times = [f"{row[name]:.1f}" for name in ("choose_ms", "sparse_forward_ms", "dense_forward_ms")]
        times += [f"{row[name]:.1f}" for name in ("sparse_both_ms", "dense_both_ms")]
        shares = [f"{row[name]:.0%}" for name in ("read_share", "loaded_share")]
        rows.append([f"{row['tokens']:,}", row["queries"], *shares, *times])
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
            figures = [f"{of['forward_seconds']:.2f}", f"{of['both_seconds']:.2f}", f"{of['peak_gib']:.1f}"]
            rows.append([f"{found['tokens']:,}", what, *figures])
    return table(["tokens", "what is trained", "forward, s", "with backward, s", "peak memory, GiB"], rows)


def training_step() -> str:
    """Seconds of each finished case's last step, and how much faster it is than the dense one. A first step, which
    compiles and measures the ceiling, says nothing of the others."""
    found = results("training-step-h200", "training-step")
    finished = [row for row in found if row["state"] == "finished" and row["steps"][-1]["step"] > 1]
    last = {row["case"]: row["steps"][-1] for row in finished}
    rows = []
    for row in found:
        case, schedule = row["case"], row["schedule"].rpartition("-")[2]
        what = schedule if row["correction"] == "none" else f"{schedule}, {row['correction'].upper()}"
        times, speedup = ["", "", "", "", row["state"]], ""
        if case in last:
            parts = [last[case].get(f"{name}_seconds") for name in ("rollout", "score", "update", "distill", "step")]
            times = ["" if seconds is None else f"{seconds:.1f}" for seconds in parts]
        if case in last and "dense" in last:
            speedup = f"{last['dense']['step_seconds'] / last[case]['step_seconds']:.2f}x"
        rows.append([f"`{case}`", f"{what}, adapter" if row["distill"] else what, *times, speedup])
    head = ["case", "what", "rollouts, s", "scoring, s", "update, s", "adapter, s", "step, s", "end to end"]
    return table(head, rows)


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
        peaks = [f"{run[name] / 2**20:.0f}" for name in ("peak_kv_bytes", "allocator_peak_bytes")]
        name = f"`{policy['kind']}`, {policy['budget_tokens']} tokens" if policy else "dense"
        rows.append([name, *peaks, f"{run['kv_saved_share']:.0%}", f"{1000 * run['seconds_per_step']:.1f}"])
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
            rows.append([str(start), f"{first} to {last}", f"{held:.0%}", f"{read:.0%}"])
    return table(["start, tokens", "steps", "tokens in bins at the target", "KV read"], rows)


def guard() -> str:
    """False alarms and detections of the guard in simulated runs, with exact intervals."""

    def share(of: dict[str, Any], towards: Callable[[float], int]) -> str:
        value, low, high = (towards(of[name] * 1000) / 10 for name in ("share", "low", "high"))
        return f"{value:.1f}% [{low:.1f}%, {high:.1f}%]"

    rows = []
    for case in results("guard-simulation", "guard-simulation"):
        found, old = case["fallen"], case["old_rule"]
        steps = f"{found['median_steps']:.0f}"
        shape = [f"budget {case['shape']}", f"{case['correlation']:g}", f"{case['design_effect']:.2f}"]
        figures = [
            share(case["above"], math.ceil),
            share(found, math.floor),
            steps,
            f"{old['steps_below']:.0%}",
            f"{old['share']:.0%}",
        ]
        rows.append([*shape, *figures])
    head = ["shape", "correlation", "design effect", "false alarms, runs", "fall found in 10 steps", "median steps"]
    return table([*head, "old rule: steps under", "old rule: false alarms, runs"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "guard": guard,
    "plans": plans,
    "quickstart-tail": quickstart_tail,
    "quickstart-runs": quickstart_runs,
    "replay": replay,
    "decode": decode,
    "rl-grid": rl_grid,
    "rollouts": rollouts,
    "whole-runs": whole_runs,
    "profiles": profiles,
    "decode-steps": decode_steps,
    "short-steps": short_steps,
    "kernels": kernels,
    "distilled": distilled,
    "sparse-training": sparse_training,
    "eviction": eviction,
    "sparse-training-model": sparse_training_model,
    "training-step": training_step,
    "study": render_study.study,
    "study-longer": render_study.study_longer,
    "study-distilled": render_study.study_distilled,
    "study-frozen": render_study.study_frozen,
    "study-eviction": render_study.study_eviction,
    "study-uniform": render_study.study_uniform,
    "controlled": controlled,
    "math-first-sight": render_math.first_sight,
    "math-now": render_math.now,
    "math-misjudged": render_math.misjudged,
}


def render(text: str) -> str:
    """A page with each marked table made anew."""

    def made(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", made, text, flags=re.S)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
