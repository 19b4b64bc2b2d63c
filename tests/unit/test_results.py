"""The tables of README and docs hold what the committed records say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from sparroll import records

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_render", ROOT / "benchmarks" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_rendered_from_the_records(tables: ModuleType) -> None:
    marked = [
        path for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) if "<!-- table: " in path.read_text()
    ]
    assert sorted(marked) == sorted(tables.PAGES)
    for page in marked:
        text = page.read_text(encoding="utf-8")
        assert tables.render(text) == text, "run: python benchmarks/render.py"


def test_every_record_is_whole() -> None:
    paths = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    assert paths
    for path in paths:
        record = records.read(path)
        assert '"/' not in path.read_text(encoding="utf-8"), f"{path.name} has a path of one machine"
        assert {"date", "commit", "hardware", "versions", "config"} <= record.keys(), path.name
