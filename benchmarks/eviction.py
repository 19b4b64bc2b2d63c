"""What eviction costs and saves in HFEngine: seconds of a decode step, and bytes of the cache, dense and under each policy.
Random weights: neither depends on them.

    python benchmarks/eviction.py --device cuda --dtype bfloat16 --layers 8 --new 256 1024 \\
        --out benchmarks/results/eviction-h200.json

Two lengths: one that stays within the budget, where a policy only keeps the books, and one far above it, where it
compresses every so many steps and reads less. `seconds_per_step` is the time of a whole generation, the prompt's pass
included, over its new tokens. `peak_kv_bytes` is the engine's own figure; on a GPU the allocator's peak above the
weights stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from random_models import random_qwen3
from transformers import PreTrainedModel

from sparroll import records
from sparroll.compression import Compression, compression_kinds, make_compression
from sparroll.engines import HFEngine
from sparroll.progress import Progress


def build(options: argparse.Namespace) -> PreTrainedModel:
    """The shape of Qwen3-1.7B with fewer words, and as many layers as asked for."""
    return random_qwen3(
        options.device,
        options.dtype,
        options.seed,
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
    )


def measured(model: PreTrainedModel, policy: Compression | None, new_tokens: int, options: argparse.Namespace) -> Any:
    engine = HFEngine(model, compression=policy, max_batch=options.batch)
    prompt = list(range(1, 1 + options.prompt))
    on_gpu = options.device == "cuda"
    per_step = []
    # The first run warms up and counts for nothing.
    for _ in range(options.repeats + 1):
        engine.reset_report()
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        started = time.perf_counter()
        rollouts = engine.generate([prompt], options.batch, max_new_tokens=new_tokens)
        per_step.append((time.perf_counter() - started) / new_tokens)
    report = engine.report()
    return {
        "policy": policy.table() if policy else None,
        "prompt_tokens": options.prompt,
        "new_tokens": new_tokens,
        "attention": rollouts[0].attention,
        "seconds_per_step": statistics.median(per_step[1:]),
        "all_seconds_per_step": per_step[1:],
        "kv_read_share": report.kv_read_share,
        "peak_kv_bytes": report.peak_kv_bytes,
        "peak_dense_kv_bytes": report.peak_dense_kv_bytes,
        "kv_saved_share": report.kv_saved_share,
        "allocator_peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new", type=int, nargs=2, default=[256, 2048], help="within the budget, and far above it")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each case; the median counts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    started = time.perf_counter()
    model = build(options)
    policies = [None, *(make_compression(kind, budget_tokens=options.budget) for kind in compression_kinds())]
    cases = [(policy, new_tokens) for new_tokens in options.new for policy in policies]
    rows = []
    with Progress() as bars:
        on_progress = bars.bar("runs")
        for done, (policy, new_tokens) in enumerate(cases):
            rows.append(measured(model, policy, new_tokens, options))
            on_progress(done + 1, len(cases))
    wall = time.perf_counter() - started
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    config = {**settings, "threads": torch.get_num_threads()}
    path = records.write(options.out, "eviction", {"runs": rows}, config=config, seed=options.seed, wall_seconds=wall)
    for (policy, new_tokens), row in zip(cases, rows, strict=True):
        name = policy.name if policy else "dense"
        step, kept = 1000 * row["seconds_per_step"], row["peak_kv_bytes"] / 2**20
        print(
            f"{new_tokens:6} new  {name:14} {step:8.2f} ms a step  {kept:9.1f} MiB, saved {row['kv_saved_share']:6.1%}"
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
