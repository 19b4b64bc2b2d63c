"""The specification of the remainder: what a step does not read enters its softmax as one entry for each group of tokens.
Plain PyTorch, any device, fp32; written to be read, not to be fast.

An entry's weight is the sum over the group's unread units of n exp(l), with n tokens in the unit and l its estimated
logit for each query head; its value is the mean of V over all tokens of the group, read ones included. A context within
its budget leaves nothing unread, so all weights are 0 and the step is dense. The first and the recent units are always
read, and the recent tokens cover a whole group, so an unread unit and its group are always complete.

The estimate: a unit of n tokens with keys k_t weighs sum_t exp(s q.k_t), where s is what the model multiplies q.k with. Of
the keys only their mean m is known, and of that only m' = m + e, which the index row stands for.

- If the keys lie about m with the variance v per channel, alike in all channels, then s q.k_t has the variance
  s^2 |q|^2 v, and the mean of exp of a Gaussian is exp(mean + variance / 2): the weight is n exp(s q.m + s^2 |q|^2 v / 2).
  Without this term the weight is too low (Jensen).
- An error e that is independent of m, with the mean square w per channel, would make exp(s q.m') too high by
  exp(s^2 |q|^2 w / 2) on average. Rounding to a few bits makes no such error. Our rows keep the norm of the mean, so
  over many units q.m' has the variance of q.m, and exp of both has the same mean: what noise adds is what the row's
  share of m loses. Taking w / 2 out was measured and makes weights too low, so nothing is taken out.

Together l = s q.m' + s^2 |q|^2 v / 2, where rows below 8 bits meet a rounded query in q.m', though not in |q|^2
(`Selector.estimated_products`). v is known when the group is complete, and kept for each unit in its group's row
(`Selector.unit_spread`). For units of one token it is 0. For others it is rough: keys spread mostly in the channels that
RoPE turns fast, and one key of a unit may be all that a query looks for.
"""

# R requests, Q query positions, H kv heads, G query heads per kv head, C tokens that may be read, U units,
# N groups, D head dimension, W index row width, V group row width in bytes

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.decode.reference import NOT_CHOSEN
from sparroll.attention.selectors.base import Selector


def group_logits(
    query_RQHGD: Tensor, index_RHUW: Tensor, rows_RHNV: Tensor, unread_RQHU: Tensor, selector: Selector, scale: float
) -> Tensor:
    """Logarithms [R, Q, H, G, N] of the groups' weights, float32; -inf for a group that is read whole.

    unread: units of the context that the position does not read. Rows of other units and groups may hold anything.
    """
    assert selector.remainder is not None, "a selector without a remainder"
    query, in_group, dim = query_RQHGD.float(), selector.units_per_group, query_RQHGD.shape[-1]
    missing = rows_RHNV.shape[2] * in_group - index_RHUW.shape[2]
    logits = F.pad(scale * selector.estimated_products(query_RQHGD, index_RHUW), (0, missing))
    spread_RHU = selector.remainder.spread(rows_RHNV, dim, in_group).flatten(2)
    half_norm = 0.5 * scale**2 * query.square().sum(-1, keepdim=True)
    logits = logits + half_norm * spread_RHU[:, None, :, None] + math.log(selector.unit_tokens)
    logits = logits.masked_fill(~F.pad(unread_RQHU, (0, missing))[:, :, :, None], -torch.inf)
    return logits.unflatten(-1, (-1, in_group)).logsumexp(-1)


def mixed(
    logits_RQHGC: Tensor, values: Tensor, group_logits_RQHGN: Tensor, rows_RHNV: Tensor, selector: Selector
) -> Tensor:
    """The mean value under the softmax over tokens and groups together: [R, Q, H, G, D] float32.

    logits: of the tokens, -inf where one is not read; values [R, H, C, D], without NaN; rows without a weight may hold
    anything.
    """
    assert selector.remainder is not None, "a selector without a remainder"
    entries = torch.cat([logits_RQHGC, group_logits_RQHGN], dim=-1)
    # A padding row has no entry at all, and softmax of nothing is NaN.
    weights = entries.softmax(-1).masked_fill((entries == -torch.inf).all(-1, keepdim=True), 0.0)
    # 0 * NaN is NaN, so what no position needs is put to zero.
    needed_RHN1 = (group_logits_RQHGN > -torch.inf).any(3).any(1)[..., None]
    means_RHND = selector.remainder.means(rows_RHNV, values.shape[-1]).masked_fill(~needed_RHN1, 0.0)
    read, unread = weights.split([logits_RQHGC.shape[-1], rows_RHNV.shape[2]], dim=-1)
    return torch.einsum("rqhgc,rhcd->rqhgd", read, values.float()) + torch.einsum(
        "rqhgn,rhnd->rqhgd", unread, means_RHND
    )


def sparse_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    rows: Tensor,
    unit_ids: Tensor,
    context_tokens: Tensor,
    selector: Selector,
    scale: float,
) -> Tensor:
    """Attention of one new token per request over the chosen units, and over the rest by groups. See
    api.sparse_decode_with_remainder."""
    unit, units, dim = selector.unit_tokens, index.shape[2], query.shape[-1]
    inside = torch.arange(unit, device=keys.device)
    positions = unit_ids.long().clamp_min(0)[..., None] * unit + inside
    visible = (unit_ids[..., None] != NOT_CHOSEN) & (positions < context_tokens[:, None, None, None])
    visible = visible.flatten(2)
    at = positions.flatten(2).masked_fill(~visible, 0)[..., None].expand(-1, -1, -1, dim)
    logits = scale * torch.einsum("rhgd,rhcd->rhgc", query.float(), keys.gather(2, at).float())
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    unread = unread_units(unit_ids[:, None], context_tokens[:, None], units, unit)
    groups = group_logits(query[:, None], index, rows, unread, selector, scale)
    # What was never written may hold NaN, and 0 * NaN is NaN.
    read_values = values.gather(2, at).masked_fill(~visible[..., None], 0.0)
    return mixed(logits[:, None], read_values, groups, rows, selector)[:, 0].to(query.dtype)


def unread_units(unit_ids_RQHN: Tensor, context_tokens_RQ: Tensor, units: int, unit_tokens: int) -> Tensor:
    """[R, Q, H, U] bool: units of the context that are not among the chosen ones."""
    # One column more than there are units: where the unused entries land.
    read = torch.zeros(*unit_ids_RQHN.shape[:3], units + 1, dtype=torch.bool, device=unit_ids_RQHN.device)
    read.scatter_(3, unit_ids_RQHN.long().masked_fill(unit_ids_RQHN == NOT_CHOSEN, units), True)
    starts = torch.arange(units, device=unit_ids_RQHN.device) * unit_tokens
    return ~read[..., :units] & (starts < context_tokens_RQ[..., None, None])
