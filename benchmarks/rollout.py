"""Tokens per second of whole rollout batches in vLLM: stock dense FlashAttention 3 against sparse at a published preset.

    python benchmarks/rollout.py --model qwen3-1.7b --out-folder benchmarks/results

Two request sets, both with prompts of 150 tokens and response lengths log-normal with median 18,000 and sigma 0.6, capped
at 32,768, drawn once from seed 0; lengths are forced, weights are random.

drained  60 requests start together and run to the last one, as in a synchronous RL step.
steady   as many requests as fill 95 % of the dense engine's KV cache; whoever ends is replaced by a fresh one, as in
         asynchronous RL. The same compositions are given to the sparse engine, whose cache is a little smaller.

Whole runs take minutes to hours, so single steps are measured at --windows evenly spaced moments of the run, each with
exactly the contexts that the requests have at that moment, and the time between is interpolated linearly.

Attainable: a sparse step could take a(batch) + bytes it must read / copy bandwidth, measured in the same process; bytes =
K and V of dense layers, K and V within budget and one index row per page in sparse layers. a(batch), everything but the
cache, is measured and not fitted: a dense step of so many requests with 64 tokens each. (A fit over windows would follow
FlashAttention's own ups and downs with the batch: 17 requests of 26K take longer than 25 of 22K.)
"""

# B requests in a batch

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import vllm_engines

from sparroll import records
from sparroll.schedule import Schedule

PROMPT_TOKENS = 150
LONGEST = 32_768
DRAINED_REQUESTS = 60
KV_HEADS, HEAD_DIM = 8, 128


def response_tokens(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).lognormal(np.log(18_000), 0.6, count)
    return np.minimum(drawn, LONGEST).astype(int)


def drained_windows(windows: int) -> list[dict[str, Any]]:
    """Moments of the drained run: how many steps one stands for, and the contexts at it."""
    lengths = response_tokens(DRAINED_REQUESTS)
    at = np.linspace(0, lengths.max() - 1, windows).astype(int)
    return [{"step": int(t), "contexts": [PROMPT_TOKENS + int(t)] * int((lengths > t).sum())} for t in at]


def steady_windows(windows: int, capacity_tokens: int) -> list[dict[str, Any]]:
    """Evenly spaced moments of a long run at constant concurrency, after everybody was replaced at least once."""
    drawn = iter(response_tokens(200_000, seed=1).tolist())
    lengths = response_tokens(100_000, seed=2).astype(float)
    in_progress = PROMPT_TOKENS + (lengths**2).mean() / (2 * lengths.mean())
    concurrent = int(0.95 * capacity_tokens / in_progress)
    length_B = np.array([next(drawn) for _ in range(concurrent)])
    age_B = np.zeros(concurrent, dtype=int)
    moments, first, gap = [], 2 * LONGEST, 5_003
    for step in range(first + gap * windows):
        if step >= first and (step - first) % gap == 0 and PROMPT_TOKENS * concurrent + age_B.sum() <= capacity_tokens:
            moments.append({"step": step, "contexts": (PROMPT_TOKENS + age_B).tolist()})
        age_B += 1
        for ended in np.flatnonzero(age_B >= length_B):
            length_B[ended], age_B[ended] = next(drawn), 0
    return moments


