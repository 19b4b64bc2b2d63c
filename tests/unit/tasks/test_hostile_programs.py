"""Nothing that a program does gets out, gets it a reward, or outlives it; the next program runs as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hostile_programs import CALLS, PROGRAMS, Hostile
from sandboxes import need_sandbox
from sparroll.tasks.code import sandbox
from sparroll.tasks.code.limits import SandboxLimits
from sparroll.tasks.code.reward import CallTests, CheckTests, CodeReward, StdinTests

HELD = [name for name, found in sandbox.probes().items() if found.holds]
LIMITS = SandboxLimits(wall_seconds=60, cpu_seconds=5, memory_bytes=512 << 20, output_bytes=1 << 20)
SQUARE = StdinTests((("4", "16"),))
GOOD = "```python\nprint(int(input()) ** 2)\n```"


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with CodeReward(LIMITS, allow_unsafe_sandbox=True, workers=1, cache_entries=1) as made:
        yield made


@pytest.fixture(scope="module")
def hasty() -> Iterator[CodeReward]:
    """For programs that may take all of their time. Others have enough of it on a busy machine, too."""
    limits = replace(LIMITS, wall_seconds=2, cpu_seconds=1)
    with CodeReward(limits, allow_unsafe_sandbox=True, workers=1, cache_entries=1) as made:
        yield made


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder outside that anybody may write to, which must stay as it is, and processes that must be gone."""
    folder = tmp_path / "canary"
    folder.mkdir()
    for place in (folder, *folder.parents):
        if place.is_relative_to("/tmp") and place != Path("/tmp"):
            place.chmod(0o777)
    (folder / "kept").write_text("kept")
    monkeypatch.setenv("SPARROLL_CANARY", "secret")
    before = _children()
    yield folder
    assert _children() <= before, "processes were left behind"
    assert not list(Path(tempfile.gettempdir()).glob(f"sparroll-*-{os.getpid()}-*")), "files were left behind"
    assert [path.name for path in folder.iterdir()] == ["kept"] and (folder / "kept").read_text() == "kept"


def _children() -> set[int]:
    """Of this process, and every process under a user id that only sandboxes have."""
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    first = 1_500_000_000 + (os.getpid() % 100_000) * 1_000
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if first <= process.uids().real < first + 1_000:
                found.add(process.pid)
    return found


def _skip_without_walls(program: Hostile) -> None:
    if program.needs_walls:
        need_sandbox()


def test_there_are_at_least_forty_hostile_programs() -> None:
    assert len({program.code for program in PROGRAMS}) >= 40
    assert len({program.name for program in (*PROGRAMS, *CALLS)}) == len(PROGRAMS) + len(CALLS)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_hostile_program_is_contained_and_the_next_one_passes(
    program: Hostile, reward: CodeReward, hasty: CodeReward, canary: Path
) -> None:
    _skip_without_walls(program)
    graded_by = hasty if "timeout" in program.ends else reward
    with socket.create_server(("127.0.0.1", 0)) as listener:
        code = program.code.replace("CANARY/", f"{canary}/").replace("'CANARY'", repr(str(canary)))
        code = code.replace("PORT", str(listener.getsockname()[1])).replace("HARNESS", str(os.getpid()))
        verdict = graded_by.grade(SQUARE, f"```python\n{code}\n```")
    assert verdict.status in program.ends, verdict
    assert verdict.reward == 0.0
    assert graded_by.grade(SQUARE, GOOD).passed


@pytest.mark.parametrize("program", CALLS, ids=lambda program: program.name)
def test_a_function_cannot_fake_a_pass(program: Hostile, reward: CodeReward, hasty: CodeReward, canary: Path) -> None:
    response = f"```python\n{program.code}\n```"
    waiting = hasty if program.ends == {"timeout"} else reward
    verdict = waiting.grade(CallTests("square", (([4], 16), ([5], 25))), response)
    assert verdict.status in program.ends, verdict
    assert verdict.reward == 0.0


@pytest.mark.parametrize("program", CALLS, ids=lambda program: program.name)
def test_a_function_cannot_fake_an_evalplus_check(
    program: Hostile, reward: CodeReward, hasty: CodeReward, canary: Path
) -> None:
    twice = CheckTests("square", "def check(candidate):\n    for n in (4, 5):\n        assert candidate(n) == n * n\n")
    verdict = (hasty if program.ends == {"timeout"} else reward).grade(twice, f"```python\n{program.code}\n```")
    assert verdict.status != "sandbox error" and verdict.reward == 0.0, verdict


def test_the_boundary_of_these_tests_is_the_strongest_that_holds(reward: CodeReward) -> None:
    assert reward.boundary.name == (HELD[0] if HELD else "unsafe")
