"""The online controller on tiny-reasoner, and what it does when the model is swapped for a harder one in mid-run.

    python benchmarks/controller_run.py --out benchmarks/results/controller-tiny.json

One run is a short `sparroll train` with a controller on synthetic_add at temperature 1.2 (at level 3 contexts of
130 to 610 tokens), pages of 4 tokens. It starts from one budget everywhere: 512 tokens, more than most contexts, or the
selector's least. Half way the policy's queries are scaled (`--harder`), which changes how sharp its attention is. Runs go
side by side, one thread each. The record holds, per run and step, budget, tail and lower bound of every bin, and events.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from sparroll import records
from sparroll.attention.selectors import PageMean
from sparroll.progress import Progress
from sparroll.schedule import Schedule
from sparroll.train.config.file import load_config
from sparroll.train.loop import Trainer
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.setup import open_run

SELECTOR = PageMean(page_tokens=4, first_tokens=16, recent_tokens=32)
SETTINGS = [
    "task.name=synthetic_add",
    "rollout.max_new_tokens=480",
    "rollout.temperature=1.2",
    "rollout.max_batch=32",
    "rollout.control_share=0",
    "train.lr=1e-5",
    "mismatch.bin_tokens=100",
    "mismatch.ceiling_every_steps=0",
    "attention.kind=schedule",
    "control.by=controller",
    "control.patience=3",
    "control.window_steps=3",
    "evaluate.prompts=0",
    "checkpoint.every_steps=0",
    "log.sinks=[]",
]
PARTS = ("mismatch/acceptance_q05/", "mismatch/tokens/", "controller/budget_tokens/", "controller/tail_low/")


class Swapped(Trainer):
    """A trainer whose weights become harder ones at the end of step `swap_at`."""

    swap_at: int
    factor: float

    def before_weights_move(self) -> None:
        super().before_weights_move()
        if self.state.step + 1 == self.swap_at:
            with torch.no_grad():
                for name, weight in self.policy.named_parameters():
                    if name.endswith("q_norm.weight"):
                        weight.mul_(self.factor)


def one_run(options: argparse.Namespace, out: Path, start: int, seed: int) -> None:
    """A whole run in this process."""
    torch.set_num_threads(1)
    schedule = Schedule.fixed(start, SELECTOR).save(out.parent / f"start-{start}-{seed}.toml")
    own = [
        f"model.device={options.device}",
        f"task.level={options.level}",
        f"attention.name={schedule}",
        f"train.steps={options.steps}",
        f"train.prompts_per_step={options.prompts}",
        f"train.seed={seed}",
        f"control.target={options.target}",
    ]
    trainer = Swapped(open_run(load_config(None, [*SETTINGS, *own]), out, False))
    trainer.swap_at, trainer.factor = options.swap_at or options.steps // 2, options.harder
    trainer.run()


def summary(folder: Path) -> list[dict[str, Any]]:
    """Per step: each of PARTS by bin, the reward, the share of the cache that was read, and what was logged."""
    steps = []
    for line in read_lines(folder / "metrics.jsonl"):
        by_bin = {
            part.rstrip("/"): {name.removeprefix(part): line[name] for name in line if name.startswith(part)}
            for part in PARTS
        }
        plain = {name: line[name] for name in ("step", "reward/mean", "rollout/kv_read_share", "time/step_seconds")}
        steps.append(plain | by_bin | {"events": line.get("events", [])})
    return steps


def side_by_side(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    wanted = [(start, seed) for start in options.starts for seed in options.seeds]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    waiting, running, finished = list(wanted), {}, 0
    with Progress() as bars:
        on_progress = bars.bar("runs")
        while waiting or running:
            while waiting and len(running) < options.at_once:
                start, seed = waiting.pop(0)
                command = [sys.executable, __file__, *sys.argv[1:], "--one", str(folder), str(start), str(seed)]
                running[start, seed] = subprocess.Popen(command, env=environment)
            for (start, seed), process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[start, seed]
                if process.returncode:
                    raise SystemExit(
                        f"the run from {start} with seed {seed} failed with exit code {process.returncode}"
                    )
                finished += 1
                on_progress(finished, len(wanted))
            time.sleep(0.2)
    return [{"start": start, "seed": seed, "steps": summary(folder / f"run-{start}-{seed}")} for start, seed in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--target", type=float, default=0.86)
    parser.add_argument("--level", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step, 8 rollouts each")
    parser.add_argument(
        "--swap-at", type=int, default=None, help="the step whose update is the swap; default: half way"
    )
    parser.add_argument("--harder", type=float, default=1.5, help="what the swap multiplies queries with; 1: no swap")
    parser.add_argument("--starts", nargs="+", type=int, default=[512, SELECTOR.least_budget_tokens])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--one", nargs=3, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder, start, seed = options.one
        one_run(options, Path(folder) / f"run-{start}-{seed}", int(start), int(seed))
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        results = side_by_side(options, Path(name))
    config = {"settings": SETTINGS, "selector": SELECTOR.table()} | {
        key: value for key, value in vars(options).items() if key not in ("out", "one")
    }
    wall = time.perf_counter() - began
    print(f"wrote {records.write(options.out, 'controller-run', results, config=config, wall_seconds=wall)}")


if __name__ == "__main__":
    main()
