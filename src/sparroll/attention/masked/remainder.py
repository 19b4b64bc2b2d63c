"""Masked attention with a remainder: what the decode steps of a rollout computed, for all positions at once. It is plain
PyTorch on any device, and has no gradient: no kernel and no training pass knows remainders yet. A chunk of positions is
taken at a time."""

# B sequences, S positions, Q positions of a chunk, A query heads, H kv heads, G query heads per kv head, C keys,
# U units, D head dimension

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.decode import remainder_reference
from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS, unpack
from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError

_LOGITS_AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits of a chunk: 64 MB in fp32, and on a GPU, where smaller chunks would wait for their launches, 512 MB. A chunk takes
some five times as much."""


def masked_attention(
    query_BASD: Tensor, keys_BHSD: Tensor, values_BHSD: Tensor, words_BHPU: Tensor, selector: Selector, scale: float
) -> Tensor:
    """`masked.api.masked_attention` in which the units of its context that a position does not read count by groups, as
    decode/remainder_reference.py says. Index and groups are built from the keys and values themselves.

    Raises UserError where a gradient is asked for.
    """
    check_no_gradient(query_BASD, keys_BHSD, values_BHSD)
    batch, all_heads, tokens, _ = query_BASD.shape
    heads, unit, units = keys_BHSD.shape[1], selector.unit_tokens, words_BHPU.shape[3]
    group_tokens = unit * selector.units_per_group
    padded = [F.pad(held, (0, 0, 0, -tokens % group_tokens)) for held in (keys_BHSD, values_BHSD)]
    with torch.autocast(query_BASD.device.type, enabled=False):
        groups = selector.build_groups(*(held.unflatten(2, (-1, group_tokens)) for held in padded))
        index = selector.build_index(padded[0].unflatten(2, (-1, unit)))[:, :, :units]
        at_once = _LOGITS_AT_ONCE.get(query_BASD.device.type, _LOGITS_AT_ONCE["cpu"])
        chunk = max(1, at_once // (batch * all_heads * tokens * WORD_POSITIONS)) * WORD_POSITIONS
        parts = []
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            # What lies behind the chunk's last position is neither read nor summed up.
            seen = -(-end // unit)
            seen_groups = -(-seen // selector.units_per_group)
            query = query_BASD[:, :, begin:end].unflatten(1, (heads, -1)).permute(0, 3, 1, 2, 4)
            context_Q = torch.arange(begin + 1, end + 1, device=query.device)
            read_BQHU = unpack(words_BHPU[..., :seen], begin, end).transpose(1, 2)
            exists_QU = torch.arange(seen, device=query.device) * unit < context_Q[:, None]
            unread_BQHU = ~read_BQHU & exists_QU[:, None]
            if not bool(unread_BQHU.any()):
                parts.append(_dense(query_BASD[:, :, begin:end], keys_BHSD[:, :, :end], values_BHSD[:, :, :end], scale))
                continue
            visible_BQHC = read_BQHU.repeat_interleave(unit, dim=3)[..., :end]
            visible_BQHC = visible_BQHC & (torch.arange(end, device=query.device) < context_Q[:, None])[:, None]
            logits = scale * torch.einsum("bqhgd,bhcd->bqhgc", query.float(), keys_BHSD[:, :, :end].float())
            logits = logits.masked_fill(~visible_BQHC[:, :, :, None], -torch.inf)
            rows = groups[:, :, :seen_groups]
            weights = remainder_reference.group_logits(query, index[:, :, :seen], rows, unread_BQHU, selector, scale)
            mixed = remainder_reference.mixed(logits, values_BHSD[:, :, :end], weights, rows, selector)
            parts.append(mixed.permute(0, 2, 3, 1, 4).flatten(1, 2).to(query_BASD.dtype))
    return torch.cat(parts, 2) if parts else torch.zeros_like(query_BASD)


def _dense(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Causal attention of a chunk's positions, which are the last ones of the keys."""
    end, grouped = keys.shape[2], query.shape[1] != keys.shape[1]
    seen_QC = (
        torch.arange(end, device=query.device) <= torch.arange(end - query.shape[2], end, device=query.device)[:, None]
    )
    mixed = F.scaled_dot_product_attention(
        query.float(), keys.float(), values.float(), attn_mask=seen_QC, scale=scale, enable_gqa=grouped
    )
    return mixed.to(query.dtype)


def check_no_gradient(*tensors: Tensor) -> None:
    """Raise UserError where autograd would record the pass."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise UserError(
            "attention with a remainder has no gradient, so no model and no adapter is trained under it",
            "train under the same selector without its remainder; rollouts, profile and calibrate take one",
        )
