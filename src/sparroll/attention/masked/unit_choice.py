"""Chooses the units of whole sequences, by plain PyTorch for any selector or by the kernels for page means.
unit_bitmap.py describes the words that both return."""

# B sequences, S positions, Q positions of a chunk, A query heads, H kv heads, U units, P blocks of 32, D head dimension

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.decode import api
from sparroll.attention.decode.reference import NOT_CHOSEN
from sparroll.attention.masked import api as masked
from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS, pack
from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.page_mean import PageMean
from sparroll.errors import UserError

_SCORED_AT_ONCE = 1 << 25
"""Scores (or what a selector holds for each of them) that exist at one time: about 128 MB in fp32."""


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
    chunk = max(1, _SCORED_AT_ONCE // (held * WORD_POSITIONS)) * WORD_POSITIONS
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        seen = -(-end // unit)
        context_Q = torch.arange(begin + 1, end + 1, device=words.device)
        exists_QU = torch.arange(seen, device=words.device) * unit < context_Q[:, None]
        read_BQHU = exists_QU[None, :, None].expand(batch, -1, heads, -1)
        if bool(sparse_S[begin:end].any()):
            part = query_BASD[:, :, begin:end].unflatten(1, (heads, group)).permute(0, 3, 1, 2, 4)
            budgets_BQ = kv_budget_tokens_S[begin:end].expand(batch, -1)
            ids = api.select(part, index[:, :, :seen], context_Q.expand(batch, -1), budgets_BQ, selector, scale)
            read_BQHU = read_BQHU & (_listed(ids, seen) | dense_BS[:, begin:end, None, None])
        blocks = slice(begin // WORD_POSITIONS, -(-end // WORD_POSITIONS))
        words[:, :, blocks, :seen] = pack(read_BQHU)
    return words


def _listed(unit_ids_RQHN: Tensor, units: int) -> Tensor:
    """[R, Q, H, U] bool from ids; one column more than there are units is where the unused entries land."""
    read = torch.zeros(*unit_ids_RQHN.shape[:3], units + 1, dtype=torch.bool, device=unit_ids_RQHN.device)
    read.scatter_(3, unit_ids_RQHN.masked_fill(unit_ids_RQHN == NOT_CHOSEN, units), True)
    return read[..., :units]
