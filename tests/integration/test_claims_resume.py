"""A cell of recipes/claims that was killed and called again has the result of one that was not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.deaths import run_script
from integration.killed_claims import MOMENTS, one_cell
from sparroll import records


def without_seconds(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_seconds(each) for name, each in value.items() if "seconds" not in name}
    return [without_seconds(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed-claims")
    run_script("killed_claims.py", str(folder))
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cell_killed_at_any_moment_goes_on_to_the_same_result(
    moment: str, killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(killed / moment)
    assert not list(Path("claims/cells").rglob("*.json"))
    path = one_cell()
    straight = records.read(killed / "run" / path)["results"]
    assert without_seconds(records.read(path)["results"]) == without_seconds(straight)
    assert not Path("claims/work/over-iterations", path.stem).exists()
