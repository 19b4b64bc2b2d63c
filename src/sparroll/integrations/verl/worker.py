"""What vLLM's workers run inside verl beside our own worker: verl's extension, which receives the weights. vLLM imports this
file by name."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

EXTENSION = "sparroll.integrations.verl.worker.VerlLoading"
"""Our worker class has our own extension already."""


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
