"""An engine's report on the attention that really ran, layer by layer. This is plain data; the engines do the
counting."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from sparroll.types import Checks


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
    resumed_sparse_tokens: int = 0
    """Of the report's `resumed_tokens`, those for which the schedule would have let this layer read only a part of the
    context."""
    extra_sparse_tokens: int = 0
    """The same of the tokens that checks gave behind whole windows (`checks.extra_tokens`)."""
    short_dense_steps: int = 0
    """Those of the dense steps that the schedule would have let read a part, and that read everything because the whole
    step was short (`short_step_tokens`). Only vLLM has such."""
    index_read_share: float = 0.0
    """Bytes that a step reads of the index and of a remainder's groups, divided by the bytes of all K and V of the context;
    0 in a dense layer."""

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
    """Response tokens that were prefilled, and so read densely, after a preemption. `prefill_tokens` includes them."""
    resumed_tokens: int = 0
    """Response tokens that were sampled at the end of such a prefill. No layer counts a step for them."""
    dense_request_steps: int = 0
    """Decode steps of requests that read everything because `generate(dense=...)` asked for it, under a schedule or a
    compression. Each layer has them among its `dense_steps`."""
    dense_request_context_tokens: int = 0
    """Sum of the contexts' lengths over these steps. Each layer has it in `context_tokens` and `read_tokens`."""
    compression_name: str | None = None
    checks: Checks = field(default_factory=Checks)
    """What the dense checks of drafted tokens did. A check is no decode step; a drafted token is one, also if it is
    taken back."""
    check_read_tokens: int = 0
    """Tokens of the cache that the checks read in each layer; a window reads its context once."""
    taken_back_context_tokens: int = 0
    """Sum of the contexts' lengths over decode steps whose position was drafted again later."""
    extra_context_tokens: int = 0
    """The same sum over the tokens that no decode step gave, because the dense policy gave them behind a window
    (`checks.extra_tokens`)."""
    check_seconds: float = 0.0
    peak_kv_bytes: int = 0
    """Largest number of bytes that the tensors of the KV cache had at any time. Only HFEngine measures it."""
    peak_dense_kv_bytes: int = 0
    """The same for dense rollouts of these requests: the size that a cache without eviction and index would have grown
    to. Under a compression, dense requests have a cache of their own after that of the others: both peaks are then the
    larger one of the two."""
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def kv_saved_share(self) -> float:
        """1 - peak bytes / peak bytes of a dense cache. It is below 0 where an index is added to a whole cache, and 0
        where nothing was measured."""
        return 1 - self.peak_kv_bytes / self.peak_dense_kv_bytes if self.peak_dense_kv_bytes else 0.0

    @property
    def kv_read_share(self) -> float:
        """Tokens attended / tokens in context over all layers and decode steps. Where drafts are checked: tokens that
        drafts and checks read / tokens that dense decoding of the same responses reads."""
        read, context = self.read_and_context_tokens
        return read / context if context else 1.0

    @property
    def read_and_context_tokens(self) -> tuple[int, int]:
        """The two sums of `kv_read_share`, which processes can add up."""
        read = sum(layer.read_tokens + self.check_read_tokens for layer in self.layers)
        net = self.extra_context_tokens - self.taken_back_context_tokens
        return read, sum(layer.context_tokens + net for layer in self.layers)

    @property
    def sparse_read_and_context_tokens(self) -> tuple[int, int]:
        """The same two sums without dense requests, which read all of their context in every layer. Nothing where drafts
        were checked: those of dense requests were, too, and what that read is not known apart."""
        if self.checks.windows:
            return 0, 0
        read, context = self.read_and_context_tokens
        dense = self.dense_request_context_tokens * len(self.layers)
        return read - dense, context - dense

    def since(self, before: EngineReport) -> EngineReport:
        """What ran after `before`, an earlier report of the same engine. Peaks and shares stay those of the whole
        time."""
        # An engine names its layers once they have run.
        layers = before.layers or [LayerReport()] * len(self.layers)
        return dataclasses.replace(
            self,
            **_counted(before, self),
            checks=Checks(**_counted(before.checks, self.checks)),
            layers=[
                dataclasses.replace(now, **_counted(was, now)) for was, now in zip(layers, self.layers, strict=True)
            ],
        )

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        layers = [dataclasses.asdict(layer) | {"kv_read_share": layer.kv_read_share} for layer in self.layers]
        shares = {"kv_read_share": self.kv_read_share, "kv_saved_share": self.kv_saved_share}
        return dataclasses.asdict(self) | {"layers": layers} | shares

    @staticmethod
    def from_table(table: dict[str, Any]) -> EngineReport:
        """The report that `table` wrote."""
        layers = [LayerReport(**_without_share(layer)) for layer in table["layers"]]
        return EngineReport(**_without_share(table) | {"layers": layers, "checks": Checks(**table["checks"])})


_NO_COUNTERS = {"weight_version", "peak_kv_bytes", "peak_dense_kv_bytes", "index_read_share"}
"""Numbers that do not add up over time."""


def _counted(before: Any, now: Any) -> dict[str, Any]:
    """By how much each counter of `now` has grown."""
    found = {each.name: getattr(now, each.name) for each in dataclasses.fields(now) if each.name not in _NO_COUNTERS}
    return {name: value - getattr(before, name) for name, value in found.items() if isinstance(value, (int, float))}


def _without_share(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name not in ("kv_read_share", "kv_saved_share")}
