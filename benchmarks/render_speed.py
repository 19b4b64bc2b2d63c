"""The tables of rollouts, steps and kernels in vLLM, from their records. Measures nothing; render.py writes them.

Ours are rounded up and the dense ones, which they are held against, down.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from record_tables import RESULTS, results, table, times

from sparroll import records
from sparroll.rounding import percent_down, percent_up, rounded_down, rounded_up

SIZES = ("1.7b", "4b", "8b", "14b")
REQUEST_SETS = ("drained", "steady")
PAPER_SPEEDUP = {"1.7b": 2.21, "4b": 2.41, "8b": 2.06, "14b": 1.49}
"""Rollouts with the 0.86 presets on an H200 (Sparrow, arXiv 2606.08446)."""
STEADY_GOAL = {"1.7b": 2.8, "4b": 2.8, "8b": 2.6, "14b": 1.95}
"""Speed-ups that were asked for with the steady request sets."""
OVERHEAD_GOAL = 0.03
"""Most that a sparse step may take more than a dense one where the schedule reads the whole context."""
NOT_YET = "Not measured yet."


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
    rows = []
    for size, request_set, found in rollout_records():
        drained = request_set == "drained"
        rows.append(
            [
                f"Qwen3-{size.upper()}",
                request_set,
                f"{math.ceil(found['dense_tokens_per_second']):,}",
                f"{math.floor(found['sparse_tokens_per_second']):,}",
                times(found["speedup"]),
                rounded_up(found["attainable_speedup"], 2) + "x",
                percent_down(found["attainable_share"]),
                rounded_up(found["attainable_speedup_fit"], 2) + "x",
                percent_down(found["attainable_share_fit"]),
                times(PAPER_SPEEDUP[size]) if drained else "",
            ]
        )
    head = ["model", "requests", "dense, tokens/s", "sparse", "speed-up", "attainable", "share of it"]
    return table([*head, "attainable, fitted", "share of it", "paper"], rows)


def steady_goals() -> str:
    """Speed-ups that were asked for with the steady sets, and whether the bytes to read allow them."""
    rows = []
    for size, request_set, found in rollout_records():
        if request_set == "steady":
            goal = STEADY_GOAL[size]
            allowed = [
                "no" if found[name] < goal else "yes" for name in ("attainable_speedup", "attainable_speedup_fit")
            ]
            reached = "yes" if found["speedup"] >= goal else "no"
            rows.append([f"Qwen3-{size.upper()}", times(goal), times(found["speedup"]), reached, *allowed])
    head = ["model, steady", "goal", "speed-up", "reached", "attainable", "attainable, fitted"]
    return table(head, rows)


@dataclass(frozen=True)
class WholeRun:
    """The drained set from the first token to the last, by one engine, and what the measured moments say of it."""

    size: str
    engine: str
    scale: float
    """Of the response lengths; 1 are the full ones."""
    tokens: int
    seconds: float
    estimated_seconds: float

    @property
    def lengths(self) -> str:
        return "full" if self.scale == 1 else f"1/{1 / self.scale:g}"

    @property
    def error_percent(self) -> str:
        """Rounded away from 0: an error is no smaller than it reads."""
        error = 100 * (self.estimated_seconds / self.seconds - 1)
        return (rounded_down if error < 0 else rounded_up)(error, 1, sign=True)


def found_whole() -> list[WholeRun]:
    """The whole runs that were recorded: with shortened lengths beside the moments, at full lengths by whole_run.py."""
    runs = []
    for size, request_set, found in rollout_records():
        shorter = found.get("whole_run") if request_set == "drained" else None
        for engine in ("dense", "sparse") if shorter is not None else ():
            of = shorter[engine]
            runs.append(WholeRun(size, engine, shorter["scale"], of["tokens"], of["seconds"], of["estimated_seconds"]))
        for engine, name in (
            (("dense", "dense"), ("sparse", found["sparse_engine"])) if request_set == "drained" else ()
        ):
            path = f"whole-run-qwen3-{size}-{name}-h200"
            if (RESULTS / f"{path}.json").exists():
                of = results(path, "whole-run")
                estimated = of["tokens"] / found[f"{engine}_tokens_per_second"]
                runs.append(WholeRun(size, engine, 1.0, of["tokens"], of["seconds"], estimated))
    return runs


def interpolated() -> str:
    """What is measured of the request sets and what is not, in words."""
    moments = {
        which: [len(found["windows"]) for _, request_set, found in rollout_records() if request_set == which]
        for which in REQUEST_SETS
    }
    drained, steady = (f"{min(counts)} to {max(counts)}" for counts in moments.values())
    runs, said = found_whole(), []
    for lengths, words in (("full", "at full lengths"), ("1/8", "with an eighth of the lengths")):
        errors = sorted((run.error_percent.lstrip("+-") for run in runs if run.lengths == lengths), key=float)
        if errors:
            said.append(f"{words} {' to '.join(dict.fromkeys((errors[0], errors[-1])))} %")
    only = "" if any(run.scale == 1 for run in runs) else "Nobody has run the full lengths whole yet. "
    text = (
        f"**The times are interpolated.** Decode steps were measured at {drained} evenly spaced moments of the drained run "
        f"and at {steady} of the steady one, and the time between is a line. {only}Against whole runs of the drained set "
        f"(Qwen3-1.7B) this is off by: {', '.join(said)}."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def whole_runs() -> str:
    """Whole runs of the drained set beside what the measured moments say of the same requests, and their speed-ups."""
    rows = []
    for (size, lengths), pair in _by_lengths(found_whole()).items():
        for run in pair.values():
            seconds = [rounded_up(run.seconds, 1), rounded_up(run.estimated_seconds, 1), f"{run.error_percent}%"]
            rows.append([f"Qwen3-{size.upper()}", run.engine, lengths, f"{run.tokens:,}", *seconds])
        if len(pair) == 2:
            dense, sparse = pair["dense"], pair["sparse"]
            speedups = [dense.seconds / sparse.seconds, dense.estimated_seconds / sparse.estimated_seconds]
            rows.append([f"Qwen3-{size.upper()}", "speed-up", lengths, "", *(times(each) for each in speedups), ""])
    return table(["model", "engine", "lengths", "tokens", "run, s", "moments say, s", "error"], rows)


def _by_lengths(runs: list[WholeRun]) -> dict[tuple[str, str], dict[str, WholeRun]]:
    found: dict[tuple[str, str], dict[str, WholeRun]] = {}
    for run in runs:
        found.setdefault((run.size, run.lengths), {})[run.engine] = run
    return found


def decode_cells(
    name: str = "decode-step-qwen3-1.7b-h200", of_blocks: Callable[[Sequence[float]], float] = statistics.median
) -> dict[tuple[int, int, str], float]:
    """(batch, context, engine) -> milliseconds of a step, where it was measured, from the seconds of its blocks."""
    return {
        (cell["batch"], cell["context_tokens"], cell["engine"]): 1e3 * of_blocks(cell["seconds"])
        for cell in results(name, "decode-step")
        if "seconds" in cell
    }


def sparse_layers(name: str) -> int:
    """How many layers were sparse in a record of decode steps."""
    schedule = records.read(RESULTS / f"{name}.json", "decode-step")["config"]["schedule_table"]
    return int(schedule["fingerprint"]["layers"] - len(schedule["dense_layers"]))


def pairs(cells: dict[tuple[int, int, str], float]) -> dict[tuple[int, int], tuple[float, float]]:
    """(batch, context) -> milliseconds of a dense and of a sparse step, where both were measured."""
    found = {}
    for batch, context in sorted({key[:2] for key in cells}):
        dense, sparse = (cells.get((batch, context, engine)) for engine in ("dense", "triton"))
        if dense is not None and sparse is not None:
            found[batch, context] = (dense, sparse)
    return found


def decode_steps() -> str:
    """Milliseconds of one decode step in vLLM, dense / sparse."""
    cells = decode_cells()
    found, contexts = pairs(cells), sorted({context for _, context, _ in cells})
    rows = []
    for batch in sorted({batch for batch, _, _ in cells}):
        row = [str(batch)]
        for context in contexts:
            took = found.get((batch, context))
            row.append("" if took is None else f"{rounded_down(took[0], 2)} / {rounded_up(took[1], 2)}")
        rows.append(row)
    return table(["batch", *(f"{context:,}" for context in contexts)], rows)


def short_steps() -> str:
    """The shortest context of the decode steps: it lies above its budget, and there is little to gain."""
    found = pairs(decode_cells())
    shortest = min(context for _, context in found)
    rows = [[str(batch), *_compared(*took)] for (batch, context), took in found.items() if context == shortest]
    return table([f"batch, {shortest:,} tokens each", "dense, ms", "sparse, ms", "difference"], rows)


def within_budget() -> str:
    """Contexts that the schedule reads whole: what sparse mode costs where it has nothing to gain."""
    rows = []
    pages = {size: f"decode-step-within-budget-qwen3-{size}-h200" for size in SIZES}
    units = {
        gpu: {size: f"decode-step-within-budget-fine-qwen3-{size}-in-turns-{gpu}" for size in SIZES}
        for gpu in ("h200", "h100")
    }
    of_units = [(gpu.upper(), "small units", names) for gpu, names in units.items()]
    for gpu, read, names in (("H200", "pages", pages), *of_units):
        for size, name in names.items():
            if not (RESULTS / f"{name}.json").exists():
                continue
            for (batch, context), took in pairs(decode_cells(name)).items():
                holds = "yes" if took[1] <= (1 + OVERHEAD_GOAL) * took[0] else "no"
                of = [gpu, f"Qwen3-{size.upper()}", read, f"{context:,}", str(batch)]
                rows.append([*of, *_compared(*took), holds])
    if not rows:
        return NOT_YET
    goal = percent_down(OVERHEAD_GOAL)
    return table(
        ["GPU", "model", "reads", "tokens each", "batch", "dense, ms", "sparse, ms", "difference", f"within {goal}"],
        rows,
    )


EARLIER = ("verified-rollouts-qwen3-1.7b-128-h200", "verified-rollouts-qwen3-1.7b-65-rows-h200")
"""Records of windows that had other numbers of drafts and rows than today's, or of a rule that computed less."""


