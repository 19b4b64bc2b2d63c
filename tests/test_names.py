"""One name, one thing: a reader who sees a class or a callback type by name knows which one it is."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "sparroll"

ALLOWED: set[str] = set()
"""Names that two modules may give to different classes, each with a reason."""


def _classes(path: Path) -> set[str]:
    """Public classes that a file defines at its top level."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return {node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}


def _aliases(path: Path) -> set[str]:
    """Public type aliases of callables that a file defines: `OnProgress = Callable[...]`."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Callable["):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def test_no_two_modules_define_a_public_class_or_callback_of_one_name() -> None:
    owners: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for name in _classes(path) | _aliases(path):
            owners[name].append(str(path.relative_to(SOURCE)))
    twice = {name: where for name, where in owners.items() if len(where) > 1 and name not in ALLOWED}
    assert not twice, f"rename all but one, or all: {twice}"


def test_the_check_itself_sees_classes_and_callbacks(tmp_path: Path) -> None:
    written = tmp_path / "written.py"
    written.write_text("class Seen:\n    class Inner: ...\nclass _Hidden: ...\nOnSeen = Callable[[int], None]\nN = 1\n")
    assert _classes(written) == {"Seen"}
    assert _aliases(written) == {"OnSeen"}
