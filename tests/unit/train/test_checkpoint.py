"""Checkpoints under kill -9 at every operation that touches the disk, damage, and what stays on disk."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from sparroll.schedule import Schedule
from sparroll.train.config.run import TrainConfig
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime import checkpoint
from sparroll.train.runtime.checkpoint import RunState, damage, newest, tidy
from sparroll.train.runtime.randomness import generator_state
from sparroll.train.update.optimizer import make_optimizer

CONFIG = TrainConfig().model_dump(mode="json")


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
        )
    )


def save(folder: Path, model: PreTrainedModel, step: int, keep: int = 2) -> Path:
    optimizer = make_optimizer(model, TrainSection())
    model(torch.tensor([[1, 2, 3]])).logits.square().sum().backward()
    optimizer.step()
    state = RunState(step=step, schedule=Schedule.fixed(64), generators=[generator_state()])
    return checkpoint.save(folder, state, CONFIG, model, None, optimizer, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_state_comes_back_and_the_model_is_a_plain_transformers_folder(tmp_path: Path, model: PreTrainedModel) -> None:
    state = RunState(
        step=3,
        prompts_drawn=12,
        metrics_bytes=99,
        evaluated_step=2,
        schedule=Schedule.fixed(128),
        watchers={"guard": {"switches": 1}, "empty_steps": {"in_a_row": 2}},
        dense_ceiling={"mismatch/dense_ceiling_q05": 1 / 3},
        generators=[generator_state()],
    )
    saved = checkpoint.save(tmp_path, state, CONFIG, model, None, make_optimizer(model, TrainSection()), keep=1)
    assert checkpoint.load_state(saved) == state
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "latest" / "model")
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert not list(saved.rglob("*.bin"))
    assert not list(saved.rglob("*.pt"))


def test_what_watchers_keep_comes_back_to_the_bit(tmp_path: Path, model: PreTrainedModel) -> None:
    kept = {"switches": 1, "3/counts": torch.arange(5), "3/settings": torch.tensor([0.1], dtype=torch.float64)}
    state = RunState(step=1, watchers={"guard": kept, "controller": {"4/counts": torch.ones(2, 3)}, "empty_steps": {}})
    saved = checkpoint.save(tmp_path, state, CONFIG, model, None, make_optimizer(model, TrainSection()), 1)
    found = checkpoint.load_state(saved).watchers
    assert found.keys() == state.watchers.keys()
    assert found["guard"].keys() == kept.keys() and found["guard"]["switches"] == 1
    for name, key in (("guard", "3/counts"), ("guard", "3/settings"), ("controller", "4/counts")):
        assert torch.equal(found[name][key], state.watchers[name][key])


def test_dense_rollouts_have_no_schedule_file(tmp_path: Path, model: PreTrainedModel) -> None:
    saved = checkpoint.save(tmp_path, RunState(step=1), CONFIG, model, None, make_optimizer(model, TrainSection()), 1)
    assert not (saved / "schedule.toml").exists()
    assert checkpoint.load_state(saved).schedule is None


def test_the_newest_stay_and_latest_points_at_the_last(tmp_path: Path, model: PreTrainedModel) -> None:
    for step in (2, 4, 6):
        save(tmp_path, model, step)
    assert names(tmp_path) == ["latest", "step-000004", "step-000006"]
    assert os.readlink(tmp_path / "latest") == "step-000006"
    assert newest(tmp_path) == (tmp_path / "step-000006", [])


def dies_at(operation: int, work: Callable[[], Any]) -> bool:
    """Run `work` in a forked process that is killed right before its n-th disk operation; was it?"""
    child = os.fork()
    if child == 0:
        left = operation

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return run

        for name in ("fsync", "unlink", "symlink", "rmdir", "mkdir", "rename", "replace", "open"):
            setattr(os, name, counted(getattr(os, name)))
        for name in ("rename", "replace", "write_text", "mkdir", "symlink_to"):
            setattr(Path, name, counted(getattr(Path, name)))
        checkpoint.save_file = counted(checkpoint.save_file)  # type: ignore[attr-defined]
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(tmp_path: Path, model: PreTrainedModel) -> None:
    base = tmp_path / "base"
    save(base, model, 2, keep=1)
    operation, used = 0, set()
    while True:
        operation += 1
        folder = tmp_path / "run"
        shutil.copytree(base, folder, symlinks=True)
        killed = dies_at(operation, lambda folder=folder: save(folder, model, 4, keep=1))
        found, complaints = newest(folder)
        assert found is not None, f"nothing whole after a kill at operation {operation}"
        assert complaints == []
        assert damage((folder / "latest").resolve()) is None
        used.add(found.name)
        tidy(folder, found)
        assert names(folder) in (
            ["latest", "step-000002"],
            ["latest", "step-000004"],
            ["latest", "step-000002", "step-000004"],
        )
        save(folder, model, 6, keep=1)
        assert names(folder) == ["latest", "step-000006"]
        shutil.rmtree(folder)
        if not killed:
            break
    assert operation > 20
    assert used == {"step-000002", "step-000004"}


@pytest.mark.parametrize(
    "what", ["short", "other", "missing", '{"format": 1, "fil', "[]", '{"files": [1]}', '{"files": {"a": 1}}']
)
def test_a_damaged_newest_folder_is_named_and_the_one_before_is_used(
    what: str, tmp_path: Path, model: PreTrainedModel
) -> None:
    save(tmp_path, model, 2)
    save(tmp_path, model, 4)
    weights = tmp_path / "step-000004" / "model" / "model.safetensors"
    content = weights.read_bytes()
    if what == "short":
        weights.write_bytes(content[:-10])
    elif what == "other":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif what == "missing":
        weights.unlink()
    else:
        (tmp_path / "step-000004" / "manifest.json").write_text(what)
    found, complaints = newest(tmp_path)
    assert found == tmp_path / "step-000002"
    assert len(complaints) == 1
    assert "step-000004 is damaged" in complaints[0]
    tidy(tmp_path, found)
    assert names(tmp_path) == ["damaged-step-000004", "latest", "step-000002"]
    assert os.readlink(tmp_path / "latest") == "step-000002"
    save(tmp_path, model, 4)
    assert newest(tmp_path) == (tmp_path / "step-000004", [])


def test_a_damaged_folder_that_a_kill_left_half_removed_is_removed_by_the_next_start(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    save(tmp_path, model, 2)
    half = tmp_path / ".damaged-step-000004.removed"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    for name in ("damaged-step-000004", "step-000004"):
        (tmp_path / name).mkdir()
    found, _ = newest(tmp_path)
    tidy(tmp_path, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-000004", "latest", "step-000002"]


def test_no_checkpoint_at_all_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "checkpoints") == (None, [])
    tidy(tmp_path / "checkpoints", None)


def test_an_interrupt_right_after_the_rename_is_no_obstacle(
    tmp_path: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path, final: Path) -> None:
        raise KeyboardInterrupt

    save(tmp_path, model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_point", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, model, 2)
    assert (tmp_path / "latest").resolve().name == "step-000001"
    assert save(tmp_path, model, 2).name == "step-000002"
    assert (tmp_path / "latest").resolve().name == "step-000002"
    assert damage(tmp_path / "step-000002") is None
