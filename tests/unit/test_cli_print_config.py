"""`sparroll train --print-config` and `sparroll distill --print-config`: a file that reads back, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import error_of
from sparroll.cli import main
from sparroll.train.config.file import load_config, load_distill_config

ASKED = {
    "train": ["--set", "attention.kind=schedule", "--set", "attention.name=qwen3-1.7b-0.86", "--set", "train.lr=1e-5"],
    "distill": ["--schedule", "qwen3-1.7b-0.80", "--model", "Qwen/Qwen3-1.7B", "--set", "train.steps=7"],
}


@pytest.mark.parametrize(("verb", "load"), [("train", load_config), ("distill", load_distill_config)])
def test_what_is_printed_reads_back_as_the_same_configuration(
    verb: str, load: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert callable(load)
    assert main([verb, *ASKED[verb], "--print-config"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "printed.toml"
    path.write_text(printed)
    assert main([verb, "--config", str(path), "--print-config"]) == 0
    assert capsys.readouterr().out == printed
    assert main([verb, *ASKED[verb], "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load(path).model_dump(mode="json")


@pytest.mark.parametrize("verb", ["train", "distill"])
def test_it_needs_no_folder_and_writes_none(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([verb, *ASKED[verb], "--print-config", "--out", "runs/mine"]) == 0
    assert not list(tmp_path.iterdir())
    capsys.readouterr()
    message, hint = error_of([verb, *ASKED[verb]], capsys)
    assert (message, hint) == ("--out is missing", "give a folder for the results, e.g. --out runs/mine")


def test_a_mistake_is_found_before_anything_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["train", "--print-config", "--set", "rollout.schedule=x"], capsys)
    assert message == "unknown key rollout.schedule"
    assert hint.startswith("it is now attention.name")
