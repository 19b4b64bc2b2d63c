"""Which model a checkpoint began as, and that a schedule for the one fits the other."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cli_runs import error_of
from sparroll.cli import main
from sparroll.errors import UserError
from sparroll.models import resolve, trained_from
from sparroll.schedule import Schedule


def checkpoint(folder: Path, began: object) -> str:
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": {"name": began}}))
    return str(folder / "model")


def test_a_checkpoint_is_traced_to_where_its_runs_began(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "one" / "step-000002", "Qwen/Qwen3-1.7B")
    second = checkpoint(tmp_path / "two" / "step-000009", first)
    assert trained_from(first) == trained_from(second) == trained_from(f"{second}/") == "Qwen/Qwen3-1.7B"


def test_anything_else_keeps_its_name(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "plain", None)
    (tmp_path / "plain" / "weights").mkdir()
    loop = checkpoint(tmp_path / "loop", str(tmp_path / "loop" / "model"))
    for name in (
        "Qwen/Qwen3-1.7B",
        "model",
        plain,
        str(tmp_path / "plain" / "weights"),
        str(tmp_path / "absent"),
        loop,
    ):
        assert trained_from(name) == name


def test_a_schedule_fits_the_checkpoints_of_its_model_and_no_others(tmp_path: Path) -> None:
    fits, other = (checkpoint(tmp_path / name, f"Qwen/{name}") for name in ("Qwen3-1.7B", "Qwen3-4B"))
    assert Schedule.load("qwen3-1.7b-0.86", model=fits).name == "qwen3-1.7b-0.86"
    with pytest.raises(UserError, match="was made for Qwen/Qwen3-1.7B, not for Qwen/Qwen3-4B"):
        Schedule.load("qwen3-1.7b-0.86", model=other)


def test_a_schedule_made_on_a_checkpoint_fits_it_and_its_relatives(tmp_path: Path) -> None:
    made_on, later, other = (
        checkpoint(tmp_path / run / "step-000002", began)
        for run, began in (("one", "Qwen/Qwen3-1.7B"), ("two", "Qwen/Qwen3-1.7B"), ("three", "Qwen/Qwen3-4B"))
    )
    schedule = replace(Schedule.fixed(512), model=made_on)
    for model in (made_on, later, "Qwen/Qwen3-1.7B"):
        schedule.check_model(model)
    with pytest.raises(UserError, match="not for Qwen/Qwen3-4B"):
        schedule.check_model(other)
    shutil.rmtree(tmp_path / "one")
    schedule.check_model(made_on)


def test_every_verb_takes_the_schedule_of_a_checkpoints_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint(tmp_path, "Qwen/Qwen3-1.7B")
    chosen = ["--model", model, "--schedule", "qwen3-1.7b-0.86"]
    assert main(["serve-args", *chosen]) == 0
    capsys.readouterr()
    for verb in ("profile", "rollout"):
        message, _ = error_of([verb, *chosen, "--prompts", str(tmp_path / "none.txt"), "--out", str(tmp_path)], capsys)
        assert message.startswith("cannot read the prompts file")


@pytest.mark.parametrize("name", ["tiny-resoner", "tiny_reasoner", "TinyReasoner", "reasoner"])
def test_a_typo_of_a_packaged_name_is_told_at_once(name: str) -> None:
    with pytest.raises(
        UserError, match=f"no packaged model and no folder '{name}'\nhint: did you mean 'tiny-reasoner'"
    ):
        resolve(name)


def test_folders_and_names_of_the_hub_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Qwen/Qwen3-1.7B", "someone/tiny-reasoner", "gpt2", str(tmp_path / "tiny-reasoner2")):
        assert resolve(name) == name
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-reasoner2").mkdir()
    assert resolve("tiny-reasoner2") == "tiny-reasoner2"


def test_names_are_checked_before_a_command_writes_its_first_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["rollout", "--task", "synthetic", "--out", str(out)]
    assert "tiny-reasoner" in error_of([*command, "--model", "tiny-resoner"], capsys)[1]
    for option, value, message in (
        ("--device", "foo", "unknown device 'foo'"),
        ("--dtype", "int3", "unknown --dtype 'int3'"),
        ("--temperature", "inf", "the temperature must be 0"),
        ("--seed", "4294967296", "Invalid value for '--seed'"),
    ):
        assert error_of([*command, "--model", "tiny-reasoner", option, value], capsys)[0].startswith(message)
    assert not out.exists()
