"""What vLLM's workers run inside verl: verl's own extension, which receives the weights, and ours, which sets the schedule
and counts. vLLM imports this file by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from sparroll.engines.vllm.worker import WorkerExtension

EXTENSION = "sparroll.integrations.verl.worker.VerlWorkerExtension"
BESIDE_WINDOWS = "sparroll.integrations.verl.worker.VerlLoading"
"""For an engine that checks its drafts, whose worker class has our extension already; vLLM refuses it a second time."""


class VerlLoading(vLLMColocateWorkerExtension):
    """verl's extension, which can load weights on a CPU, too. Mixed into vLLM's worker, so `self` is the worker."""

    def update_weights_from_ipc(self, *arguments: Any, **named: Any) -> None:
        self._received: list[tuple[str, Tensor]] = []
        super().update_weights_from_ipc(*arguments, **named)
        if self._received:
            self.sparroll_load_weights(self._received)
        self._received = []

    def _update_weights(self, weights: list[tuple[str, Tensor]], *arguments: Any, **named: Any) -> None:
        if self.device.type == "cpu":
            # vLLM packs the weights of its layers for the CPU, so they must all be loaded anew, at once. The tensors lie
            # in a buffer that the next ones overwrite.
            self._received += [(name, tensor.clone()) for name, tensor in weights]
        else:
            super()._update_weights(weights, *arguments, **named)


class VerlWorkerExtension(VerlLoading, WorkerExtension):
    """For an engine without checks."""
