"""What one decode step reads under a schedule, request by request, in token-equivalents of one layer's K and V."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape
from sparroll.schedule import Schedule


@dataclass(frozen=True)
class StepReads:
    """What a decode step reads and computes, in token-equivalents of one layer's K and V per request."""

    shape: ModelShape
    schedule: Schedule
    element_bytes: int

    @property
    def token_bytes(self) -> float:
        return 2 * self.shape.kv_heads * self.shape.head_dim * self.element_bytes

    @property
    def dense_layers(self) -> int:
        return len(self.schedule.dense_layers)

    @property
    def index_share(self) -> float:
        """Bytes of the index per byte of K and V."""
        head_dim = self.shape.head_dim
        return self.schedule.selector.index_bytes_per_token(head_dim) / (2 * head_dim * self.element_bytes)

    def attended(self, contexts: np.ndarray) -> np.ndarray:
        """Tokens attended in a sparse layer. At a length between two whole ones, as many tokens are left out as at the
        longer one."""
        whole = np.ceil(contexts).astype(np.int64)
        return contexts - (whole - self.schedule.read_tokens(whole))

    def index(self, contexts: np.ndarray) -> np.ndarray:
        """Index reads; attended + index is at most the context, and none within the budget."""
        return np.minimum(contexts - self.attended(contexts), contexts * self.index_share)

    def layer_sums(self, mix: LengthMix) -> tuple[float, float]:
        """Expected tokens attended and index token-equivalents of one request in one step, over all layers."""
        sparse_layers = self.shape.layers - self.dense_layers
        attended = self.dense_layers * mix.mean_tokens + sparse_layers * mix.mean_of(self.attended)
        return attended, sparse_layers * mix.mean_of(self.index)

    def selecting_layers(self, mix: LengthMix) -> int:
        """Layers that select for at least one length of the mix."""
        partly = bool((self.attended(mix.tokens) < mix.tokens).any())
        return self.shape.layers - self.dense_layers if partly else 0

    def kv_read_share(self, mix: LengthMix) -> float:
        """Tokens attended / tokens in context, all layers together."""
        return self.layer_sums(mix)[0] / (self.shape.layers * mix.mean_tokens)
