"""CI does not pass with the tests of the sandbox skipped, unless it is told to."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sandboxes import NEEDED, need_sandbox
from sparroll.tasks.code import sandbox
from sparroll.tasks.code.sandbox import Probe

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
TOOLS = ["bash", "dirname", "timeout", "sh", "mktemp", "tee", "cat", "grep", "rm", "nice", "sleep"]
MAKE = f"#!/bin/sh\necho \"make $*, {NEEDED}=${NEEDED}\" >> made\necho '1 passed in 0.1s'\n"


def run_ci(tmp_path: Path, **environment: str) -> tuple[int, str, str]:
    """(exit status, output, what `make` was asked for) on a machine that has no bubblewrap and no network."""
    if not SCRIPT.is_file():
        pytest.skip("the source distribution has no .ci")
    tools, copy = tmp_path / "tools", tmp_path / "repository" / ".ci" / "run"
    for folder in (tools, copy.parent):
        folder.mkdir(parents=True)
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, text in (("make", MAKE), ("apt-get", "#!/bin/sh\nexit 100\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    shutil.copy(SCRIPT, copy)
    ran = subprocess.run(
        [str(tools / "bash"), str(copy)], env={"PATH": str(tools)} | environment, capture_output=True, text=True
    )
    made = copy.parents[1] / "made"
    return ran.returncode, ran.stdout + ran.stderr, made.read_text() if made.exists() else ""


def test_without_bubblewrap_ci_fails_before_anything_runs(tmp_path: Path) -> None:
    status, output, made = run_ci(tmp_path)
    assert status == 1 and "bubblewrap cannot be installed" in output and "SPARROLL_WITHOUT_SANDBOX=1" in output
    assert made == ""


def test_told_so_ci_runs_without_a_sandbox(tmp_path: Path) -> None:
    status, output, made = run_ci(tmp_path, SPARROLL_WITHOUT_SANDBOX="1")
    assert status == 0, output
    targets = (
        "test WORKERS=1 --keep-going",
        "test-verl test-trl WORKERS=1 --keep-going",
        "test-vllm lint docs --keep-going",
    )
    assert sorted(made.splitlines()) == [f"make {name}, {NEEDED}=" for name in targets]


def test_where_a_sandbox_must_hold_its_tests_fail_and_elsewhere_they_are_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox, "probes", lambda: {"bubblewrap": Probe("bubblewrap", False, "it does not run")})
    monkeypatch.setenv(NEEDED, "1")
    with pytest.raises(pytest.fail.Exception, match="no sandbox holds here"):
        need_sandbox()
    monkeypatch.delenv(NEEDED)
    with pytest.raises(pytest.skip.Exception, match="needs a sandbox that holds"):
        need_sandbox()
