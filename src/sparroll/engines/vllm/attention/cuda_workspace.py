"""Device memory that all sparse layers of a worker share, and a stream for what runs beside a step's other kernels."""

# R rows that decode (padding included), H kv heads, G query heads per kv head, U units, N chosen units, P blocks,
# B tokens per block, S units per block, D head dim, W index row width, K peaks of scores, L layers of the model;
# of log_weights, N groups of a remainder

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparroll.attention.decode.layers_apart import layers_apart
from sparroll.attention.decode.workspace import LayerPlans, StepWorkspace, log_weights_for, peaks_for
from sparroll.attention.selectors.base import Selector
from sparroll.engines.vllm import compat


@dataclass
class Workspace:
    """Device memory that all sparse layers share. Its contents are needed only within a layer, except for what the first one
    writes anew in each step, so an engine may wake from sleep with other contents. What `apart` holds is allocated at the
    first step, and sleep does not touch it."""

    scores_RHU: Tensor
    peaks_RHK: Tensor | None
    log_weights_RHGN: Tensor | None
    unit_ids_RHN: Tensor
    pages_RHN: Tensor
    plans: LayerPlans
    kv_budget_tokens_LR: Tensor
    read_tokens_LRH: Tensor
    starts: Tensor
    """0, 1, 2, ...: where the one query of each (request, head) starts."""
    beside: Beside
    apart: LayersApart | None = None
    """Known once a step ran over the KV cache."""
    only_decodes: bool = False
    """Whether each row of the step whose metadata was built last has at most one new token."""

    @staticmethod
    def allocate(
        rows: int,
        heads: int,
        group: int,
        dim: int,
        most_units: int,
        dtype: torch.dtype,
        selector: Selector,
        layers: int,
        device: torch.device,
        short_lists: bool = False,
    ) -> Workspace:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # Rows of whole 16 bytes are read 16 bytes at a time.
        padded = torch.zeros(rows, heads, -(-most_units // 4) * 4, dtype=torch.float32, device=device)
        return Workspace(
            scores_RHU=padded[..., :most_units],
            peaks_RHK=peaks_for(selector, rows, heads, most_units, device),
            log_weights_RHGN=log_weights_for(selector, rows, heads, group, most_units, device),
            unit_ids_RHN=integers(rows, heads, most_units),
            pages_RHN=integers(rows, heads, most_units),
            plans=LayerPlans.of(
                StepWorkspace.allocate(
                    rows, group, dim, dtype, selector, device, kv_heads=heads, short_lists=short_lists
                ),
                layers,
            ),
            kv_budget_tokens_LR=integers(layers, rows),
            read_tokens_LRH=integers(layers, rows, heads),
            starts=integers(rows * heads + 1),
            beside=Beside(device),
        )


class Beside:
    """A stream of its own for kernels that run beside those which are launched after them, in CUDA graphs, too."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def what_follows(self) -> Iterator[None]:
        """Kernels launched in here run after all that was launched before, and beside what is launched later."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is launched from here on runs after them."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


@dataclass(frozen=True)
class LayersApart:
    """How far apart the K caches and the index rows of this worker's sparse layers lie, and where they lie. No cache is
    held: vLLM measures memory with one and then allocates another."""

    addresses: list[int]
    bytes_2L: Tensor

    @staticmethod
    def of(layers: list[Any]) -> LayersApart:
        return LayersApart(_addresses(layers), layers_apart([keys_and_index(layer) for layer in layers]))

    def holds(self, layers: list[Any]) -> bool:
        """Whether all caches still lie there."""
        return self.addresses == _addresses(layers)


def _addresses(layers: list[Any]) -> list[int]:
    return [held.kv_cache.data_ptr() for layer in layers for held in (layer, layer.impl.index)]


def keys_and_index(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys [P, B, H, D] and index rows [P, S, H, W] of a layer."""
    rows_PSHW = layer.impl.index.rows_PSHW
    assert rows_PSHW is not None, "vLLM gave memory to some layers of the index only"
    return compat.keys_and_values(layer.kv_cache, layer.impl.head_size)[0], rows_PSHW
