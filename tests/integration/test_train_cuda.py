"""Training runs on a GPU: the same loop, other devices and precisions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.train_runs import short_config, write_model
from sparroll.train import train
from sparroll.train.runtime.sinks import read_lines

pytestmark = pytest.mark.gpu


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(out / "metrics.jsonl") if "reward/mean" in line]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_gpu_run_trains_resumes_and_agrees_with_its_engine(dtype: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    changes: dict[str, Any] = {
        "model": {"device": "cuda"},
        "rollout": {"dtype": dtype},
        "train": {"dtype": dtype, "steps": 2, "gradient_checkpointing": dtype == "bf16", "kl_coefficient": 0.01},
    }
    train(short_config(model, **changes), tmp_path / "run")
    changes["train"]["steps"] = 4
    result = train(short_config(model, **changes), tmp_path / "run", resume=True)
    assert result.steps == 4
    for line in steps_of(tmp_path / "run"):
        assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4 if dtype == "fp32" else 0.02)
        assert line["mismatch/dense_ceiling_q05"] > 0.8
        assert line["policy/gradient_norm"] > 0
        assert line["rollout/kv_read_share"] < 1


def test_a_gpu_run_takes_the_first_step_of_the_cpu_run(tmp_path: Path) -> None:
    """Same seeds, same draws: in fp32 the first step's figures agree up to rounding."""
    model = write_model(tmp_path / "model")
    for device in ("cpu", "cuda"):
        config = short_config(model, model={"device": device}, train={"steps": 1}, evaluate={"prompts": 0})
        train(config, tmp_path / device)
    (on_cpu,), (on_gpu,) = (steps_of(tmp_path / device) for device in ("cpu", "cuda"))
    for name in ("reward/mean", "mismatch/acceptance_q05", "policy/gradient_norm", "correction/weight_mean"):
        assert on_gpu[name] == pytest.approx(on_cpu[name], rel=1e-3), name
