"""What a whole training step costs where rollouts are most of it: with dense rollouts, with sparse ones, with verified
ones, and with sparse ones and DistillSparse. Weights are random: times depend on shapes and lengths alone.

    python benchmarks/training_step.py --out benchmarks/results/training-step-h200.json --work /tmp/step \\
        --response-tokens 12288 --kv-cache-gib 52 --cases dense distill sparse --gpus 0 1 2

Each case is `sparroll.train.train` in a process of its own on one GPU: Qwen3-1.7B's shape, 4 prompts x 8 rollouts of
12,288 tokens (nothing ends a response), vLLM, bf16. Rewards are drawn from the responses, so that the policy really
moves. The last step counts: what is compiled is compiled in the first, and in the first sparse runs measure their dense
ceiling, one dense rollout. Each speed-up is of that one step. No run writes a checkpoint.

Random weights would take back nearly every draft, so in vLLM the case `verified` keeps each with the probability
--kept-share, as benchmarks/verified_rollouts.py does, after the rule was computed; what was cut is in its steps.

`--dry` runs everything with a tiny model on the CPU, where the figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "mismatch-study"))

import torch
from random_models import random_qwen3
from study_jobs import visible_device

from sparroll import records
from sparroll.attention.selectors import PageMean
from sparroll.engines.load_model import load_tokenizer
from sparroll.progress import OnProgress, quiet_transformers
from sparroll.schedule import Schedule
from sparroll.train import train
from sparroll.train.config.file import config_from
from sparroll.train.config.run import TrainConfig
from sparroll.train.runtime.sinks import read_lines
from sparroll.types import Prompt, Rollout

PROMPT_TOKENS = 1024
"""Room for a prompt beside a response."""
DRY = dict(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=32, vocabulary=512, response_tokens=64, prompts=2, samples=4,
    engine="hf", dtype="fp32", sleep_level=0, kv_cache_gib=None, cases=["dense", "distill", "sparse"],
)  # fmt: skip
DRY_SCHEDULE = Schedule.fixed(48, PageMean(page_tokens=4, first_tokens=4, recent_tokens=8), dense_layers=(0,))
PROGRESS_SECONDS = 20
CHECK_METRICS = ("check/windows", "check/cut_share", "check/drafted_per_kept")


@dataclass(frozen=True)
class Case:
    schedule: str
    correction: str
    distill: bool = False
    verified: bool = False


CASES = {
    "dense": Case("dense", "none"),
    "distill": Case("qwen3-1.7b-0.80", "tis", distill=True),
    "sparse": Case("qwen3-1.7b-0.86", "tis"),
    "verified": Case("qwen3-1.7b-0.86", "tis", verified=True),
    "sparse-0.80": Case("qwen3-1.7b-0.80", "tis"),
}
"""The longest first, so that they end together where there are fewer GPUs."""


def drawn_reward(prompt: Prompt, response_text: str, rollout: Rollout) -> float:
    """As good as random, and different within a group."""
    return sum(rollout.response_ids) % 101 / 100


# -- one case, in a process of its own -----------------------------------------------------------------------------------


class Finished(Exception):
    """Ends a run before its last checkpoint, which with the optimizer would be 27 GB."""


def run_case(options: argparse.Namespace, name: str) -> None:
    folder = options.work / name
    with verdicts(options) if CASES[name].verified else nullcontext():
        try:
            train(config_of(options, name), folder, on_progress=after_step(folder))
        except Finished:
            return


def verdicts(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Forced where vLLM samples. HFEngine, which only a dry run takes, obeys the rule."""
    if options.engine != "vllm":
        return nullcontext()
    from forced_verdicts import verdicts_forced

    return verdicts_forced(options.kept_share)


def after_step(folder: Path) -> OnProgress:
    def note(done: int, steps: int, words: str) -> None:
        if done and torch.cuda.is_available():
            with (folder / "memory.jsonl").open("a") as file:
                file.write(json.dumps({"step": done, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}) + "\n")
            torch.cuda.reset_peak_memory_stats()
        if done == steps:
            raise Finished

    return note


