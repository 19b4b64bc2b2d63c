"""A run trains no adapter under a schedule with a remainder, and says so before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparroll.attention.selectors import PageMean, Remainder
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train.config.file import config_from
from sparroll.train.schedules import starting_schedule


def test_an_adapter_refuses_a_schedule_with_a_remainder(tmp_path: Path) -> None:
    path = Schedule.fixed(128, PageMean(remainder=Remainder(16)), dense_layers=(0,)).save(tmp_path / "kept.toml")
    table = {"attention": {"kind": "schedule", "name": str(path)}, "guard": {"action": "off"}}
    assert starting_schedule(config_from(table)) is not None
    with pytest.raises(UserError, match="'kept' has a remainder, and .distill. trains an adapter"):
        starting_schedule(config_from(table | {"distill": {"rank": 4}}))
