"""Our attention inside transformers' models: prefill, one decode step, and the teacher-forced replay of decode steps.

A model is routed here through transformers' attention interface for the length of a `with routed(model)` block; the
step object that says what to do travels as a keyword argument through the model's forward. Nothing is patched.
"""

# B rows of a batch, S tokens, A active rows, H kv heads, G query heads per kv head, D head dim, C cached tokens,
# M rows to compress, W observed queries

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from sparroll.attention import api
from sparroll.compression import Compression
from sparroll.engines.kv_cache import KVCache, taken
from sparroll.errors import UserError
from sparroll.schedule import Schedule

IMPLEMENTATION = "sparroll"
_REPLAY_MASK_ELEMENTS = 1 << 25
"""Replay works through so many (row, query, head, key) mask entries at a time: about 32 MB."""


class AttentionStep(Protocol):
    """What the attention of one forward does; called once per layer."""

    ran: dict[int, str]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [B, H*G, S, D], keys and values [B, H, S, D] of the new tokens -> [B, H*G, S, D]."""
        ...


@contextmanager
def routed(model: PreTrainedModel) -> Iterator[None]:
    """Send the model's attention to the step given to its forward, in eval mode; put everything back afterwards."""
    before, training = model.config._attn_implementation, model.training
    model.config._attn_implementation = IMPLEMENTATION
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = before
        model.train(training)


def run_step(model: nn.Module, step: AttentionStep, layers: int, **inputs: Any) -> Any:
    """One forward of a routed model (or its body) under `step`. An error if any layer's attention went elsewhere."""
    output = model(**inputs, use_cache=False, sparroll_step=step)
    if sorted(step.ran) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(step.ran))
        raise UserError(f"layers {missing} did not use sparroll's attention", "this architecture is not supported")
    return output


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sparroll_step: AttentionStep | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    if sparroll_step is None:
        raise UserError("sparroll's attention was called outside an engine", "run the model through HFEngine or Scorer")
    for name in ("softcap", "s_aux", "sliding_window"):
        if features.get(name) is not None:
            raise UserError(f"the model uses {name}, which sparse decoding does not support")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = sparroll_step.attend(int(module.layer_idx), query, key, value, scale)  # type: ignore[arg-type]
    return mixed.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _attention)


