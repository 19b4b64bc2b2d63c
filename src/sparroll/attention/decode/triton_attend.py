"""Attention of one new token per request over its chosen units. The tiles of all (request, head) pairs form one row,
and every program takes an equal stretch of it, which may cross pairs. A second kernel adds up the parts of pairs that
were cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_work_split import plan_step, request_at, stretch
from sparroll.attention.selectors.base import Selector

if TYPE_CHECKING:
    from sparroll.attention.decode.paged import StepWorkspace

_LOG2_E = 1.4426950408889634
_PARTS = 16
"""How many partial results the addition holds at a time."""


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
) -> None:
    """See paged.paged_decode."""
    requests, heads, group, dim = query_RHGD.shape
    if requests == 0:
        return
    if not planned:
        plan_step(context_tokens_R, kv_budget_tokens_R, selector, unit_ids_RHN.shape[2], workspace)
    unit, tile = selector.unit_tokens, workspace.tile
    lanes_d = triton.next_power_of_2(dim)
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    overlap = overlapping(query_RHGD)
    _gather[(workspace.programs,)](
        query_RHGD,
        keys_PBHD,
        values_PBHD,
        block_table_RM,
        unit_ids_RHN,
        pages,
        context_tokens_R,
        kv_budget_tokens_R,
        workspace.read_before_R,
        out_RHGD,
        workspace.mixed_XGD,
        workspace.log_sum_XG,
        *query_RHGD.stride()[:3],
        *keys_PBHD.stride()[:3],
        *values_PBHD.stride()[:3],
        block_table_RM.stride(0),
        *unit_ids_RHN.stride()[:2],
        *pages.stride()[:2],
        *out_RHGD.stride()[:3],
        scale * _LOG2_E,
        unit_ids_RHN.shape[2],
        requests,
        UNIT=unit,
        UNITS_PER_BLOCK=keys_PBHD.shape[1] // unit,
        HEADS=heads,
        G=group,
        D=dim,
        LANES_R=triton.next_power_of_2(requests),
        LANES_G=max(16, triton.next_power_of_2(group)),
        LANES_D=lanes_d,
        TILE=tile.tokens,
        WITH_PAGES=pages_RHN is not None,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap,
    )
    _add_up[(group, heads, requests)](
        workspace.mixed_XGD,
        workspace.log_sum_XG,
        workspace.read_before_R,
        out_RHGD,
        *out_RHGD.stride()[:3],
        requests,
        PROGRAMS=workspace.programs,
        G=group,
        D=dim,
        LANES_D=lanes_d,
        PARTS=_PARTS,
        num_warps=1,
        **overlap,
    )


@triton.jit(do_not_specialize=["requests"])
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
    out,
    mixed,
    log_sum,
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
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_R: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_D: tl.constexpr,
    TILE: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    at, end = stretch(read_before, requests, HEADS)
    member = tl.arange(0, LANES_G)
    channel = tl.arange(0, LANES_D)
    in_group = (member < G)[:, None] & (channel < D)[None, :]
    while at < end:
        request, request_begins, tiles = request_at(at, read_before, requests, HEADS, LANES_R)
        context = tl.load(context_tokens + request).to(tl.int32)
        budget = tl.load(kv_budget_tokens + request).to(tl.int32)
        units = (context + UNIT - 1) // UNIT
        chosen_units = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most_units)
        head = (at - request_begins) // tiles
        first_tile = at - request_begins - head * tiles
        last_tile = tl.minimum(tiles, first_tile + end - at)

        ids_row = unit_ids + request * ids_per_request + head * ids_per_head
        pages_row = pages + request * pages_per_request + head * pages_per_head
        table_row = block_table + request * table_per_request
        slot = first_tile * TILE + tl.arange(0, TILE)
        unit, page = _look_up(
            ids_row, pages_row, table_row, slot // UNIT, chosen_units, UNIT, UNITS_PER_BLOCK, context, WITH_PAGES
        )
        query_tile = tl.load(
            query
            + request * query_per_request
            + head * query_per_head
            + member[:, None] * query_per_member
            + channel[None, :],
            mask=in_group,
            other=0.0,
        )
        top = tl.full([LANES_G], float("-inf"), tl.float32)
        total_weight = tl.zeros([LANES_G], tl.float32)
        mix = tl.zeros([LANES_G, LANES_D], tl.float32)
        head_keys = keys + head * keys_per_head
        head_values = values + head * values_per_head
        for _ in range(first_tile, last_tile):
            # Where the next tile lies is looked up one iteration early, so that its keys wait for no other load.
            next_unit, next_page = _look_up(
                ids_row,
                pages_row,
                table_row,
                (slot + TILE) // UNIT,
                chosen_units,
                UNIT,
                UNITS_PER_BLOCK,
                context,
                WITH_PAGES,
            )
            visible = (unit >= 0) & (unit * UNIT + slot % UNIT < context)
            block = (page // UNITS_PER_BLOCK).to(tl.int64)
            token = (page % UNITS_PER_BLOCK) * UNIT + slot % UNIT
            # Where D fills its lanes, the mask is one per row and each load stays 128 bits wide.
            readable = visible[:, None]
            if D != LANES_D:
                readable = readable & (channel < D)[None, :]
            key_at = head_keys + block * keys_per_block + token * keys_per_token
            key = tl.load(key_at[:, None] + channel[None, :], mask=readable, other=0.0)
            logit = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale_log2
            logit = tl.where(visible[None, :], logit, float("-inf"))
            new_top = tl.maximum(top, tl.max(logit, axis=1))
            # Nothing seen yet: -inf minus -inf would be NaN.
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(logit - anchor[:, None])
            shrink = tl.exp2(top - anchor)
            value_at = head_values + block * values_per_block + token * values_per_token
            value = tl.load(value_at[:, None] + channel[None, :], mask=readable, other=0.0)
            total_weight = total_weight * shrink + tl.sum(weight, axis=1)
            mix = mix * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            top = new_top
            slot += TILE
            unit = next_unit
            page = next_page

        divisor = tl.where(total_weight > 0.0, total_weight, 1.0)
        mix = mix / divisor[:, None]
        if last_tile - first_tile == tiles:
            target = out + request * out_per_request + head * out_per_head
            tl.store(
                target + member[:, None] * out_per_member + channel[None, :],
                mix.to(out.dtype.element_ty),
                mask=in_group,
            )
        else:
            # A program cuts at most two pairs: the one that it goes on with, and the one that it begins.
            part = (2 * tl.program_id(0) + (first_tile == 0).to(tl.int32)).to(tl.int64)
            log_total = tl.where(total_weight > 0.0, top + tl.log2(divisor), float("-inf"))
            tl.store(log_sum + part * G + member, log_total, mask=member < G)
            tl.store(mixed + part * (G * D) + member[:, None] * D + channel[None, :], mix, mask=in_group)
        at += last_tile - first_tile


@triton.jit
@no_type_check
def _look_up(
    ids_row,
    pages_row,
    table_row,
    column,
    chosen_units,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    context,
    WITH_PAGES: tl.constexpr,
):
    """Unit ids in a column of the list, -1 past its end, and where each lies: block * units per block + unit in it."""
    listed = column < chosen_units
    unit = tl.load(ids_row + column, mask=listed, other=-1)
    if WITH_PAGES:
        page = tl.load(pages_row + column, mask=listed, other=0)
    else:
        known = (unit >= 0) & (unit * UNIT < context)
        block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=known, other=0).to(tl.int32)
        page = block * UNITS_PER_BLOCK + unit % UNITS_PER_BLOCK
    return unit, page


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _add_up(
    mixed,
    log_sum,
    read_before,
    out,
    out_per_request,
    out_per_head,
    out_per_member,
    requests,
    PROGRAMS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    PARTS: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    member = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    request = tl.program_id(2).to(tl.int64)
    total = tl.load(read_before + requests) * heads
    before = tl.load(read_before + request)
    tiles = tl.load(read_before + request + 1) - before
    share = tl.maximum((total + PROGRAMS - 1) // PROGRAMS, 1)
    begins = before * heads + head * tiles
    first = begins // share
    parts = (begins + tiles - 1) // share - first + 1
    channel = tl.arange(0, LANES_D)
    target = out + request * out_per_request + head * out_per_head + member * out_per_member
    if tiles == 0:
        tl.store(target + channel, tl.zeros([LANES_D], out.dtype.element_ty), mask=channel < D)
    elif parts > 1:
        top = float("-inf")
        total_weight = 0.0
        result = tl.zeros([LANES_D], tl.float32)
        for begin in range(0, parts, PARTS):
            part = begin + tl.arange(0, PARTS)
            row = _row(first, part)
            log_weight = tl.load(log_sum + row * G + member, mask=part < parts, other=float("-inf"))
            part_mixed = tl.load(
                mixed + row[:, None] * (G * D) + member * D + channel[None, :],
                mask=(part < parts)[:, None] & (channel < D)[None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(log_weight, axis=0))
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(log_weight - anchor)
            shrink = tl.exp2(top - anchor)
            total_weight = total_weight * shrink + tl.sum(weight, axis=0)
            result = result * shrink + tl.sum(part_mixed * weight[:, None], axis=0)
            top = new_top
        result = result / tl.where(total_weight > 0.0, total_weight, 1.0)
        tl.store(target + channel, result.to(out.dtype.element_ty), mask=channel < D)


@triton.jit
@no_type_check
def _row(first, part):
    """Where the part of a pair lies that begins in program `first`: see the end of `_gather`."""
    return 2 * (first + part) + (part == 0).to(tl.int32)
