"""What one decode step reads under a schedule, for each request. The unit is one token's K and V in one layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from sparroll.plan.kernel_times import LayerLoad
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape
from sparroll.schedule import Schedule


@dataclass(frozen=True)
class StepReads:
    """What a decode step reads per request. Counts are in token-equivalents: the K and V of one token in one layer."""

    shape: ModelShape
    schedule: Schedule
    element_bytes: int

    @property
    def token_bytes(self) -> float:
        return 2 * self.shape.kv_heads * self.shape.head_dim * self.element_bytes

    @property
    def index_share(self) -> float:
        """Bytes that are read of the index per byte of K and V."""
        head_dim = self.shape.head_dim
        return self.schedule.selector.index_read_bytes_per_token(head_dim) / (2 * head_dim * self.element_bytes)

    def attended(self, schedule: Schedule, contexts: np.ndarray) -> np.ndarray:
        """Tokens attended to at each context in a sparse layer that has this schedule. A length between two whole ones
        leaves out as many tokens as the longer of them."""
        whole = np.ceil(contexts).astype(np.int64)
        return contexts - (whole - schedule.read_tokens(whole))

    def index(self, schedule: Schedule, contexts: np.ndarray) -> np.ndarray:
        """Reads of the index at each context in such a layer. Attended tokens and index together are at most the
        context, so a context within the budget reads no index."""
        return np.minimum(contexts - self.attended(schedule, contexts), contexts * self.index_share)

    def layer_sums(self, mix: LengthMix) -> tuple[float, float]:
        """(tokens attended to, reads of the index) that one request is expected to need in a step, summed over all
        layers."""
        parts = self.schedule.parts(self.shape.layers)
        attended = (self.shape.layers - sum(len(layers) for layers, _ in parts)) * mix.mean_tokens
        index = 0.0
        for layers, schedule in parts:
            attended += len(layers) * mix.mean_of(partial(self.attended, schedule))
            index += len(layers) * mix.mean_of(partial(self.index, schedule))
        return attended, index

    def load(self, schedule: Schedule, mix: LengthMix, batch: int, dense_share: float = 0.0) -> LayerLoad:
        """What a sparse layer with this schedule has to do in a step of a batch. dense_share: of the requests, those that
        read all of their context."""
        few, scored = mix.mean_of(partial(self.attended, schedule)), mix.mean_of(partial(self.index, schedule))
        longest = math.ceil(mix.longest_tokens)
        unit = schedule.selector.unit_tokens
        chooses = schedule.read_tokens(longest) < longest
        layer_bytes = batch * self.token_bytes
        return LayerLoad(
            index_bytes=layer_bytes * (1 - dense_share) * scored,
            kv_bytes=layer_bytes * (dense_share * mix.mean_tokens + (1 - dense_share) * few),
            unread_bytes=layer_bytes * (1 - dense_share) * (mix.mean_tokens - few),
            longest_tokens=mix.longest_tokens,
            longest_units=longest / unit if chooses else 0.0,
            wanted_units=schedule.kv_budget_tokens(longest) / unit,
            programs=batch * self.shape.kv_heads,
            mean_share=mix.mean_tokens / mix.longest_tokens,
            gqa_ratio=self.shape.gqa_ratio,
        )

    def selecting_layers(self, mix: LengthMix) -> int:
        """How many layers select for at least one length of the mix."""
        return sum(
            len(layers)
            for layers, schedule in self.schedule.parts(self.shape.layers)
            if bool((self.attended(schedule, mix.tokens) < mix.tokens).any())
        )

    def kv_read_share(self, mix: LengthMix) -> float:
        """Tokens attended / tokens in context, over all layers."""
        return self.layer_sums(mix)[0] / (self.shape.layers * mix.mean_tokens)