def causal(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Dense causal attention of whole sequences: [B, H*G, S, D], [B, H, S, D] -> [B, H*G, S, D]."""
    return F.scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scale, enable_gqa=query.shape[1] != keys.shape[1]
    )


@dataclass
class PrefillStep:
    """Dense causal attention over right-padded prompts; each prompt's K and V go to all rows that will sample from it. Under
    a compression a prompt above the budget is compressed on the way, so that the cache never holds it whole."""

    cache: KVCache
    prompt_tokens: list[int]
    rows: list[list[int]]
    """Cache rows that take entry b of the batch."""
    compression: Compression | None = None
    ran: dict[int, str] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        for entry, (tokens, rows) in enumerate(zip(self.prompt_tokens, self.rows, strict=True)):
            held = keys[entry : entry + 1, :, :tokens], values[entry : entry + 1, :, :tokens]
            if self.compression is not None and tokens > self.compression.budget_tokens:
                slots = self._kept(self.compression, query[entry : entry + 1, :, :tokens], held[0], scale)
                held = taken(held[0], slots), taken(held[1], slots)
            for row in rows:
                self.cache.write_prompt(layer, row, held[0][0], held[1][0])
        self.ran[layer] = "dense"
        return causal(query, keys, values, scale)

    def _kept(self, policy: Compression, query: Tensor, keys: Tensor, scale: float) -> Tensor:
        """query [1, H*G, S, D], keys [1, H, S, D] of one prompt -> slots [1, H, budget]"""
        heads, tokens = keys.shape[1:3]
        recent = query[:, :, tokens - policy.query_tokens :].unflatten(1, (heads, -1)) if policy.query_tokens else None
        return policy.keep(keys, recent, torch.tensor([tokens], device=keys.device), scale)


@dataclass
class Evicting:
    """What a decode step does for a compression, beside attending to all tokens that the cache still holds."""

    policy: Compression
    query_slots: Tensor | None
    """[A] place of this step's query in each row's ring; None where no compression is near enough to read it."""
    due: list[int]
    """M rows that are compressed after this step."""
    rows: Tensor | None = None
    """[M] the same on the device; None where no row is due, like the following."""
    tokens: Tensor | None = None
    """[M] tokens that these hold."""
    recent_slots: Tensor | None = None
    """[M, W] places of their last W queries, oldest first."""

    def after(self, cache: KVCache, layer: int, query: Tensor, longest: int, scale: float) -> None:
        """query [A, H, G, D] of this step, whose tokens are in the cache already."""
        if self.query_slots is not None:
            cache.remember(layer, query, self.query_slots)
        if self.rows is None:
            return
        assert self.tokens is not None and self.recent_slots is not None, "rows to compress without their lengths"
        recent = cache.remembered(layer, self.rows, self.recent_slots) if self.policy.query_tokens else None
        keys = cache.keys[layer][self.rows, :, :longest]
        cache.keep(layer, self.rows, self.policy.keep(keys, recent, self.tokens, scale))


@dataclass
class DecodeStep:
    """One new token for each of the cache's first A rows, dense or sparse layer by layer, or over what eviction left."""

    cache: KVCache
    context_tokens: Tensor
    """[A] context lengths, the new token included; under eviction, the tokens that the cache holds of them."""
    longest: int
    """The largest of them, known on the host."""
    even: bool
    """Whether all rows have the same context length, so that no mask is needed."""
    completed: Tensor | None
    """Rows whose unit is full with this token."""
    kv_budget_tokens: Tensor | None
    """[A], or None where every layer reads everything in this step."""
    dense_layers: frozenset[int]
    evicting: Evicting | None = None
    ran: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._positions = self.context_tokens - 1
        columns = torch.arange(self.longest, device=self.context_tokens.device)
        self._mask = None if self.even else (columns < self.context_tokens[:, None])[:, None, None]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        rows, heads = keys.shape[:2]
        self.cache.append(layer, keys[:, :, 0], values[:, :, 0], self._positions, self.completed)
        query = query[:, :, 0].unflatten(1, (heads, -1))
        if self.kv_budget_tokens is None or layer in self.dense_layers:
            self.ran[layer] = "dense" if self.evicting is None else "evicted"
            mixed = F.scaled_dot_product_attention(
                query,
                self.cache.keys[layer][:rows, :, : self.longest],
                self.cache.values[layer][:rows, :, : self.longest],
                attn_mask=self._mask,
                scale=scale,
            )
        else:
            self.ran[layer] = "sparse"
            mixed = self._sparse(layer, query, scale)
        if self.evicting is not None:
            self.evicting.after(self.cache, layer, query, self.longest, scale)
        return mixed.flatten(1, 2)[:, :, None]

    def _sparse(self, layer: int, query: Tensor, scale: float) -> Tensor:
        assert self.kv_budget_tokens is not None and self.cache.selector is not None, "sparse step without a schedule"
        rows, unit = len(query), self.cache.unit_tokens
        units = -(-self.longest // unit)
        unit_ids = api.select(
            query[:, None],
            self.cache.index[layer][:rows, :, :units],
            self.context_tokens[:, None],
            self.kv_budget_tokens[:, None],
            self.cache.selector,
            scale,
        )
        return api.sparse_decode(
            query,
            self.cache.keys[layer][:rows, :, : units * unit],
            self.cache.values[layer][:rows, :, : units * unit],
            unit_ids[:, 0],
            self.context_tokens,
            unit,
            scale,
        )


@dataclass
class ReplayStep:
    """A rollout's prefill and decode steps at once: position p reads what the engine's step with p + 1 tokens of context
    read. K and V of every layer come from the sparse stream, as they did in the rollout. Differentiable."""

    schedule: Schedule
    prompt_tokens: Tensor
    """[B]; positions before it are prefill, which is dense."""
    ran: dict[int, str] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        dense = causal(query, keys, values, scale)
        if layer in self.schedule.dense_layers:
            self.ran[layer] = "dense"
            return dense
        self.ran[layer] = "sparse"
        selector, unit = self.schedule.selector, self.schedule.selector.unit_tokens
        batch, heads, tokens, _ = keys.shape
        padding = -tokens % unit
        keys, values = F.pad(keys, (0, 0, 0, padding)), F.pad(values, (0, 0, 0, padding))
        index = selector.build_index(keys.unflatten(2, (-1, unit)))
        context_S = torch.arange(1, tokens + 1, device=query.device)
        budget_S = self.schedule.kv_budget_tokens(context_S)
        sparse_BS = (context_S > self.prompt_tokens[:, None]) & (budget_S < context_S)
        wanted = sparse_BS.any(0).nonzero().flatten()
        if not len(wanted):
            return dense
        mixed = dense.clone()
        chunk = max(1, _REPLAY_MASK_ELEMENTS // (batch * query.shape[1] * (tokens + padding)))
        for positions in wanted.split(chunk):
            part = query[:, :, positions].unflatten(1, (heads, -1)).permute(0, 3, 1, 2, 4)
            context = context_S[positions].expand(batch, -1)
            with torch.no_grad():
                unit_ids = api.select(part, index, context, budget_S[positions].expand(batch, -1), selector, scale)
            read = api.sparse_prefill(part, keys, values, unit_ids, context, unit, scale)
            read = read.permute(0, 2, 3, 1, 4).flatten(1, 2)
            chosen = sparse_BS[:, positions][:, None, :, None]
            mixed[:, :, positions] = torch.where(chosen, read.type_as(dense), dense[:, :, positions])
        return mixed
