"""Brings the trainer's weights to the engine, and checks on both sides that they arrived. A rollout sampled from other
weights than the trainer assumes would make every log-ratio wrong, and nothing else would notice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedModel

from sparroll.engines.base import Engine
from sparroll.types import Rollout

if TYPE_CHECKING:
    from sparroll.engines.adapter import Adapter

Holds = Literal["policy", "sampler"]
"""policy: the policy alone. sampler: the policy with the adapter merged in. A run without an adapter has only
"policy"."""


class EngineWeights:
    """Knows which weights the engine has, and of which step. Without an adapter, the engine's weight version is the
    step. With one, each load has the next number, and only this object knows which weights that are.

    dtype: the engine's; merged weights are rounded to it once.
    """

    def __init__(
        self, policy: PreTrainedModel, engine: Engine, adapter: Adapter | None = None, dtype: torch.dtype | None = None
    ):
        self.policy, self.engine, self.adapter, self.dtype = policy, engine, adapter, dtype
        self._holds: tuple[Holds, int] = ("policy", 0)
        """The engine starts from the initial model."""
        self._version = engine.weight_version

    def bring_policy(self, step: int) -> None:
        """Give the engine the policy of that step without the adapter, for dense rollouts."""
        self._bring("policy", step)

    def bring_sampler(self, step: int) -> None:
        """Give the engine the policy of that step with that step's adapter merged in, for sparse rollouts."""
        self._bring("policy" if self.adapter is None else "sampler", step)

    def _bring(self, what: Holds, step: int) -> None:
        check_version(self.engine, self._version)
        if self._holds != (what, step):
            if self.adapter is None:
                version = step
                self.engine.load_weights(self.policy, version)
            else:
                version = self._version + 1
                self.engine.load_weights(self.adapter.merged(self.dtype) if what == "sampler" else self.policy, version)
            self._holds, self._version = (what, step), version
            check_version(self.engine, self._version)

    def check_sampled(self, rollouts: Iterable[Rollout], step: int) -> None:
        """Assert that these were sampled with the weights that `bring_sampler` brought for that step."""
        assert self._holds == ("policy" if self.adapter is None else "sampler", step), f"the engine has {self._holds}"
        check_rollouts(rollouts, self._version)


def check_version(engine: Engine, version: int) -> None:
    assert engine.weight_version == version, f"the engine has weights {engine.weight_version}, the trainer {version}"


def check_rollouts(rollouts: Iterable[Rollout], version: int) -> None:
    for rollout in rollouts:
        assert rollout.weight_version == version, (
            f"rollout {rollout.prompt_index}/{rollout.sample_index} was sampled with weights {rollout.weight_version}, "
            f"the trainer has {version}"
        )
