"""Seconds of the dense pass that checks a window of drafts of each request, from the shape of the model and the rates of
the device. Arithmetic, and three constants that were fitted to records.

A pass has three parts, one after the other:

    attention   reads the cache of each request once, and computes whole tiles of query rows, as many at a time as the
                device has processors
    layers      read their weights once, and take 2 FLOPs for each parameter and row
    logits      both distributions of each row, and the rule over them: memory traffic in proportion to the vocabulary

Attention takes the larger of its reads at the device's bandwidth and its arithmetic at ATTENTION_SHARE of its rate, and
the layers likewise at LAYERS_SHARE. `python benchmarks/check_times.py` fits the constants again and prints how far off
each record is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparroll.plan.hardware import Hardware
from sparroll.plan.model_shape import ModelShape

TILE_ROWS = 128
"""Query rows of a tile of FlashAttention 3. All query heads of a KV head share a tile, so with two of them it holds 64
tokens of a window. An incomplete tile takes as long as a whole one, and a tile is one processor's."""
ATTENTION_SHARE = 0.526
"""Of the data sheet's FLOPs per second, that attention reaches in a check."""
LAYERS_SHARE = 0.793
"""The same for everything but attention."""
LOGIT_BYTES = 113.0
"""Memory traffic for each row and entry of the vocabulary: some 28 passes over float32 numbers, at the device's bandwidth.
It also stands for what the host does meanwhile."""
SCORING_SHARE, SCORING_LOGIT_BYTES = 0.56, 376.0
"""Of a trainer's scoring pass: the share that all its arithmetic reaches, and its logits, which PyTorch's operators take."""


@dataclass(frozen=True)
class CheckTime:
    """Where the seconds of a check go."""

    attention_seconds: float
    layers_seconds: float
    logits_seconds: float

    @property
    def seconds(self) -> float:
        return self.attention_seconds + self.layers_seconds + self.logits_seconds


def check_time(
    shape: ModelShape,
    device: Hardware,
    *,
    batch: int,
    mean_context_tokens: float,
    window_tokens: int,
    element_bytes: int = 2,
    attention_share: float = ATTENTION_SHARE,
    layers_share: float = LAYERS_SHARE,
    logit_bytes: float = LOGIT_BYTES,
) -> CheckTime:
    """A check of one window of each of `batch` requests, on its own.

    window_tokens: rows of each request, of which a window has as many as tokens: the token before it and its drafts.
    """
    rows, bandwidth = batch * window_tokens, device.bandwidth_bytes_per_second
    cache_bytes = batch * mean_context_tokens * 2 * shape.kv_width * element_bytes
    tiles = batch * shape.kv_heads * math.ceil(window_tokens * shape.gqa_ratio / TILE_ROWS)
    # The last tiles of a check leave processors idle. With 136 tiles on 132 of them it takes as long as with 264.
    tiles = math.ceil(tiles / device.processors) * device.processors
    tile_flops = TILE_ROWS / shape.query_heads * attention_flops(shape, mean_context_tokens)
    attention = tiles * tile_flops / (attention_share * device.flops_per_second)
    layers = rows * layer_flops(shape) / (layers_share * device.flops_per_second)
    return CheckTime(
        attention_seconds=max(cache_bytes / bandwidth, attention),
        layers_seconds=max(shape.parameters_used(rows) * element_bytes / bandwidth, layers),
        logits_seconds=rows * shape.vocabulary * logit_bytes / bandwidth,
    )


def scoring_seconds(shape: ModelShape, device: Hardware, batch: int, mean_context_tokens: float) -> float:
    """What a trainer's own scoring pass takes for one token of each request, prompts left out. It has the same arithmetic
    as a check, in passes so long that every tile is whole, and logits without a kernel."""
    flops = attention_flops(shape, mean_context_tokens) + layer_flops(shape)
    logits = shape.vocabulary * SCORING_LOGIT_BYTES / device.bandwidth_bytes_per_second
    return batch * (flops / (SCORING_SHARE * device.flops_per_second) + logits)


def attention_flops(shape: ModelShape, context_tokens: float) -> float:
    """Q.K and A.V of one token in all layers: 4 FLOPs per query head, channel and token that it attends to."""
    return 4 * shape.layers * shape.query_heads * shape.head_dim * context_tokens


def layer_flops(shape: ModelShape) -> float:
    """Of one token in everything but attention."""
    return 2 * shape.parameters_used(1)
