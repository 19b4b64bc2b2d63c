"""What every engine offers, and how it says which attention really ran. No engine in here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from sparroll.compression import Compression
from sparroll.progress import OnProgress
from sparroll.schedule import Schedule
from sparroll.types import Rollout


@dataclass
class LayerReport:
    """What one layer did, counted in request-steps (a decode step of a batch of 8 counts 8)."""

    dense_steps: int = 0
    sparse_steps: int = 0
    """Steps that read a part of the context, chosen or left by eviction. A context within its budget is read whole and
    counts as dense."""
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
    compression_name: str | None = None
    peak_kv_bytes: int = 0
    """Most bytes that the tensors of the KV cache had at a time, measured; HFEngine only."""
    peak_dense_kv_bytes: int = 0
    """The same for dense rollouts of these requests: what a cache without eviction and index would have grown to."""
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def kv_saved_share(self) -> float:
        """1 - peak bytes / those of a dense cache; below 0 where an index comes on top, 0 where nothing was measured."""
        return 1 - self.peak_kv_bytes / self.peak_dense_kv_bytes if self.peak_dense_kv_bytes else 0.0

    @property
    def kv_read_share(self) -> float:
        """Tokens attended / tokens in context over all layers and decode steps."""
        read = sum(layer.read_tokens for layer in self.layers)
        context = sum(layer.context_tokens for layer in self.layers)
        return read / context if context else 1.0

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        layers = [dataclasses.asdict(layer) | {"kv_read_share": layer.kv_read_share} for layer in self.layers]
        shares = {"kv_read_share": self.kv_read_share, "kv_saved_share": self.kv_saved_share}
        return dataclasses.asdict(self) | {"layers": layers} | shares

    @staticmethod
    def from_table(table: dict[str, Any]) -> EngineReport:
        """The report that `table` wrote."""
        layers = [LayerReport(**_without_share(layer)) for layer in table["layers"]]
        return EngineReport(**_without_share(table) | {"layers": layers})


def _without_share(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in ("kv_read_share", "kv_saved_share")}


def samples_densely(engine: Engine) -> bool:
    """Whether its rollouts come from the dense policy: no schedule, and nothing that drops tokens."""
    return engine.schedule is None and engine.compression is None


class Engine(Protocol):
    """Samples rollouts from a model under a schedule or a compression (neither = dense attention)."""

    kind: str
    """Its name: "hf", "vllm"."""
    schedule: Schedule | None
    compression: Compression | None
    """What decides which tokens leave the cache; None where every token stays. Excludes a schedule."""
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
        on_progress: OnProgress | None = None,
    ) -> list[Rollout]:
        """`n` rollouts per prompt, in the prompts' order; the same seed gives the same rollouts in any batch.

        seed: one for all, or one per request, prompt by prompt.
        on_progress: called with (rollouts finished, rollouts in all) after each rollout that ends.
        """
        ...

    def load_weights(self, weights: nn.Module | dict[str, Tensor], version: int) -> None:
        """Take over the policy's weights; `version` must rise, and is stamped on every rollout."""
        ...

    def set_schedule(self, schedule: Schedule | str | None) -> None:
        """From the next `generate` on; None is dense, unless a compression is set."""
        ...

    def set_compression(self, compression: Compression | str | None) -> None:
        """From the next `generate` on; None keeps every token. UserError where the engine cannot evict."""
        ...

    def report(self) -> EngineReport:
        """Which attention ran, layer by layer."""
        ...

    def reset_report(self) -> None:
        """Start counting anew."""
        ...
