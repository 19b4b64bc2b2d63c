"""What `sparroll calibrate` costs beside one evaluation of the same model, in seconds, with vLLM on one GPU.

    python benchmarks/calibration_cost.py --model qwen3-1.7b --out benchmarks/results/calibration-cost-qwen3-1.7b-h100.json
    python benchmarks/calibration_cost.py --dry --out runs/calibration-cost.json       # a tiny model on the CPU

Both are the commands that a user calls, on a model with random weights: no response ends before --response-tokens. The
calibration measures five budgets of the published grid, as many as by default; where these miss the target, as they may
with such weights, a sixth that holds the whole context takes their place unmeasured. Its seconds are those of the whole
command, its start included. `most_seconds` is what it would take with as many tokens as the command says it samples at
most, four rounds of verification among them.

An evaluation of 60 problems x 16 samples of such a length takes about half an hour. Of each problem --samples are sampled,
and the seconds of a whole evaluation are its tokens at that rate: sampling alone, without start and scores. Requests
that wait would keep the batch full in a whole one, so it would be somewhat faster, and the shares somewhat larger.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import vllm_engines
from random_models import make_sure_of_tokens, random_qwen3

from sparroll import records
from sparroll.calibrate.defaults import EVALUATION_PROBLEMS, EVALUATION_SAMPLES, PROMPTS
from sparroll.engines.load_model import load_tokenizer
from sparroll.progress import quiet_transformers

PROMPT_TOKENS = 1024
"""Room for a prompt beside a response."""
TARGET = 0.5
"""Below what dense rollouts of such weights reach: they had a tail of .81 on an H100, in bf16."""
DRY = {"model": vllm_engines.TINY, "response_tokens": 64, "problems": 3, "samples": 1, "prompts": 8, "temperature": 0.1}
DRY_FLAGS = {
    "calibrate": ["--page-tokens", "4", "--recent-tokens", "8", "--bin-tokens", "300"],
    "evaluate": [],
}  # fmt: skip
BUDGETS, DRY_BUDGETS = (512, 768, 1024, 2048, 4096), (48, 64)
"""Five of the published grid; and what a context of a few hundred tokens is more than."""


def write_model(options: argparse.Namespace, folder: Path) -> None:
    """Random weights that are as sure of a token as trained ones, and a tokenizer without an end of sequence."""
    quiet_transformers()
    sizes = {
        "vocab_size": 151_936,
        "num_key_value_heads": vllm_engines.KV_HEADS,
        "head_dim": vllm_engines.HEAD_DIM,
        **vllm_engines.QWEN3[options.model],
    }
    device, dtype = ("cpu", "float32") if options.dry else ("cuda", "bfloat16")
    model = random_qwen3(
        device, dtype, options.seed, **sizes, rope_theta=1_000_000.0,
        max_position_embeddings=options.response_tokens + PROMPT_TOKENS,
    )  # fmt: skip
    model.save_pretrained(folder, max_shard_size="100GB")
    del model
    if not options.dry:
        torch.cuda.empty_cache()
    make_sure_of_tokens(folder)
    tokenizer = load_tokenizer("tiny-reasoner")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


def called(options: argparse.Namespace, name: str, flags: list[str]) -> dict[str, Any]:
    """Run a command of sparroll on the model. -> the record that it wrote, and `command_seconds`."""
    out = options.work / name
    engine = ["--device", "cpu"] if options.dry else ["--engine", "vllm", "--max-batch", str(options.max_batch)]
    more = DRY_FLAGS[name] if options.dry else []
    command = [
        sys.executable, "-m", "sparroll", name, "--model", str(options.work / "model"), *engine, "--max-new-tokens",
        str(options.response_tokens), "--temperature", str(options.temperature), "--seed", str(options.seed), "--out",
        str(out), *flags, *more,
    ]  # fmt: skip
    began = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - began
    file = {"calibrate": "calibration", "evaluate": "evaluation"}[name]
    record: dict[str, Any] = json.loads((out / f"{file}.json").read_text(encoding="utf-8"))
    return record | {"command_seconds": seconds}


def figures(options: argparse.Namespace, calibration: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    """Seconds of both, and the share that one is of the other: by the clock, and by tokens as the command says it."""
    found, ahead = calibration["results"], calibration["config"]["cost_ahead"]
    rounds = found["verification"]["rounds"]
    ((_, task),) = evaluation["results"]["tasks"].items()
    sampled = task["policies"]["dense"]
    whole_tokens = EVALUATION_PROBLEMS * EVALUATION_SAMPLES * options.response_tokens
    whole_seconds = whole_tokens / sampled["tokens_per_second"]
    most_seconds = calibration["command_seconds"] * ahead["sampled_tokens"] / found["generated_tokens"]
    return {
        "calibration": {
            "seconds": calibration["command_seconds"],
            "most_seconds": most_seconds,
            "sets": [
                {name: measured[name] for name in ("name", "kv_read_share", "wall_seconds")}
                for measured in (found["sweep"]["dense_ceiling"], *found["sweep"]["budgets"], *rounds)
            ],
            "verify_rounds": len(rounds),
            **{name: found[name] for name in ("generated_tokens", "scored_tokens")},
            "cost_ahead": ahead,
        },
        "evaluation": {
            "sampled_rollouts": options.problems * options.samples,
            "sampled_seconds": sampled["generate_seconds"],
            "tokens_per_second": sampled["tokens_per_second"],
            "whole_tokens": whole_tokens,
            "whole_seconds": whole_seconds,
        },
        "share_of_seconds": calibration["command_seconds"] / whole_seconds,
        "most_share_of_seconds": most_seconds / whole_seconds,
        "share_of_tokens_ahead": ahead["share_of_evaluation"],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/sparroll-calibration-cost"))
    parser.add_argument("--model", default="qwen3-1.7b", choices=list(vllm_engines.QWEN3))
    parser.add_argument("--response-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of the calibration")
    parser.add_argument("--problems", type=int, default=EVALUATION_PROBLEMS, help="that are sampled of the evaluation")
    parser.add_argument("--samples", type=int, default=2, help="of each of these")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument(
        "--temperature", type=float, default=0.6, help="low enough that lists of 20 tokens hold nearly all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="a tiny model on the CPU, whose seconds say nothing")
    options = parser.parse_args()
    if options.dry:
        vars(options).update(DRY)
    elif not torch.cuda.is_available():
        parser.error("there is no GPU; --dry needs none")
    if options.work.exists():
        parser.error(f"{options.work} is there already; give --work another folder")
    return options


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    write_model(options, options.work / "model")
    print(f"wrote the model after {time.perf_counter() - began:.0f} s", flush=True)
    evaluation = called(
        options,
        "evaluate",
        ["--tasks", "synthetic", "--count", str(options.problems), "--samples", str(options.samples)],
    )
    whole = options.response_tokens + PROMPT_TOKENS
    budgets = [
        word for budget in (*(DRY_BUDGETS if options.dry else BUDGETS), whole) for word in ("--budget", str(budget))
    ]
    asked = ["--task", "synthetic", "--count", str(options.prompts), "--target", str(TARGET), *budgets]
    calibration = called(options, "calibrate", asked)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "work")}
    found, wall = figures(options, calibration, evaluation), time.perf_counter() - began
    records.write(options.out, "calibration-cost", found, config=config, seed=options.seed, wall_seconds=wall)
    print(json.dumps(found), flush=True)
    print(f"wrote {options.out} after {wall:.0f} s")


if __name__ == "__main__":
    main()
