"""Attention of one new token per request over its chosen units. Several programs share one (request, head), each gathers
a stretch of the chosen tokens and keeps a running softmax; a second kernel adds up what they left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.selectors.base import Selector

if TYPE_CHECKING:
    from sparroll.attention.paged import DecodeWorkspace

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """How one program of the gather is laid out. Changes its speed, not its result."""

    tokens: int
    """Tokens read per iteration."""
    warps: int
    stages: int
    """Iterations in flight, the running one included."""


_ROOMY = {(8, 0), (9, 0), (10, 0), (10, 3)}
"""Compute capabilities with 164 KB of shared memory or more on each multiprocessor."""


def default_tile(dim: int, element_bytes: int, device: torch.device) -> Tile:
    """Measured on an H200 for 128 channels of 16 bits: 64 tokens, 4 warps, 3 stages (96 KB, two programs to a
    multiprocessor). Devices with less shared memory, and wider heads, take smaller tiles."""
    token_bytes = 2 * triton.next_power_of_2(dim) * element_bytes
    roomy = device.type == "cuda" and torch.cuda.get_device_capability(device) in _ROOMY
    tokens = 64 if roomy and token_bytes <= 512 else 32
    stage_bytes = tokens * token_bytes
    return Tile(tokens, warps=4, stages=4 if stage_bytes <= 16384 else 3 if stage_bytes <= 32768 else 2)


def paged_decode(
    query_RHGD: Tensor,
    keys_PBHD: Tensor,
    values_PBHD: Tensor,
    block_table_RM: Tensor,
    unit_ids_RHN: Tensor,
    context_tokens_R: Tensor,
    selector: Selector,
    scale: float,
    out_RHGD: Tensor,
    workspace: DecodeWorkspace,
    pages_RHN: Tensor | None = None,
    kv_budget_tokens_R: Tensor | None = None,
    tile: Tile | None = None,
    splits: int | None = None,
) -> None:
    """See paged.paged_decode. `tile` and `splits` are for measurements."""
    requests, heads, group, dim = query_RHGD.shape
    if requests == 0:
        return
    most, unit = unit_ids_RHN.shape[2], selector.unit_tokens
    tile = tile or default_tile(dim, keys_PBHD.element_size(), keys_PBHD.device)
    splits = splits or min(workspace.splits(requests, heads), triton.cdiv(most * unit, tile.tokens))
    assert requests * heads * splits <= len(workspace.mixed_XGD), "workspace is too small for these splits"
    lanes_d = triton.next_power_of_2(dim)
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    _gather[(heads, splits, requests)](
        query_RHGD,
        keys_PBHD,
        values_PBHD,
        block_table_RM,
        unit_ids_RHN,
        pages,
        context_tokens_R,
        context_tokens_R if kv_budget_tokens_R is None else kv_budget_tokens_R,
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
        most,
        UNIT=unit,
        UNITS_PER_BLOCK=keys_PBHD.shape[1] // unit,
        G=group,
        D=dim,
        LANES_G=max(16, triton.next_power_of_2(group)),
        LANES_D=lanes_d,
        LANES_N=triton.next_power_of_2(most),
        TILE=tile.tokens,
        WITH_PAGES=pages_RHN is not None,
        WITH_BUDGET=kv_budget_tokens_R is not None,
        ALONE=splits == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _add_up[(group, heads, requests)](
            workspace.mixed_XGD,
            workspace.log_sum_XG,
            out_RHGD,
            *out_RHGD.stride()[:3],
            splits,
            G=group,
            D=dim,
            LANES_D=lanes_d,
            LANES_SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
        )


@triton.jit
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
    most,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_D: tl.constexpr,
    LANES_N: tl.constexpr,
    TILE: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    WITH_BUDGET: tl.constexpr,
    ALONE: tl.constexpr,
):
    head = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    request = tl.program_id(2).to(tl.int64)
    context = tl.load(context_tokens + request).to(tl.int32)
    ids_row = unit_ids + request * ids_per_request + head * ids_per_head
    pages_row = pages + request * pages_per_request + head * pages_per_head
    if WITH_BUDGET:
        budget = tl.load(kv_budget_tokens + request).to(tl.int32)
        units = (context + UNIT - 1) // UNIT
        chosen_units = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most)
    else:
        place = tl.arange(0, LANES_N)
        ids = tl.load(ids_row + place, mask=place < most, other=-1)
        chosen_units = tl.sum((ids >= 0).to(tl.int32), axis=0)
    tiles = (chosen_units * UNIT + TILE - 1) // TILE
    share = (tiles + splits - 1) // splits
    first_tile = split * share
    last_tile = tl.minimum(first_tile + share, tiles)

    member = tl.arange(0, LANES_G)
    channel = tl.arange(0, LANES_D)
    query_tile = tl.load(
        query
        + request * query_per_request
        + head * query_per_head
        + member[:, None] * query_per_member
        + channel[None, :],
        mask=(member < G)[:, None] & (channel < D)[None, :],
        other=0.0,
    )
    top = tl.full([LANES_G], float("-inf"), tl.float32)
    total = tl.zeros([LANES_G], tl.float32)
    mix = tl.zeros([LANES_G, LANES_D], tl.float32)
    head_keys = keys + head * keys_per_head
    head_values = values + head * values_per_head

    table_row = block_table + request * table_per_request
    slot = first_tile * TILE + tl.arange(0, TILE)
    unit, page = _look_up(
        ids_row, pages_row, table_row, slot // UNIT, chosen_units, UNIT, UNITS_PER_BLOCK, context, WITH_PAGES
    )
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
        total = total * shrink + tl.sum(weight, axis=1)
        mix = mix * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top
        slot += TILE
        unit = next_unit
        page = next_page

    divisor = tl.where(total > 0.0, total, 1.0)
    mix = mix / divisor[:, None]
    written = (member < G)[:, None] & (channel < D)[None, :]
    if ALONE:
        target = out + request * out_per_request + head * out_per_head
        tl.store(
            target + member[:, None] * out_per_member + channel[None, :], mix.to(out.dtype.element_ty), mask=written
        )
    else:
        row = (request * tl.num_programs(0) + head) * splits + split
        log_total = tl.where(total > 0.0, top + tl.log2(divisor), float("-inf"))
        tl.store(log_sum + row * G + member, log_total, mask=member < G)
        # A split without tokens leaves its partial output as it is; its sum says so.
        tl.store(
            mixed + row * (G * D) + member[:, None] * D + channel[None, :],
            mix,
            mask=written & (first_tile < last_tile),
        )


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


@triton.jit
@no_type_check
def _add_up(
    mixed,
    log_sum,
    out,
    out_per_request,
    out_per_head,
    out_per_member,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    LANES_SPLITS: tl.constexpr,
):
    member = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, LANES_SPLITS)
    channel = tl.arange(0, LANES_D)
    row = (request * tl.num_programs(1) + head) * splits + split
    part_log_sum = tl.load(log_sum + row * G + member, mask=split < splits, other=float("-inf"))
    top = tl.max(part_log_sum, axis=0)
    weight = tl.exp2(part_log_sum - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    part = tl.load(
        mixed + row[:, None] * (G * D) + member * D + channel[None, :],
        mask=(part_log_sum > float("-inf"))[:, None] & (channel < D)[None, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    target = out + request * out_per_request + head * out_per_head + member * out_per_member
    tl.store(target + channel, result.to(out.dtype.element_ty), mask=channel < D)
