"""Many short CPU training runs of the tiny model side by side, one thread each: schedules x corrections x seeds.

    python benchmarks/rl_grid.py --out benchmarks/results/rl-grid-tiny.json --corrections tis --seeds 0 1 2
    python benchmarks/rl_grid.py --out benchmarks/results/rl-grid-lr-2e-4.json --corrections tis --seeds 0 1 \\
        --schedules dense calibrated --lr 2e-4

One run is `sparroll train` on synthetic_add level 3 at temperature 1.2 (contexts of 130 to 610 tokens), 14 steps of 4
prompts x 8 rollouts, lr 1e-4 unless --lr says otherwise. The record holds, per run, the reward of every step, dense accuracy
before and after (256 held-out prompts), the 5th percentile of the acceptance per bin and step, and the share of the
KV cache read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.attention.selectors import PageMean
from sparroll.progress import Progress
from sparroll.schedule import Schedule, Step

SELECTOR = PageMean(page_tokens=4, first_tokens=16, recent_tokens=32)
CALIBRATED = Schedule(
    steps=(Step(0, 136), Step(200, 184), Step(300, 224), Step(400, 236), Step(500, 304), Step(600, 320)),
    selector=SELECTOR,
)
"""As the quickstart calibrated it at 0.86 (seed 0)."""
SCHEDULES = {"dense": None, "calibrated": CALIBRATED, "fixed-128": Schedule.fixed(128, SELECTOR)}
SETTINGS = [
    "task.name=synthetic_add",
    "task.level=3",
    "rollout.max_new_tokens=480",
    "rollout.temperature=1.2",
    "rollout.max_batch=32",
    "rollout.control_share=0",
    "train.steps=14",
    "train.prompts_per_step=4",
    "train.beta2=0.95",
    "mismatch.bin_tokens=100",
    "evaluate.prompts=256",
    "evaluate.temperature=1.2",
    "checkpoint.every_steps=0",
    "log.sinks=[]",
]


def settings(lr: str) -> list[str]:
    """What all runs share."""
    return [*SETTINGS, f"train.lr={lr}"]


def command(folder: Path, schedule: str, correction: str, seed: int, lr: str) -> list[str]:
    overrides = [*settings(lr), f"train.seed={seed}", f"correction.name={correction}"]
    made = SCHEDULES[schedule]
    if made is not None:
        overrides += ["attention.kind=schedule", f"attention.name={made.save(folder / f'{schedule}.toml')}"]
    run = [sys.executable, "-c", "from sparroll.cli import main; main()", "train"]
    run += ["--out", str(folder / f"{schedule}-{correction}-{seed}")]
    return [*run, *(part for override in overrides for part in ("--set", override))]


def summary(folder: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/mean" in row]
    tail = "mismatch/acceptance_q05/"
    return {
        "reward": [row["reward/mean"] for row in steps],
        "dense_accuracy": [row["evaluate/dense_accuracy"] for row in rows if "evaluate/dense_accuracy" in row],
        "acceptance_q05": [
            {key.removeprefix(tail): value for key, value in row.items() if key.startswith(tail)} for row in steps
        ],
        "kv_read_share": [row["rollout/kv_read_share"] for row in steps],
        "step_seconds": [row["time/step_seconds"] for row in steps],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--corrections", nargs="+", default=["none", "tis", "icepop"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lr", default="1e-4", help="learning rate of all runs")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    started = time.perf_counter()
    wanted = [
        (schedule, correction, seed)
        for seed in options.seeds
        for schedule in options.schedules
        for correction in (options.corrections if SCHEDULES[schedule] else ["tis"])
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, Progress() as bars:
        on_progress, folder, running = bars.bar("runs"), Path(name), {}
        waiting = list(wanted)
        while waiting or running:
            while waiting and len(running) < options.at_once:
                run = waiting.pop(0)
                running[run] = subprocess.Popen(
                    command(folder, *run, options.lr), env=environment, stdout=subprocess.DEVNULL
                )
            for run, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[run]
                if process.returncode:
                    raise SystemExit(f"run {run} failed with exit code {process.returncode}")
                schedule, correction, seed = run
                about = {"schedule": schedule, "correction": correction, "seed": seed}
                results.append(about | summary(folder / f"{schedule}-{correction}-{seed}"))
                on_progress(len(results), len(wanted))
            time.sleep(0.5)
    results.sort(key=lambda run: (run["schedule"], run["correction"], run["seed"]))
    made = {key: schedule and schedule.table() for key, schedule in SCHEDULES.items()}
    config = {"settings": settings(options.lr), "schedules": made}
    wall = time.perf_counter() - started
    print(f"wrote {records.write(options.out, 'rl-grid', results, config=config, wall_seconds=wall)}")


if __name__ == "__main__":
    main()