def config_of(options: argparse.Namespace, name: str) -> TrainConfig:
    case = CASES[name]
    schedule = str(options.work / "schedule.toml") if options.dry and name != "dense" else case.schedule
    attention = {"kind": "schedule", "name": schedule, "force": True}
    vllm = {
        "kind": "vllm",
        "gpu_memory_share": options.gpu_memory_share,
        "kv_cache_gib": options.kv_cache_gib,
        "sleep_level": options.sleep_level,
    }
    rollout = {
        "samples_per_prompt": options.samples,
        "max_new_tokens": options.response_tokens,
        "max_batch": options.prompts * options.samples,
        "dtype": options.dtype,
        "control_share": 0,
    }
    training = {
        "steps": options.steps,
        "prompts_per_step": options.prompts,
        # One response a pass.
        "micro_batch_tokens": options.response_tokens + PROMPT_TOKENS,
        "gradient_checkpointing": True,
        "dtype": options.dtype,
        "seed": options.seed,
    }
    return config_from(
        {
            "model": {"name": str(options.work / "model"), "device": "cpu" if options.dry else "cuda"},
            "task": {"name": "synthetic_add", "level": 0},
            "engine": vllm if options.engine == "vllm" else options.engine,
            "rollout": rollout,
            "attention": "dense" if schedule == "dense" else attention,
            "reward": {"terms": [{"use": "training_step:drawn_reward"}]},
            "train": training,
            "correction": {"name": case.correction},
            "mismatch": {"ceiling_every_steps": 0, "ceiling_prompts": 1},
            "guard": {"action": "off"},
            "check": {"window_tokens": options.window_tokens, "floor": options.floor} if case.verified else None,
            "distill": {"objective": "kl", "kl": "top_k"} if case.distill else None,
            "evaluate": {"prompts": 0},
            "checkpoint": {"every_steps": 0},
            "log": {"sinks": []},
        }
    )


# -- all cases -----------------------------------------------------------------------------------------------------------


def write_model(options: argparse.Namespace) -> None:
    """Random weights, and tiny-reasoner's tokenizer without an end of sequence: ids above its vocabulary say nothing."""
    quiet_transformers()
    device, dtype = ("cpu", "float32") if options.dry else (f"cuda:{options.gpus[0]}", "bfloat16")
    model = random_qwen3(
        device, dtype, options.seed, vocab_size=options.vocabulary, hidden_size=options.hidden,
        intermediate_size=3 * options.hidden, num_hidden_layers=options.layers, num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads, head_dim=options.head_dim, rope_theta=1_000_000.0,
        max_position_embeddings=options.response_tokens + PROMPT_TOKENS,
    )  # fmt: skip
    model.save_pretrained(options.work / "model")
    tokenizer = load_tokenizer("tiny-reasoner")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(options.work / "model")
    DRY_SCHEDULE.save(options.work / "schedule.toml")
    del model
    if not options.dry:
        torch.cuda.empty_cache()


class Run:
    """The process of one case, and what it has left so far."""

    def __init__(self, options: argparse.Namespace, name: str, gpu: int):
        self.name, self.gpu, self.folder = name, gpu, options.work / name
        self.began, self.cut = time.perf_counter(), False
        self.log = options.work / f"{name}.log"
        # Each has a compile cache of its own: two that begin together would write the same files.
        own = {
            "CUDA_VISIBLE_DEVICES": "" if options.dry else visible_device(gpu),
            "VLLM_CACHE_ROOT": f"{self.folder}-vllm",
        }
        command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one", name]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **own}, start_new_session=True
            )

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.cut = True

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def state(self) -> str:
        if self.cut or not self.ended:
            return "cut off" if self.cut else "running"
        return "failed" if self.process.returncode else "finished"

    def last_lines(self, count: int) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()][-count:]

    def steps(self) -> list[dict[str, Any]]:
        """Of each completed step its times, and what says what they were spent on."""
        metrics, memory = self.folder / "metrics.jsonl", self.folder / "memory.jsonl"
        peaks = {line["step"]: line["peak_gib"] for line in read_lines(memory)} if memory.is_file() else {}
        found = []
        for line in read_lines(metrics) if metrics.is_file() else []:
            step = {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}
            step |= {
                "step": line["step"],
                "rollout_tokens": round(line["rollout/count"] * line["rollout/response_tokens_mean"]),
                "kv_read_share": line["rollout/kv_read_share"],
                "acceptance_q05": line["mismatch/acceptance_q05"],
                "trained_rollouts": line["policy/trained_rollouts"],
                # Of torch's allocator: the engine's cache counts also while it sleeps.
                "peak_gib": peaks.get(line["step"]),
            }
            step |= {name.removeprefix("check/"): line[name] for name in CHECK_METRICS if name in line}
            found.append(step)
        return found

    def result(self) -> dict[str, Any]:
        steps = self.steps()
        case = CASES[self.name]
        told = {"case": self.name, "schedule": case.schedule, "correction": case.correction, "distill": case.distill}
        told |= {"verified": case.verified}
        told |= {"state": self.state, "gpu": self.gpu, "steps": steps}
        return told if self.state == "finished" else told | {"last_lines": self.last_lines(30)}

    def in_words(self) -> str:
        seconds = [f"{step['step_seconds']:.1f} s" for step in self.steps()]
        last = "" if self.state == "finished" else "".join(f" | {line[:100]}" for line in self.last_lines(1))
        ran = f"{self.state}, {time.perf_counter() - self.began:.0f} s"
        return f"{self.name}: {ran}, steps: {', '.join(seconds) or '-'}{last}"


