"""Sparse decoding written a second time, as slowly and plainly as possible: one query position, one head at a time, with
the page scores worked out from method's text. Shares no code with the package; the engine must agree with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel


def read_positions(
    queries: Tensor, keys: Tensor, budget: int, page: int, first_pages: int, recent_pages: int
) -> list[int]:
    """Token positions that one KV head's query group [G, D] reads from keys [C, D] under page_mean."""
    context = len(keys)
    if context <= budget:
        return list(range(context))
    pages = [list(range(start, min(start + page, context))) for start in range(0, context, page)]
    always = set(range(first_pages)) | set(range(len(pages) - recent_pages, len(pages)))
    mean_query = queries.detach().float().mean(0)
    scores = {}
    for number, members in enumerate(pages):
        if number not in always:
            landmark = keys[members].detach().float().mean(0).bfloat16().float()
            scores[number] = float(mean_query @ landmark)
    best = sorted(scores, key=lambda number: -scores[number])[: budget // page - len(always)]
    return sorted(position for number in (always | set(best)) for position in pages[number])


def sparse_logp(
    model: PreTrainedModel,
    ids: list[int],
    prompt_tokens: int,
    budget_of: Callable[[int], int] | Mapping[int, Callable[[int], int]],
    *,
    page: int,
    first_pages: int,
    recent_pages: int,
    dense_layers: tuple[int, ...],
    gradient: bool = False,
) -> Tensor:
    """[T] log-probabilities of ids[prompt_tokens:], each position reading what a decode step would have read.
    budget_of: the budget at a context length; or that of each sparse layer.

    With `gradient`, through autograd: the selection is of plain numbers and has none.
    """

    def attention(module, query, key, value, attention_mask, scaling=None, **kwargs):  # type: ignore[no-untyped-def]
        scale = scaling or 1 / math.sqrt(query.shape[-1])
        group = query.shape[1] // key.shape[1]
        output = torch.zeros_like(query)
        for position in range(query.shape[2]):
            context = position + 1
            dense = position < prompt_tokens or module.layer_idx in dense_layers
            for head in range(key.shape[1]):
                mine = query[0, head * group : (head + 1) * group, position]
                seen = key[0, head, :context]
                of_layer = budget_of if callable(budget_of) or dense else budget_of[module.layer_idx]
                budget = context if dense else of_layer(context)
                read = read_positions(mine, seen, budget, page, first_pages, recent_pages)
                weights = torch.softmax(scale * mine @ seen[read].T, dim=-1)
                output[0, head * group : (head + 1) * group, position] = weights @ value[0, head, :context][read]
        return output.transpose(1, 2), None

    AttentionInterface.register("test_oracle", attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = "test_oracle"
    try:
        with torch.set_grad_enabled(gradient):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        model.config._attn_implementation = before
    logp = torch.log_softmax(logits[prompt_tokens - 1 : -1].float(), dim=-1)
    return logp.gather(-1, torch.tensor(ids[prompt_tokens:])[:, None])[:, 0]
