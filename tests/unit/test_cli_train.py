"""`sparroll train` on the command line: a run ends with its report; mistakes in the configuration are one line."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from cli_runs import error_of
from sparroll.cli import main

SMALL = [
    "task.level=0", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=40", "train.prompts_per_step=2",
    "train.steps=2", "evaluate.prompts=2", "mismatch.bin_tokens=50",
]  # fmt: skip


def _command(out: Path, *more: str) -> list[str]:
    return ["train", "--out", str(out), *(part for setting in SMALL for part in ("--set", setting)), *more]


def test_a_run_ends_with_its_report_and_can_be_taken_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(_command(out)) == 0
    output = capsys.readouterr()
    assert "tail_q05_min" in output.out
    assert output.err.splitlines()[-1] == f"wrote {out / 'result.json'}"
    assert "<svg" in (out / "report.html").read_text()
    _check_that_every_metric_is_documented(out / "metrics.jsonl")
    message, hint = error_of(_command(out), capsys)
    assert message == f"{out} already holds a run"
    assert "--resume" in hint
    assert main(_command(out, "--resume", "--set", "train.steps=3", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3


def test_the_folder_of_an_evaluation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model": "tiny-reasoner", "tasks": []}')
    message, hint = error_of(_command(tmp_path), capsys)
    assert message == f"{tmp_path} was made by another command: config.json is not of this one" and "--out" in hint
    assert "tasks" in (tmp_path / "config.json").read_text()


def test_sigterm_right_after_a_checkpoint_is_renamed_leaves_a_run_that_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.train.runtime import checkpoint

    point = checkpoint._point

    def terminated(folder: Path, final: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        point(folder, final)

    command = _command(tmp_path, "--set", "checkpoint.every_steps=1", "--set", "evaluate.prompts=0")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_point", terminated)
        assert main(command) == 130
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "interrupted: step 1 is saved; --resume goes on there"
    assert main([*command, "--resume"]) == 0
    assert "resuming from step-000001" in capsys.readouterr().err


def test_rewards_lie_beside_the_configuration_and_what_they_raise_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    config = tmp_path / "train.toml"
    config.write_text('[reward]\nterms = [{ use = "beside_the_config:reward" }]\n')
    (tmp_path / "beside_the_config.py").write_text(
        "def reward(prompt, response_text, rollout):\n    raise LookupError('no judge')\n"
    )
    assert main(_command(tmp_path / "out", "--config", str(config), "--set", "evaluate.prompts=0")) == 2
    *_, kept, message, hint = capsys.readouterr().err.splitlines()
    assert kept == "stopped by an error: step 0 is saved; --resume goes on there"
    place = "(beside_the_config.py, line 2), for the prompt synthetic/train/"
    assert message.startswith(f"error: the reward beside_the_config:reward raised LookupError: no judge {place}")
    way_out = "it may return None when it cannot judge a response"
    assert hint == f"hint: finished work is kept, so fix the function and continue; {way_out}"
    assert (tmp_path / "out/checkpoints/step-000000").is_dir()


def test_a_misspelt_key_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["train", "--out", str(tmp_path), "--set", "train.learning_rat=1"], capsys)
    assert message == "unknown key train.learning_rat"
    assert hint
    message, hint = error_of(["train", "--out", str(tmp_path), "--set", "trian.lr=1"], capsys)
    assert message == "unknown section [trian]"
    assert hint == "did you mean 'train'?"
    message, _ = error_of(["train", "--out", str(tmp_path), "--set", "train.lr=fast"], capsys)
    assert "train.lr" in message
    path = tmp_path / "broken.toml"
    path.write_text("[train\n")
    message, _ = error_of(["train", "--out", str(tmp_path), "--config", str(path)], capsys)
    assert "is not valid TOML" in message


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.temperature=1e-4", "rollout.temperature: input should be greater than or equal to 0.001"),
        ("evaluate.temperature=1e-5", "evaluate.temperature must be 0 or from 0.001 up"),
        ("evaluate.level=99", "level"),
    ],
)
def test_what_can_never_be_sampled_is_refused_before_the_folder_holds_a_run(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, _ = error_of(_command(tmp_path / "out", "--set", setting), capsys)
    assert message in said
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["evaluate.prompts=0", "evaluate.every_steps=5"],
            "evaluate.every_steps does nothing with evaluate.prompts = 0",
        ),
        (["evaluate.prompts=0", "evaluate.level=1"], "evaluate.level does nothing with evaluate.prompts = 0"),
        (["task.name=data", "task.level=7"], "task.level does nothing with task.name = 'data'"),
        (["task.name=data", "evaluate.level=2"], "evaluate.level does nothing with task.name = 'data'"),
    ],
)
def test_settings_without_effect_are_refused(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for setting in settings for word in ("--set", setting)]
    said, _ = error_of(["train", "--print-config", "--out", str(tmp_path / "out"), *words], capsys)
    assert message in said


@pytest.mark.parametrize("content", ["{", "[1]"])
@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_a_damaged_configuration_of_a_run_is_named(
    content: str, resume: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text("{}\n" if resume else "")
    said, hint = error_of([*_command(tmp_path), *resume], capsys)
    assert said.startswith(f"cannot read {tmp_path / 'config.json'}")
    assert hint == "choose another folder with --out"


def _check_that_every_metric_is_documented(metrics: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    names = {name for line in metrics.read_text().splitlines() for name in json.loads(line)} - {"step", "events"}
    plain = {re.sub(r"/[0-9k]+-[0-9k]+$", "/16k-18k", name) for name in names}
    assert sorted(name for name in plain if f"`{name}`" not in page) == []
