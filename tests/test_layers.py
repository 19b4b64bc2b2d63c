"""Who may import whom, and what `import sparroll` may load. Reads the sources; the table below is the architecture."""

from __future__ import annotations

import ast
import graphlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparroll"
MOST_FILES = 16

_GROUND = {"types", "errors", "files", "locks", "progress", "rounding", "strict"}
_FIRST = {"draft_check", "layer_groups", "attention", "mismatch", "compression", "models", "checkout", "presets"}
_SECOND = {"schedule", "corrections", "records", "resume"}
_THIRD = {"control", "tasks"}
_FOURTH = {"engines"}
_FIFTH = {"plan", "calibrate", "evaluate"}
_SIXTH = {"train", "integrations", "report"}
_SEVENTH = {"quickstart", "cli", "doctor", "verl", "__main__"}
FLOORS = (_GROUND, _FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH, _SIXTH, _SEVENTH)
"""From the ground up. A part may import from every floor below its own, and from itself."""

ON_THE_SAME_FLOOR: dict[str, set[str]] = {
    "types": {"errors", "rounding"},
    "files": {"errors"},
    "locks": {"errors", "files"},
    "progress": {"errors"},
    # Corrections compare top-k lists as the acceptance does.
    "resume": {"records"},
    "quickstart": {"doctor"},
    "cli": {"quickstart", "doctor"},
    "__main__": {"cli"},
    "calibrate": {"plan"},
    "report": {"train"},
    # Guard, controller and their settings are those of our own loop.
    "integrations": {"train"},
}
"""What a part may import of its own floor."""

WITHOUT: dict[str, set[str]] = {
    # A verl or TRL user gets these without our engines, tasks or records.
    "control": {"records", "resume"},
    "corrections": {"attention", "compression", "models"},
    "tasks": {"attention", "compression", "mismatch", "schedule", "corrections"},
}
"""What a part may not import although it lies below."""


def _may_import(part: str) -> set[str]:
    own = next(number for number, floor in enumerate(FLOORS) if part in floor)
    below = set().union(*FLOORS[:own])
    return below - WITHOUT.get(part, set()) | ON_THE_SAME_FLOOR.get(part, set()) | {part}


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
    return name.partition(".")[0] in _may_import(own)


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_the_layers_below_it(path: Path) -> None:
    own = _part(path)
    assert any(own in floor for floor in FLOORS), f"{own} is new: give it a floor in FLOORS"
    wrong = sorted(name for name in _imports(path) if not _allowed(name, own))
    assert not wrong, f"{own} may not import {wrong}"


def _files_imported(path: Path) -> set[str]:
    """Modules that a file imports when it is loaded; what stands in functions or under TYPE_CHECKING does not count."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    names = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in FILES}
    edges = {name: _files_imported(path) & names.keys() - {name} for name, path in names.items()}
    try:
        tuple(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"these files import each other: {' -> '.join(error.args[1])}")


def test_no_folder_has_more_files_than_one_can_look_through() -> None:
    for folder in {path.parent for path in FILES}:
        files = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
        assert len(files) <= MOST_FILES, f"{folder.relative_to(SOURCE)} has {len(files)} files: {files}"


COMPUTING = {"numpy", "scipy", "torch", "os", "io", "tempfile", "shutil"}
OPENING = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir"}


def _computes(path: Path) -> set[str]:
    """Imports for arithmetic or files, and calls that open or change a file, in one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {call.attr for call in calls if isinstance(call, ast.Attribute)}
    called |= {call.id for call in calls if isinstance(call, ast.Name)}
    return {name for name in found if name.partition(".")[0] in COMPUTING} | called & OPENING


@pytest.mark.parametrize("path", sorted((SOURCE / "cli").rglob("*.py")), ids=lambda path: path.name)
def test_the_command_line_computes_nothing_and_opens_no_file(path: Path) -> None:
    found = _computes(path)
    if path == SOURCE / "cli" / "__init__.py":
        # What starts it says in the environment how torch's threads wait, and does nothing else with `os`.
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"]
        assert {node.attr for node in used} == {"environ"}
        found -= {"os"}
    assert not found, "the command line reads options, calls the library and prints"


def test_the_check_itself_sees_arithmetic_and_files(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f(path):\n    import numpy as np\n    return np.sum(path.read_text(), open(path))\n")
    assert _computes(wrong) == {"numpy", "read_text", "open"}


def test_the_check_itself_sees_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("def f():\n    from sparroll.train import loop\n")
    assert _imports(wrong) == {"train"}
    assert not _allowed("train", "attention")
    assert _allowed("attention.selectors", "schedule")
    assert not _allowed("engines.base", "control")


def test_importing_the_light_parts_loads_torch_at_most() -> None:
    light = "sparroll, sparroll.schedule, sparroll.attention.decode.api, sparroll.mismatch, sparroll.corrections"
    light += ", sparroll.compression, sparroll.integrations.tail, sparroll.integrations.corrections"
    heavy = [
        "transformers",
        "accelerate",
        "peft",
        "vllm",
        "trl",
        "verl",
        "triton",
        "matplotlib",
        "typer",
        "pydantic",
        "rich",
    ]
    code = (
        f"import sys, torch; before = set(sys.modules); import {light}; "
        f"print(*(name for name in {heavy} if name in sys.modules and name not in before))"
    )
    environment = os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []
