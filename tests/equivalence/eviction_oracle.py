"""Rollouts with eviction written a second time, as plainly as possible: one request, one token and one head at a time, with
the keys and values of every token that ever was, and a set of the positions that each head may still see."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from plain_policies import kept
from sparroll.compression import Compression


@dataclass
class Layer:
    """Everything that one layer has seen of a request, and what it may still read."""

    keys: list[Tensor] = field(default_factory=list)
    """[H, D] by position, like the following two."""
    values: list[Tensor] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    """[H*G, D]"""
    seen: list[list[int]] = field(default_factory=list)
    """Positions that are left, by KV head."""


class Oracle:
    """Feed it a prompt, then one token after another; `logits` are those after the last one."""

    def __init__(self, model: PreTrainedModel, policy: Compression):
        self.model, self.policy = model, policy
        self.layers = [Layer() for _ in range(model.config.num_hidden_layers)]
        self.steps = 0
        self.logits = torch.empty(0)

    def prefill(self, prompt_ids: list[int]) -> None:
        self._forward(prompt_ids, 0)
        if len(prompt_ids) > self.policy.budget_tokens:
            self._compress()

    def decode(self, token: int) -> None:
        self._forward([token], len(self.layers[0].keys))
        self.steps += 1
        if self.steps % self.policy.every_tokens == 0 and len(self.layers[0].seen[0]) > self.policy.budget_tokens:
            self._compress()

    @property
    def held_tokens(self) -> int:
        counts = {len(seen) for layer in self.layers for seen in layer.seen}
        assert len(counts) == 1, "all heads keep the same number"
        return counts.pop()

    def _forward(self, ids: list[int], position: int) -> None:
        def attention(module, query, key, value, attention_mask, scaling=None, **_):  # type: ignore[no-untyped-def]
            self.scale = scaling or 1 / math.sqrt(query.shape[-1])
            return self._attend(self.layers[module.layer_idx], query[0], key[0], value[0]), None

        AttentionInterface.register("test_eviction_oracle", attention)
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = "test_eviction_oracle"
        positions = torch.arange(position, position + len(ids))[None]
        try:
            with torch.no_grad():
                output = self.model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False)
        finally:
            self.model.config._attn_implementation = before
        self.logits = output.logits[0, -1].float()

    def _attend(self, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [H*G, S, D], key and value [H, S, D] of the new tokens -> [1, S, H*G, D]"""
        group = query.shape[0] // key.shape[0]
        layer.seen = layer.seen or [[] for _ in range(key.shape[0])]
        output = torch.zeros(1, query.shape[1], query.shape[0], query.shape[2])
        for token in range(query.shape[1]):
            layer.keys.append(key[:, token])
            layer.values.append(value[:, token])
            layer.queries.append(query[:, token])
            for seen in layer.seen:
                seen.append(len(layer.keys) - 1)
            for head in range(query.shape[0]):
                mine = layer.seen[head // group]
                logits = [self.scale * float(query[head, token] @ layer.keys[p][head // group]) for p in mine]
                weights = torch.softmax(torch.tensor(logits), 0)
                for weight, p in zip(weights, mine, strict=True):
                    output[0, token, head] += weight * layer.values[p][head // group]
        return output

    def _compress(self) -> None:
        for layer in self.layers:
            heads = len(layer.seen)
            group = layer.queries[0].shape[0] // heads
            window = layer.queries[-self.policy.query_tokens :] if self.policy.query_tokens else []
            for head, seen in enumerate(layer.seen):
                keys = [layer.keys[p][head].tolist() for p in seen]
                queries = [[query[head * group + g].tolist() for query in window] for g in range(group)]
                layer.seen[head] = [seen[place] for place in kept(self.policy, keys, queries, self.scale)]
