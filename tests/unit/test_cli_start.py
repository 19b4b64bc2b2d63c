"""The first moments of a command: Ctrl-C while modules are imported, and terminals that know only ASCII."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparroll.cli import main

SOURCE = Path(__file__).parents[2] / "src"
MAIN = "import sys; from sparroll.cli import main; sys.exit(main())"


def run(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), **environment},
        # What a shell puts in the background is deaf to SIGINT, and so are its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.parametrize(
    ("module", "number"), [("typer", "SIGINT"), ("sparroll.schedule", "SIGTERM"), ("importlib.metadata", "SIGINT")]
)
def test_an_interrupt_during_an_import_is_one_line(module: str, number: str) -> None:
    press = f"""
import os, signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.{number})

sys.meta_path.insert(0, Press())
"""
    result = run(press + MAIN, "doctor")
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted before anything was written\n")


@pytest.mark.parametrize(("chosen", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_sleep_from_before_torch_is_imported_on(chosen: dict[str, str], expected: str) -> None:
    look = """
import os, sys

class Look:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            sys.exit(0)

sys.meta_path.insert(0, Look())
"""
    assert run(look + MAIN, "doctor", **chosen).stdout == f"{expected}\n"


def test_an_interrupt_after_a_file_was_written_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sparroll.cli.schedule.wrote", press)
    out = tmp_path / "checked.toml"
    assert main(["schedule", "check", "qwen3-1.7b-0.86", "--out", str(out)]) == 130
    assert capsys.readouterr().err == f"interrupted: the last file that was written is {out}\n"


def test_a_terminal_that_knows_only_ascii_gets_plots_in_ascii() -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    result = run(MAIN, "schedule", "show", "qwen3-1.7b-0.86", **ascii_only)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.isascii()
    assert "4,096 |" in result.stdout
    assert "####" in result.stdout


def test_python_m_sparroll_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sparroll", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("sparroll", run_name="__main__")
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("sparroll ")


def test_no_command_waits_for_transformers_before_it_needs_it() -> None:
    result = run("import sys; import sparroll.cli.app; print('transformers' in sys.modules, 'torch' in sys.modules)")
    assert (result.returncode, result.stdout) == (0, "False True\n")
