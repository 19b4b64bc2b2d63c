"""The trainer's weights on their way to the engine, and proof on both sides that they arrived. A rollout sampled from other
weights than the trainer believes would make every log-ratio wrong without an error anywhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from sparroll.engines.base import Engine
from sparroll.types import Rollout


def push(policy: nn.Module, engine: Engine, version: int) -> None:
    """Bring the engine to the trainer's version; nothing moves when it is there already."""
    if engine.weight_version != version:
        engine.load_weights(policy, version)
    check_engine(engine, version)


def park(engine: Any, level: int) -> None:
    """Let the engine give up GPU memory until `push` wakes it; level 0 leaves it as it is."""
    if level:
        engine.sleep(level)


def check_engine(engine: Engine, version: int) -> None:
    assert engine.weight_version == version, f"the engine has weights {engine.weight_version}, the trainer {version}"


def check_rollouts(rollouts: Iterable[Rollout], version: int) -> None:
    for rollout in rollouts:
        assert rollout.weight_version == version, (
            f"rollout {rollout.prompt_index}/{rollout.sample_index} was sampled with weights {rollout.weight_version}, "
            f"the trainer has {version}"
        )