def verified_records() -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(size, GPU, cells) of each record of verified rollouts, by size, the plainest names first."""
    found = []
    for path in sorted(RESULTS.glob("verified-rollouts-*-h[12]00.json"), key=lambda path: (len(path.stem), path)):
        if path.stem not in (*EARLIER, WINDOW_PROFILE):
            record = records.read(path, "verified-rollouts")
            size, gpu = record["config"]["model"].removeprefix("qwen3-"), path.stem.rpartition("-")[2].upper()
            found.append((size, gpu, record["results"]))
    return sorted(found, key=lambda each: SIZES.index(each[0]))


def verified_rollouts() -> str:
    """Tokens per second of engines that check their drafts, beside the same schedule without a check and dense decoding."""
    rows = []
    for size, gpu, cells in verified_records():
        batches = [cell for cell in cells if cell["set"] == "batch"]
        checked = {cell["schedule"] for cell in batches if cell["engine"] == "verified"}
        for cell in batches:
            if cell["schedule"] in checked:
                requests = f"{cell['batch']} x {cell['context_tokens'] // cell['batch']:,}"
                rows.append(
                    [f"Qwen3-{size.upper()}", gpu, requests, *_verified_line(cell, [cell], _of_dense(cell, batches))]
                )
    return table(["model", "GPU", "requests", *VERIFIED_HEAD], rows)


def _of_dense(cell: dict[str, Any], cells: list[dict[str, Any]]) -> float | None:
    """Its tokens per second / those of dense attention with the same requests; None where nobody measured these."""
    for each in cells:
        if each["engine"] == "dense" and all(each[name] == cell[name] for name in ("batch", "context_tokens")):
            return float(cell["tokens_per_second"] / each["tokens_per_second"])
    return None


def verified_runs() -> str:
    """The same for whole runs of the request sets, with a sentence on how they are measured; nothing without a record."""
    rows, counts = [], {}
    for size, gpu, cells in verified_records():
        runs = [cell for cell in cells if "moments" in cell]
        dense = {run["set"]: f"{math.floor(run['tokens_per_second']):,}" for run in runs if run["engine"] == "dense"}
        for run in runs:
            counts.setdefault(run["set"], []).append(run["moments"])
            if run["engine"] != "dense":
                line = _verified_line(run, moments_of(run, cells), run.get("of_dense"))
                rows.append([f"Qwen3-{size.upper()}", gpu, run["set"], dense.get(run["set"], ""), *line])
    if not rows:
        return ""
    moments = " and ".join(f"{_span(found)} moments of the {name} one" for name, found in counts.items())
    said = textwrap.fill(
        "Whole runs of the [request sets](#rollouts-in-vllm), interpolated between moments as the runs above are: "
        f"{moments}. Windows cut and drafts are means over the moments.",
        120,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"\n{said}\n\n{table(['model', 'GPU', 'set', 'dense tokens/s', *VERIFIED_HEAD], rows)}"


def moments_of(run: dict[str, Any], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that a run is interpolated between."""
    same = ("set", "engine", "schedule", "window_tokens", "floor", "kept_share_forced")
    return [cell for cell in cells if "batch" in cell and all(cell.get(name) == run.get(name) for name in same)]


