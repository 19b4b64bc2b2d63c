"""Which model a checkpoint began as, and that a schedule for the one fits the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparroll.cli import common
from sparroll.errors import UserError
from sparroll.models import trained_from


def checkpoint(folder: Path, began: object) -> str:
    (folder / "model").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": {"name": began}}))
    return str(folder / "model")


def test_a_checkpoint_is_traced_to_where_its_runs_began(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "one" / "step-000002", "Qwen/Qwen3-1.7B")
    second = checkpoint(tmp_path / "two" / "step-000009", first)
    assert trained_from(first) == trained_from(second) == trained_from(f"{second}/") == "Qwen/Qwen3-1.7B"


def test_anything_else_keeps_its_name(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path / "plain", None)
    (tmp_path / "plain" / "weights").mkdir()
    loop = checkpoint(tmp_path / "loop", str(tmp_path / "loop" / "model"))
    for name in (
        "Qwen/Qwen3-1.7B",
        "model",
        plain,
        str(tmp_path / "plain" / "weights"),
        str(tmp_path / "absent"),
        loop,
    ):
        assert trained_from(name) == name


def test_a_schedule_fits_the_checkpoints_of_its_model_and_no_others(tmp_path: Path) -> None:
    fits, other = (checkpoint(tmp_path / name, f"Qwen/{name}") for name in ("Qwen3-1.7B", "Qwen3-4B"))
    schedule = common.load_schedule("qwen3-1.7b-0.86", None, fits)
    assert schedule is not None and schedule.name == "qwen3-1.7b-0.86"
    with pytest.raises(UserError, match="was made for Qwen/Qwen3-1.7B, not for Qwen/Qwen3-4B"):
        common.load_schedule("qwen3-1.7b-0.86", None, other)
