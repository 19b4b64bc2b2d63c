"""One process of data-parallel runs: python one_rank.py MODEL FOLDER, under the environment that torchrun sets. With a third
word the run is one whose second process fails in its second step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.train_runs import DYNAMIC, short_config, short_distill_config
from sparroll.engines.hf.engine import HFEngine
from sparroll.errors import UserError
from sparroll.train import train
from sparroll.train.distill.run import distill

CHANGES = {"steps": 2, "prompts_per_step": 3, "lr": 1e-4}
"""Three prompts a step: with two processes, one of them has two."""

SHORTER = {"max_new_tokens": 50}
"""Contexts of 20 to 110 tokens: below and above the budget of 64."""

LONELY = {"steps": 1, "prompts_per_step": 1}
"""With two processes, one of them has nothing to do."""

JACKPOT: dict[str, dict[str, Any]] = {
    "correction": {"name": "jackpot"},
    "train": CHANGES | {"epochs_per_batch": 2},
    "rollout": SHORTER,
    "evaluate": {"prompts": 0},
}
"""Draws for each token, a normaliser over the whole step, and weights that move with the policy."""

CONTROLLED: dict[str, dict[str, Any]] = {
    "train": {"steps": 2, "prompts_per_step": 3},
    "control": {"by": "controller", "target": 0.85},
    "guard": {"at_least": 0.5, "impossible_at_most": 0.5, "impossible_nats": 2},
    "evaluate": {"prompts": 0},
}
"""64 tokens everywhere at first: some bins move."""

EVICTION: dict[str, dict[str, Any]] = {
    "attention": {"kind": "compression", "policy": "r_kv", "budget_tokens": 24, "every_tokens": 16},
    "train": CHANGES,
    "rollout": SHORTER | {"control_share": 0.125, "control_share_first": 0.25},
    "evaluate": {"prompts": 0},
}

DISTILLED: dict[str, dict[str, Any]] = {
    "train": CHANGES,
    "rollout": SHORTER,
    "distill": {"objective": "kl", "kl": "top_k", "lr": 1e-4, "rank": 4},
    "evaluate": {"prompts": 0},
}
"""An adapter beside the policy."""

LONELY_ADAPTER: dict[str, dict[str, Any]] = {
    "train": LONELY,
    "distill": {"lr": 1e-4, "rank": 4},
    "evaluate": {"prompts": 3},
}
"""An adapter alone, with held-out prompts."""

DYNAMICALLY: dict[str, dict[str, Any]] = DYNAMIC | {
    "train": {"steps": 2, "prompts_per_step": 3, "lr": 1e-4},
    "reward": DYNAMIC["reward"] | {"overlong_buffer_tokens": 40, "leave_out_truncated": True},
    "correction": {"name": "jackpot"},
    "evaluate": {"prompts": 0},
}
"""Groups that differ in number from process to process, in rounds that do too."""

CONTROL_GROUP: dict[str, dict[str, Any]] = DYNAMIC | {
    "train": {"steps": 2, "prompts_per_step": 3, "lr": 1e-4},
    "rollout": DYNAMIC["rollout"] | {"control_share": 0.25},
}
"""Dense rollouts beside sparse ones, compared over all processes, in rounds that differ from process to process."""


def fail_in_the_second_step(model: str, out: Path) -> None:
    """Its first call is for the dense ceiling, and each step has one."""
    generate, calls = HFEngine.generate, list[int]()

    def fails(engine: HFEngine, *arguments: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if os.environ["RANK"] == "1" and len(calls) == 3:
            raise UserError("this process alone has a prompt that is too long")
        return generate(engine, *arguments, **named)

    HFEngine.generate = fails  # type: ignore[method-assign]
    train(short_config(model, train=CHANGES, evaluate={"prompts": 0}, mismatch={"ceiling_every_steps": 0}), out)


def main() -> None:
    torch.set_num_threads(1)
    model, out = sys.argv[1], Path(sys.argv[2])
    if len(sys.argv) > 3:
        fail_in_the_second_step(model, out)
        return
    train(short_config(model, train=CHANGES), out)
    train(short_config(model, train=CHANGES | {"steps": 3}), out, resume=True)
    train(short_config(model, train=LONELY), out / "lonely")
    train(short_config(model, **JACKPOT), out / "jackpot")
    train(short_config(model, **CONTROLLED), out / "controlled")
    train(short_config(model, **EVICTION), out / "eviction")
    train(short_config(model, **DISTILLED), out / "distilled")
    train(short_config(model, **DYNAMICALLY), out / "dynamic")
    train(short_config(model, **CONTROL_GROUP), out / "control-group")
    distill(short_distill_config(model, **LONELY_ADAPTER), out / "adapter")


if __name__ == "__main__":
    main()
