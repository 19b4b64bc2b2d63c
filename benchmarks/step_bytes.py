"""What one decode step of a benchmark's model must read, in bytes, and the time that no step can go below. Arithmetic alone;
nothing here runs a model.

The attainable step: the measured step of one request with one token of context, dense, and no less than the weights at the
bandwidth of a large copy; plus K and V within budget, K and V of dense layers and the index rows at that bandwidth. What a
larger batch computes beyond that counts as a loss, so no step is faster, and a share of the attainable stays below 100 %,
unless that step was timed on a disturbed host.

Records without the field `attainable_definition` are older. Their step without the cache is that of so many requests as the
batch has, with 64 tokens each. Short contexts were in there twice, so a share could exceed 100 %.
"""

# B requests in a batch

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import vllm_engines
from vllm_engines import ELEMENT_BYTES, HEAD_DIM, KV_HEADS

from sparroll.schedule import Schedule

ATTAINABLE_DEFINITION = (
    "the fastest step of one request with one token of context, plus the cache's bytes at copy speed"
)


def layers_of(model: str) -> int:
    return int(vllm_engines.QWEN3[model]["num_hidden_layers"])


def weight_bytes(model: str) -> int:
    """Weights that a step reads: all layers, and the output projection. Of an embedding that is no output projection, a
    step reads a row for each request, which does not count."""
    of = {"vocab_size": 151_936, **vllm_engines.QWEN3[model]}
    hidden, heads = of["hidden_size"], of["num_attention_heads"]
    attention = 2 * hidden * HEAD_DIM * (heads + KV_HEADS)
    norms = 2 * hidden + 2 * HEAD_DIM
    layer = attention + 3 * hidden * of["intermediate_size"] + norms
    return ELEMENT_BYTES * (of["num_hidden_layers"] * layer + hidden + of["vocab_size"] * hidden)


def kv_bytes() -> int:
    """K and V of a token in a layer."""
    return 2 * KV_HEADS * HEAD_DIM * ELEMENT_BYTES


def index_bytes(schedule: Schedule) -> float:
    """Index of a token in a sparse layer."""
    return KV_HEADS * schedule.selector.index_bytes_per_token(HEAD_DIM)


def index_read_bytes(schedule: Schedule) -> float:
    """What a step reads of them: with a remainder index rows twice, unless scores weigh its groups."""
    return KV_HEADS * schedule.selector.index_read_bytes_per_token(HEAD_DIM)


def index_share(schedule: Schedule, layers: int) -> float:
    """Bytes of the index / bytes of K and V, over all layers."""
    return (layers - len(schedule.dense_layers)) / layers * index_bytes(schedule) / kv_bytes()


def smaller_capacity(dense_tokens: int, schedules: Sequence[Schedule], layers: int) -> int:
    """What the cache of each of these sparse engines holds at least, from what the dense one's does: the largest index, and
    1 % for workspace."""
    return int(0.99 * dense_tokens / (1 + max(index_share(schedule, layers) for schedule in schedules)))


def bytes_read(contexts: Sequence[int], schedule: Schedule, layers: int) -> float:
    """K, V and index rows that one step must read, over all layers."""
    context = np.array(contexts)
    moved = len(schedule.dense_layers) * context.sum() * kv_bytes()
    for own, group in schedule.parts(layers):
        read = group.read_tokens(context)
        index = np.where(read < context, context * index_read_bytes(schedule), 0)
        moved = moved + len(own) * (read * kv_bytes() + index).sum()
    return float(moved)


def attainable_seconds(one_token_seconds: float, model: str, cache_bytes: float, bandwidth: float) -> float:
    """The step that no schedule which reads so many bytes of the cache can go below."""
    return max(one_token_seconds, weight_bytes(model) / bandwidth) + cache_bytes / bandwidth


def fit_steps(batches: list[int], contexts: list[int], seconds: list[float]) -> dict[str, float]:
    """Dense step time as per_step + per_request * batch + per_token * context tokens, least squares."""
    terms = np.stack([np.ones(len(batches)), np.array(batches), np.array(contexts)], axis=1).astype(float)
    # In units of each term's largest value: sums of contexts are a million times the constant.
    size = terms.max(axis=0)
    found, *_ = np.linalg.lstsq(terms / size, np.array(seconds), rcond=None)
    off = np.abs(terms / size @ found / np.array(seconds) - 1)
    per_step, per_request, per_token = (found / size).tolist()
    return {
        "seconds_per_step": per_step,
        "seconds_per_request": per_request,
        "seconds_per_context_token": per_token,
        "largest_relative_error": float(off.max()),
    }
