"""Decode steps of one response whose budgets differ by layer and KV head: what ReplayStep computes for a schedule, with
budgets that no schedule can say. For a measurement only; no engine knows such budgets.

The prefill is dense, so it is computed once for all budgets. What a budget changes begins at its layer, so a pass
begins at the first layer whose budgets differ from those of a pass whose states were kept.
"""

# S positions of the response, P prompt tokens, C tokens of the whole context, A query heads, H kv heads, G query heads
# per kv head, U units, E hidden, D head dimension

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from sparroll.attention.decode import reference
from sparroll.attention.masked.unit_choice import best
from sparroll.attention.selectors import Selector
from sparroll.engines.hf.attention import causal, routed
from sparroll.types import Rollout

Budgets = tuple[tuple[int, ...] | None, ...]
"""Tokens that each KV head of each layer reads; None: a dense layer.

>>> (None, None, (512, 256), (384, 384))
"""


@dataclass
class _Prefill:
    """Keeps K and V of a dense prompt, by layer."""

    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        self.keys[layer], self.values[layer] = keys, values
        return causal(query, keys, values, scale)


@dataclass
class _Steps:
    """The attention of all decode steps of a response, whose K and V come from the sparse stream."""

    prefill: _Prefill
    budgets: Budgets
    selector: Selector

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [1, A, S, D], keys and values [1, H, S, D] of the response -> [1, A, S, D]"""
        prompt, steps = self.prefill.keys[layer].shape[2], keys.shape[2]
        keys = torch.cat([self.prefill.keys[layer], keys], 2)
        values = torch.cat([self.prefill.values[layer], values], 2)
        context_S = torch.arange(prompt + 1, prompt + steps + 1)
        visible_HSC = (torch.arange(prompt + steps) < context_S[:, None])[None]
        budgets = self.budgets[layer]
        if budgets is not None:
            read_HSU = chosen(query, keys, context_S, budgets, self.selector, scale)[0].transpose(0, 1)
            visible_HSC = visible_HSC & read_HSU.repeat_interleave(self.selector.unit_tokens, 2)[..., : prompt + steps]
        # KV heads take the batch's place, so that the query heads of each share one mask.
        mixed_HGSD = F.scaled_dot_product_attention(
            query[0].unflatten(0, (keys.shape[1], -1)),
            keys[0, :, None],
            values[0, :, None],
            attn_mask=visible_HSC[:, None],
            scale=scale,
            enable_gqa=True,
        )
        return mixed_HGSD.flatten(0, 1)[None]


def chosen(
    query_1ASD: Tensor, keys_1HCD: Tensor, context_S: Tensor, budgets: tuple[int, ...], selector: Selector, scale: float
) -> Tensor:
    """[1, S, H, U] bool: the units that each position reads, of as many tokens as its head's budget has."""
    unit, heads = selector.unit_tokens, keys_1HCD.shape[1]
    assert len(budgets) == heads and not any(budget % unit for budget in budgets), "a budget of whole units a head"
    padded = F.pad(keys_1HCD, (0, 0, 0, -keys_1HCD.shape[2] % unit))
    index = selector.build_index(padded.unflatten(2, (-1, unit)))
    part_1SHGD = query_1ASD.unflatten(1, (heads, -1)).permute(0, 3, 1, 2, 4)
    context_1S = context_S[None]
    score_1SHU, _ = reference.ranked(part_1SHGD, index, context_1S, context_1S, selector, scale)
    # A budget of at least the context wants every unit, so such a position is dense.
    units_1S1 = -(-context_1S[..., None] // unit)
    wanted_1SH = torch.minimum(torch.tensor(budgets) // unit, units_1S1)
    exists_SU = torch.arange(score_1SHU.shape[3]) * unit < context_S[:, None]
    return best(score_1SHU, wanted_1SH) & exists_SU[None, :, None]


class Replays:
    """One rollout, replayed under any budgets."""

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, rollout: Rollout, selector: Selector) -> None:
        self.body, self.model, self.selector = model.get_decoder(), model, selector
        self._prefill, prompt = _Prefill(), len(rollout.prompt_ids)
        ids_1C = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids[:-1]]])
        self._positions = torch.arange(prompt, ids_1C.shape[1])[None]
        embedded = self.body.embed_tokens(ids_1C)
        states = self._through(embedded[:, :prompt], torch.arange(prompt)[None], self._prefill, 0)[-1]
        self._first_E = self.body.norm(states)[0, -1:]
        self._kept: tuple[Budgets, list[Tensor]] = ((), [embedded[:, prompt:]])

    @torch.inference_mode()
    def hidden(self, budgets: Budgets, keep: bool = False) -> Tensor:
        """[S, E] final states at the positions that response tokens are drawn from. keep: later passes begin with the
        states of this one, as far as their budgets are the same."""
        known, states = self._kept
        begin = next(
            (layer for layer, (one, other) in enumerate(zip(known, budgets, strict=False)) if one != other), len(known)
        )
        found = self._through(states[begin], self._positions, _Steps(self._prefill, budgets, self.selector), begin)
        if keep:
            self._kept = budgets, states[:begin] + found
        return torch.cat([self._first_E, self.body.norm(found[-1])[0]]).float()

    def _through(self, hidden: Tensor, positions: Tensor, step: _Prefill | _Steps, begin: int) -> list[Tensor]:
        """States before each layer from `begin` on, and behind the last one."""
        angles, states = self.body.rotary_emb(hidden, positions), [hidden]
        with routed(self.model):
            for layer in self.body.layers[begin:]:
                states.append(layer(states[-1], position_embeddings=angles, sparroll_step=step))
        return states
