"""The specification of the paged operations: plain PyTorch, any device, fp32 accumulation. The signatures are those of
paged.py, which also checks the arguments. Units are chosen by the rule of reference.py: of equal scores, the lowest."""

# R requests, T new tokens, P blocks, B tokens per block, M blocks per request, S units per block, H kv heads,
# G query heads per kv head, U units, N chosen units, D head dim, W index row width, V group row width in bytes

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.decode import remainder_reference
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.reference import NOT_CHOSEN, best_first, in_order
from sparroll.attention.decode.workspace import PEAK_UNITS
from sparroll.attention.selectors.base import Selector


def update_index(
    keys_PBHD: Tensor,
    index_PSHW: Tensor,
    slots_T: Tensor,
    selector: Selector,
    apart_2L: Tensor | None = None,
    beside: bool = False,
) -> None:
    """See paged.update_index."""
    assert apart_2L is None, "the reference does not follow addresses"
    unit, block_tokens = selector.unit_tokens, keys_PBHD.shape[1]
    last_X = slots_T[(slots_T >= 0) & (slots_T % unit == unit - 1)].long()
    if not len(last_X):
        return
    blocks_X, rows_X = last_X // block_tokens, last_X % block_tokens // unit
    inside = torch.arange(unit, device=keys_PBHD.device)
    complete_XUHD = keys_PBHD[blocks_X[:, None], rows_X[:, None] * unit + inside]
    cut = selector.cut_at(keys_PBHD.shape[-1])
    _store_rows(index_PSHW, blocks_X, rows_X, selector.build_index(complete_XUHD.transpose(1, 2)), cut)


