"""DistillSparse on a GPU: the same loop, with the sparse training forward in Triton, checkpointed activations and bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.train_runs import short_config, short_distill_config, write_model
from sparroll.train import TrainConfig, train
from sparroll.train.distill.run import distill
from sparroll.train.runtime.sinks import read_lines

pytestmark = pytest.mark.gpu


def config_of(model: str, dtype: str, steps: int) -> TrainConfig:
    changes: dict[str, dict[str, Any]] = {
        "model": {"device": "cuda"},
        "rollout": {"dtype": dtype},
        "train": {"dtype": dtype, "steps": steps, "lr": 1e-30, "gradient_checkpointing": True},
        "distill": {"lr": 1e-3, "rank": 4},
    }
    return short_config(model, **changes)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gpu_run_distills_resumes_and_starts_where_its_rollouts_were_sampled(dtype: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    train(config_of(model, dtype, 2), tmp_path / "run")
    result = train(config_of(model, dtype, 4), tmp_path / "run", resume=True)
    assert result.steps == 4
    for line in (line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line):
        assert line["distill/ratio_mean"] == pytest.approx(1.0, abs=1e-4 if dtype == "fp32" else 0.02)
        assert line["distill/left_out_share"] < 0.01
        assert line["distill/gradient_norm"] > 0
        assert line["mismatch/dense_ceiling_q05"] > 0.8
        assert 0 < line["time/distill_share"] < 1


def test_a_gpu_run_distills_an_adapter_alone(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    settings = short_distill_config(model, model={"device": "cuda"}, train={"steps": 2, "gradient_checkpointing": True})
    result = distill(settings, tmp_path / "run")
    assert (result.adapter / "adapter_model.safetensors").is_file()
    assert result.before is not None
    assert result.after is not None
    assert result.before.q05 != result.after.q05
