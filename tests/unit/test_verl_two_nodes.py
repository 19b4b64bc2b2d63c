"""recipes/verl-polaris/two_nodes.sh with a stand-in for Ray that writes down what it is asked: whatever happens, a Ray that
was started is stopped, no machine waits for ever, and another one's Ray is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "recipes" / "verl-polaris" / "two_nodes.sh"
STARTED = ["start --head --port 6379", "status --address 127.0.0.1:6379"]
RAY = """#!/bin/sh
echo "$*, auth $RAY_AUTH_MODE" >> "$FOLDER/asked"
case "$1" in
    start) exit "${START:-0}" ;;
    status)
        echo x >> "$FOLDER/polls"
        if [ "$(wc -l < "$FOLDER/polls")" -gt "${ALIVE_POLLS:-1000000}" ]; then exit 1; fi
        printf 'Active:\\n 1 node_aa\\n'
        if [ "$(wc -l < "$FOLDER/polls")" -gt "${ALONE_POLLS:-0}" ]; then printf ' 1 node_bb\\n'; fi ;;
esac
"""
PYTHON = """#!/bin/sh
trap 'kill "$!"; exit 143' TERM
sleep "${RUN_SECONDS:-0}" &
echo "run in $RAY_ADDRESS: $*" >> "$FOLDER/asked"
wait "$!"
echo "ran to the end" >> "$FOLDER/asked"
exit "${RUN_STATUS:-0}"
"""


@dataclass
class Ended:
    status: int
    output: str
    asked: list[str]
    """What Ray was asked, in order, and how the run went."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With stand-ins for `ray` and for the Python that runs verl."""
    for name, text in (("ray", RAY), ("python", PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    own = {"FOLDER": str(folder), "HOME": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
    own |= {"PYTHON": str(folder / "python"), "WAIT_SECONDS": "60", "POLL_SECONDS": "0.1"}
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        ["bash", str(SCRIPT), *words],
        env=rest | own | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Where a shell started the tests in the background, they ignore Ctrl-C, and bash cannot trap what it ignores.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ended(process: subprocess.Popen[str], folder: Path) -> Ended:
    output, _ = process.communicate(timeout=60)
    lines = (folder / "asked").read_text().splitlines()
    asked = [line.partition(", auth")[0].partition(" actor_rollout_ref")[0] for line in lines]
    # A line for each time that something was waited for says nothing.
    short = [line for number, line in enumerate(asked) if number == 0 or line != asked[number - 1]]
    return Ended(process.returncode, output, short)


def test_the_run_begins_when_the_second_machine_is_there_and_ray_ends_with_it(folder: Path) -> None:
    found = ended(start(folder, "head", "4b", "trainer.total_training_steps=2", ALONE_POLLS="2"), folder)
    assert found.status == 0, found.output
    assert found.asked == [*STARTED, "run in 127.0.0.1:6379: -m sparroll.verl", "ran to the end", "stop"]
    assert found.output.count("waiting for the second machine") == 2
    command = (folder / "asked").read_text()
    assert "trainer.nnodes=2" in command and "trainer.total_training_steps=2" in command


def test_a_run_that_fails_leaves_no_ray_behind_and_its_status_stands(folder: Path) -> None:
    found = ended(start(folder, "head", "4b", RUN_STATUS="3"), folder)
    assert (found.status, found.asked[-1]) == (3, "stop")
    found = ended(start(folder, "head", "5b"), folder)
    assert (found.status, found.asked[-1]) == (2, "stop") and "no size 5b" in found.output


def test_a_second_machine_that_never_comes_ends_it_with_two_lines(folder: Path) -> None:
    found = ended(start(folder, "head", "4b", ALONE_POLLS="1000000", WAIT_SECONDS="1"), folder)
    assert found.status == 1 and found.asked == [*STARTED, "stop"]
    assert "error: the second machine did not join within 1 s\nhint: run two_nodes.sh join there" in found.output


@pytest.mark.parametrize("words", [("head", "4b"), ("join", "192.0.2.1")])
def test_a_ray_that_was_not_started_here_is_not_stopped(words: tuple[str, str], folder: Path) -> None:
    found = ended(start(folder, *words, START="1", WAIT_SECONDS="1"), folder)
    assert found.status == 1 and "stop" not in found.asked


def test_a_first_machine_that_never_answers_ends_it_with_two_lines(folder: Path) -> None:
    found = ended(start(folder, "join", "192.0.2.1", START="1", WAIT_SECONDS="1"), folder)
    assert found.status == 1 and found.asked == ["start --address 192.0.2.1:6379"]
    assert "error: no Ray answered at 192.0.2.1:6379 within 1 s\nhint: run two_nodes.sh head" in found.output
    assert (folder / "asked").read_text().count("start") > 1


def test_the_second_machine_stops_when_the_first_one_has(folder: Path) -> None:
    found = ended(start(folder, "join", "192.0.2.1", ALIVE_POLLS="2"), folder)
    assert found.status == 0, found.output
    assert found.asked == ["start --address 192.0.2.1:6379", "status --address 192.0.2.1:6379", "stop"]
    # One answer that stays out is no end.
    assert len((folder / "polls").read_text().splitlines()) == 5


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_then_ray(number: signal.Signals, status: int, folder: Path) -> None:
    process = start(folder, "head", "4b", RUN_SECONDS="600")
    until = time.monotonic() + 30
    while "run in" not in (text := (folder / "asked").read_text() if (folder / "asked").exists() else ""):
        assert time.monotonic() < until, text
        time.sleep(0.05)
    process.send_signal(number)
    found = ended(process, folder)
    assert (found.status, found.asked[-1]) == (status, "stop") and "ran to the end" not in found.asked


@pytest.mark.parametrize(("files", "mode"), [((), "disabled"), (("auth_token",), "token")])
def test_every_command_agrees_on_whether_ray_asks_for_a_token(files: tuple[str, ...], mode: str, folder: Path) -> None:
    (folder / ".ray").mkdir()
    for name in files:
        (folder / ".ray" / name).write_text("a token")
    ended(start(folder, "head", "4b"), folder)
    asked = [line for line in (folder / "asked").read_text().splitlines() if ", auth" in line]
    assert len(asked) == 3 and all(line.endswith(f", auth {mode}") for line in asked)
