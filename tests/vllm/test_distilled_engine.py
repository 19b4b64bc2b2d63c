"""VLLMEngine samples what the adapted model says, and is dense with the model's own weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll.engines.load_model import load_model
from sparroll.engines.scoring import Scorer
from sparroll.engines.vllm.launch import installed_version
from sparroll.schedule import Schedule

if installed_version() is None:
    pytest.skip("needs vllm; `make test-vllm` installs it", allow_module_level=True)
pytest.importorskip("peft")
pytest.importorskip("accelerate")

from sparroll.engines.adapter import Adapter, load_adapter
from sparroll.engines.vllm.engine import VLLMEngine
from sparroll.train.config.file import config_from
from sparroll.train.loop import Trainer
from sparroll.train.setup import open_run

MODEL = "tiny-reasoner"


def test_an_adapter_of_a_folder_reaches_vllm(tmp_path: Path) -> None:
    model, _ = load_model(MODEL, torch.float32, "cpu")
    adapter = Adapter(model)
    torch.manual_seed(0)
    for parameter in adapter.parameters:
        torch.nn.init.normal_(parameter, std=0.05)
    adapter.write(tmp_path / "adapter", MODEL)
    engine = VLLMEngine(MODEL, schedule=Schedule.fixed(64), dtype=torch.float32, max_batch=8)
    try:
        load_adapter(engine, MODEL, tmp_path / "adapter")
        rollouts = engine.generate([list(range(5, 15)) * 9], 4, max_new_tokens=24, seed=1)
    finally:
        engine.close()
    for policy, least, most in ((adapter.adapted, 0.0, 1e-4), (model, 1e-2, 100.0)):
        scores = Scorer(policy).sparse(rollouts, Schedule.fixed(64))
        apart = max(
            float((rollout.sparse_logp - score.logp).abs().max())
            for rollout, score in zip(rollouts, scores, strict=True)
        )
        assert least <= apart <= most


def test_a_run_with_vllm_samples_with_the_adapter_and_measures_the_ceiling_without(tmp_path: Path) -> None:
    config: dict[str, dict[str, Any]] = {
        "model": {"name": MODEL, "device": "cpu"},
        "task": {"level": 0},
        "engine": {"kind": "vllm"},
        "attention": {"kind": "budget", "kv_budget_tokens": 64},
        "rollout": {"samples_per_prompt": 4, "max_new_tokens": 40},
        "train": {"steps": 2, "prompts_per_step": 2, "lr": 1e-30},
        "distill": {"lr": 1e-3},
        "mismatch": {"bin_tokens": 50, "ceiling_every_steps": 1},
        "evaluate": {"prompts": 2},
        "log": {"sinks": []},
    }
    trainer = Trainer(open_run(config_from(config), tmp_path / "run", resume=False))
    try:
        distill = trainer.parts.distill
        assert distill is not None
        for parameter in distill.adapter.parameters:
            torch.nn.init.normal_(parameter, std=0.1)
        reports = []
        for _ in range(2):
            reports.append(trainer.step())
            trainer.interrupts.release()
    finally:
        trainer.engine.close()
    for report in reports:
        assert report["mismatch/dense_ceiling_q05"] > 0.9
        assert report["mismatch/acceptance_mean"] < 0.9
        # Phase two begins where the rollouts were sampled, since the policy does not move.
        assert report["distill/ratio_max"] == pytest.approx(1.0, abs=1e-3)
        assert report["distill/left_out_share"] == 0.0
