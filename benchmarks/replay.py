"""What the cheap calibration mode misses: the tail of replayed dense rollouts beside that of rollouts sampled with each
budget, on the packaged model.

    python benchmarks/replay.py --out benchmarks/results/replay.json
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from sparroll import records, tasks
from sparroll.attention.selectors import PageMean
from sparroll.calibrate.measure import Measurement, MeasureSettings, Study
from sparroll.engines import HFEngine
from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.engines.scoring import Scorer
from sparroll.progress import Progress, quiet_transformers
from sparroll.schedule import Schedule

SELECTOR = PageMean(page_tokens=4)


def study(options: argparse.Namespace) -> Study:
    quiet_transformers()
    engine = HFEngine("tiny-reasoner", device="cpu", max_batch=64)
    prompts = tasks.get(options.task).prompts("eval", options.level, options.seed, options.prompts)
    ids = PromptEncoder(engine.tokenizer).ids(prompts)
    settings = MeasureSettings(
        max_new_tokens=options.max_new_tokens, samples=options.samples, bin_tokens=options.bin_tokens, seed=options.seed
    )
    return Study(engine, Scorer(engine.model), ids, settings)


def rows(faithful: Measurement, replay: Measurement, budget: int) -> list[dict[str, Any]]:
    return [
        {
            "from_context_tokens": left.from_context_tokens,
            "kv_budget_tokens": budget,
            **{f"faithful_{name}": getattr(left, name) for name in ("q05", "low", "high", "tokens", "rollouts")},
            **{f"replay_{name}": getattr(right, name) for name in ("q05", "low", "high", "tokens", "rollouts")},
        }
        for left in faithful.tail().rows
        for right in replay.tail().rows
        if left.from_context_tokens == right.from_context_tokens
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--task", default="synthetic_add")
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=480)
    parser.add_argument("--bin-tokens", type=int, default=200)
    parser.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 192, 256])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, found = time.perf_counter(), study(options)
    table: list[dict[str, Any]] = []
    seconds = {"faithful": 0.0, "replay": 0.0}
    with Progress() as bars:
        found.dense_rollouts(bars.bar("dense rollouts"))
        for budget in options.budgets:
            schedule = Schedule.fixed(budget, SELECTOR)
            faithful = found.measure(schedule, mode="faithful", on_progress=bars.bar(f"faithful {budget}"))
            replay = found.measure(schedule, mode="replay", on_progress=bars.bar(f"replay {budget}"))
            seconds["faithful"] += faithful.wall_seconds
            seconds["replay"] += replay.wall_seconds
            table += rows(faithful, replay, budget)
    results = {"rows": table, "seconds": seconds, "selector": SELECTOR.table()}
    wall = time.perf_counter() - started
    path = records.write(options.out, "replay", results, config=vars(options), seed=options.seed, wall_seconds=wall)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
