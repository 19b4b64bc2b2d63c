"""sparroll's attention inside transformers' models: prefill, one decode step, and the teacher-forced replay of decode
steps.

Inside a `with routed(model)` block, transformers' attention interface sends the model's attention here. A step object
says what to do; it is passed through the model's forward as a keyword argument. Nothing is patched.
"""

# B rows of a batch, S tokens, A active rows, H kv heads, G query heads per kv head, D head dim, C cached tokens,
# M rows to compress, W observed queries

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from sparroll.attention.decode import api
from sparroll.attention.masked import remainder as masked_remainder
from sparroll.attention.masked.api import masked_attention
from sparroll.attention.masked.unit_choice import chosen_words, implementation
from sparroll.compression import Compression
from sparroll.engines.hf.kv_cache import KVCache, taken
from sparroll.errors import UserError
from sparroll.schedule import Schedule

IMPLEMENTATION = "sparroll"


class AttentionStep(Protocol):
    """Does the attention of one forward; called once per layer."""

    ran: dict[int, str]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [B, H*G, S, D], keys and values [B, H, S, D] of the new tokens -> [B, H*G, S, D]."""
        ...


@contextmanager
def routed(model: PreTrainedModel, *, training: bool = False) -> Iterator[None]:
    """Send the model's attention to the step that its forward is given, in eval mode. Everything is put back
    afterwards.

    With `training` the model's mode stays as it is, and layers that transformers checkpoints are also routed when they
    are recomputed, which happens after this block.
    """
    mode = model.training
    if not training:
        model.eval()
    checkpointed = [module for module in model.modules() if "_gradient_checkpointing_func" in vars(module)]
    original = [module._gradient_checkpointing_func for module in checkpointed]
    for module, run in zip(checkpointed, original, strict=True):
        module._gradient_checkpointing_func = _routing(model, run)
    try:
        with _attention_of(model):
            yield
    finally:
        for module, run in zip(checkpointed, original, strict=True):
            module._gradient_checkpointing_func = run
        if not training:
            model.train(mode)


@contextmanager
def _attention_of(model: PreTrainedModel) -> Iterator[None]:
    before = model.config._attn_implementation
    model.config._attn_implementation = IMPLEMENTATION
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _routing(model: PreTrainedModel, run: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointing(layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def routed_layer(*given: Any, **named: Any) -> Any:
            with _attention_of(model):
                return layer(*given, **named)

        return run(routed_layer, *args, **options)

    return checkpointing


def run_step(model: nn.Module, step: AttentionStep, layers: int, **inputs: Any) -> Any:
    """One forward of a routed model (or its body) under `step`. Raises UserError if a layer did not use this
    attention."""
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
    if dropout:
        raise UserError(f"attention dropout of {dropout} is not supported", "set the model's attention_dropout to 0")
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
    """Dense causal attention over right-padded prompts. Each prompt's K and V are written to all rows that will sample
    from it. Under a compression, a prompt above the budget is compressed first, so the cache never holds it whole."""

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
    """What a decode step does for a compression, apart from attending to all tokens that the cache still holds."""

    policy: Compression
    query_slots: Tensor | None
    """[A] place of this step's query in each row's ring; None where no compression comes soon enough to read it."""
    due: list[int]
    """The M rows that are compressed after this step."""
    rows: Tensor | None = None
    """[M] the same on the device. This and the next two are None where no row is due."""
    tokens: Tensor | None = None
    """[M] tokens that these rows hold."""
    recent_slots: Tensor | None = None
    """[M, W] places of these rows' last W queries, oldest first."""

    def after(self, cache: KVCache, layer: int, query: Tensor, longest: int, scale: float) -> None:
        """Keep this step's query [A, H, G, D], and compress the rows that are due. The step's tokens are already in the
        cache."""
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
    """One new token for each of the cache's first A rows. Each layer is dense or sparse, or attends to what eviction
    left."""

    cache: KVCache
    context_tokens: Tensor
    """[A] context lengths, the new token included; under eviction, the tokens that the cache holds of them."""
    longest: int
    """The largest of these lengths, known on the host."""
    even: bool
    """Whether all rows have the same length, so that no mask is needed."""
    completed: Tensor | None
    """Rows whose last unit is complete with this token; None where there is none."""
    kv_budget_tokens: Mapping[int, Tensor]
    """[A] of each layer that reads a part of some row's context; the others read everything in this step."""
    dense_rows: Tensor | None = None
    """Rows that read everything in every layer, whatever their budget; None where there is none."""
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
        if layer not in self.kv_budget_tokens:
            self.ran[layer] = "dense" if self.evicting is None else "evicted"
            mixed = self._dense(layer, query, slice(rows), scale)
        else:
            self.ran[layer] = "sparse"
            mixed = self._sparse(layer, query, scale)
            if self.dense_rows is not None:
                # All rows went through the sparse step: to leave some out would copy the others' K and V.
                mixed[self.dense_rows] = self._dense(layer, query[self.dense_rows], self.dense_rows, scale)
        if self.evicting is not None:
            self.evicting.after(self.cache, layer, query, self.longest, scale)
        return mixed.flatten(1, 2)[:, :, None]

    def _dense(self, layer: int, query: Tensor, rows: Tensor | slice, scale: float) -> Tensor:
        """query [.., H, G, D] of these rows, which read everything."""
        return F.scaled_dot_product_attention(
            query,
            self.cache.keys[layer][rows, :, : self.longest],
            self.cache.values[layer][rows, :, : self.longest],
            attn_mask=None if self._mask is None else self._mask[rows],
            scale=scale,
        )

    def _sparse(self, layer: int, query: Tensor, scale: float) -> Tensor:
        assert self.cache.selector is not None, "sparse step without a schedule"
        rows, unit = len(query), self.cache.unit_tokens
        units = -(-self.longest // unit)
        unit_ids = api.select(
            query[:, None],
            self.cache.index[layer][:rows, :, :units],
            self.context_tokens[:, None],
            self.kv_budget_tokens[layer][:, None],
            self.cache.selector,
            scale,
        )
        selector = self.cache.selector
        if selector.remainder is not None:
            return api.sparse_decode_with_remainder(
                query,
                self.cache.keys[layer][:rows],
                self.cache.values[layer][:rows],
                self.cache.index[layer][:rows, :, :units],
                self.cache.groups[layer][:rows, :, : -(-units // selector.units_per_group)],
                unit_ids[:, 0],
                self.context_tokens,
                selector,
                scale,
            )
        # The whole capacity: a part of it could only be read through a copy.
        return api.sparse_decode(
            query,
            self.cache.keys[layer][:rows],
            self.cache.values[layer][:rows],
            unit_ids[:, 0],
            self.context_tokens,
            unit,
            scale,
        )


@dataclass
class CheckStep:
    """Dense causal attention of several tokens in a row for some of the cache's rows, right-padded. Their K and V take
    the place of those that sparse steps wrote."""

    cache: KVCache
    rows: list[int]
    """Cache rows of the batch's entries."""
    starts: list[int]
    """Position of each entry's first token; what the cache holds before it stays."""
    tokens: list[int]
    """How many tokens each entry has."""
    ran: dict[int, str] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        for entry, (row, start, tokens) in enumerate(zip(self.rows, self.starts, self.tokens, strict=True)):
            self.cache.rewrite(layer, row, start, keys[entry, :, :tokens], values[entry, :, :tokens])
        self.ran[layer] = "dense"
        longest = max(start + tokens for start, tokens in zip(self.starts, self.tokens, strict=True))
        device = query.device
        positions = torch.tensor(self.starts, device=device)[:, None] + torch.arange(query.shape[2], device=device)
        # A padded query also attends to something, so that no row of the mask is empty; nobody reads its output.
        seen = torch.arange(longest, device=device) <= positions[:, None, :, None]
        return F.scaled_dot_product_attention(
            query,
            self.cache.keys[layer][self.rows, :, :longest],
            self.cache.values[layer][self.rows, :, :longest],
            attn_mask=seen,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )


@dataclass
class ReplayStep:
    """A rollout's prefill and all its decode steps at once: position p reads what the engine's step with p + 1 tokens
    of context read. K and V of every layer come from the sparse stream, as they did in the rollout. The pass is
    differentiable, but the selection has no gradient. Under autocast, attention and landmarks have autocast's dtype, as
    in an engine of that dtype."""

    schedule: Schedule
    prompt_tokens: Tensor
    """[B]; positions before it belong to the prefill, which is dense."""
    impl: str = "reference"
    """What runs sparse layers: one of attention.masked.api.IMPLEMENTATIONS. Only plain PyTorch knows remainders, so it
    attends, without a gradient, where the selector has one."""
    keep_selection: bool = False
    """Keep each layer's units, so that a recomputation (gradient checkpointing) reads the same ones instead of choosing
    again."""
    ran: dict[int, str] = field(default_factory=dict)
    chose: dict[int, str] = field(default_factory=dict)
    """What chose the units of each sparse layer: a name that `attention.masked.unit_choice.implementation` returned."""
    _words: dict[int, Tensor] = field(default_factory=dict)
    _budgets: dict[int, tuple[Tensor, Tensor, bool]] = field(default_factory=dict)
    """Of each group of layers, by its place."""

    def __post_init__(self) -> None:
        if self.schedule.check is not None:
            raise UserError(
                f"a replay drafts nothing, so the check of {self.schedule.name} has nothing to take back",
                "the dense log-probabilities of checked rollouts are in rollout.dense; or take the schedule without its "
                "check: dataclasses.replace(schedule, check=None)",
            )

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
        if layer in self.schedule.dense_layers:
            self.ran[layer] = "dense"
            return causal(query, keys, values, scale)
        self.ran[layer] = "sparse"
        group = self.schedule.group_of(layer)
        if group not in self._budgets:
            self._budgets[group] = self._reads(self.schedule.of_layer(layer), keys.shape[2], query.device)
        dense_BS, budget_S, all_dense = self._budgets[group]
        if all_dense:
            return causal(query, keys, values, scale)
        selector = self.schedule.selector
        words = self._words.get(layer)
        if words is None:
            self.chose[layer] = implementation(self.impl, selector)
            words = chosen_words(query, keys, dense_BS, budget_S, selector, scale, self.chose[layer])
            if self.keep_selection:
                self._words[layer] = words
        if selector.remainder is not None:
            return masked_remainder.masked_attention(query, keys, values, words, selector, scale)
        return masked_attention(query, keys, values, words, selector.unit_tokens, scale, self.impl)

    def _reads(self, schedule: Schedule, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, bool]:
        """[B, S] bool positions that read everything, [S] budgets, and whether all positions are dense. They are
        computed once for all layers of a group, because the last one waits for the device."""
        context_S = torch.arange(1, tokens + 1, device=device)
        budget_S = schedule.kv_budget_tokens(context_S)
        dense_BS = (context_S <= self.prompt_tokens[:, None]) | (budget_S >= context_S)
        return dense_BS, budget_S, bool(dense_BS.all())