def score_units(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    block_table_RM: Tensor,
    context_tokens_R: Tensor,
    selector: Selector,
    scores_RHU: Tensor,
    kv_budget_tokens_R: Tensor | None,
    scale: float,
    workspace: Any = None,
    planned: bool = False,
    peaks_RHK: Tensor | None = None,
    groups_PSHV: Tensor | None = None,
    log_weights_RHGN: Tensor | None = None,
    new_tokens: NewTokens | None = None,
) -> None:
    """See paged.score_units."""
    if new_tokens is not None:
        _store(new_tokens)
    unit, units_per_block = selector.unit_tokens, index_PSHW.shape[1]
    first, recent = selector.first_tokens // unit, selector.recent_tokens // unit
    ids_U = torch.arange(scores_RHU.shape[2], device=scores_RHU.device)
    units_R1 = (context_tokens_R[:, None] + unit - 1) // unit
    exists_RU = ids_U < units_R1
    forced_RU = exists_RU & ((ids_U < first) | (ids_U >= units_R1 - recent))
    candidates_RU = exists_RU & ~forced_RU
    columns_U = (ids_U // units_per_block).clamp_max(block_table_RM.shape[1] - 1)
    blocks_RU = block_table_RM[:, columns_U].long().masked_fill(~candidates_RU, 0)
    # Rows that were never written may hold NaN, and a selector may mix rows.
    index_RUHW = rows_of_units(index_PSHW, blocks_RU, ids_U % units_per_block, selector.cut_at(query_RHGD.shape[-1]))
    index_RUHW = index_RUHW.masked_fill(~candidates_RU[..., None, None], 0)
    score_RHU = selector.score(
        query_RHGD[:, None], index_RUHW.transpose(1, 2), scale, candidates_RU[:, None, None]
    )[:, 0]  # fmt: skip
    score_RHU = score_RHU.masked_fill(forced_RU[:, None], torch.inf).masked_fill(~exists_RU[:, None], -torch.inf)
    if kv_budget_tokens_R is not None:
        scored_R = kv_budget_tokens_R < context_tokens_R
        score_RHU = torch.where(scored_R[:, None, None], score_RHU, scores_RHU)
    scores_RHU.copy_(score_RHU)
    if peaks_RHK is not None:
        peaks_RHK.copy_(peaks_of(scores_RHU))
    if log_weights_RHGN is not None and groups_PSHV is not None:
        in_group, width = selector.units_per_group, groups_PSHV.shape[1]
        wanted_RN = F.pad(candidates_RU, (0, -len(ids_U) % in_group)).unflatten(1, (-1, in_group)).any(2)
        # A block holds whole groups.
        groups_N = torch.arange(wanted_RN.shape[1], device=ids_U.device)
        columns_N = (groups_N // width).clamp_max(block_table_RM.shape[1] - 1)
        blocks_RN = block_table_RM[:, columns_N].long().masked_fill(~wanted_RN, 0)
        log_RHGN = remainder_reference.group_logits(
            query_RHGD[:, None], index_RUHW.transpose(1, 2), groups_PSHV[blocks_RN, groups_N % width].transpose(1, 2),
            candidates_RU[:, None, None], selector, scale,
        )[:, 0]  # fmt: skip
        log_weights_RHGN.copy_(log_RHGN / math.log(2))


def _store(new: NewTokens) -> None:
    there_T = new.slots_T >= 0
    new.keys_PBHD[new.places], new.values_PBHD[new.places] = new.keys_THD[there_T], new.values_THD[there_T]


def peaks_of(scores_RHU: Tensor) -> Tensor:
    """Of every PEAK_UNITS scores the largest, as whole numbers in the order of the scores, with NaN on top."""
    padded = F.pad(in_order(scores_RHU), (0, -scores_RHU.shape[2] % PEAK_UNITS), value=-(1 << 31))
    return padded.unflatten(2, (-1, PEAK_UNITS)).amax(3)


def choose_units(
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor | None,
    block_table_RM: Tensor | None,
    units_per_block: int,
    fill_rest: bool = True,
    peaks_RHK: Tensor | None = None,
    planned: bool = False,
    workspace: Any = None,
) -> None:
    """See paged.choose_units. It announces nothing."""
    unit, units, most = selector.unit_tokens, scores_RHU.shape[2], unit_ids_RHN.shape[2]
    ids_U = torch.arange(units, device=scores_RHU.device)
    units_R = (context_tokens_R + unit - 1) // unit
    wanted_R = _wanted(context_tokens_R, kv_budget_tokens_R, unit).clamp_max(most)
    score_RHU = scores_RHU.masked_fill(ids_U >= units_R[:, None, None], -torch.inf)
    best_RHU = best_first(score_RHU)
    chosen_RHU = torch.zeros_like(best_RHU, dtype=torch.bool)
    chosen_RHU.scatter_(2, best_RHU, (ids_U < wanted_R[:, None, None]).expand_as(best_RHU))
    ascending_RHU = torch.where(chosen_RHU, ids_U, units).sort(dim=-1).values[..., :most]
    ids_RHN = torch.full_like(unit_ids_RHN, NOT_CHOSEN)
    ids_RHN[..., :units] = ascending_RHU.masked_fill(ascending_RHU == units, NOT_CHOSEN)
    written_RHN = (ids_RHN != NOT_CHOSEN) | fill_rest
    unit_ids_RHN.copy_(torch.where(written_RHN, ids_RHN, unit_ids_RHN))
    if pages_RHN is not None and block_table_RM is not None:
        pages_RHN.copy_(torch.where(written_RHN, _pages(ids_RHN, block_table_RM, units_per_block), pages_RHN))


def paged_decode(
    query_RHGD: Tensor,
    keys_PBHD: Tensor,
    values_PBHD: Tensor,
    block_table_RM: Tensor,
    unit_ids_RHN: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    scale: float,
    out_RHGD: Tensor,
    workspace: Any = None,
    pages_RHN: Tensor | None = None,
    planned: bool = False,
    index_PSHW: Tensor | None = None,
    groups_PSHV: Tensor | None = None,
    log_weights_RHGN: Tensor | None = None,
    announced: bool = False,
) -> None:
    """See paged.paged_decode. Workspace, pages and plan save kernels some work; they are not used here."""
    unit = selector.unit_tokens
    wanted_R = _wanted(context_tokens_R, kv_budget_tokens_R, unit)
    past_RN = torch.arange(unit_ids_RHN.shape[2], device=unit_ids_RHN.device) >= wanted_R[:, None]
    rising_RHN = (unit_ids_RHN[..., 1:] > unit_ids_RHN[..., :-1]) | past_RN[:, None, 1:]
    assert rising_RHN.all() and ((unit_ids_RHN >= 0) | past_RN[:, None]).all(), "a list of units does not rise"
    unit_ids_RHN = unit_ids_RHN.masked_fill(past_RN[:, None], NOT_CHOSEN)
    if index_PSHW is not None and groups_PSHV is not None:
        _decode_with_remainder(
            query_RHGD, keys_PBHD, values_PBHD, index_PSHW, groups_PSHV, block_table_RM, unit_ids_RHN, context_tokens_R,
            selector, scale, out_RHGD,
        )  # fmt: skip
        return
    inside = torch.arange(unit, device=keys_PBHD.device)
    positions_RHNt = unit_ids_RHN.long()[..., None] * unit + inside
    chosen_RHN1 = (unit_ids_RHN != NOT_CHOSEN)[..., None]
    visible_RHC = (chosen_RHN1 & (positions_RHNt < context_tokens_R[:, None, None, None])).flatten(2)
    units_per_block = keys_PBHD.shape[1] // unit
    pages_RHN = _pages(unit_ids_RHN, block_table_RM, units_per_block).long().clamp_min(0)
    blocks_RHN1 = (pages_RHN // units_per_block)[..., None]
    tokens_RHNt = (pages_RHN % units_per_block)[..., None] * unit + inside
    heads_H11 = torch.arange(keys_PBHD.shape[2], device=keys_PBHD.device)[:, None, None]
    # What was never written may hold NaN, and 0 * NaN is NaN: a masked softmax alone does not keep it out.
    keys_RHCD, values_RHCD = (
        held[blocks_RHN1, tokens_RHNt, heads_H11].flatten(2, 3).float().masked_fill_(~visible_RHC[..., None], 0.0)
        for held in (keys_PBHD, values_PBHD)
    )
    mixed_RHGD = F.scaled_dot_product_attention(
        query_RHGD.float(), keys_RHCD, values_RHCD, attn_mask=visible_RHC[:, :, None], scale=scale
    )
    # A padding row sees nothing, and softmax of nothing is NaN.
    out_RHGD.copy_(mixed_RHGD.masked_fill(~visible_RHC.any(-1)[..., None, None], 0.0))


def update_groups(
    keys_PBHD: Tensor, values_PBHD: Tensor, groups_PSHV: Tensor, slots_T: Tensor, selector: Selector
) -> None:
    """See paged.update_groups. The rows of a block's groups belong to the block, as its index rows do."""
    assert selector.remainder is not None, "a selector without a remainder"
    group, block_tokens = selector.remainder.group_tokens, keys_PBHD.shape[1]
    last_X = slots_T[(slots_T >= 0) & (slots_T % group == group - 1)].long()
    if not len(last_X):
        return
    blocks_X, rows_X = last_X // block_tokens, last_X % block_tokens // group
    inside = torch.arange(group, device=keys_PBHD.device)
    keys_XHgD, values_XHgD = (
        held[blocks_X[:, None], rows_X[:, None] * group + inside].transpose(1, 2) for held in (keys_PBHD, values_PBHD)
    )
    groups_PSHV[blocks_X, rows_X] = selector.build_groups(keys_XHgD, values_XHgD)


def _decode_with_remainder(
    query_RHGD: Tensor,
    keys_PBHD: Tensor,
    values_PBHD: Tensor,
    index_PSHW: Tensor,
    groups_PSHV: Tensor,
    block_table_RM: Tensor,
    unit_ids_RHN: Tensor,
    context_tokens_R: Tensor,
    selector: Selector,
    scale: float,
    out_RHGD: Tensor,
) -> None:
    """`remainder_reference.sparse_decode` on a copy of each request's blocks, as far as contexts go."""
    if not len(context_tokens_R):
        return
    units, block_tokens = index_PSHW.shape[1], keys_PBHD.shape[1]
    columns = max(1, -(-int(context_tokens_R.max()) // block_tokens))
    # Past a request's own blocks the table may hold anything.
    own_RM = torch.arange(columns, device=block_table_RM.device) * block_tokens < context_tokens_R[:, None]
    blocks_RM = block_table_RM[:, :columns].long().masked_fill(~own_RM, 0)
    keys_RHCD, values_RHCD, groups_RHNV = (
        held[blocks_RM].flatten(1, 2).transpose(1, 2) for held in (keys_PBHD, values_PBHD, groups_PSHV)
    )
    blocks_RU = blocks_RM.repeat_interleave(units, dim=1)
    rows_U = torch.arange(units, device=blocks_RM.device).repeat(blocks_RM.shape[1])
    cut = selector.cut_at(query_RHGD.shape[-1])
    index_RHUW = rows_of_units(index_PSHW, blocks_RU, rows_U, cut).transpose(1, 2)
    out_RHGD.copy_(
        remainder_reference.sparse_decode(
            query_RHGD, keys_RHCD, values_RHCD, index_RHUW, groups_RHNV, unit_ids_RHN, context_tokens_R, selector, scale
        )
    )


def _store_rows(index_PSHW: Tensor, blocks_X: Tensor, rows_X: Tensor, built_XHW: Tensor, cut: int) -> None:
    if cut == index_PSHW.shape[3]:
        index_PSHW[blocks_X, rows_X] = built_XHW
        return
    units_SW, numbers_SW = _places(index_PSHW, cut)
    index_PSHW[blocks_X[:, None], units_SW[rows_X], :, numbers_SW[rows_X]] = built_XHW.transpose(1, 2)


def rows_of_units(index_PSHW: Tensor, blocks_RU: Tensor, rows_U: Tensor, cut: int) -> Tensor:
    """Whole index rows [R, U, H, W] from blocks in which they are cut (`Selector.cut_at`). rows_U: places in a block."""
    if cut == index_PSHW.shape[3]:
        return index_PSHW[blocks_RU, rows_U]
    units_SW, numbers_SW = _places(index_PSHW, cut)
    return index_PSHW[blocks_RU[..., None], units_SW[rows_U], :, numbers_SW[rows_U]].transpose(2, 3)


def _places(index_PSHW: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Where each number of each unit's row is stored, as places on the axes S and W: behind the first parts of all rows
    of a block, which end at the cut, stand the second parts."""
    units, width = index_PSHW.shape[1], index_PSHW.shape[3]
    unit = torch.arange(units, device=index_PSHW.device)[:, None]
    number = torch.arange(width, device=index_PSHW.device)
    behind = units * cut + unit * (width - cut) + number - cut
    place_SW = torch.where(number < cut, unit * cut + number, behind)
    return place_SW // width, place_SW % width


def _wanted(context_tokens_R: Tensor, kv_budget_tokens_R: Tensor, unit: int) -> Tensor:
    """Units that each request reads."""
    units_R = (context_tokens_R + unit - 1) // unit
    return torch.where(kv_budget_tokens_R >= context_tokens_R, units_R, kv_budget_tokens_R // unit)


def _pages(unit_ids_RHN: Tensor, block_table_RM: Tensor, units_per_block: int) -> Tensor:
    ids = unit_ids_RHN.long().clamp_min(0)
    rows = torch.arange(len(ids), device=ids.device)[:, None, None]
    pages = block_table_RM[rows, ids // units_per_block].long() * units_per_block + ids % units_per_block
    return pages.masked_fill(unit_ids_RHN == NOT_CHOSEN, NOT_CHOSEN)
