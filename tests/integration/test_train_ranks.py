"""Data-parallel training on two gloo processes is training on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from free_ports import free_port
from integration.one_rank import (
    CHANGES,
    CONTROL_GROUP,
    CONTROLLED,
    DISTILLED,
    DYNAMICALLY,
    EVICTION,
    JACKPOT,
    LONELY,
    LONELY_ADAPTER,
)
from integration.train_runs import short_config, short_distill_config, write_model
from sparroll.schedule import Schedule
from sparroll.train import train
from sparroll.train.distill.run import distill
from sparroll.train.runtime.sinks import read_lines

HERE = Path(__file__).parent


def start_ranks(count: int, *words: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, str(HERE / "one_rank.py"), *words]
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | shared
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(HERE.parents[1] / "src")},
        )
        for rank in range(count)
    ]


def run_ranks(count: int, model: str, out: Path) -> None:
    for process in start_ranks(count, model, str(out)):
        _, error = process.communicate(timeout=240)
        assert process.returncode == 0, error


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    """Two steps, then a third one after a resume; then one prompt for two processes, Jackpot, eviction, adapters,
    dynamic sampling, a control group."""
    model = write_model(tmp_path / "model")
    run_ranks(2, model, tmp_path / "two")
    train(short_config(model, train=CHANGES | {"steps": 3}, checkpoint={"every_steps": 1, "keep": 3}), tmp_path / "one")
    before = load_file(Path(model) / "model.safetensors")
    for step in (2, 3):
        place = f"checkpoints/step-{step:06d}/model/model.safetensors"
        one, two = (load_file(tmp_path / name / place) for name in ("one", "two"))
        assert difference(one, before) > 1e-4
        assert difference(one, two) < 1e-6
    train(short_config(model, train=LONELY), tmp_path / "one" / "lonely")
    same_lines(tmp_path / "two" / "lonely", tmp_path / "one" / "lonely")
    train(short_config(model, **CONTROLLED), tmp_path / "one" / "controlled")
    same_lines(tmp_path / "two" / "controlled", tmp_path / "one" / "controlled")
    one, two = (Schedule.load(tmp_path / name / "controlled" / "schedule.toml") for name in ("one", "two"))
    assert one.steps == two.steps
    assert one.kv_budget_tokens(torch.arange(150)).ne(64).any(), "nothing moved"
    same_lines(tmp_path / "two", tmp_path / "one")
    train(short_config(model, **JACKPOT), tmp_path / "one" / "jackpot")
    same_lines(tmp_path / "two" / "jackpot", tmp_path / "one" / "jackpot")
    place = "jackpot/checkpoints/step-000002/model/model.safetensors"
    # Four updates of up to 1e-4 each; AdamW makes as much of the rounding of small gradients as of large ones.
    assert difference(*(load_file(tmp_path / name / place) for name in ("one", "two"))) < 5e-6
    train(short_config(model, **DYNAMICALLY), tmp_path / "one" / "dynamic")
    same_lines(tmp_path / "two" / "dynamic", tmp_path / "one" / "dynamic")
    assert any(
        line["groups/sampled"] > line["groups/kept"] for line in read_lines(tmp_path / "one/dynamic/metrics.jsonl")
    )
    place = "dynamic/checkpoints/step-000002/model/model.safetensors"
    assert difference(*(load_file(tmp_path / name / place) for name in ("one", "two"))) < 5e-6
    train(short_config(model, **CONTROL_GROUP), tmp_path / "one" / "control-group")
    same_lines(tmp_path / "two" / "control-group", tmp_path / "one" / "control-group")
    place = "control-group/checkpoints/step-000002"
    one, two = (json.loads((tmp_path / name / place / "state.json").read_text()) for name in ("one", "two"))
    assert len(one["watchers"]["guard"]["reward_gap"]["pairs"]) > 6
    one, two = (state["watchers"]["guard"]["reward_gap"] for state in (one, two))
    assert [pair[:3] for pair in one["pairs"]] == [pair[:3] for pair in two["pairs"]]
    assert [pair[4] for pair in one["pairs"]] == [pair[4] for pair in two["pairs"]]
    train(short_config(model, **EVICTION), tmp_path / "one" / "eviction")
    same_lines(tmp_path / "two" / "eviction", tmp_path / "one" / "eviction")
    for line in read_lines(tmp_path / "two" / "eviction" / "metrics.jsonl"):
        assert 0 < line["compression/kv_saved_share"] < 1 and line["control/rollouts"] > 0
    train(short_config(model, **DISTILLED), tmp_path / "one" / "distilled")
    distill(short_distill_config(model, **LONELY_ADAPTER), tmp_path / "one" / "adapter")
    for run, step in (("distilled", 2), ("adapter", 1)):
        same_lines(tmp_path / "two" / run, tmp_path / "one" / run)
        place = f"{run}/checkpoints/step-{step:06d}/adapter/adapter_model.safetensors"
        assert difference(*(load_file(tmp_path / name / place) for name in ("one", "two"))) < 2e-5


def test_an_error_on_one_process_loses_no_step_that_all_have_completed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    said = [process.communicate(timeout=120)[1] for process in start_ranks(2, model, str(tmp_path / "two"), "fails")]
    assert "this process alone has a prompt that is too long" in said[1]
    assert "stopped by an error: step 1 is saved; --resume goes on there" in said[0]
    config = short_config(model, train=CHANGES, evaluate={"prompts": 0}, mismatch={"ceiling_every_steps": 0})
    resumed = train(config, tmp_path / "two", resume=True)
    assert resumed.table()["steps"] == 2


def same_lines(out: Path, expected_out: Path) -> None:
    logged, expected = (read_lines(folder / "metrics.jsonl") for folder in (out, expected_out))
    # The run that was resumed evaluated after its second step too, which was its last at first.
    logged = [line for line in logged if not (line["step"] == 2 and "evaluate/prompts" in line)]
    # Times and caches are each process's own.
    own = ("time/", "compression/")
    for line, same in zip(logged, expected, strict=True):
        assert line.pop("events", []) == same.pop("events", [])
        assert line.keys() == same.keys()
        assert {k: v for k, v in line.items() if not k.startswith(own)} == pytest.approx(
            {k: v for k, v in same.items() if not k.startswith(own)}, rel=1e-4, abs=1e-5
        )
