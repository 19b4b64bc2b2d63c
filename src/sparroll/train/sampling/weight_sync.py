"""Brings the trainer's weights to the engine, and checks on both sides that they arrived. A rollout sampled from other
weights than the trainer assumes would make every log-ratio wrong, and nothing else would notice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparroll.engines.base import Engine
from sparroll.types import Rollout

Holds = Literal["policy", "sampler"]
"""policy: the newest policy alone. sampler: other weights, which sample in its place. A run without such weights has only
"policy"."""


class SamplerWeights(Protocol):
    """What samples in the policy's place, such as the policy with an adapter merged in, or an older version of it."""

    def merged(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The state_dict for the engine, as of now. dtype: that of tensors that are computed for it."""


class EngineWeights:
    """Knows which weights the engine has, and of which step. Where the policy itself samples, the engine's weight version
    is the step. Where others do, each load has the next number, and only this object knows which weights that are.

    sampler: what samples in the policy's place; None: the policy.  dtype: the engine's; merged weights are rounded to it
    once.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        engine: Engine,
        sampler: SamplerWeights | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.policy, self.engine, self.sampler, self.dtype = policy, engine, sampler, dtype
        self._holds: tuple[Holds, int] = ("policy", 0)
        """The engine starts from the initial model."""
        self._version = engine.weight_version

    def bring_policy(self, step: int) -> None:
        """Give the engine the policy of that step itself, for dense rollouts."""
        self._bring("policy", step)

    def bring_sampler(self, step: int) -> None:
        """Give the engine the weights that sample in that step."""
        self._bring("policy" if self.sampler is None else "sampler", step)

    def _bring(self, what: Holds, step: int) -> None:
        check_version(self.engine, self._version)
        if self._holds != (what, step):
            if self.sampler is None:
                version = step
                self.engine.load_weights(self.policy, version)
            else:
                version = self._version + 1
                self.engine.load_weights(self.sampler.merged(self.dtype) if what == "sampler" else self.policy, version)
            self._holds, self._version = (what, step), version
            check_version(self.engine, self._version)

    def check_sampled(self, rollouts: Iterable[Rollout], step: int) -> None:
        """Assert that these were sampled with the weights that `bring_sampler` brought for that step."""
        assert self._holds == ("policy" if self.sampler is None else "sampler", step), f"the engine has {self._holds}"
        check_rollouts(rollouts, self._version)


def check_version(engine: Engine, version: int) -> None:
    assert engine.weight_version == version, f"the engine has weights {engine.weight_version}, the trainer {version}"


def check_rollouts(rollouts: Iterable[Rollout], version: int) -> None:
    for rollout in rollouts:
        assert rollout.weight_version == version, (
            f"rollout {rollout.prompt_index}/{rollout.sample_index} was sampled with weights {rollout.weight_version}, "
            f"the trainer has {version}"
        )
