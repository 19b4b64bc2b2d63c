"""Training with vLLM on the trainer's own GPU: rollouts, sleep while the policy moves, new weights, and on. A minute on an
H200:

    SPARROLL_GPU_RECORD=training.json python -m pytest -n0 -q -s tests/vllm/test_train_engine_cuda.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_gpu
from sparroll.train import train
from sparroll.train.config.file import config_from
from sparroll.train.runtime.sinks import read_lines
from sparroll.train.sampling.rewards import Graded
from sparroll.train.setup import open_run
from vllm_gpu import DRY, note

pytestmark = vllm_gpu.needs_gpu_and_vllm

DTYPE = "fp32" if DRY else "bf16"


def settings(steps: int, sleep_level: int) -> Any:
    return config_from(
        {
            "model": {"name": "tiny-reasoner"},
            "task": {"name": "synthetic_add", "level": 0 if DRY else 3},
            "engine": {
                "kind": "vllm",
                "gpu_memory_share": 0.3,
                "sleep_level": 0 if DRY else sleep_level,
            },
            "attention": {"kind": "budget", "kv_budget_tokens": 64 if DRY else 192},
            "rollout": {
                "samples_per_prompt": 4,
                "max_new_tokens": 60 if DRY else 480,
                "dtype": DTYPE,
            },
            # Far too fast to learn, so that an engine with last step's weights could not go unseen.
            "train": {"steps": steps, "prompts_per_step": 4, "lr": 2e-3, "dtype": DTYPE},
            "mismatch": {"bin_tokens": 100, "ceiling_every_steps": 1},
            "evaluate": {"prompts": 4},
            "checkpoint": {"every_steps": 1},
            "log": {"sinks": []},
        }
    )


@pytest.fixture(autouse=True)
def _random_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(trainer: Any, prompts: Any, rollouts: list[Any]) -> Graded:
        # Real rewards may all be equal, and then nothing moves.
        odd_GN = torch.tensor([float(sum(r.response_ids) % 2) for r in rollouts]).view(len(prompts), -1)
        return Graded({"task": odd_GN}, odd_GN, torch.zeros_like(odd_GN))

    monkeypatch.setattr("sparroll.train.loop.Trainer.grade", drawn)


def close_engines() -> None:
    from sparroll.engines.vllm import engine

    for one in list(engine._open):
        one.close()
    vllm_gpu.clean()


@pytest.mark.parametrize("sleep_level", [0] if DRY else [0, 1, 2])
def test_the_engine_has_the_trainers_weights_in_every_step(sleep_level: int, tmp_path: Path) -> None:
    try:
        train(settings(3, sleep_level), tmp_path / "run")
        close_engines()
        # A killed run goes on with the weights of its checkpoint.
        result = train(settings(5, sleep_level), tmp_path / "run", resume=True)
    finally:
        close_engines()
    assert result.steps == 5
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    ceilings = [line["mismatch/dense_ceiling_q05"] for line in lines]
    note(
        f"training, sleep level {sleep_level}",
        dense_ceiling_q05=ceilings,
        tail_q05=[line["mismatch/acceptance_q05"] for line in lines],
        gradient_norm=[line["policy/gradient_norm"] for line in lines],
        kl_to_first=[line["mismatch/kl_sparse_to_dense"] for line in lines],
        step_seconds=[line["time/step_seconds"] for line in lines],
    )
    assert min(ceilings) > 0.8
    assert all(line["policy/gradient_norm"] > 0 for line in lines)
    assert all(0 < line["rollout/kv_read_share"] < 1 for line in lines)
    assert all(line["policy/ratio_mean"] == pytest.approx(1.0, abs=0.02) for line in lines)


def test_old_weights_would_have_been_seen(tmp_path: Path) -> None:
    """The same figures with an engine that missed the updates: the test above can fail."""
    from sparroll.train.loop import Trainer

    parts = open_run(settings(4, 0), tmp_path / "run", resume=False)
    try:
        parts.engine.load_weights = lambda weights, version: setattr(parts.engine, "weight_version", version)  # type: ignore[method-assign]
        Trainer(parts).run()
    finally:
        close_engines()
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    ceilings = [line["mismatch/dense_ceiling_q05"] for line in lines]
    note("training with old weights", dense_ceiling_q05=ceilings)
    assert min(ceilings[1:]) < 0.7
