"""What a step does not read, summed up by groups: for each (request, head) one more entry of the softmax, which
triton_attend.py begins with (remainder_reference.py has the specification).

Every pair's units are cut into up to 8 stretches, fewer where the pairs fill the GPU anyway. Each stretch has a program,
which leaves its part in memory. It goes through the stretch in tiles: it estimates the logits of a tile's units from their
index rows, leaves out those that stand in the pair's list, adds up the weights of each group, and multiplies by the group's
mean value.

Index rows of few bits are not read twice: triton_unread.py has a kernel for them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_index import words_of
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_work_split import blocks_of, competes
from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.quantized_mean import QuantizedMean

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import StepWorkspace

_LOG2_E = math.log2(math.e)
_LEAST_OF_A_DOT = tl.constexpr(16)
_LISTED = tl.constexpr(16)
"""Chosen units that are compared with a tile's at a time."""
_NO_UNIT = tl.constexpr(0x7FFFFFFF)


def sum_unread(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    groups_PSHV: Tensor,
    block_table_RM: Tensor,
    unit_ids_RHN: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    scale: float,
    workspace: StepWorkspace,
) -> int:
    """Write each pair's parts into the workspace; says how many parts a pair has."""
    requests, heads, group, dim = query_RHGD.shape
    remainder, unit = selector.remainder, selector.unit_tokens
    assert remainder is not None, "a selector without a remainder"
    words, first_scale = index_PSHW, 0
    if isinstance(selector, QuantizedMean):
        words, first_scale = words_of(index_PSHW, selector, dim), selector.scale_at(dim) // 4
    parts = workspace.unread_parts(requests * heads)
    lanes = max(16, triton.next_power_of_2(dim))
    _sum_unread[(parts, heads, requests)](
        query_RHGD,
        index_PSHW,
        words,
        groups_PSHV,
        groups_PSHV.view(torch.bfloat16),
        groups_PSHV.view(torch.float32),
        block_table_RM,
        unit_ids_RHN,
        context_tokens_R,
        kv_budget_tokens_R,
        workspace.unread_mixed_XGD,
        workspace.unread_log_sum_XG,
        *query_RHGD.stride()[:3],
        *index_PSHW.stride()[:3],
        *words.stride()[:3],
        *groups_PSHV.stride()[:3],
        block_table_RM.stride(0),
        *unit_ids_RHN.stride()[:2],
        unit_ids_RHN.shape[2],
        first_scale,
        scale,
        scale * _LOG2_E,
        UNIT_SHIFT=unit.bit_length() - 1,
        UNITS_PER_BLOCK=index_PSHW.shape[1],
        PER_GROUP=selector.units_per_group,
        FIRST=selector.first_tokens // unit,
        RECENT=selector.recent_tokens // unit,
        G=group,
        D=dim,
        LANES_G=triton.next_power_of_2(group),
        LANES_D=lanes,
        FP8_INDEX=isinstance(selector, QuantizedMean),
        FP8_VALUES=remainder.values == "fp8",
        SPREADS_AT=remainder.spreads_at(dim),
        TILE=workspace.unread_tile_units,
        num_warps=warps(workspace.unread_tile_units, selector.units_per_group),
        **overlapping(query_RHGD),
    )
    return parts


def warps(tile_units: int, units_per_group: int) -> int:
    """The values of many groups need many registers."""
    return 8 if tile_units // units_per_group >= _LEAST_OF_A_DOT.value else 4


