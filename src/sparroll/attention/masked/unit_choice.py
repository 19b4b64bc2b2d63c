"""Chooses the units of whole sequences, by plain PyTorch for any selector or by the kernels for page means.
unit_bitmap.py describes the words that both return."""

# B sequences, S positions, Q positions of a chunk, A query heads, H kv heads, U units, P blocks of 32, D head dimension

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.decode import reference
from sparroll.attention.masked import api as masked
from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS, pack
from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.page_mean import PageMean
from sparroll.errors import UserError

_SCORED_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 27}
"""Scores (or what a selector holds for each of them) that exist at one time: about 128 MB in fp32, and on a GPU, where
smaller pieces would wait for their launches, 512 MB."""


def implementation(impl: str, selector: Selector) -> str:
    """What chooses where `impl`, "reference" or "triton", attends: "triton" only for `page_mean`, which has kernels;
    "reference", plain PyTorch on the same device, for every other selector."""
    return "triton" if impl == "triton" and type(selector) is PageMean else "reference"


@torch.no_grad()
def chosen_words(
    query_BASD: Tensor,
    keys_BHSD: Tensor,
    dense_BS: Tensor,
    kv_budget_tokens_S: Tensor,
    selector: Selector,
    scale: float,
    impl: str = "reference",
) -> Tensor:
    """Words that say what each position reads: the units of its context that `api.select` chooses, or all where it is
    dense.

    query and keys after RoPE; position s has s + 1 tokens of context, budgets [S] int are those of these contexts;
    dense_BS bool: positions that read their whole context, whatever their budget. The index is built from the keys
    themselves, so landmarks are those of an engine that wrote the same keys. Deterministic, and the same under
    autocast.

    impl: "reference" for any selector, "triton" for `page_mean`. Raises UserError where it cannot run. Of equal scores,
    both choose the lowest units, as engines do.
    """
    with torch.autocast(query_BASD.device.type, enabled=False):
        if masked.implementation(impl, query_BASD.device) == "reference":
            return _selected(query_BASD, keys_BHSD, dense_BS, kv_budget_tokens_S, selector, scale)
        if type(selector) is not PageMean:
            raise UserError(f"no kernels choose units for the selector {selector.kind!r}", 'impl="reference" does')
        from sparroll.attention.masked import triton_unit_choice

        masked.check_offsets(query_BASD, keys_BHSD)
        return triton_unit_choice.chosen_words(query_BASD, keys_BHSD, dense_BS, kv_budget_tokens_S, selector)


def _selected(
    query_BASD: Tensor,
    keys_BHSD: Tensor,
    dense_BS: Tensor,
    kv_budget_tokens_S: Tensor,
    selector: Selector,
    scale: float,
) -> Tensor:
    batch, heads, tokens, dim = keys_BHSD.shape
    group, unit = query_BASD.shape[1] // heads, selector.unit_tokens
    units = -(-tokens // unit)
    words = torch.zeros(batch, heads, -(-tokens // WORD_POSITIONS), units, dtype=torch.int32, device=query_BASD.device)
    sparse_S = (~dense_BS).any(0).cpu()
    padded = F.pad(keys_BHSD, (0, 0, 0, units * unit - tokens))
    index = selector.build_index(padded.unflatten(2, (units, unit)))
    held = batch * query_BASD.shape[1] * units * max(1, index.shape[-1] // dim)
    at_once = _SCORED_AT_ONCE.get(words.device.type, 1 << 25)
    chunk = max(1, at_once // (held * WORD_POSITIONS)) * WORD_POSITIONS
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        seen = -(-end // unit)
        context_Q = torch.arange(begin + 1, end + 1, device=words.device)
        exists_QU = torch.arange(seen, device=words.device) * unit < context_Q[:, None]
        read_BQHU = exists_QU[None, :, None].expand(batch, -1, heads, -1)
        if bool(sparse_S[begin:end].any()):
            part = query_BASD[:, :, begin:end].unflatten(1, (heads, group)).permute(0, 3, 1, 2, 4)
            budgets_BQ = kv_budget_tokens_S[begin:end].expand(batch, -1)
            ranked = reference.ranked(
                part, index[:, :, :seen], context_Q.expand(batch, -1), budgets_BQ, selector, scale
            )
            read_BQHU = read_BQHU & (best(*ranked) | dense_BS[:, begin:end, None, None])
        blocks = slice(begin // WORD_POSITIONS, -(-end // WORD_POSITIONS))
        words[:, :, blocks, :seen] = pack(read_BQHU)
    return words


def best(score_RQHU: Tensor, wanted_RQ1: Tensor) -> Tensor:
    """[R, Q, H, U] bool: as many units as are wanted, those that `reference.best_first` puts first.

    It looks for the score of the last wanted unit and sorts nothing, which matters for units of one token.
    """
    # Without NaN, the scores compare as their order does.
    order_RQHU = reference.in_order(score_RQHU) if bool(score_RQHU.isnan().any()) else score_RQHU
    fewest, most = (int(bound) for bound in wanted_RQ1.aminmax())
    top_RQHN = order_RQHU.topk(max(most, 1), sorted=fewest < most).values
    if fewest < most:
        last_RQH1 = top_RQHN.gather(3, (wanted_RQ1[..., None] - 1).clamp_min(0).expand(*top_RQHN.shape[:3], 1).long())
    else:
        last_RQH1 = top_RQHN.amin(3, keepdim=True)
    above_RQHU, equal_RQHU = order_RQHU > last_RQH1, order_RQHU == last_RQH1
    left_RQH1 = wanted_RQ1[..., None] - above_RQHU.sum(3, keepdim=True)
    if bool((equal_RQHU.sum(3, keepdim=True) > left_RQH1).any()):
        equal_RQHU = equal_RQHU & (equal_RQHU.cumsum(3, dtype=torch.int32) <= left_RQH1)
    return above_RQHU | equal_RQHU
