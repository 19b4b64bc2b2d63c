"""Attention over chosen units in other ways than the engines' kernel (triton_attend.py). attention_sweep.py times them.

Four things differ, each of which can be left out. Where a program begins is written once a step (`places`): a program
then waits for one load where it waited for three that follow each other. Its first ids are loaded before its budget is
known. Lists are ascending, so only their last unit can be incomplete, and ids of the others are not read. Parts of pairs
that were cut are added up by whichever program finishes last; where no pair was cut, nothing is left to do.
"""

# X programs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode import triton_attend
from sparroll.attention.decode.paged import StepWorkspace, Tile
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_work_split import request_at, stretch
from sparroll.attention.selectors.base import Selector

_PLACE = tl.constexpr(8)
"""Numbers in the place of a program: see `_find_places`."""
_AT_A_TIME = 64
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Variant:
    """Tile and what differs from the engines' kernel."""

    tile: Tile
    placed: bool = True
    """Where each program begins was written by `Places.write`."""
    ascending: bool = True
    """Ids are not read, except the last one of a list."""
    fused: bool = True
    """Parts are added up by the last of their programs."""
    most_registers: int | None = None


@dataclass
class Places:
    """What a plan leaves beside the running sums."""

    places_X8: Tensor
    arrivals_X: Tensor
    """How many parts of the pair that begins in a program are ready. All 0 between launches."""

    @staticmethod
    def allocate(workspace: StepWorkspace) -> Places:
        device = workspace.read_before_R.device
        return Places(
            torch.full((workspace.programs, 8), -(1 << 30), dtype=torch.int32, device=device),
            torch.zeros(workspace.programs, dtype=torch.int32, device=device),
        )

    def write(
        self, contexts_R: Tensor, budgets_R: Tensor, heads: int, most_units: int, selector: Selector,
        workspace: StepWorkspace,
    ) -> None:  # fmt: skip
        """Once a step, after `plan_step`."""
        requests = len(contexts_R)
        _find_places[(triton.cdiv(workspace.programs, _AT_A_TIME),)](
            workspace.read_before_R, contexts_R, budgets_R, self.places_X8, requests, most_units,
            PROGRAMS=workspace.programs, HEADS=heads, UNIT=selector.unit_tokens,
            LANES_R=triton.next_power_of_2(requests), LANES_X=_AT_A_TIME, num_warps=4,
        )  # fmt: skip


