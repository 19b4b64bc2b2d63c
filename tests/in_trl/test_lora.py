"""TRL merges a LoRA adapter into the weights that it sends to vLLM, so sparse rollouts run with one."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig

import trl_runs


def test_the_engine_samples_with_the_adapter_merged_in(tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    changes = {"max_steps": 2, "learning_rate": 0.02, "save_strategy": "no"}
    observed = trl_runs.train(tmp_path, changes=changes, peft_config=adapter)
    assert observed.steps("rollout/sparse_steps")[0] > 0
    trainer = observed.trainer
    report = trainer.evaluate()
    assert report["eval_sampling/sampling_logp_difference/max"] < 1e-4
    # The adapter has moved the policy by far more than that.
    batch = observed.batches[-1]
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad(), trainer.model.disable_adapter():
        base, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, batch["completion_ids"].shape[1]
        )
    moved = (base - batch["old_per_token_logps"])[batch["completion_mask"].bool()].abs()
    assert float(moved.max()) > 1e-2
