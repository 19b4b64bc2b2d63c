"""One process at a time in a folder, and that a dead process holds nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cli_runs import error_of
from sparroll.errors import UserError
from sparroll.locks import NAME, locked

HOLDER = """
import sys
from sparroll.locks import locked
with locked(sys.argv[1], "sparroll train"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the folder. It ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_folder_that_another_process_has_is_refused_with_its_name(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as other:
        with pytest.raises(UserError) as caught, locked(tmp_path, "sparroll rollout"):
            pass
        known = rf"is in use by sparroll train \(process {other.pid} on .+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
        assert re.search(known, caught.value.message)
        assert caught.value.hint is not None and "--out" in caught.value.hint
    with locked(tmp_path, "sparroll rollout"):
        assert (tmp_path / NAME).exists()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_does_not_block(tmp_path: Path) -> None:
    with held_elsewhere(tmp_path) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert "sparroll train" in (tmp_path / NAME).read_text()
        with locked(tmp_path, "sparroll rollout"):
            assert "sparroll rollout" in (tmp_path / NAME).read_text()


def test_a_child_that_outlives_its_process_holds_nothing(tmp_path: Path) -> None:
    with locked(tmp_path, "sparroll train"):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
    try:
        with held_elsewhere(tmp_path) as other:
            assert f"process {other.pid} " in (tmp_path / NAME).read_text()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_may_take_its_own_folder_again(tmp_path: Path) -> None:
    with locked(tmp_path, "sparroll calibrate"), locked(tmp_path / ".." / tmp_path.name, "calibrate"):
        pass
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("verb", ["rollout", "calibrate", "profile", "evaluate", "train", "distill", "quickstart"])
def test_every_verb_that_keeps_work_refuses_a_folder_in_use(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], busy: Path
) -> None:
    asks: dict[str, list[str]] = {
        "train": ["--set", "log.sinks=[]"],
        "distill": ["--budget", "64", "--set", "log.sinks=[]"],
        "evaluate": ["--model", "tiny-reasoner", "--tasks", "synthetic", "--count", "1"],
        "quickstart": [],
    }
    ask = asks.get(verb, ["--model", "tiny-reasoner", "--task", "synthetic", "--budget", "64"])
    message, hint = error_of([verb, "--out", str(busy), *ask], capsys)
    assert message.startswith(f"{busy} is in use by sparroll train (process ")
    assert "wait until it ends" in hint
    assert [path.name for path in busy.iterdir()] == [NAME]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("busy")
    with held_elsewhere(folder):
        yield folder


def test_a_folder_that_the_lock_made_goes_if_nothing_was_written(tmp_path: Path) -> None:
    new, kept = tmp_path / "new", tmp_path / "kept"
    with locked(new, "sparroll train"):
        assert new.is_dir()
    with locked(kept, "sparroll train"):
        (kept / "config.json").write_text("{}")
    assert not new.exists() and [path.name for path in kept.iterdir()] == ["config.json"]
    (tmp_path / "own").mkdir()
    with locked(tmp_path / "own", "sparroll train"):
        pass
    assert (tmp_path / "own").is_dir()