def measure(options: argparse.Namespace) -> None:
    """One engine in this process: a JSON line per window, read from standard input."""
    import torch

    asked = None
    if options.engine != "dense":
        asked = {"schedule": options.schedule, "attention": options.engine}
    llm = vllm_engines.start(
        options.model, Path(options.folder), asked, max_num_seqs=options.max_seqs, max_model_len=40_960
    )
    cache = llm.llm_engine.vllm_config.cache_config
    print(json.dumps({"capacity_tokens": cache.num_gpu_blocks * cache.block_size}), flush=True)
    for line in sys.stdin:
        window = json.loads(line)
        seconds = vllm_engines.step_seconds(llm, window["contexts"], options.steps)
        print(json.dumps({"step": window["step"], "seconds": seconds}), flush=True)
    vllm_engines.stop(llm)
    del llm
    torch.cuda.empty_cache()
    print(json.dumps({"copy_bytes_per_second": copy_bandwidth()}), flush=True)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device copy."""
    import torch

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.numel() / vllm_engines.median(times)


class Engine:
    """A measuring process, and what it found."""

    def __init__(self, options: argparse.Namespace, engine: str, max_seqs: int) -> None:
        command = [sys.executable, __file__, "--engine", engine, "--model", options.model, "--max-seqs", str(max_seqs)]
        command += ["--schedule", options.schedule, "--steps", str(options.steps), "--folder", options.folder]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.capacity_tokens = int(self._read("capacity_tokens"))

    def _read(self, key: str) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{") and key in (row := json.loads(line)):
                return row[key]
        raise SystemExit(f"the measuring process ended before it reported {key}")

    def seconds(self, window: dict[str, Any]) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(window) + "\n")
        self.process.stdin.flush()
        return self._read("seconds")

    def copy_bandwidth(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.close()
        found = float(self._read("copy_bytes_per_second"))
        self.process.wait()
        return found


def bytes_read(contexts: list[int], schedule: Schedule, layers: int) -> float:
    """K, V and index rows that one step must read, over all layers."""
    per_token = 2 * KV_HEADS * HEAD_DIM * 2
    context = np.array(contexts)
    budget = np.array([schedule.kv_budget_tokens(int(c)) for c in contexts])
    dense = len(schedule.dense_layers)
    index = np.where(budget < context, context / schedule.selector.unit_tokens * per_token / 2, 0)
    return float(
        dense * context.sum() * per_token + (layers - dense) * (np.minimum(budget, context) * per_token + index).sum()
    )


def run_seconds(windows: list[dict[str, Any]], step_seconds: list[float], request_set: str) -> tuple[float, float]:
    """(seconds, tokens) of the run that the windows stand for."""
    steps, tokens = [w["step"] for w in windows], [len(w["contexts"]) for w in windows]
    if request_set == "steady":
        return float(np.mean(step_seconds)), float(np.mean(tokens))
    every = np.arange(steps[-1] + 1)
    return float(np.interp(every, steps, step_seconds).sum()), float(response_tokens(DRAINED_REQUESTS).sum())


def attainable_seconds(
    windows: list[dict[str, Any]], rest: dict[int, float], schedule: Schedule, layers: int, bandwidth: float
) -> list[float]:
    """Per window: the cost of everything but the cache, plus what the schedule must read at copy bandwidth."""
    return [rest[len(w["contexts"])] + bytes_read(w["contexts"], schedule, layers) / bandwidth for w in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out-folder", type=Path)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule")
    parser.add_argument("--sets", nargs="+", default=["drained", "steady"], choices=["drained", "steady"])
    parser.add_argument("--sparse-engine", default="triton", choices=["triton", "fa3_pages"])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--folder", default="/tmp/sparroll-bench")
    parser.add_argument("--engine", help="measure this one in this process (internal)")
    options = parser.parse_args()
    options.schedule = options.schedule or f"{options.model}-0.86"
    if options.engine:
        measure(options)
        return
    began = time.perf_counter()
    dense = Engine(options, "dense", options.max_seqs)
    windows = {}
    if "drained" in options.sets:
        windows["drained"] = drained_windows(options.windows)
    if "steady" in options.sets:
        windows["steady"] = steady_windows(
            max(4, options.windows // 2), min(dense.capacity_tokens, options.max_seqs * 12_000)
        )
    dense_seconds = {name: [dense.seconds(w) for w in rows] for name, rows in windows.items()}
    batches = sorted({len(w["contexts"]) for rows in windows.values() for w in rows})
    rest = {batch: dense.seconds({"step": -1, "contexts": [64] * batch}) for batch in batches}
    bandwidth = dense.copy_bandwidth()
    sparse = Engine(options, options.sparse_engine, options.max_seqs)
    sparse_seconds = {name: [sparse.seconds(w) for w in rows] for name, rows in windows.items()}
    sparse.copy_bandwidth()
    for name, rows in windows.items():
        found = result(options, name, rows, dense_seconds[name], sparse_seconds[name], rest, bandwidth)
        found |= {"dense_capacity_tokens": dense.capacity_tokens, "sparse_capacity_tokens": sparse.capacity_tokens}
        print(json.dumps({k: v for k, v in found.items() if k not in ("repeats", "windows")}), flush=True)
        if options.out_folder:
            path = options.out_folder / f"rollout-{options.model}-{name}-h200.json"
            wall = time.perf_counter() - began
            config = {"windows": options.windows, "steps": options.steps, "max_seqs": options.max_seqs}
            records.write(path, "rollout", found, config=config, seed=0, wall_seconds=wall)


def result(
    options: argparse.Namespace,
    request_set: str,
    windows: list[dict[str, Any]],
    dense: list[list[float]],
    sparse: list[list[float]],
    rest: dict[int, list[float]],
    bandwidth: float,
) -> dict[str, Any]:
    schedule = Schedule.load(options.schedule)
    layers = int(vllm_engines.QWEN3[options.model]["num_hidden_layers"])
    dense_median, sparse_median = ([vllm_engines.median(s) for s in found] for found in (dense, sparse))
    rest_median = {batch: vllm_engines.median(seconds) for batch, seconds in rest.items()}
    best = attainable_seconds(windows, rest_median, schedule, layers, bandwidth)
    seconds, tokens = run_seconds(windows, dense_median, request_set)
    sparse_run, attainable_run = (
        run_seconds(windows, sparse_median, request_set)[0],
        run_seconds(windows, best, request_set)[0],
    )
    speedup, attainable = seconds / sparse_run, seconds / attainable_run
    return {
        "model": options.model,
        "schedule": options.schedule,
        "request_set": request_set,
        "sparse_engine": options.sparse_engine,
        "dense_tokens_per_second": tokens / seconds,
        "sparse_tokens_per_second": tokens / sparse_run,
        "speedup": speedup,
        "attainable_speedup": attainable,
        "attainable_share": speedup / attainable,
        "copy_bytes_per_second": bandwidth,
        "windows": [
            {"step": w["step"], "batch": len(w["contexts"]), "context_tokens": sum(w["contexts"])} for w in windows
        ],
        "repeats": {"dense_seconds": dense, "sparse_seconds": sparse, "dense_seconds_without_context": rest},
    }


if __name__ == "__main__":
    main()
