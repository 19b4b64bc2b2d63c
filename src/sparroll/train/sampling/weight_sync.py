"""The trainer's weights on their way to the engine, and proof on both sides that they arrived. A rollout sampled from other
weights than the trainer believes would make every log-ratio wrong without an error anywhere else."""

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
"""The policy alone, or what samples: the policy with the adapter merged in. Without an adapter they are the same."""


class EngineWeights:
    """Which weights the engine has, as of which step. Without an adapter its version is the step; with one, each load has
    the next number, and only this object says what it stands for.

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
        """For whatever is dense: the policy of that step, without the adapter."""
        self._bring("policy", step)

    def bring_sampler(self, step: int) -> None:
        """For sparse rollouts: the policy of that step, with the adapter of that step merged in."""
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
        """That they were sampled with the weights that `bring_sampler` brought for that step."""
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
