"""What every engine offers, and how it says which attention really ran. No engine in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from sparroll.schedule import Schedule
from sparroll.types import Rollout

Progress = Callable[[int, int], None]
"""Called with (rollouts finished, rollouts in all), after each rollout that ends."""


@dataclass
class LayerReport:
    """What one layer did, counted in request-steps (a decode step of a batch of 8 counts 8)."""

    dense_steps: int = 0
    sparse_steps: int = 0
    """Steps that read a part of the context. A context within its budget is read whole and counts as dense."""
    context_tokens: int = 0
    """Sum of the contexts' lengths over all steps."""
    read_tokens: int = 0
    """Sum of the tokens attended."""
    index_read_share: float = 0.0
    """Bytes of index rows that scoring reads, over the bytes of all K and V of the context; 0 in a dense layer."""

    @property
    def kv_read_share(self) -> float:
        """Tokens attended / tokens in context; 1 when nothing ran."""
        return self.read_tokens / self.context_tokens if self.context_tokens else 1.0


@dataclass
class EngineReport:
    """What ran since the engine was made or `reset_report` was called."""

    engine: str
    model: str
    schedule_name: str | None
    weight_version: int
    prefill_tokens: int = 0
    generated_tokens: int = 0
    wall_seconds: float = 0.0
    preemptions: int = 0
    """How often a request lost its cache and was computed again. Only vLLM does that."""
    recomputed_tokens: int = 0
    """Response tokens that went through prefill after a preemption, so densely; among `prefill_tokens`."""
    resumed_tokens: int = 0
    """Response tokens sampled at the end of such a prefill: no layer counts a step for them."""
    resumed_sparse_tokens: int = 0
    """Of those, the ones for which the schedule reads a part of the context."""
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def kv_read_share(self) -> float:
        """Tokens attended / tokens in context over all layers and decode steps."""
        read = sum(layer.read_tokens for layer in self.layers)
        context = sum(layer.context_tokens for layer in self.layers)
        return read / context if context else 1.0

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        layers = [dataclasses.asdict(layer) | {"kv_read_share": layer.kv_read_share} for layer in self.layers]
        return dataclasses.asdict(self) | {"layers": layers, "kv_read_share": self.kv_read_share}

    @staticmethod
    def from_table(table: dict[str, Any]) -> EngineReport:
        """The report that `table` wrote."""
        layers = [LayerReport(**_without_share(layer)) for layer in table["layers"]]
        return EngineReport(**_without_share(table) | {"layers": layers})


def _without_share(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != "kv_read_share"}


class Engine(Protocol):
    """Samples rollouts from a model under a schedule (None = dense attention)."""

    kind: str
    """Its name: "hf", "vllm"."""
    schedule: Schedule | None
    weight_version: int

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        n: int = 1,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        stop_ids: Sequence[int] | None = None,
        seed: int | Sequence[int] = 0,
        top_k: int = 0,
        on_progress: Progress | None = None,
    ) -> list[Rollout]:
        """`n` rollouts per prompt, in the prompts' order; the same seed gives the same rollouts in any batch.

        seed: one for all, or one per request, prompt by prompt.
        """
        ...

    def load_weights(self, weights: nn.Module | dict[str, Tensor], version: int) -> None:
        """Take over the policy's weights; `version` must rise, and is stamped on every rollout."""
        ...

    def set_schedule(self, schedule: Schedule | str | None) -> None:
        """From the next `generate` on; None is dense."""
        ...

    def report(self) -> EngineReport:
        """Which attention ran, layer by layer."""
        ...

    def reset_report(self) -> None:
        """Start counting anew."""
        ...
