"""Attention of one new token per request over its chosen units. The tiles of all (request, head) pairs form one row,
and every program takes a stretch of it, which may cross pairs (see triton_work_split.py). The parts of a pair that was
cut are added up by whichever of its programs finishes last. Where all stretches are equal and there is no remainder, the
kernel is that of triton_attend_flat.py.

Lists are ascending, so only their last unit can be incomplete: where pages say where units lie, no other id is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode import triton_attend_flat
from sparroll.attention.decode.remainder import triton_remainder, triton_unread
from sparroll.attention.decode.triton_attend_tile import (
    arrive,
    clear_idle,
    end_pair,
    joined,
    look_up,
    stored,
    with_tile,
)
from sparroll.attention.decode.triton_launch import let_next_begin, overlapping, wait_for_previous
from sparroll.attention.decode.triton_work_split import (
    by_request,
    number_of,
    plan_step,
    request_at,
    request_lanes,
    stretch,
)
from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.quantized_mean import QuantizedMean

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import StepWorkspace

_LOG2_E = 1.4426950408889634


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
    workspace: StepWorkspace,
    pages_RHN: Tensor | None,
    planned: bool,
    index_PSHW: Tensor | None,
    groups_PSHV: Tensor | None,
    log_weights_RHGN: Tensor | None,
) -> None:
    """See paged.paged_decode."""
    requests, heads, group, dim = query_RHGD.shape
    if requests == 0:
        return
    if not planned:
        plan_step(context_tokens_R, kv_budget_tokens_R, selector, unit_ids_RHN.shape[2], workspace)
    unread_parts = 0
    if index_PSHW is not None and groups_PSHV is not None and log_weights_RHGN is not None:
        assert isinstance(selector, QuantizedMean), "groups are weighed by the scores of quantized_mean"
        unread_parts = triton_unread.sum_unread(
            query_RHGD, index_PSHW, groups_PSHV, log_weights_RHGN, block_table_RM, unit_ids_RHN, pages_RHN,
            context_tokens_R, kv_budget_tokens_R, selector, scale, workspace,
        )  # fmt: skip
    elif index_PSHW is not None and groups_PSHV is not None:
        unread_parts = triton_remainder.sum_unread(
            query_RHGD, index_PSHW, groups_PSHV, block_table_RM, unit_ids_RHN, context_tokens_R, kv_budget_tokens_R,
            selector, scale, workspace,
        )  # fmt: skip
    unit, tile = selector.unit_tokens, workspace.tile
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    per_block = keys_PBHD.shape[1] // unit
    tensors = (
        query_RHGD, keys_PBHD, values_PBHD, block_table_RM, unit_ids_RHN, pages, context_tokens_R, kv_budget_tokens_R,
        workspace.read_before_R, workspace.arrivals_X, out_RHGD, workspace.mixed_XGD, workspace.log_sum_XG,
    )  # fmt: skip
    strides = (
        *query_RHGD.stride()[:3], *keys_PBHD.stride()[:3], *values_PBHD.stride()[:3], block_table_RM.stride(0),
        *unit_ids_RHN.stride()[:2], *pages.stride()[:2], *out_RHGD.stride()[:3],
    )  # fmt: skip
    numbers = scale * _LOG2_E, unit_ids_RHN.shape[2], requests
    constants = {
        "UNIT_SHIFT": unit.bit_length() - 1, "UNITS_PER_BLOCK": per_block, "HEADS": heads, "G": group, "D": dim,
        "LANES_R": request_lanes(requests), "LANES_G": max(16, triton.next_power_of_2(group)),
        "ADDED_G": triton.next_power_of_2(group), "LANES_D": triton.next_power_of_2(dim), "TILE": tile.tokens,
        "WITH_PAGES": pages_RHN is not None, "ALIKE": keys_PBHD.stride() == values_PBHD.stride(),
    }  # fmt: skip
    if workspace.own_programs(requests) is None and not unread_parts:
        arguments = (*tensors, *strides, *numbers)
        triton_attend_flat.attend(query_RHGD, arguments, constants, tile, workspace.programs(requests))
    else:
        _gather[(workspace.programs(requests),)](
            *tensors,
            workspace.unread_mixed_XGD,
            workspace.unread_log_sum_XG,
            *strides,
            *numbers,
            unread_parts,
            **constants,
            COMPILED=query_RHGD.is_cuda and torch.version.hip is None,
            WITH_UNREAD=unread_parts > 0,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **overlapping(query_RHGD),
        )


@triton.jit(do_not_specialize=["requests", "unread_parts"])
@no_type_check
def _gather(
    query,
    keys,
    values,
    block_table,
    unit_ids,
    pages,
    context_tokens,
    kv_budget_tokens,
    read_before,
    arrivals,
    out,
    mixed,
    log_sum,
    unread_mixed,
    unread_log_sum,
    query_per_request,
    query_per_head,
    query_per_member,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    values_per_block,
    values_per_token,
    values_per_head,
    table_per_request,
    ids_per_request,
    ids_per_head,
    pages_per_request,
    pages_per_head,
    out_per_request,
    out_per_head,
    out_per_member,
    scale_log2,
    most_units,
    requests,
    unread_parts,
    UNIT_SHIFT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_R: tl.constexpr,
    LANES_G: tl.constexpr,
    ADDED_G: tl.constexpr,
    LANES_D: tl.constexpr,
    TILE: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    ALIKE: tl.constexpr,
    COMPILED: tl.constexpr,
    WITH_UNREAD: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """UNIT_SHIFT: logarithm of a unit's tokens.  ALIKE: keys and values have the same strides.  unread_parts: those in
    which a kernel of remainder/ left what a pair does not read.  WITH_UNREAD: whether there is a remainder.  ADDED_G: lanes
    of the query heads in a part."""
    let_next_begin(launch_pdl)
    ends_R = by_request(read_before + 1, requests, LANES_R)
    contexts_R = by_request(context_tokens, requests, LANES_R)
    budgets_R = by_request(kv_budget_tokens, requests, LANES_R)
    share = tl.load(read_before + requests + 1)
    at, end = stretch(ends_R, HEADS, share)
    member = tl.arange(0, LANES_G)
    channel = tl.arange(0, LANES_D)
    in_group = (member < G)[:, None] & (channel < D)[None, :]
    while at < end:
        its_lane, request_begins, planned = request_at(at, ends_R, requests, HEADS, LANES_R)
        context, budget = number_of(its_lane, contexts_R, LANES_R), number_of(its_lane, budgets_R, LANES_R)
        request = its_lane.to(tl.int64)
        units = (context + (1 << UNIT_SHIFT) - 1) >> UNIT_SHIFT
        chosen_units = tl.minimum(tl.where(budget >= context, units, budget >> UNIT_SHIFT), most_units)
        head = (at - request_begins) // planned
        begins = request_begins + head * planned
        first_tile = at - begins
        tiles = ((chosen_units << UNIT_SHIFT) + TILE - 1) // TILE
        last_tile = tl.minimum(tiles, end - begins)

        ids_row = unit_ids + request * ids_per_request + head * ids_per_head
        pages_row = pages + request * pages_per_request + head * pages_per_head
        table_row = block_table + request * table_per_request
        query_rows = query + request * query_per_request + head * query_per_head
        last_id = ids_row + tl.maximum(chosen_units - 1, 0)
        wait_for_previous(launch_pdl)
        if COMPILED:
            # ptxas loads the query when the first pages are there, and the first keys wait for it: it is in L2 by then.
            piece = tl.arange(0, 8)[None, :] * (LANES_D // 8)
            _prefetch(query_rows + tl.minimum(member, G - 1)[:, None] * query_per_member + tl.minimum(piece, D - 1))
            _prefetch(last_id)
        query_tile = tl.load(
            query_rows + member[:, None] * query_per_member + channel[None, :], mask=in_group, other=0.0
        )
        slot = first_tile * TILE + tl.arange(0, TILE)
        page = look_up(
            ids_row, pages_row, table_row, slot, chosen_units, most_units, UNIT_SHIFT, UNITS_PER_BLOCK, WITH_PAGES
        )
        # Of the listed tokens, those of an incomplete last unit do not exist yet.
        listed = chosen_units << UNIT_SHIFT
        listed -= tl.where(tl.load(last_id) == units - 1, (units << UNIT_SHIFT) - context, 0)
        top = tl.full([LANES_G], float("-inf"), tl.float32)
        total_weight = tl.zeros([LANES_G], tl.float32)
        mix = tl.zeros([LANES_G, LANES_D], tl.float32)
        # What is not read is the first entry of the softmax, for the program that begins the pair.
        for number in range(0, tl.where(first_tile == 0, unread_parts, 0) if WITH_UNREAD else 0, 4):
            # Loaded together, as in `add_up`.
            row = (request * HEADS + head) * unread_parts + number
            left = unread_parts - number
            log_0, mixed_0 = stored(unread_mixed, unread_log_sum, row, True, member, channel, in_group, G, D)
            log_1, mixed_1 = stored(unread_mixed, unread_log_sum, row + 1, left > 1, member, channel, in_group, G, D)
            log_2, mixed_2 = stored(unread_mixed, unread_log_sum, row + 2, left > 2, member, channel, in_group, G, D)
            log_3, mixed_3 = stored(unread_mixed, unread_log_sum, row + 3, left > 3, member, channel, in_group, G, D)
            top, total_weight, mix = joined(
                top, total_weight, mix, log_0, log_1, log_2, log_3, mixed_0, mixed_1, mixed_2, mixed_3
            )
        head_keys = keys + head * keys_per_head
        head_values = values + head * values_per_head
        for _ in range(first_tile, last_tile):
            # Where the next tile lies is looked up one iteration early, so that its keys wait for no other load.
            next_page = look_up(
                ids_row, pages_row, table_row, slot + TILE, chosen_units, most_units, UNIT_SHIFT, UNITS_PER_BLOCK, WITH_PAGES
            )  # fmt: skip
            visible = slot < listed
            top, total_weight, mix = with_tile(
                top, total_weight, mix, query_tile, head_keys, head_values, page, slot, visible, visible, channel,
                scale_log2, keys_per_block, keys_per_token, values_per_block, values_per_token,
                UNIT_SHIFT, UNITS_PER_BLOCK, D, LANES_D, ALIKE,
            )  # fmt: skip
            slot += TILE
            page = next_page

        target = out + request * out_per_request + head * out_per_head
        whole = last_tile - first_tile == tiles
        end_pair(
            top, total_weight, mix, mixed, log_sum, target, out_per_member, whole, first_tile, member, channel, in_group,
            G, D,
        )  # fmt: skip
        if not whole:
            # All threads have stored their part before one of them says so.
            tl.debug_barrier()
            arrive(
                mixed, log_sum, arrivals, target, out_per_member, begins, tiles, share, channel, G, D, ADDED_G, LANES_D
            )  # fmt: skip
        at = begins + planned
    wait_for_previous(launch_pdl)
    clear_idle(
        read_before, out, requests, out_per_request, out_per_head, out_per_member, member, channel, in_group,
        HEADS, LANES_G, LANES_D,
    )  # fmt: skip


@triton.jit
@no_type_check
def _prefetch(places):
    """Begin to bring memory into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
