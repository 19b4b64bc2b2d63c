"""recipes/mismatch-study for tests: importing this puts its folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[1] / "recipes" / "mismatch-study"
sys.path.insert(0, str(RECIPE))

import table_sums  # noqa: E402


@pytest.fixture(autouse=True)
def registered() -> None:
    """The study's task is one of sparroll's."""
    table_sums.register()
