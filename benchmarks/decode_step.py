"""Time of one decode step in vLLM, dense (stock FlashAttention 3) against sparse, over batch and context. One GPU.

    python benchmarks/decode_step.py --model qwen3-1.7b --out benchmarks/results/decode-step-qwen3-1.7b-h200.json

Each engine lives in a process of its own, one after the other, with the same settings.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vllm_engines

from sparroll import records

BATCHES = [1, 8, 32, 64]
CONTEXTS = [1024, 4096, 8192, 16384, 32768]
ENGINES: dict[str, str | None] = {"dense": None, "triton": "triton", "fa3_pages": "fa3_pages"}


def measure(options: argparse.Namespace) -> None:
    """One engine, every cell; prints a JSON line a cell."""
    attention = ENGINES[options.engine]
    asked = (
        None if attention is None else {"schedule": options.schedule or f"{options.model}-0.86", "attention": attention}
    )
    began = time.perf_counter()
    llm = vllm_engines.start(options.model, Path(options.folder), asked, max_num_seqs=max(options.batches))
    print(json.dumps({"start_seconds": time.perf_counter() - began}), flush=True)
    for context in options.contexts:
        for batch in options.batches:
            if batch * context > options.most_tokens:
                continue
            seconds = vllm_engines.step_seconds(llm, [context] * batch, options.steps)
            cell = {"engine": options.engine, "batch": batch, "context_tokens": context, "seconds": seconds}
            print(json.dumps(cell), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out")
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--most-tokens", type=int, default=1_000_000, help="skip cells with more cached tokens")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    parser.add_argument("--engine", choices=list(ENGINES), help="measure this one in this process (internal)")
    options = parser.parse_args()
    if options.engine:
        measure(options)
        return
    began, cells = time.perf_counter(), []
    for engine in options.engines:
        run = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--engine", engine], stdout=subprocess.PIPE, text=True
        )
        if run.returncode:
            raise SystemExit(f"{engine} failed with exit code {run.returncode}; nothing was written")
        rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        cells += [row for row in rows if "engine" in row]
    table(cells)
    if options.out:
        config = {key: value for key, value in vars(options).items() if key not in ("out", "folder", "engine")}
        records.write(options.out, "decode-step", cells, config=config, wall_seconds=time.perf_counter() - began)


def table(cells: list[dict[str, Any]]) -> None:
    found = {(c["engine"], c["batch"], c["context_tokens"]): 1e3 * vllm_engines.median(c["seconds"]) for c in cells}
    for batch, context in sorted({key[1:] for key in found}):
        times = {engine: found.get((engine, batch, context)) for engine in ENGINES}
        shown = "  ".join(f"{name} {ms:.2f}" for name, ms in times.items() if ms)
        print(f"batch {batch:3} context {context:6}: {shown} ms", flush=True)


if __name__ == "__main__":
    main()
