"""What the long runs rest on: a run whose Ray did not start in time begins again, and any other failure is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import runs


def attempts(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[str, int]:
    """What the run of a program printed in the end, and how often it was started."""
    count = folder / "count"
    counting = f"n = open({str(count)!r}, 'a+'); n.write('x'); n.seek(0); n = len(n.read())\n"
    monkeypatch.setattr(runs, "command", lambda settings: [sys.executable, "-S", "-c", counting + program])
    return runs.run(folder, {}, "run"), len(count.read_text())


def test_a_run_begins_again_where_ray_did_not_start_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"print({runs.SLOW_START!r} if n == 1 else 'done')"
    assert attempts(tmp_path, monkeypatch, program) == ("done\n", 2)


@pytest.mark.parametrize(("said", "starts"), [(runs.SLOW_START, runs.STARTS), ("another error", 1)])
def test_a_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, starts: int) -> None:
    assert attempts(tmp_path, monkeypatch, f"print({said!r})") == (f"{said}\n", starts)


def test_a_cluster_that_does_not_start_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "ray_cluster.py").write_text("raise SystemExit('no room for a cluster')")
    monkeypatch.setattr(runs, "SHIM", tmp_path / "shim")
    sizes = {f"ray_kwargs.ray_init.{name}": "1" for name in ("num_cpus", "num_gpus", "object_store_memory")}
    assert "no room for a cluster" in runs.run(tmp_path, sizes, "run", standing=True)
