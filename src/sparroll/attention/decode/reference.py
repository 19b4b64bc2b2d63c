"""The specification of selection and sparse attention: plain PyTorch, any device, fp32 accumulation. It is written to
be read, not to be fast. Every kernel follows these rules and is tested against them.

Which units a position reads: as many as its budget holds, or all of them where the context is within the budget. The
first and the recent units, including the incomplete one, have the score +inf; every other unit has the score that its
selector gives it. The units with the highest scores are read, and of equal scores the lowest units. NaN ranks above
+inf. HFEngine, the training pass and all kernels choose units by this rule.
"""

# R requests, Q query positions, H kv heads, G query heads per kv head, C cached tokens, U units, N chosen units,
# D head dim

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.selectors.base import Selector

NOT_CHOSEN = -1


def select(
    query: Tensor, index: Tensor, context_tokens: Tensor, kv_budget_tokens: Tensor, selector: Selector, scale: float
) -> Tensor:
    """Units that each query position reads, per KV head (Sparrow, section 3). See api.select."""
    score_RQHU, wanted_RQ1 = ranked(query, index, context_tokens, kv_budget_tokens, selector, scale)
    most = min(int(wanted_RQ1.max()), index.shape[2])
    ids_RQHN = best_first(score_RQHU)[..., :most]
    chosen_RQ1N = torch.arange(most, device=query.device) < wanted_RQ1[:, :, None]
    return ids_RQHN.masked_fill(~chosen_RQ1N, NOT_CHOSEN)


def ranked(
    query: Tensor, index: Tensor, context_tokens: Tensor, kv_budget_tokens: Tensor, selector: Selector, scale: float
) -> tuple[Tensor, Tensor]:
    """Scores [R, Q, H, U] in whose order units are read: +inf for those that are always read, -inf for those that do
    not exist. And how many units each position reads: [R, Q, 1]. Arguments as in api.select."""
    unit = selector.unit_tokens
    ids_U = torch.arange(index.shape[2], device=query.device)
    units_RQ1 = (context_tokens[..., None] + unit - 1) // unit
    first, recent = selector.first_tokens // unit, selector.recent_tokens // unit
    exists_RQU = ids_U < units_RQ1
    forced_RQU = exists_RQU & ((ids_U < first) | (ids_U >= units_RQ1 - recent))
    candidates_RQU = exists_RQU & ~forced_RQU
    score_RQHU = selector.score(query, index, scale, candidates_RQU[:, :, None])
    score_RQHU = score_RQHU.masked_fill(forced_RQU[:, :, None], torch.inf)
    score_RQHU = score_RQHU.masked_fill(~exists_RQU[:, :, None], -torch.inf)
    wanted_RQ1 = torch.minimum(kv_budget_tokens[..., None] // unit, units_RQ1)
    return score_RQHU, torch.where(kv_budget_tokens[..., None] >= context_tokens[..., None], units_RQ1, wanted_RQ1)


def best_first(score: Tensor) -> Tensor:
    """score [..., U] -> units [..., U] int64, the highest score first; of equal scores, the lowest unit first."""
    # Not topk, which promises no order among equal scores; not the scores themselves, whose stable sort on a GPU leaves
    # NaNs in any order.
    return in_order(score).argsort(dim=-1, descending=True, stable=True)


def in_order(score: Tensor) -> Tensor:
    """Whole numbers in the order of the scores: both zeros are one number, and every NaN is the largest."""
    score = score if score.dtype == torch.float64 else score.float()
    whole = torch.int64 if score.dtype == torch.float64 else torch.int32
    largest = torch.iinfo(whole).max
    bits = torch.where(score == 0, 0.0, score).view(whole)
    bits = torch.where(bits < 0, bits ^ largest, bits)
    return bits.masked_fill(score.isnan(), largest)


def sparse_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    unit_ids: Tensor,
    context_tokens: Tensor,
    unit_tokens: int,
    scale: float,
) -> Tensor:
    """Exact attention of one new token per request over the chosen units. See api.sparse_decode."""
    requests, heads, cached = keys.shape[:3]
    inside = torch.arange(unit_tokens, device=keys.device)
    positions = unit_ids.clamp_min(0)[..., None] * unit_tokens + inside
    visible = (unit_ids[..., None] != NOT_CHOSEN) & (positions < context_tokens[:, None, None, None])
    visible = visible.flatten(2)
    # What was never written may hold NaN, and 0 * NaN is NaN: a masked softmax alone does not keep it out. So a masked
    # entry stands for the first token, which every request has.
    starts = torch.arange(0, requests * heads * cached, cached, device=keys.device).view(requests, heads, 1)
    read = starts + positions.flatten(2).masked_fill(~visible, 0)
    # An embedding is a lookup of rows, which a CPU does several times faster than an index.
    mixed = F.scaled_dot_product_attention(
        query.float(),
        F.embedding(read, keys.flatten(0, 2)).float(),
        F.embedding(read, values.flatten(0, 2)).float(),
        attn_mask=visible[:, :, None],
        scale=scale,
    )
    return mixed.to(query.dtype)
