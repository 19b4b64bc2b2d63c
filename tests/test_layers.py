"""Who may import whom, and what `import sparroll` may load. Reads the sources; the table below is the architecture."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparroll"

_LEAVES = {"types", "errors", "files"}
_DATA = _LEAVES | {"tasks", "models", "records"}
_RUNS = _DATA | {"attention", "schedule", "mismatch", "compression", "engines"}
_ALL = _RUNS | {"calibrate", "train", "evaluate", "report", "progress"}

MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "errors": set(),
    "files": _LEAVES,
    "attention": _LEAVES,
    # A schedule file names its selector and its model; an unknown selector must be refused at load, and another model too.
    "schedule": _LEAVES | {"attention.selectors", "models"},
    "mismatch": _LEAVES,
    "compression": _LEAVES,
    "tasks": _LEAVES,
    "models": _LEAVES,
    "records": _LEAVES,
    "engines": _LEAVES | {"attention", "schedule", "mismatch", "compression", "models"},
    "calibrate": _RUNS,
    "evaluate": _RUNS,
    "train": _RUNS | {"evaluate"},
    "report": _RUNS | {"calibrate", "evaluate"},
    "progress": _LEAVES,
    "doctor": _ALL,
    "quickstart": _ALL,
    "cli": _ALL | {"doctor", "quickstart"},
}


def _part(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """Dotted names inside sparroll that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it out"
            found.add(node.module or "")
            if node.module == "sparroll":
                found |= {f"sparroll.{alias.name}" for alias in node.names}
    return {name.removeprefix("sparroll.") for name in found if name.startswith("sparroll.")}


def _allowed(name: str, own: str) -> bool:
    allowed = MAY_IMPORT[own] | {own}
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_the_layers_below_it(path: Path) -> None:
    own = _part(path)
    assert own in MAY_IMPORT, f"{own} is new: give it a row in MAY_IMPORT"
    wrong = sorted(name for name in _imports(path) if not _allowed(name, own))
    assert not wrong, f"{own} may not import {wrong}"


def test_the_check_itself_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from sparroll.train import loop\n")
    assert _imports(wrong) == {"train"}
    assert not _allowed("train", "attention")
    assert _allowed("attention.selectors", "schedule")
    assert not _allowed("attention.api", "schedule")


def test_importing_the_light_parts_loads_torch_at_most() -> None:
    light = "sparroll, sparroll.schedule, sparroll.attention.api, sparroll.mismatch, sparroll.train.corrections"
    light += ", sparroll.compression"
    heavy = ["transformers", "accelerate", "peft", "vllm", "trl", "verl", "triton", "matplotlib", "typer", "pydantic"]
    code = (
        f"import sys, torch; before = set(sys.modules); import {light}; "
        f"print(*(name for name in {heavy} if name in sys.modules and name not in before))"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
