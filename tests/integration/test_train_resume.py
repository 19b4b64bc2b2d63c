"""A run that was cut off anywhere and resumed is the run that was not: weights, optimizer, metrics, to the bit."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.deaths import run_script
from integration.killed_runs import MOMENTS, PLAIN
from integration.train_runs import assert_same_run, short_config
from sparroll.engines import HFEngine
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train import TrainResult, train
from sparroll.train.runtime.sinks import read_lines


@pytest.fixture(scope="module")
def straight(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "straight"
    train(short_config(model, **PLAIN), out)
    return out


@pytest.fixture(scope="module")
def killed(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder per moment, each with a run that was killed there."""
    folder = tmp_path_factory.mktemp("killed")
    run_script("killed_runs.py", model, str(folder), "plain", *MOMENTS)
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_any_moment_resumes_to_the_bit(moment: str, model: str, killed: Path, straight: Path) -> None:
    train(short_config(model, **PLAIN, checkpoint={"every_steps": 1, "keep": 1}), killed / moment, resume=True)
    assert_same_run(killed / moment, straight)


def interrupted_at(call: int, monkeypatch: pytest.MonkeyPatch, really: bool = False) -> None:
    """Ctrl-C at the n-th time that the engine is asked for rollouts."""
    original = HFEngine.generate
    left = call

    def generate(self: HFEngine, *args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(HFEngine, "generate", generate)


@pytest.mark.parametrize("call", [1, 3, 6, 8])
def test_ctrl_c_during_rollouts_saves_the_last_completed_step(
    call: int,
    model: str,
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, out = short_config(model, **PLAIN, checkpoint={"every_steps": 0}), tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupted_at(call, patch)
        with pytest.raises(KeyboardInterrupt):
            train(config, out)
    (saved,) = [path.name for path in (out / "checkpoints").glob("step-*")]
    assert f"interrupted: step {int(saved.removeprefix('step-'))} is saved" in capsys.readouterr().err
    train(config, out, resume=True)
    assert_same_run(out, straight)


def test_what_a_run_says_at_its_start_is_said_by_the_one_that_goes_on_from_before_its_first_step(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short_config(model, **PLAIN, guard={"action": "warn"}, checkpoint={"every_steps": 0})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    (notice, *_) = train(config, whole).events
    assert "the guard watches nothing" in notice
    with monkeypatch.context() as patch:
        interrupted_at(1, patch)
        with pytest.raises(KeyboardInterrupt):
            train(config, cut)
    train(config, cut, resume=True)
    assert_same_run(cut, whole)
    assert notice in train(config, cut, resume=True).events


def test_ctrl_c_during_the_update_waits_for_the_step_to_be_complete(
    model: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = short_config(model, **PLAIN, checkpoint={"every_steps": 0}), tmp_path / "run"
    original, calls = HFEngine.load_weights, []

    def load_weights(self: HFEngine, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "load_weights", load_weights)
        with pytest.raises(KeyboardInterrupt):
            train(config, out)
    assert "interrupted: step 2 is saved" in capsys.readouterr().err
    assert [line["step"] for line in read_lines(out / "metrics.jsonl")] == [0, 1, 2]
    train(config, out, resume=True)
    assert_same_run(out, straight)


def test_a_second_ctrl_c_during_the_update_leaves_the_checkpoint_before(
    model: str, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = short_config(model, **PLAIN), tmp_path / "run"
    original, calls = HFEngine.load_weights, []

    def load_weights(self: HFEngine, *args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "load_weights", load_weights)
        with pytest.raises(KeyboardInterrupt):
            train(config, out)
    assert "the update of step 4 was cut off, the last checkpoint is of step 2" in capsys.readouterr().err
    train(config, out, resume=True)
    assert_same_run(out, straight)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_goes_on(
    model: str, straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train(short_config(model, **PLAIN), out)
    weights = out / "checkpoints" / "step-000004" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    train(short_config(model, **PLAIN), out, resume=True)
    told = capsys.readouterr().err
    assert "step-000004 is damaged" in told
    assert "resuming from step-000002" in told
    assert_same_run(out, straight)


def test_a_finished_run_may_be_given_more_steps(model: str, tmp_path: Path) -> None:
    without = {"evaluate": {"prompts": 0}}
    long = train(short_config(model, **PLAIN, **without), tmp_path / "long")
    train(short_config(model, **PLAIN, train={"steps": 2}, **without), tmp_path / "short")
    extended = train(short_config(model, **PLAIN, **without), tmp_path / "short", resume=True)
    assert_same_run(tmp_path / "short", tmp_path / "long")
    assert (extended.reward_first, extended.reward_last) == (long.reward_first, long.reward_last)


@pytest.mark.parametrize("changed", ["attention.name", "control.stricter"])
def test_a_schedules_file_that_has_changed_is_refused(changed: str, model: str, tmp_path: Path) -> None:
    paths = {
        name: str(Schedule.fixed(budget).save(tmp_path / f"{name.replace('.', '-')}.toml"))
        for name, budget in (("attention.name", 64), ("control.stricter", 128))
    }
    about: dict[str, Any] = {
        "attention": {"kind": "schedule", "name": paths["attention.name"]},
        "guard": {"action": "warn", "at_least": 0.1},
        "control": {"by": "guard", "stricter": [paths["control.stricter"]]},
        "evaluate": {"prompts": 0},
    }
    train(short_config(model, **PLAIN, train={"steps": 2}, **about), tmp_path / "run")
    # Where it comes from changes nothing.
    replace(Schedule.load(paths[changed]), made_by={"command": "another"}).save(paths[changed])
    train(short_config(model, **PLAIN, train={"steps": 3}, **about), tmp_path / "run", resume=True)
    Schedule.fixed(256).save(paths[changed])
    with pytest.raises(UserError, match=rf"(?s){changed}.*(64|128).*256"):
        train(short_config(model, **PLAIN, **about), tmp_path / "run", resume=True)


def test_resuming_a_finished_run_computes_nothing(model: str, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFEngine, "generate", None)
    before = (straight / "metrics.jsonl").read_bytes()
    result: TrainResult = train(short_config(model, **PLAIN), straight, resume=True)
    assert result.steps == 4
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_a_guards_fallback_survives_a_kill(model: str, tmp_path: Path) -> None:
    guard = {"action": "warn", "at_least": 0.999, "window_steps": 1}
    control = {"by": "guard", "stricter": ["dense"]}
    changes: dict[str, Any] = {
        "guard": guard,
        "control": control,
        "mismatch": {"least_tokens": 20, "ceiling_every_steps": 0},
    }
    long = train(short_config(model, **PLAIN, **changes), tmp_path / "long")
    train(short_config(model, **PLAIN, train={"steps": 2}, evaluate={"prompts": 6}, **changes), tmp_path / "short")
    again = train(short_config(model, **PLAIN, **changes), tmp_path / "short", resume=True)
    assert again.events == long.events
    assert again.reward_last == long.reward_last
