"""Attention of one new token per request over its chosen units. The tiles of all (request, head) pairs form one row,
and every program takes a stretch of it, which may cross pairs (see triton_work_split.py). The parts of a pair that was
cut are added up by whichever of its programs finishes last.

Lists are ascending, so only their last unit can be incomplete: where pages say where units lie, no other id is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.remainder import triton_remainder, triton_unread
from sparroll.attention.decode.triton_launch import (
    let_next_begin,
    overlapping,
    runs_ptx,
    wait_for_previous,
    wait_until_announced,
)
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
    announced: bool,
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
    # After what is not read has been summed up, all lists are there.
    early = announced and not unread_parts and workspace.begins_early(requests)
    unit, tile = selector.unit_tokens, workspace.tile
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    per_block = keys_PBHD.shape[1] // unit
    _gather[(workspace.programs(requests),)](
        query_RHGD,
        keys_PBHD,
        values_PBHD,
        block_table_RM,
        unit_ids_RHN,
        pages,
        context_tokens_R,
        kv_budget_tokens_R,
        workspace.read_before_R,
        workspace.arrivals_X,
        workspace.listed_RH,
        out_RHGD,
        workspace.mixed_XGD,
        workspace.log_sum_XG,
        workspace.unread_mixed_XGD,
        workspace.unread_log_sum_XG,
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
        unread_parts,
        workspace.running,
        UNIT_SHIFT=unit.bit_length() - 1,
        UNITS_PER_BLOCK=per_block,
        HEADS=heads,
        G=group,
        D=dim,
        LANES_R=request_lanes(requests),
        LANES_G=max(16, triton.next_power_of_2(group)),
        ADDED_G=triton.next_power_of_2(group),
        LANES_D=triton.next_power_of_2(dim),
        TILE=tile.tokens,
        WITH_PAGES=pages_RHN is not None,
        ALIKE=keys_PBHD.stride() == values_PBHD.stride(),
        COMPILED=runs_ptx(query_RHGD),
        WITH_UNREAD=unread_parts > 0,
        ANNOUNCED=early,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **(overlapping(query_RHGD) if early or unread_parts else {}),
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
    lists_complete,
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
    running,
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
    ANNOUNCED: tl.constexpr,
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
    # Its first list may still be made when it begins; later lists are complete by then, and so are those of programs that
    # had to wait for room.
    first_at = tl.where(tl.program_id(0) < running, at, -1)
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
        list_complete = lists_complete + request * HEADS + head
        if ANNOUNCED:
            if at == first_at:
                wait_until_announced(list_complete, launch_pdl)
            else:
                wait_for_previous(launch_pdl)
        else:
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
        page = _look_up(
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
            # Loaded together, as in `_add_up`.
            row = (request * HEADS + head) * unread_parts + number
            left = unread_parts - number
            log_0, mixed_0 = _stored(unread_mixed, unread_log_sum, row, True, member, channel, in_group, G, D)
            log_1, mixed_1 = _stored(unread_mixed, unread_log_sum, row + 1, left > 1, member, channel, in_group, G, D)
            log_2, mixed_2 = _stored(unread_mixed, unread_log_sum, row + 2, left > 2, member, channel, in_group, G, D)
            log_3, mixed_3 = _stored(unread_mixed, unread_log_sum, row + 3, left > 3, member, channel, in_group, G, D)
            top, total_weight, mix = _joined(
                top, total_weight, mix, log_0, log_1, log_2, log_3, mixed_0, mixed_1, mixed_2, mixed_3
            )
        head_keys = keys + head * keys_per_head
        head_values = values + head * values_per_head
        for _ in range(first_tile, last_tile):
            # Where the next tile lies is looked up one iteration early, so that its keys wait for no other load.
            next_page = _look_up(
                ids_row,
                pages_row,
                table_row,
                slot + TILE,
                chosen_units,
                most_units,
                UNIT_SHIFT,
                UNITS_PER_BLOCK,
                WITH_PAGES,
            )
            visible = slot < listed
            block, unit = _parted(page, UNITS_PER_BLOCK)
            block = block.to(tl.int64)
            token = (unit << UNIT_SHIFT) + (slot & ((1 << UNIT_SHIFT) - 1))
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
            tl.store(list_complete, 0)
        else:
            # A program cuts at most two pairs: the one that it goes on with, and the one that it begins.
            part = (2 * tl.program_id(0) + (first_tile == 0).to(tl.int32)).to(tl.int64)
            log_total = tl.where(total_weight > 0.0, top + tl.log2(divisor), float("-inf"))
            tl.store(log_sum + part * G + member, log_total, mask=member < G)
            tl.store(mixed + part * (G * D) + member[:, None] * D + channel[None, :], mix, mask=in_group)
            # Only one pair goes on from a program to the next, so the program that it begins in stands for it.
            first = begins // share
            parts = (begins + tiles - 1) // share - first + 1
            # All threads have stored their part before one of them says so.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == parts - 1:
                _add_up(mixed, log_sum, first, parts, target, out_per_member, channel, G, D, ADDED_G, LANES_D)
                tl.store(arrivals + first, 0)
                tl.store(list_complete, 0)
        at = begins + planned
    wait_for_previous(launch_pdl)
    # A request that reads nothing, as padding rows do, is in nobody's stretch.
    for row in range(tl.program_id(0), requests, tl.num_programs(0)):
        if tl.load(read_before + row) == tl.load(read_before + row + 1):
            zeros = tl.zeros([LANES_G, LANES_D], out.dtype.element_ty)
            for head in range(HEADS):
                target = out + tl.cast(row, tl.int64) * out_per_request + head * out_per_head
                tl.store(target + member[:, None] * out_per_member + channel[None, :], zeros, mask=in_group)


@triton.jit
@no_type_check
def _prefetch(places):
    """Begin to bring memory into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