@triton.jit
@no_type_check
def _sum_unread(
    query,
    index,
    words,
    groups,
    groups_bf16,
    groups_fp32,
    block_table,
    unit_ids,
    context_tokens,
    kv_budget_tokens,
    mixed,
    log_sum,
    query_per_request,
    query_per_head,
    query_per_member,
    index_per_block,
    index_per_unit,
    index_per_head,
    words_per_block,
    words_per_unit,
    words_per_head,
    groups_per_block,
    groups_per_row,
    groups_per_head,
    table_per_request,
    ids_per_request,
    ids_per_head,
    most_units,
    first_scale,
    scale,
    scale_log2,
    UNIT_SHIFT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    PER_GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_D: tl.constexpr,
    FP8_INDEX: tl.constexpr,
    FP8_VALUES: tl.constexpr,
    SPREADS_AT: tl.constexpr,
    TILE: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """UNIT_SHIFT: logarithm of a unit's tokens.  words, groups_bf16, groups_fp32: the same memory as index and groups.
    FP8_INDEX: whether index rows are codes of e4m3, with a scale at the word first_scale."""
    after_previous(launch_pdl)
    request, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    context = tl.load(context_tokens + request).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request).to(tl.int32)
    units = (context + (1 << UNIT_SHIFT) - 1) >> UNIT_SHIFT
    chosen_units = tl.minimum(budget >> UNIT_SHIFT, most_units)
    tiles = (units + TILE - 1) // TILE
    tiles_each = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
    tile = tl.program_id(0) * tiles_each
    # Within its budget a request reads everything.
    last_tile = tl.where(budget >= context, tile, tl.minimum(tile + tiles_each, tiles))

    # Where a tile has too few groups for a matrix product, its few rows are multiplied one by one, and only as many
    # rows are kept as there are query heads. Of more than 8 query heads, groups that do not exist fill the matrix up: summed
    # one by one, 16 rows came out wrong on an H100 (triton 3.6).
    TILE_GROUPS: tl.constexpr = TILE // PER_GROUP
    FILLED_UP: tl.constexpr = TILE_GROUPS < _LEAST_OF_A_DOT and LANES_G >= _LEAST_OF_A_DOT
    LANES_N: tl.constexpr = _LEAST_OF_A_DOT if FILLED_UP else TILE_GROUPS
    ROWS: tl.constexpr = _LEAST_OF_A_DOT if LANES_N >= _LEAST_OF_A_DOT else LANES_G
    member = tl.arange(0, _LEAST_OF_A_DOT)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, LANES_D)
    query_rows = query + request * query_per_request + head * query_per_head
    query_tile = tl.load(
        query_rows + member[:, None] * query_per_member + channel[None, :],
        mask=(member < G)[:, None] & (channel < D)[None, :],
        other=0.0,
    )
    whole = query_tile.to(tl.float32)
    half_norm = tl.sum(whole * whole, axis=1) * (0.5 * scale * scale_log2)
    table_row = block_table + request * table_per_request
    ids_row = unit_ids + request * ids_per_request + head * ids_per_head
    listed = tl.arange(0, _LISTED)

    # The list is ascending: chosen units before the first tile are passed over.
    passed = tl.zeros([], tl.int32)
    if tile < last_tile:
        each = tl.arange(0, 128)
        for start in range(0, chosen_units, 128):
            chosen = tl.load(ids_row + start + each, mask=start + each < chosen_units, other=_NO_UNIT)
            passed += tl.sum((chosen < tile * TILE).to(tl.int32), axis=0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total_weight = tl.zeros([ROWS], tl.float32)
    mix = tl.zeros([ROWS, LANES_D], tl.float32)
    inside_tile = tl.arange(0, TILE)
    its_group = tl.arange(0, LANES_N)
    in_its_group = (inside_tile[:, None] // PER_GROUP == its_group[None, :]).to(tl.float32)
    PER_BLOCK: tl.constexpr = UNITS_PER_BLOCK // PER_GROUP
    block = blocks_of(table_row, tile * TILE + inside_tile, units, UNITS_PER_BLOCK, FIRST, RECENT)
    # Of a unit that competes, the group is complete and its row written.
    first_unit = (tile * TILE_GROUPS + its_group) * PER_GROUP
    group_block = _blocks_of_groups(table_row, first_unit, units, UNITS_PER_BLOCK, PER_GROUP, FIRST, RECENT)
    chosen = tl.load(ids_row + passed + listed, mask=passed + listed < chosen_units, other=_NO_UNIT)
    for number in range(tile, last_tile):
        # All that is read of the tile, at once: only then does it wait for any of it.
        unit = number * TILE + inside_tile
        inside = unit % UNITS_PER_BLOCK
        unread = competes(unit, units, FIRST, RECENT)
        rows = index + block * index_per_block + head * index_per_head + inside * index_per_unit
        held_rows = tl.load(rows[:, None] + channel[None, :], mask=unread[:, None] & (channel < D)[None, :], other=0)
        if FP8_INDEX:
            scale_at = words + block * words_per_block + head * words_per_head + inside * words_per_unit + first_scale
            unit_scale = tl.load(scale_at, mask=unread, other=0).to(tl.float32, bitcast=True)[None, :]
            mean = _of_e4m3(held_rows).to(query_tile.dtype)
        else:
            unit_scale = 1.0
            mean = held_rows.to(query_tile.dtype)
        if UNIT_SHIFT:
            row_of_unit = block * groups_per_block + (inside // PER_GROUP) * groups_per_row + head * groups_per_head
            spread_at = groups_bf16 + row_of_unit // 2 + SPREADS_AT // 2 + unit % PER_GROUP
            spread = tl.load(spread_at, mask=unread, other=0.0).to(tl.float32)
        group = number * TILE_GROUPS + its_group
        wanted = _some_compete(group * PER_GROUP, units, PER_GROUP, FIRST, RECENT) & (its_group < TILE_GROUPS)
        group_row = group_block * groups_per_block + (group % PER_BLOCK) * groups_per_row + head * groups_per_head
        readable = wanted[:, None] & (channel < D)[None, :]
        if FP8_VALUES:
            value_code = tl.load(groups + group_row[:, None] + channel[None, :], mask=readable, other=0)
            value_scale = tl.load(groups_fp32 + group_row // 4 + (SPREADS_AT // 4 - 1), mask=wanted, other=0.0)
        else:
            value = tl.load(groups_bf16 + (group_row // 2)[:, None] + channel[None, :], mask=readable, other=0.0)
        # Where the next tile lies.
        block = blocks_of(table_row, unit + TILE, units, UNITS_PER_BLOCK, FIRST, RECENT)
        first_unit = (group + TILE_GROUPS) * PER_GROUP
        group_block = _blocks_of_groups(table_row, first_unit, units, UNITS_PER_BLOCK, PER_GROUP, FIRST, RECENT)

        # Units that are read leave the sum. More of them may stand in the list than are compared at a time.
        ends = (number + 1) * TILE
        unread = unread & (tl.max((unit[:, None] == chosen[None, :]).to(tl.int32), axis=1) == 0)
        found = tl.sum((chosen < ends).to(tl.int32), axis=0)
        passed += found
        while found == _LISTED:
            chosen = tl.load(ids_row + passed + listed, mask=passed + listed < chosen_units, other=_NO_UNIT)
            unread = unread & (tl.max((unit[:, None] == chosen[None, :]).to(tl.int32), axis=1) == 0)
            found = tl.sum((chosen < ends).to(tl.int32), axis=0)
            passed += found
        chosen = tl.load(ids_row + passed + listed, mask=passed + listed < chosen_units, other=_NO_UNIT)

        # [16, TILE] q.m of units, but for their scales. e4m3 is exact in every type a query has, and channels past D meet 0.
        logit = tl.dot(query_tile, tl.trans(mean), input_precision="ieee") * unit_scale * scale_log2
        if UNIT_SHIFT:
            logit += half_norm[:, None] * spread[None, :] + UNIT_SHIFT
        logit = tl.where((member < G)[:, None] & unread[None, :], logit, float("-inf"))
        if ROWS < _LEAST_OF_A_DOT:
            # The rows behind the group's hold nothing.
            logit = tl.max(tl.reshape(logit, [_LEAST_OF_A_DOT // ROWS, ROWS, TILE]), axis=0)
        new_top = tl.maximum(top, tl.max(logit, axis=1))
        # Nothing seen yet: -inf minus -inf would be NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - anchor)
        weight = tl.exp2(logit - anchor[:, None])
        if FILLED_UP:
            weight = tl.dot(weight, in_its_group, input_precision="ieee")
        else:
            weight = tl.sum(tl.reshape(weight, [ROWS, TILE_GROUPS, PER_GROUP]), axis=2)
        total_weight = total_weight * shrink + tl.sum(weight, axis=1)
        mix = mix * shrink[:, None]
        if FP8_VALUES:
            value = _of_e4m3(value_code) * value_scale[:, None]
        if LANES_N >= _LEAST_OF_A_DOT:
            its_type = query.dtype.element_ty
            mix += tl.dot(weight.to(its_type), value.to(its_type), input_precision="ieee")
        else:
            mix += tl.sum(weight[:, :, None] * value.to(tl.float32)[None, :, :], axis=1)
        top = new_top

    divisor = tl.where(total_weight > 0.0, total_weight, 1.0)
    log_total = tl.where(total_weight > 0.0, top + tl.log2(divisor), float("-inf"))
    at = (request * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(log_sum + at * G + row, log_total, mask=row < G)
    in_group = (row < G)[:, None] & (channel < D)[None, :]
    tl.store(mixed + at * (G * D) + row[:, None] * D + channel[None, :], mix / divisor[:, None], mask=in_group)


@triton.jit
@no_type_check
def _some_compete(first_unit, units, PER_GROUP: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr):
    """Whether one of a group's units competes: it has some behind the first ones and some before the recent ones."""
    return (first_unit + PER_GROUP > FIRST) & (first_unit < units - RECENT)


@triton.jit
@no_type_check
def _blocks_of_groups(
    table_row,
    first_unit,
    units,
    UNITS_PER_BLOCK: tl.constexpr,
    PER_GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
):
    wanted = _some_compete(first_unit, units, PER_GROUP, FIRST, RECENT)
    return tl.load(table_row + first_unit // UNITS_PER_BLOCK, mask=wanted, other=0).to(tl.int64)


@triton.jit
@no_type_check
def _of_e4m3(code):
    """The number that a byte of e4m3 is, as fp32, in integers, because not every GPU converts."""
    bits = code.to(tl.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    # Times 2 ** 9: whole numbers up to 15 * 2 ** 14.
    size = tl.where(exponent == 0, mantissa, (8 + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where(bits >= 128, -size, size).to(tl.float32) * 0.001953125