def attend(
    query_RHGD: Tensor,
    keys_PBHD: Tensor,
    values_PBHD: Tensor,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    scale: float,
    out_RHGD: Tensor,
    workspace: StepWorkspace,
    places: Places,
    variant: Variant,
) -> None:
    """What paged.paged_decode does with pages, for lists in ascending order. The step is planned already."""
    requests, heads, group, dim = query_RHGD.shape
    unit, tile, lanes_d = selector.unit_tokens, variant.tile, triton.next_power_of_2(dim)
    per_block = keys_PBHD.shape[1] // unit
    assert per_block & (per_block - 1) == 0, "blocks hold a power of two of units"
    assert tile.tokens == workspace.tile.tokens, "the plan counts tiles of another size"
    overlap: dict[str, Any] = overlapping(query_RHGD)
    bound = {} if variant.most_registers is None else {"maxnreg": variant.most_registers}
    _gather[(workspace.programs,)](
        query_RHGD, keys_PBHD, values_PBHD, unit_ids_RHN, pages_RHN, context_tokens_R, kv_budget_tokens_R,
        workspace.read_before_R, places.places_X8, places.arrivals_X, out_RHGD, workspace.mixed_XGD,
        workspace.log_sum_XG, *query_RHGD.stride()[:3], *keys_PBHD.stride()[:3], *values_PBHD.stride()[:3],
        *unit_ids_RHN.stride()[:2], *pages_RHN.stride()[:2], *out_RHGD.stride()[:3], scale * _LOG2_E,
        unit_ids_RHN.shape[2], requests, UNIT=unit, UNIT_SHIFT=unit.bit_length() - 1,
        BLOCK_SHIFT=per_block.bit_length() - 1, HEADS=heads, G=group, D=dim, LANES_R=triton.next_power_of_2(requests),
        LANES_G=max(16, triton.next_power_of_2(group)), LANES_D=lanes_d, TILE=tile.tokens,
        ALIKE=keys_PBHD.stride() == values_PBHD.stride(), PLACED=variant.placed, ASCENDING=variant.ascending,
        FUSED=variant.fused, COMPILED=query_RHGD.is_cuda and torch.version.hip is None,
        num_warps=tile.warps, num_stages=tile.stages, **bound, **overlap,
    )  # fmt: skip
    if not variant.fused:
        triton_attend._add_up[(group, heads, requests)](
            workspace.mixed_XGD, workspace.log_sum_XG, workspace.read_before_R, out_RHGD, *out_RHGD.stride()[:3],
            requests, PROGRAMS=workspace.programs, G=group, D=dim, LANES_D=lanes_d, PARTS=triton_attend._PARTS,
            num_warps=1, **overlap,
        )  # fmt: skip


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _find_places(
    read_before,
    context_tokens,
    kv_budget_tokens,
    places,
    requests,
    most_units,
    PROGRAMS: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    LANES_R: tl.constexpr,
    LANES_X: tl.constexpr,
):
    """Of each program: where its stretch begins and ends; of the pair that it begins in: the request, the first tile of
    the request, its tiles in each head, its context and the units that it reads; then the length of a stretch."""
    total = tl.load(read_before + requests) * HEADS
    share = (total + PROGRAMS - 1) // PROGRAMS
    program = tl.program_id(0) * LANES_X + tl.arange(0, LANES_X)
    at = tl.minimum(program * share, total)
    each = tl.arange(0, LANES_R)
    starts = tl.load(read_before + each, mask=each < requests, other=0) * HEADS
    here = (starts[None, :] <= at[:, None]) & (each < requests)[None, :]
    request = tl.sum(here.to(tl.int32), axis=1) - 1
    its_first = tl.load(read_before + request)
    context = tl.load(context_tokens + request).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request).to(tl.int32)
    units = (context + UNIT - 1) // UNIT
    row = places + program * _PLACE
    exists = program < PROGRAMS
    tl.store(row, at, mask=exists)
    tl.store(row + 1, tl.minimum(at + share, total), mask=exists)
    tl.store(row + 2, request, mask=exists)
    tl.store(row + 3, its_first * HEADS, mask=exists)
    tl.store(row + 4, tl.load(read_before + request + 1) - its_first, mask=exists)
    tl.store(row + 5, context, mask=exists)
    chosen_units = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most_units)
    tl.store(row + 6, chosen_units, mask=exists)
    tl.store(row + 7, share, mask=exists)


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _gather(
    query,
    keys,
    values,
    unit_ids,
    pages,
    context_tokens,
    kv_budget_tokens,
    read_before,
    places,
    arrivals,
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
    UNIT_SHIFT: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_R: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_D: tl.constexpr,
    TILE: tl.constexpr,
    ALIKE: tl.constexpr,
    PLACED: tl.constexpr,
    ASCENDING: tl.constexpr,
    FUSED: tl.constexpr,
    COMPILED: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    if PLACED:
        place = places + tl.program_id(0) * _PLACE
        at = tl.load(place)
        end = tl.load(place + 1)
        request = tl.load(place + 2).to(tl.int64)
        request_begins = tl.load(place + 3)
        tiles = tl.load(place + 4)
        context = tl.load(place + 5)
        chosen_units = tl.load(place + 6)
        share = tl.load(place + 7)
    else:
        at, end = stretch(read_before, requests, HEADS)
        share = (tl.load(read_before + requests) * HEADS + tl.num_programs(0) - 1) // tl.num_programs(0)
        request, request_begins, tiles, context, chosen_units = _pair_at(
            tl.minimum(at, end),
            read_before,
            context_tokens,
            kv_budget_tokens,
            requests,
            most_units,
            HEADS,
            UNIT,
            LANES_R,
        )
    member = tl.arange(0, LANES_G)
    channel = tl.arange(0, LANES_D)
    in_group = (member < G)[:, None] & (channel < D)[None, :]
    while at < end:
        units = (context + UNIT - 1) // UNIT
        head = (at - request_begins) // tiles
        first_tile = at - request_begins - head * tiles
        last_tile = tl.minimum(tiles, first_tile + end - at)

        ids_row = unit_ids + request * ids_per_request + head * ids_per_head
        pages_row = pages + request * pages_per_request + head * pages_per_head
        query_rows = query + request * query_per_request + head * query_per_head
        if COMPILED:
            # ptxas loads the query when the first ids are there, and the first keys wait for it: it is in L2 by then.
            piece = tl.arange(0, 8)[None, :] * (LANES_D // 8)
            _prefetch(query_rows + tl.minimum(member, G - 1)[:, None] * query_per_member + tl.minimum(piece, D - 1))
            if ASCENDING:
                _prefetch(ids_row + tl.maximum(chosen_units - 1, 0))
        query_tile = tl.load(
            query_rows + member[:, None] * query_per_member + channel[None, :],
            mask=in_group,
            other=0.0,
        )
        slot = first_tile * TILE + tl.arange(0, TILE)
        unit, page = _look_up(ids_row, pages_row, slot, most_units, UNIT_SHIFT, ASCENDING)
        # Of the listed tokens, those of an incomplete last unit that do not exist yet.
        listed = chosen_units * UNIT
        if ASCENDING:
            last_unit = tl.load(ids_row + tl.maximum(chosen_units - 1, 0))
            listed -= tl.where(last_unit == units - 1, units * UNIT - context, 0)
        top = tl.full([LANES_G], float("-inf"), tl.float32)
        total_weight = tl.zeros([LANES_G], tl.float32)
        mix = tl.zeros([LANES_G, LANES_D], tl.float32)
        head_keys = keys + head * keys_per_head
        head_values = values + head * values_per_head
        for _ in range(first_tile, last_tile):
            # Where the next tile lies is looked up one iteration early, so that its keys wait for no other load.
            next_unit, next_page = _look_up(ids_row, pages_row, slot + TILE, most_units, UNIT_SHIFT, ASCENDING)
            visible = slot < listed
            if not ASCENDING:
                visible = visible & (unit * UNIT + (slot & (UNIT - 1)) < context)
            # Shifts and masks: a division of signed numbers takes four instructions more.
            block = (page >> BLOCK_SHIFT).to(tl.int64)
            token = (page & ((1 << BLOCK_SHIFT) - 1)) * UNIT + (slot & (UNIT - 1))
            # Where D fills its lanes, the mask is one per row and each load stays 128 bits wide.
            readable = visible[:, None]
            if D != LANES_D:
                readable = readable & (channel < D)[None, :]
            key_at = block * keys_per_block + token * keys_per_token
            key = tl.load(head_keys + (key_at[:, None] + channel[None, :]), mask=readable, other=0.0)
            logit = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale_log2
            logit = tl.where(visible[None, :], logit, float("-inf"))
            new_top = tl.maximum(top, tl.max(logit, axis=1))
            # Nothing seen yet: -inf minus -inf would be NaN.
            anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(logit - anchor[:, None])
            shrink = tl.exp2(top - anchor)
            value_at = key_at
            if not ALIKE:
                value_at = block * values_per_block + token * values_per_token
            value = tl.load(head_values + (value_at[:, None] + channel[None, :]), mask=readable, other=0.0)
            total_weight = total_weight * shrink + tl.sum(weight, axis=1)
            mix = mix * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
            top = new_top
            slot += TILE
            unit = next_unit
            page = next_page

        divisor = tl.where(total_weight > 0.0, total_weight, 1.0)
        mix = mix / divisor[:, None]
        target = out + request * out_per_request + head * out_per_head
        if last_tile - first_tile == tiles:
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
            if FUSED:
                # As in _add_up. Only one pair goes on from a program to the next, so its first program stands for it.
                begins = request_begins + head * tiles
                first = begins // share
                parts = (begins + tiles - 1) // share - first + 1
                # All threads have stored their part before one of them says so.
                tl.debug_barrier()
                if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == parts - 1:
                    _add_up_pair(
                        mixed, log_sum, first, parts, target, out_per_member, member, channel, in_group, G, D, LANES_G,
                        LANES_D,
                    )  # fmt: skip
                    tl.store(arrivals + first, 0)
        at += last_tile - first_tile
        if at < end:
            request, request_begins, tiles, context, chosen_units = _pair_at(
                at, read_before, context_tokens, kv_budget_tokens, requests, most_units, HEADS, UNIT, LANES_R
            )
    if FUSED:
        # Zeros where a request reads nothing, as padding rows do.
        for row in range(tl.program_id(0), requests, tl.num_programs(0)):
            if tl.load(read_before + row) == tl.load(read_before + row + 1):
                for head in range(HEADS):
                    target = out + tl.cast(row, tl.int64) * out_per_request + head * out_per_head
                    zeros = tl.zeros(in_group.shape, out.dtype.element_ty)
                    tl.store(target + member[:, None] * out_per_member + channel[None, :], zeros, mask=in_group)


@triton.jit
@no_type_check
def _prefetch(places):
    """Begin to bring memory into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
@no_type_check
def _pair_at(
    at,
    read_before,
    context_tokens,
    kv_budget_tokens,
    requests,
    most_units,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    LANES_R: tl.constexpr,
):
    """The request that a tile belongs to, where its tiles begin, its tiles in each head, its context and the units that it
    reads."""
    request, request_begins, tiles = request_at(at, read_before, requests, HEADS, LANES_R)
    context = tl.load(context_tokens + request).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request).to(tl.int32)
    units = (context + UNIT - 1) // UNIT
    chosen_units = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most_units)
    return request, request_begins, tiles, context, chosen_units


@triton.jit
@no_type_check
def _look_up(ids_row, pages_row, slot, most_units, UNIT_SHIFT: tl.constexpr, ASCENDING: tl.constexpr):
    """The units that listed tokens belong to and where they lie. Past what is listed these are rubbish."""
    column = slot >> UNIT_SHIFT
    page = tl.load(pages_row + column, mask=column < most_units, other=0)
    unit = page if ASCENDING else tl.load(ids_row + column, mask=column < most_units, other=0)
    return unit, page


@triton.jit
@no_type_check
def _add_up_pair(
    mixed,
    log_sum,
    first,
    parts,
    target,
    out_per_member,
    member,
    channel,
    in_group,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_D: tl.constexpr,
):
    """What triton_attend._add_up does, for all heads of a group and a part at a time."""
    top = tl.full([LANES_G], float("-inf"), tl.float32)
    total_weight = tl.zeros([LANES_G], tl.float32)
    result = tl.zeros([LANES_G, LANES_D], tl.float32)
    for part in range(parts):
        row = (2 * (first + part)).to(tl.int64)
        if part == 0:
            row += 1
        # Other programs wrote them: they are read past this multiprocessor's own cache.
        log_weight = tl.load(log_sum + row * G + member, mask=member < G, other=float("-inf"), cache_modifier=".cg")
        part_mixed = tl.load(
            mixed + row * (G * D) + member[:, None] * D + channel[None, :], mask=in_group, other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_top = tl.maximum(top, log_weight)
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(log_weight - anchor)
        shrink = tl.exp2(top - anchor)
        total_weight = total_weight * shrink + weight
        result = result * shrink[:, None] + part_mixed * weight[:, None]
        top = new_top
    result = result / tl.where(total_weight > 0.0, total_weight, 1.0)[:, None]
    at = target + member[:, None] * out_per_member + channel[None, :]
    tl.store(at, result.to(target.dtype.element_ty), mask=in_group)