@no_type_check
def _parted(number, PARTS: tl.constexpr):
    """Quotient and rest of numbers that are 0 or more, as unsigned ones: where PARTS is a power of two, that is a shift and
    a mask, four instructions less than for signed ones."""
    unsigned = number.to(tl.uint32, bitcast=True)
    quotient = (unsigned // PARTS).to(tl.int32)
    return quotient, number - quotient * PARTS


@triton.jit
@no_type_check
def _look_up(
    ids_row,
    pages_row,
    table_row,
    slot,
    chosen_units,
    most_units,
    UNIT_SHIFT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Where the units of listed tokens lie: block * units per block + unit in it. Past what is listed this is rubbish."""
    column = slot >> UNIT_SHIFT
    if WITH_PAGES:
        # Nothing is read at a page that is rubbish, so the load need not wait for the budget.
        page = tl.load(pages_row + column, mask=column < most_units, other=0)
    else:
        listed = column < chosen_units
        column, unit = _parted(tl.load(ids_row + column, mask=listed, other=0), UNITS_PER_BLOCK)
        page = tl.load(table_row + column, mask=listed, other=0).to(tl.int32) * UNITS_PER_BLOCK + unit
    return page


@triton.jit
@no_type_check
def _add_up(
    mixed,
    log_sum,
    first,
    parts,
    target,
    out_per_member,
    channel,
    G: tl.constexpr,
    D: tl.constexpr,
    ADDED_G: tl.constexpr,
    LANES_D: tl.constexpr,
):
    """The attention of a pair that begins in program `first`, from its parts. Whichever program adds them up, they are taken
    in their order."""
    member = tl.arange(0, ADDED_G)
    in_group = (member < G)[:, None] & (channel < D)[None, :]
    top = tl.full([ADDED_G], float("-inf"), tl.float32)
    total_weight = tl.zeros([ADDED_G], tl.float32)
    result = tl.zeros([ADDED_G, LANES_D], tl.float32)
    for part in range(0, parts, 4):
        # Loaded together: a program waits once for four of them.
        log_0, mixed_0 = _part(mixed, log_sum, first, part, parts, member, channel, in_group, G, D)
        log_1, mixed_1 = _part(mixed, log_sum, first, part + 1, parts, member, channel, in_group, G, D)
        log_2, mixed_2 = _part(mixed, log_sum, first, part + 2, parts, member, channel, in_group, G, D)
        log_3, mixed_3 = _part(mixed, log_sum, first, part + 3, parts, member, channel, in_group, G, D)
        top, total_weight, result = _joined(
            top, total_weight, result, log_0, log_1, log_2, log_3, mixed_0, mixed_1, mixed_2, mixed_3
        )
    result = result / tl.where(total_weight > 0.0, total_weight, 1.0)[:, None]
    tl.store(target + member[:, None] * out_per_member + channel[None, :], result.to(target.dtype.element_ty), in_group)


@triton.jit
@no_type_check
def _part(mixed, log_sum, first, part, parts, member, channel, in_group, G: tl.constexpr, D: tl.constexpr):
    """What a program left of the pair, where it left it: see the end of `_gather`."""
    row = (2 * (first + part) + tl.where(part == 0, 1, 0)).to(tl.int64)
    return _stored(mixed, log_sum, row, part < parts, member, channel, in_group, G, D)


@triton.jit
@no_type_check
def _stored(mixed, log_sum, row, there, member, channel, in_group, G: tl.constexpr, D: tl.constexpr):
    """Logarithms of a part's softmax sums, and what it mixed; of one that is not there, what adds nothing. Other programs
    wrote it: it is read past this multiprocessor's own cache."""
    log_weight = tl.load(
        log_sum + row * G + member, mask=(member < G) & there, other=float("-inf"), cache_modifier=".cg"
    )
    its_mixed = tl.load(
        mixed + row * (G * D) + member[:, None] * D + channel[None, :],
        mask=in_group & there,
        other=0.0,
        cache_modifier=".cg",
    )
    return log_weight, its_mixed


@triton.jit
@no_type_check
def _joined(top, total_weight, mix, log_0, log_1, log_2, log_3, mixed_0, mixed_1, mixed_2, mixed_3):
    """A running softmax with four more parts."""
    new_top = tl.maximum(tl.maximum(tl.maximum(log_0, log_1), tl.maximum(log_2, log_3)), top)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - anchor)
    weight_0, weight_1 = tl.exp2(log_0 - anchor), tl.exp2(log_1 - anchor)
    weight_2, weight_3 = tl.exp2(log_2 - anchor), tl.exp2(log_3 - anchor)
    total_weight = total_weight * shrink + ((weight_0 + weight_1) + (weight_2 + weight_3))
    mix = mix * shrink[:, None] + (
        (mixed_0 * weight_0[:, None] + mixed_1 * weight_1[:, None])
        + (mixed_2 * weight_2[:, None] + mixed_3 * weight_3[:, None])
    )
    return new_top, total_weight, mix
