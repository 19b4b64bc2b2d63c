"""The separate trainer without hybrid replicas gets past the line of its own log at which verl 0.9.1 ends."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from sparroll.integrations.verl.trainers import SparrollSeparateAsync

LOG = logging.getLogger(trainer_separate_async.__name__)


def says_it(_: Any) -> None:
    LOG.info("rollout served by standalone replicas only", flush=True)  # type: ignore[call-arg]


def test_verl_still_has_the_line_and_ends_there() -> None:
    assert "flush=True" in inspect.getsource(PPOTrainerSeparateAsync._setup), "SparrollSeparateAsync._setup can go"
    with pytest.raises(TypeError, match="flush"):
        says_it(None)


def test_the_line_is_left_out_and_the_log_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSeparateAsync, "_setup", says_it)
    level = LOG.level
    SparrollSeparateAsync._setup(object.__new__(SparrollSeparateAsync))
    assert LOG.level == level == logging.INFO
