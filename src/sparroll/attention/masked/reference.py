"""The specification of masked attention: plain PyTorch through autograd. It takes a chunk of positions at a time and
computes it again in the backward pass, so that no mask and no softmax is kept. Accumulation is in fp32, or fp64 for
fp64 tensors."""

# B sequences, S positions, Q positions of a chunk, C keys seen by a chunk, A query heads, H kv heads, D head dimension

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS, unpack

_LOGITS_AT_ONCE = 1 << 24
"""Logits of a chunk: 64 MB in fp32."""


def masked_attention(
    query_BASD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor, words_BHPU: Tensor, unit_tokens: int, scale: float
) -> Tensor:
    """See api.masked_attention."""
    batch, all_heads, tokens, _ = query_BASD.shape
    chunk = max(1, _LOGITS_AT_ONCE // (batch * all_heads * tokens * WORD_POSITIONS)) * WORD_POSITIONS
    parts = []
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        given = (query_BASD[:, :, begin:end], keys_BHSD[:, :, :end], values_BHSD[:, :, :end])
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            parts.append(checkpoint(_chunk, *given, words_BHPU, begin, unit_tokens, scale, use_reentrant=False))
        else:
            parts.append(_chunk(*given, words_BHPU, begin, unit_tokens, scale))
    return torch.cat(parts, 2) if parts else torch.zeros_like(query_BASD)


def _chunk(
    query: Tensor, keys: Tensor, values: Tensor, words_BHPU: Tensor, begin: int, unit_tokens: int, scale: float
) -> Tensor:
    heads, end = keys.shape[1], keys.shape[2]
    accurate = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        visible = unpack(words_BHPU, begin, end).repeat_interleave(unit_tokens, dim=3)[..., :end]
        visible &= torch.arange(end, device=query.device) <= torch.arange(begin, end, device=query.device)[:, None]
        # A row that reads nothing has no softmax: it reads everything, and is then put to zero.
        nothing_BH1Q1 = ~visible.any(-1)[:, :, None, :, None]
        visible |= nothing_BH1Q1[:, :, 0]
        grouped = query.unflatten(1, (heads, -1))
        mixed = F.scaled_dot_product_attention(
            grouped.flatten(2, 3).to(accurate),
            keys.to(accurate),
            values.to(accurate),
            attn_mask=visible.repeat(1, 1, grouped.shape[2], 1),
            scale=scale,
        )
        mixed = mixed.unflatten(2, grouped.shape[2:4]).masked_fill(nothing_BH1Q1, 0.0)
    return mixed.flatten(1, 2).to(query.dtype)
