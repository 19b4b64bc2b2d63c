"""The quickstart at toy sizes: from nothing to summary.json and report.html, interrupted on the way and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cli_runs import error_of
from sparroll.cli import main
from sparroll.quickstart import load_settings, stages
from sparroll.train.dense_checks import first_accuracy

SIZES = """
model = "tiny-reasoner"
[calibrate]
level = 0
prompts = 12
samples = 1
max_new_tokens = 100
target = 0.5
bin_tokens = 100
page_tokens = 4
first_tokens = 4
recent_tokens = 8
budgets = [32, 160]
verify_rounds = 1
[[plans]]
model = "Qwen/Qwen3-1.7B"
schedule = "qwen3-1.7b-0.86"
[[plans]]
model = "tiny-reasoner"
schedule = "calibrated"
lengths = "0-200"
[train.task]
level = 0
[train.rollout]
samples_per_prompt = 2
max_new_tokens = 40
[train.train]
steps = 2
prompts_per_step = 2
lr = 1e-5
[train.mismatch]
bin_tokens = 100
ceiling_prompts = 1
[train.evaluate]
prompts = 2
[train.checkpoint]
every_steps = 1
[train.log]
sinks = []
[runs.dense]
schedule = "dense"
[runs.calibrated]
schedule = "calibrated"
[runs.aggressive]
kv_budget_tokens = 16
"""
CODE = "import sys; from sparroll.cli import main; sys.exit(main())"
KEYS = {"schedule_path", "target", "tail", "runs", "kv_read_share", "wall_seconds"}


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.toml"
    path.write_text(SIZES)
    return path


def _start(sizes: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CODE, "quickstart", "--config", str(sizes), "--out", str(out)]
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": source}, preexec_fn=_heed_interrupts,
    )  # fmt: skip


def _heed_interrupts() -> None:
    # A shell starts what it puts in the background deaf to SIGINT, and so would be all of its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _figures(out: Path) -> dict[str, Any]:
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary) == KEYS
    return {"tail": summary["tail"], "runs": summary["runs"]}


@pytest.mark.slow
def test_an_interrupted_quickstart_goes_on_and_ends_like_a_straight_one(
    sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["quickstart", "--config", str(sizes), "--out"]
    assert main([*command, f"{tmp_path}/straight"]) == 0
    said = capsys.readouterr()
    assert "calibrated rollouts read" in said.out
    lines = said.err.splitlines()
    assert lines[-2:] == [f"wrote {tmp_path}/straight/summary.json", f"wrote {tmp_path}/straight/report.html"]
    # The first figure comes before the other budgets are measured.
    place = next(number for number, line in enumerate(lines) if "tail of 32 tokens" in line)
    assert "dense ceiling" in lines[place] and float(lines[place + 1].split()[-1]) > 0.9
    assert place < next(number for number, line in enumerate(lines) if "the other budgets" in line)

    cut, out = _start(sizes, tmp_path / "cut"), tmp_path / "cut"
    began = time.monotonic()
    while not (out / "calibrated" / "metrics.jsonl").exists():
        assert time.monotonic() - began < 300
        assert cut.poll() is None, cut.communicate()[1]
        time.sleep(0.05)
    # To the parent alone, as a process manager would; a terminal sends it to all.
    cut.send_signal(signal.SIGINT)
    _, errors = cut.communicate(timeout=120)
    assert cut.returncode == 130, errors
    assert "run the same command to continue" in errors
    assert not (out / "summary.json").exists()
    assert "<svg" in (out / "report.html").read_text()
    calibrated_at = (out / "calibration" / "calibration.json").stat().st_mtime_ns

    assert main([*command, str(out)]) == 0
    assert (out / "calibration" / "calibration.json").stat().st_mtime_ns == calibrated_at
    assert _figures(out) == _figures(tmp_path / "straight")
    # What is measured once for all runs is what each would have measured.
    first = json.loads((out / "first_accuracy.json").read_text())
    settings = load_settings(sizes)
    assert first == first_accuracy(stages.train_config(settings, out, "calibrated"))
    for name in settings.runs:
        line = json.loads((out / name / "metrics.jsonl").read_text().splitlines()[0])
        assert line["step"] == 0 and {key: line[key] for key in first} == first

    page = (out / "report.html").read_text()
    assert "src=" not in page
    assert "http" not in page
    assert page.count("<svg") == 8
    for question in ("Is this schedule safe here?", "What does it save?", "Did training hold?"):
        assert question in page
    assert "aggressive" in page


def test_mistakes_in_the_sizes_are_found_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "sizes.toml", tmp_path / "out"
    command = ["quickstart", "--config", str(path), "--out", str(out)]
    path.write_text(SIZES.replace("[calibrate]", "[calibrated]"))
    message, hint = error_of(command, capsys)
    assert "unknown key 'calibrated'" in message
    assert hint == "did you mean 'calibrate'?"
    path.write_text(SIZES.replace("lr = 1e-5", "learning_rate = 1e-5"))
    message, _ = error_of(command, capsys)
    assert "unknown key train.learning_rate" in message
    path.write_text(SIZES.replace("prompts = 12", "prompts = 0"))
    message, _ = error_of(command, capsys)
    assert "calibrate.prompts" in message
    assert not (out / "calibration").exists()


def test_a_folder_of_another_quickstart_is_refused(
    sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "calibration").mkdir(parents=True)
    (out / "settings.json").write_text("{}")
    message, _ = error_of(["quickstart", "--config", str(sizes), "--out", str(out)], capsys)
    assert "was made with model = null" in message
    assert main(["report", "--run", str(out)]) == 2
