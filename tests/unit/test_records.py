"""Records: complete, plain, and readable back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from sparroll import records
from sparroll.errors import UserError


def test_a_record_says_what_code_machine_and_seed_made_it(tmp_path: Path) -> None:
    path = records.write(tmp_path / "r.json", "profile", {"q05": 0.5}, config={"n": 2}, seed=7, wall_seconds=1.23456)
    record = json.loads(path.read_text())
    assert record["config"] == {"n": 2}
    assert record["seed"] == 7
    assert record["wall_seconds"] == 1.235
    assert record["results"] == {"q05": 0.5}
    assert set(record["commit"]) == {"id", "dirty", "said_by"}
    assert record["versions"]["torch"] == torch.__version__
    assert record["hardware"]["cores"] >= 1
    assert record["date"].endswith("+00:00")
    assert records.read(path, "profile") == record


@dataclass
class _Row:
    low: float
    where: Path
    ids: torch.Tensor


def test_plain_turns_dataclasses_tensors_and_nan_into_json() -> None:
    row = _Row(float("nan"), Path("a/b"), torch.tensor([1, 2]))
    assert records.plain({"row": row, "xs": (np.float64(0.5),)}) == {
        "row": {"low": None, "where": "a/b", "ids": [1, 2]},
        "xs": [0.5],
    }


def test_reading_anything_else_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        records.read(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"format": 1,')
    with pytest.raises(UserError, match="not valid JSON"):
        records.read(tmp_path / "half.json")
    (tmp_path / "other.json").write_text("[1, 2]")
    with pytest.raises(UserError, match="not a sparroll record"):
        records.read(tmp_path / "other.json")
    (tmp_path / "foreign.json").write_text('{"format": 1, "results": {}}')
    with pytest.raises(UserError, match="of kind None, not 'plan'"):
        records.read(tmp_path / "foreign.json", "plan")
    path = records.write(tmp_path / "r.json", "profile", {})
    with pytest.raises(UserError, match="of kind 'profile', not 'plan'"):
        records.read(path, "plan")


def test_made_by_is_four_short_strings() -> None:
    made_by = records.made_by("sparroll calibrate")
    assert list(made_by) == ["command", "commit", "hardware", "date"]
    assert all(isinstance(value, str) and value for value in made_by.values())