WINDOW_PROFILE = "verified-rollouts-wide-512-4x2-qwen3-1.7b-h200"
"""The record of a profile. Its moments are not those of the others, so its whole runs stand in no table."""
PROFILE_WORDS = {
    "gather": "attention of the drafts",
    "GEMM": "matrix products",
    "scores": "scores of units",
    "choice": "choice of units",
    "attention, FA3": "dense attention",
    "draws": "drawing drafts",
    "the rule": "comparing both policies",
}
LEAST_MS = 0.5
"""Kinds of kernels that take less of a window than this share one row."""


def profiled_windows() -> list[dict[str, Any]]:
    """The profiles of the steady set's moments."""
    cells = results(WINDOW_PROFILE, "verified-rollouts")
    return [cell["profile"] for cell in cells if cell["set"] == "steady" and "profile" in cell]


def window_profile() -> str:
    """Milliseconds of a window by kinds of kernels, those of its drafts and of its check, as means over the moments."""
    profiles = profiled_windows()
    parts = ("drafts", "check")
    took = {
        group: [
            statistics.mean(profile[part]["groups_ms"].get(group, 0.0) for profile in profiles) for part in parts
        ]
        for group in {group for profile in profiles for part in parts for group in profile[part]["groups_ms"]}
    }  # fmt: skip
    shown = [group for group in took if group != "other" and sum(took[group]) >= LEAST_MS]
    shown.sort(key=lambda group: -sum(took[group]))
    rest = [sum(took[group][place] for group in took if group not in shown) for place in range(len(parts))]
    rows = [[PROFILE_WORDS.get(group, group), *(rounded_up(ms, 1) for ms in took[group])] for group in shown]
    whole = [statistics.mean(profile[part]["kernel_ms"] for profile in profiles) for part in parts]
    rows += [[name, *(rounded_up(ms, 1) for ms in of)] for name, of in (("all others", rest), ("together", whole))]
    return table(["kernels", "63 drafts, ms", "check, ms"], rows)


