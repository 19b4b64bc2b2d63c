"""What code of the user's cannot do to the run that calls it: print into its results, end it, move it elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparroll.tasks.containment import contained

SOURCE = Path(__file__).parents[3] / "src"


def test_what_it_prints_goes_to_standard_error_and_results_stay_on_standard_output() -> None:
    code = """
import os, subprocess, sys
from sparroll.tasks.containment import contained
print("before")
with contained():
    print("python")
    subprocess.run(["echo", "a program"], check=True)
    os.write(1, b"a library\\n")
print("after")
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SOURCE)}
    )
    assert result.stdout.split() == ["before", "after"]
    assert sorted(result.stderr.splitlines()) == ["a library", "a program", "python"]


def test_nothing_breaks_where_standard_output_is_closed() -> None:
    code = "from sparroll.tasks.containment import contained\nwith contained():\n    print('python')\n"
    command = f'exec {sys.executable} -c "$CODE" >&-'
    environment = {"PYTHONPATH": str(SOURCE), "CODE": code}
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "python\n")


def test_ending_the_process_is_an_exception() -> None:
    before = os._exit
    with pytest.raises(SystemExit, match=r"os\._exit\(3\)"), contained():
        os._exit(3)
    assert os._exit is before


def test_a_process_that_it_forks_ends_as_usual() -> None:
    with contained():
        child = os.fork()
        if child == 0:
            os._exit(7)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_the_folder_is_the_same_afterwards_also_after_an_exception(tmp_path: Path) -> None:
    before = Path.cwd()
    with contained():
        os.chdir(tmp_path)
        assert Path.cwd() == tmp_path
    assert Path.cwd() == before
    with pytest.raises(FileNotFoundError), contained():
        [os.chdir(folder) for folder in (tmp_path, tmp_path / "nothing")]
    assert Path.cwd() == before


def test_json_is_a_part_of_standard_output_that_nobody_else_writes_to(capsys: pytest.CaptureFixture[str]) -> None:
    with contained():
        print("noise")
    print(json.dumps({"a": 1}))
    output = capsys.readouterr()
    assert json.loads(output.out) == {"a": 1}
    assert output.err == "noise\n"