def run_all(options: argparse.Namespace, until: float, on_end: Any) -> list[Run]:
    """Cases in their order, each on the next free GPU; what is left at `until` is killed or never begins."""
    waiting, runs, told = list(options.cases), [], time.perf_counter()
    try:
        while waiting or any(not run.ended for run in runs):
            if time.perf_counter() > until:
                break
            free = [gpu for gpu in options.gpus if all(run.ended or run.gpu != gpu for run in runs)]
            runs += [Run(options, waiting.pop(0), gpu) for gpu in free[: len(waiting)]]
            before = [run for run in runs if not run.ended]
            time.sleep(0.5)
            for run in before:
                if run.ended:
                    print(run.in_words(), flush=True)
                    on_end(runs)
            if time.perf_counter() - told > PROGRESS_SECONDS:
                told = time.perf_counter()
                for run in runs:
                    if not run.ended:
                        print(run.in_words(), flush=True)
    finally:
        for run in runs:
            run.kill()
    return runs


def table(found: list[dict[str, Any]]) -> str:
    """Of the cases that finished a step after their first, the last one."""
    columns = ("rollout", "score", "update", "distill", "step")
    lines = [f"{'case':12}" + "".join(f"{name + ' s':>11}" for name in columns) + f"{'speed-up':>11}"]
    finished = [row for row in found if row["state"] == "finished" and row["steps"][-1]["step"] > 1]
    last = {row["case"]: row["steps"][-1] for row in finished}
    for row in found:
        name, step = row["case"], last.get(row["case"])
        if step is None:
            lines.append(f"{name:12} {row['state']}")
            continue
        times = [step.get(f"{column}_seconds", 0.0) for column in columns]
        speedup = f"{last['dense']['step_seconds'] / step['step_seconds']:.2f}x" if "dense" in last else ""
        lines.append(f"{name:12}" + "".join(f"{seconds:11.2f}" for seconds in times) + f"{speedup:>11}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the model, the runs and their logs")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gpus", nargs="+", type=int, default=[0], help="one case at a time on each")
    parser.add_argument("--limit-seconds", type=float, help="then what is left is killed, and what is there recorded")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="vllm")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--gpu-memory-share", type=float, default=0.55)
    parser.add_argument("--kv-cache-gib", type=float, default=68.0, help="32 responses of 16,384 tokens take 58")
    parser.add_argument("--sleep-level", type=int, choices=[0, 1, 2], default=1)
    parser.add_argument("--window-tokens", type=int, default=64, help="of the case verified")
    parser.add_argument("--floor", type=float, default=0.01, help="of its rule, which vLLM computes and does not obey")
    parser.add_argument("--kept-share", type=float, default=0.9993, help="of drafts, forced; the study's at 0.86")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU; further options still count")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    if parser.parse_args().dry:
        parser.set_defaults(**DRY)
    options = parser.parse_args()
    if options.steps < 2 and not options.dry:
        parser.error("--steps must be at least 2: a first step compiles, and says nothing of the others")
    return options


def main() -> None:
    options = arguments()
    if options.one:
        run_case(options, options.one)
        return
    # So that `timeout` ends the cases, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.perf_counter()
    until = started + (options.limit_seconds or float("inf"))
    taken = [name for name in options.cases if (options.work / name).exists()]
    if taken:
        raise SystemExit(f"{options.work} already holds a run of {taken[0]}\nhint: give --work another folder")
    options.work.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "work", "one")}
    write_model(options)
    print(f"wrote the model after {time.perf_counter() - started:.0f} s", flush=True)

    def record(runs: list[Run]) -> list[dict[str, Any]]:
        results, wall = [run.result() for run in runs], time.perf_counter() - started
        records.write(options.out, "training-step", results, config=config, seed=options.seed, wall_seconds=wall)
        return results

    found = record(run_all(options, until, record))
    print(table(found))
    print(f"wrote {options.out} after {time.perf_counter() - started:.0f} s")
    finished = [row["case"] for row in found if row["state"] == "finished"]
    for row in found:
        if row["case"] not in finished:
            print(f"{row['case']} {row['state']}:", *row["last_lines"][-10:], sep="\n  ")
    if set(finished) != set(options.cases):
        raise SystemExit(f"of {', '.join(options.cases)} only {', '.join(finished) or 'none'} finished")


if __name__ == "__main__":
    main()