def _span(counts: list[int]) -> str:
    return " to ".join(dict.fromkeys((str(min(counts)), str(max(counts)))))


VERIFIED_HEAD = [
    "schedule",
    "window",
    "windows cut",
    "drafted per kept",
    "tokens/s",
    "of dense",
    "of unverified",
]


def _verified_line(cell: dict[str, Any], moments: list[dict[str, Any]], of_dense: float | None) -> list[str]:
    """The cells of a line from the schedule on."""
    checked, did = cell["engine"] == "verified", ["none", "", ""]
    if checked:
        cut, drafted = (statistics.mean(each[name] for each in moments) for name in ("cut_share", "drafted_per_kept"))
        did = [str(cell["window_tokens"]), percent_up(cut, 1), rounded_up(drafted, 2)]
    return [
        cell["schedule"],
        *did,
        f"{math.floor(cell['tokens_per_second']):,}",
        "" if of_dense is None else times(of_dense),
        rounded_down(cell["of_unverified"]) if "of_unverified" in cell else "",
    ]


def _compared(dense_ms: float, sparse_ms: float) -> list[str]:
    difference = rounded_up(100 * (sparse_ms / dense_ms - 1), 1, sign=True)
    return [rounded_down(dense_ms), rounded_up(sparse_ms), f"{difference}%"]


def kernels() -> str:
    """Microseconds of each kernel beside the time that its bytes take at copy bandwidth."""
    rows = []
    for row in results("kernels-h200", "kernels")["rows"]:
        if row["context_tokens"] not in ("30000", "93 mixed"):
            continue
        budget = row.get("kv_budget_tokens")
        requests = "32 of 30,000 tokens" if row["context_tokens"] == "30000" else "93 of mixed lengths"
        took = [rounded_up(row["graph_us"], 1), rounded_down(row["floor_us"], 1)]
        rows.append([requests, row["kernel"], str(budget or ""), *took])
    return table(["requests", "kernel", "KV budget", "time, us", "floor, us"], rows)
