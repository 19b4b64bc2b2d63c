"""HFEngine against transformers' own generate, and what its decode step costs as the context grows. Random weights: the
time of a step does not depend on them.

    python benchmarks/hf_decode.py --out benchmarks/results/hf-decode-cpu.json

Two tables. `generate`: the same batch, prompts and number of new tokens through `model.generate` (sampling, its default
cache) and through HFEngine with dense attention, alternating, medians. `step`: seconds of one decode step at each context
length, dense and at a fixed budget, with every layer sparse so that nothing but the index grows; the slope of each
against the context says what a step's cost grows with.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from random_models import random_qwen3
from torch import Tensor
from transformers import PreTrainedModel

from sparroll import records
from sparroll.engines import HFEngine
from sparroll.engines.hf.attention import DecodeStep, routed, run_step
from sparroll.engines.hf.kv_cache import KVCache
from sparroll.progress import Progress
from sparroll.schedule import Schedule

CONTEXTS = [1024, 2048, 4096, 8192, 16384]


def build(options: argparse.Namespace) -> PreTrainedModel:
    return random_qwen3(
        options.device,
        options.dtype,
        options.seed,
        vocab_size=512,
        hidden_size=options.hidden,
        intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=max(CONTEXTS) + 64,
    )


def seconds(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def against_generate(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, object]:
    ids = torch.randint(1, 512, (options.batch, 256), device=options.device)
    engine = HFEngine(model, max_batch=options.batch)
    prompts = ids.tolist()

    def theirs() -> object:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.new, do_sample=True, top_k=0, top_p=1.0
        )

    def ours() -> object:
        return engine.generate(prompts, max_new_tokens=options.new)

    theirs(), ours()
    pairs = [(seconds(theirs, options.device), seconds(ours, options.device)) for _ in range(options.repeats)]
    generate, dense = zip(*pairs, strict=True)
    return {
        "batch": options.batch,
        "prompt_tokens": 256,
        "new_tokens": options.new,
        "generate_seconds": generate,
        "engine_seconds": dense,
        "engine_over_generate": statistics.median(dense) / statistics.median(generate),
    }


def filled_cache(model: PreTrainedModel, options: argparse.Namespace, context: int, schedule: Schedule) -> KVCache:
    """A cache that holds random K, V and their index: what a step reads, without computing a prompt of that length."""
    layers, config = range(options.layers), model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    cache = KVCache(
        options.layers, options.step_batch, heads, dim, context, schedule.selector, frozenset(layers), model.dtype,
        model.device,
    )  # fmt: skip
    cache.reserve(context)
    for layer in layers:
        for row in range(options.step_batch):
            keys, values = torch.randn(2, heads, context - 1, dim, dtype=model.dtype, device=model.device)
            cache.write_prompt(layer, row, keys, values)
    return cache


@torch.inference_mode()
def step_costs(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, object]:
    schedule = Schedule.fixed(options.budget, dense_layers=())
    raw: dict[str, list[list[float]]] = {"dense": [], "sparse": []}
    with Progress() as bars, routed(model):
        on_progress = bars.bar("decode steps")
        for done, context in enumerate(CONTEXTS):
            cache = filled_cache(model, options, context, schedule)
            contexts = torch.full((options.step_batch,), context, device=model.device)
            ids = torch.ones(options.step_batch, 1, dtype=torch.int64, device=model.device)

            def step(mode: str, cache: KVCache = cache, contexts: Tensor = contexts, ids: Tensor = ids) -> None:
                selecting = range(options.layers) if mode == "sparse" else ()
                budgets = dict.fromkeys(selecting, torch.full_like(contexts, options.budget))
                decode = DecodeStep(cache, contexts, int(contexts[0]), True, None, budgets)
                run_step(model, decode, options.layers, input_ids=ids, position_ids=(contexts - 1)[:, None])

            for mode in raw:
                step(mode), step(mode)
            times: dict[str, list[float]] = {"dense": [], "sparse": []}
            for _ in range(options.steps):
                for mode, taken in times.items():
                    taken.append(seconds(lambda mode=mode, step=step: step(mode), options.device))
            for mode, taken in times.items():
                raw[mode].append(taken)
            on_progress(done + 1, len(CONTEXTS))
    medians = {mode: [statistics.median(taken) for taken in times] for mode, times in raw.items()}
    slopes = {mode: float(np.polyfit(CONTEXTS, times, 1)[0]) for mode, times in medians.items()}
    return {
        "batch": options.step_batch,
        "kv_budget_tokens": options.budget,
        "contexts": CONTEXTS,
        "step_seconds": medians,
        "raw_step_seconds": raw,
        "seconds_per_context_token": slopes,
        "sparse_over_dense_growth": slopes["sparse"] / slopes["dense"],
        "index_bytes_over_kv_bytes": cache.index_read_share(0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="rows against generate")
    parser.add_argument("--new", type=int, default=256, help="new tokens against generate")
    parser.add_argument("--step-batch", type=int, default=8)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs against generate")
    parser.add_argument("--steps", type=int, default=15, help="decode steps timed per context and mode")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    model = build(options)
    results = {"generate": against_generate(model, options), "step": step_costs(model, options)}
    wall = time.perf_counter() - started
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    config = {**settings, "threads": torch.get_num_threads()}
    path = records.write(options.out, "hf-decode", results, config=config, seed=options.seed, wall_seconds=wall)
    print(f"engine / generate: {results['generate']['engine_over_generate']:.2f}")
    for mode, times in results["step"]["step_seconds"].items():
        print(f"{mode:7}", *(f"{1000 * one:8.2f} ms" for one in times))
    print(f"growth sparse / dense: {results['step']['sparse_over_dense_growth']:.3f}")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
