"""What a step does not read, summed up from what its groups weigh: triton_score_codes.py left the weight of each group as if
none of its units were read. For each (request, head) the result is one more entry of the softmax, which triton_attend.py
begins with (remainder_reference.py has the specification).

Every pair's groups are cut into up to 8 stretches. Each stretch has a program, which leaves its part in memory. It takes the
weights of the units that are read out of those of their groups, with logits that it computes as the kernel that scores does,
and multiplies what is left by the groups' mean values. What is left is right to about a millionth of the heaviest unit that
is read in the group, and units are counted, so that a group that is read whole weighs nothing at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.scores.triton_score_codes import REGISTERS
from sparroll.attention.decode.triton_codes import (
    LOG2_E,
    logit_of,
    products_of,
    rounded_heads,
    whole_of,
    words_apart,
)
from sparroll.attention.decode.triton_index import loaded_bytes, words_of
from sparroll.attention.decode.triton_launch import let_next_begin, overlapping, runs_ptx, wait_for_previous
from sparroll.attention.decode.triton_work_split import competes
from sparroll.attention.selectors.quantized_mean import QuantizedMean

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import StepWorkspace

_LEAST_OF_A_DOT = 16
_COUNTED = tl.constexpr(256)
"""Chosen units that are counted at a time, on the way to a program's own."""
_TOPPED = tl.constexpr(128)
"""Groups among which the heaviest is looked for at a time."""
_NO_UNIT = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True)
class UnreadLayout:
    """How the programs of a launch are laid out. It changes the speed, and the result only by rounding. What threads of a
    single warp tell each other needs no barrier, and there is much of it for little to compute. Chosen by
    counts of registers; others were up to a tenth faster on an H200 (LOG.md)."""

    warps: int = 1
    groups: int = 16
    """Groups that a program sums up at a time; 16 or more."""
    listed: int = 16
    """Chosen units that it takes out of them at a time."""
    programs_per_multiprocessor: int = 10
    """That run at a time; as many as fit in registers. About as many are launched (workspace.py)."""

    @staticmethod
    def default(unit_tokens: int) -> UnreadLayout:
        """For units of so many tokens. Of small ones, more are chosen in as many groups."""
        return UnreadLayout(listed=32 if unit_tokens <= 2 else 16)

    @property
    def options(self) -> dict[str, int]:
        """How the kernel is launched."""
        registers = REGISTERS // (32 * self.warps * self.programs_per_multiprocessor) // 8 * 8
        return {"num_warps": self.warps, "maxnreg": min(registers, 248)}


def sum_unread(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    groups_PSHV: Tensor,
    log_weights_RHGN: Tensor,
    block_table_RM: Tensor,
    unit_ids_RHN: Tensor,
    pages_RHN: Tensor | None,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: QuantizedMean,
    scale: float,
    workspace: StepWorkspace,
    layout: UnreadLayout | None = None,
) -> int:
    """Write each pair's parts into the workspace; says how many parts a pair has. `layout` is for measurements."""
    requests, heads, group, dim = query_RHGD.shape
    remainder, unit = selector.remainder, selector.unit_tokens
    assert remainder is not None, "a selector without a remainder"
    words, held = words_of(index_PSHW, selector, dim), selector.scale_at(dim) // 4
    align = loaded_bytes(selector, dim) // 4
    layout = layout or UnreadLayout.default(unit)
    parts = workspace.unread_parts(requests * heads)
    pages = unit_ids_RHN if pages_RHN is None else pages_RHN
    fp8 = remainder.values == "fp8"
    # What the place of every row is a multiple of; at least 4 bytes, as paged.py checks.
    row_align = math.gcd(16, *groups_PSHV.stride()[:3], groups_PSHV.storage_offset())
    _sum_weighed[(parts, heads, requests)](
        query_RHGD,
        words,
        groups_PSHV.view(torch.int32 if fp8 else torch.bfloat16),
        groups_PSHV.view(torch.bfloat16),
        groups_PSHV.view(torch.float32),
        log_weights_RHGN,
        block_table_RM,
        unit_ids_RHN,
        pages,
        context_tokens_R,
        kv_budget_tokens_R,
        workspace.unread_mixed_XGD,
        workspace.unread_log_sum_XG,
        *query_RHGD.stride()[:3],
        words.stride(0) // align,
        words.stride(2) // align,
        *(stride // row_align for stride in groups_PSHV.stride()[:3]),
        *log_weights_RHGN.stride()[:3],
        block_table_RM.stride(0),
        *unit_ids_RHN.stride()[:2],
        *pages.stride()[:2],
        unit_ids_RHN.shape[2],
        scale * LOG2_E,
        0.5 * scale * scale * LOG2_E,
        UNIT=unit,
        UNITS_PER_BLOCK=index_PSHW.shape[1],
        PER_GROUP=selector.units_per_group,
        FIRST=selector.first_tokens // unit,
        RECENT=selector.recent_tokens // unit,
        G=group,
        D=dim,
        W=held,
        ROW_WORDS=words.shape[3],
        LANES_G=triton.next_power_of_2(group),
        LANES_V=value_lanes(dim, fp8),
        LANES_W=triton.next_power_of_2(held),
        BITS=selector.bits,
        ALIGN=align,
        ROW_ALIGN=row_align,
        FP8_VALUES=fp8,
        SPREADS_AT=remainder.spreads_at(dim),
        TILE=layout.groups,
        LISTED=layout.listed,
        WITH_PAGES=pages_RHN is not None,
        DP4A=runs_ptx(query_RHGD),
        enable_fp_fusion=False,
        **layout.options,
        **overlapping(query_RHGD),
    )
    return parts


def value_lanes(dim: int, fp8: bool) -> int:
    """Lanes for the values of a group: words of four codes, or numbers."""
    return max(_LEAST_OF_A_DOT, triton.next_power_of_2(dim) // (4 if fp8 else 1))


@triton.jit
@no_type_check
def _sum_weighed(
    query,
    words,
    values,
    groups_bf16,
    groups_fp32,
    log_weights,
    block_table,
    unit_ids,
    pages,
    context_tokens,
    kv_budget_tokens,
    mixed,
    log_sum,
    query_per_request,
    query_per_head,
    query_per_member,
    words_per_block,
    words_per_head,
    groups_per_block,
    groups_per_row,
    groups_per_head,
    weights_per_request,
    weights_per_head,
    weights_per_member,
    table_per_request,
    ids_per_request,
    ids_per_head,
    pages_per_request,
    pages_per_head,
    most_units,
    scale_log2,
    scale_spread,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    PER_GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_V: tl.constexpr,
    LANES_W: tl.constexpr,
    BITS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    FP8_VALUES: tl.constexpr,
    SPREADS_AT: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
    WITH_PAGES: tl.constexpr,
    DP4A: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """values, groups_bf16, groups_fp32: the rows of groups, as words of four codes or as bf16, and the same memory.
    scale_log2, scale_spread: see `_score_codes`."""
    let_next_begin(launch_pdl)
    request, head = tl.program_id(2).to(tl.int64), tl.program_id(1)
    context = tl.load(context_tokens + request).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request).to(tl.int32)
    units = (context + UNIT - 1) // UNIT
    chosen_units = tl.minimum(budget // UNIT, most_units)
    # Groups with a unit that competes. Within its budget a request reads everything, and nothing was weighed.
    FIRST_GROUP: tl.constexpr = FIRST // PER_GROUP
    last_group = tl.where(budget >= context, 0, (units - RECENT + PER_GROUP - 1) // PER_GROUP)
    groups_each = (tl.maximum(last_group - FIRST_GROUP, 0) + tl.num_programs(0) - 1) // tl.num_programs(0)
    begins = FIRST_GROUP + tl.program_id(0) * groups_each
    ends = tl.minimum(begins + groups_each, last_group)
    wait_for_previous(launch_pdl)

    member = tl.arange(0, LANES_G)
    weights_rows = log_weights + request * weights_per_request + head * weights_per_head + member * weights_per_member
    ids_row = unit_ids + request * ids_per_request + head * ids_per_head
    pages_row = pages + request * pages_per_request + head * pages_per_head
    table_row = block_table + request * table_per_request
    head_words = words + head * words_per_head * ALIGN
    head_groups = head * groups_per_head

    # The list is ascending: chosen units before the first group are passed over. Most programs look at no more than what
    # they load here, at once.
    topped, counted = tl.arange(0, _TOPPED), tl.arange(0, _COUNTED)
    to_count = tl.where(begins < ends, chosen_units, 0)
    own = (member < G)[:, None]
    tops = tl.load(
        weights_rows[:, None] + (begins + topped)[None, :],
        mask=own & (begins + topped < ends)[None, :],
        other=float("-inf"),
    )
    chosen = tl.load(ids_row + counted, mask=counted < to_count, other=_NO_UNIT)
    its_group = tl.arange(0, TILE)
    block = _blocks_of(table_row, begins + its_group, ends, UNITS_PER_BLOCK, PER_GROUP)
    for start in range(begins + _TOPPED, ends, _TOPPED):
        there = own & (start + topped < ends)[None, :]
        log_weight = tl.load(weights_rows[:, None] + (start + topped)[None, :], mask=there, other=float("-inf"))
        tops = tl.maximum(tops, log_weight)
    before = (chosen < begins * PER_GROUP).to(tl.int32)
    for start in range(_COUNTED, to_count, _COUNTED):
        chosen = tl.load(ids_row + start + counted, mask=start + counted < to_count, other=_NO_UNIT)
        before += (chosen < begins * PER_GROUP).to(tl.int32)
    top = tl.max(tops, axis=1)
    anchor = tl.where(top == float("-inf"), 0.0, top)
    passed = tl.sum(before, axis=0)

    PARTS: tl.constexpr = 8 // BITS
    APART: tl.constexpr = words_apart(LANES_W)
    query_parts, head_sums, head_scales, half_norms = rounded_heads(
        query + request * query_per_request + head * query_per_head, (), query_per_member, scale_log2, scale_spread,
        1, LISTED, G, D, LANES_W, PARTS, APART,
    )  # fmt: skip
    listed = tl.arange(0, LISTED)
    lane = tl.arange(0, LANES_V)
    # A word has four values, and each of them a product of its own.
    VALUES: tl.constexpr = 4 if FP8_VALUES else 1
    its_type = query.dtype.element_ty
    # Values of codes are too small by 2 ** SMALLER. The weights make up for a part of it, as far as their type goes.
    SMALLER: tl.constexpr = 0 if not FP8_VALUES else 8 if its_type == tl.float16 else 120
    WEIGHTS_UP: tl.constexpr = min(SMALLER, 60)
    total_weight = tl.zeros([LANES_G], tl.float32)
    # Channels by query heads: of these there are few, and a matrix product takes 8 columns or more.
    COLUMNS: tl.constexpr = max(LANES_G, 8)
    mixes = ()
    for _ in tl.static_range(VALUES):
        mixes += (tl.zeros([LANES_V, COLUMNS], tl.float32),)
    more = passed + listed < chosen_units
    chosen = tl.load(ids_row + passed + listed, mask=more, other=_NO_UNIT)
    page = tl.load(pages_row + passed + listed, mask=more, other=0) if WITH_PAGES else chosen
    for tile in range(begins, ends, TILE):
        group = tile + its_group
        wanted = group < ends
        row = block * groups_per_block + group % (UNITS_PER_BLOCK // PER_GROUP) * groups_per_row + head_groups
        weighed = own & wanted[None, :]
        log_weight = tl.load(weights_rows[:, None] + group[None, :], mask=weighed, other=float("-inf"))
        value_at = (row * (ROW_ALIGN // (4 if FP8_VALUES else 2)))[:, None] + lane[None, :]
        # Where values fill their lanes, the mask is one per row and loads stay 16 bytes wide.
        readable = wanted[:, None]
        if LANES_V * VALUES != D:
            readable = readable & (lane * VALUES < D)[None, :]
        held = tl.load(values + value_at, mask=readable, other=0)
        if FP8_VALUES:
            value_scale = tl.load(groups_fp32 + row * (ROW_ALIGN // 4) + (SPREADS_AT // 4 - 1), mask=wanted, other=0.0)
        # Where the next tile lies.
        block = _blocks_of(table_row, group + TILE, ends, UNITS_PER_BLOCK, PER_GROUP)
        weight = tl.exp2(log_weight - anchor[:, None])

        read = tl.zeros([LANES_G, TILE], tl.float32)
        read_units = tl.zeros([TILE], tl.int32)
        unit_ends = tl.minimum(tile + TILE, ends) * PER_GROUP
        found = tl.sum((chosen < unit_ends).to(tl.int32), axis=0)
        while found > 0:
            taken = (chosen < unit_ends) & competes(chosen, units, FIRST, RECENT)
            if WITH_PAGES:
                its_block, inside = (page // UNITS_PER_BLOCK).to(tl.int64), page % UNITS_PER_BLOCK
            else:
                its_block = tl.load(table_row + chosen // UNITS_PER_BLOCK, mask=taken, other=0).to(tl.int64)
                inside = chosen % UNITS_PER_BLOCK
            its_row = its_block * groups_per_block + inside // PER_GROUP * groups_per_row + head_groups
            spread_at = its_row * (ROW_ALIGN // 2) + SPREADS_AT // 2 + inside % PER_GROUP
            products, scale, spread = _read_units(
                head_words + its_block * words_per_block * ALIGN, groups_bf16 + spread_at, inside, taken, query_parts, UNIT,
                UNITS_PER_BLOCK, G, W, ROW_WORDS, LANES_W, BITS, APART, DP4A,
            )  # fmt: skip
            its = taken[:, None] & ((chosen // PER_GROUP - tile)[:, None] == its_group[None, :])
            read_units += tl.sum(its.to(tl.int32), axis=0)
            for number in tl.static_range(G):
                whole = tl.reshape(whole_of(products[number], head_sums[number], BITS), [LISTED])
                logit = logit_of(whole, scale, head_scales[number])
                if UNIT > 1:
                    logit += spread * half_norms[number]
                its_anchor = tl.max(tl.where(member == number, anchor, float("-inf")), axis=0)
                its_weight = tl.exp2(logit - its_anchor) * UNIT
                of_groups = tl.sum(tl.where(its, its_weight[:, None], 0.0), axis=0)
                read += tl.where((member == number)[:, None], of_groups[None, :], 0.0)
            passed += found
            more = passed + listed < chosen_units
            chosen = tl.load(ids_row + passed + listed, mask=more, other=_NO_UNIT)
            page = tl.load(pages_row + passed + listed, mask=more, other=0) if WITH_PAGES else chosen
            found = tl.sum((chosen < unit_ends).to(tl.int32), axis=0)

        competing = tl.minimum((group + 1) * PER_GROUP, units - RECENT) - tl.maximum(group * PER_GROUP, FIRST)
        weight = tl.where((read_units < competing)[None, :], tl.maximum(weight - read, 0.0), 0.0)
        total_weight += tl.sum(weight, axis=1)
        if FP8_VALUES:
            weight = weight * (value_scale * 2.0**WEIGHTS_UP)[None, :]
        columns = tl.trans(_rows_of(weight, COLUMNS)).to(its_type)
        added = ()
        for number in tl.static_range(VALUES):
            its_values = _value_of_codes(held, number, its_type) if FP8_VALUES else held.to(its_type)
            added += (tl.dot(tl.trans(its_values), columns, mixes[number], input_precision="ieee"),)
        mixes = added

    divisor = tl.where(total_weight > 0.0, total_weight, 1.0)
    log_total = tl.where(total_weight > 0.0, top + tl.log2(divisor), float("-inf"))
    at = (request * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    tl.store(log_sum + at * G + member, log_total, mask=member < G)
    column = tl.arange(0, COLUMNS)
    up = 2.0 ** (SMALLER - WEIGHTS_UP) / tl.reshape(_rows_of(divisor[:, None], COLUMNS), [COLUMNS])
    for number in tl.static_range(VALUES):
        channel = lane * VALUES + number
        target = mixed + at * (G * D) + column[None, :] * D + channel[:, None]
        tl.store(target, mixes[number] * up[None, :], mask=(column < G)[None, :] & (channel < D)[:, None])


@triton.jit
@no_type_check
def _blocks_of(table_row, group, ends, UNITS_PER_BLOCK: tl.constexpr, PER_GROUP: tl.constexpr):
    """The blocks of groups before the last one of a stretch."""
    column = group // (UNITS_PER_BLOCK // PER_GROUP)
    return tl.load(table_row + column, mask=group < ends, other=0).to(tl.int64)


@triton.jit
@no_type_check
def _read_units(
    its_words,
    spread_at,
    inside,
    taken,
    query_parts,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES_W: tl.constexpr,
    BITS: tl.constexpr,
    APART: tl.constexpr,
    DP4A: tl.constexpr,
):
    """Products of each query head with units, their scales and spreads. its_words, inside: where the words of the unit's
    block and head begin, and its place there."""
    word = tl.arange(0, LANES_W)
    held_at = (its_words + inside * W)[None, :, None] + word[None, None, :]
    readable = taken[None, :, None]
    if LANES_W != W:
        readable = readable & (word < W)[None, None, :]
    held = tl.load(held_at, mask=readable, other=0)
    scale = tl.load(its_words + UNITS_PER_BLOCK * W + inside * (ROW_WORDS - W), mask=taken, other=0)
    spread = tl.load(spread_at, mask=taken, other=0.0).to(tl.float32) if UNIT > 1 else scale
    return products_of(held, query_parts, G, BITS, APART, DP4A), scale, spread


@triton.jit
@no_type_check
def _rows_of(weight, ROWS: tl.constexpr):
    """The rows again and again, until there are as many."""
    again = tl.broadcast_to(weight[None, :, :], [ROWS // weight.shape[0], weight.shape[0], weight.shape[1]])
    return tl.reshape(again, [ROWS, weight.shape[1]])


@triton.jit
@no_type_check
def _value_of_codes(words, number: tl.constexpr, its_type: tl.constexpr):
    """Byte `number` of each word, a code of e4m3, as another type: sign, exponent and mantissa only move, so that the
    value is smaller by the distance of the exponents' biases, 2 ** 8 in fp16 and 2 ** 120 in bf16 and fp32."""
    if its_type == tl.float32:
        # The sign's copies that the shift leaves between are masked out, by 0x87F00000.
        value = (((words << (24 - 8 * number)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)
    else:
        # Two of the word's values at a time, in its halves: those of bytes 0 and 2, or those of bytes 1 and 3. The signs are
        # masked out by 0x80008000.
        MOVED: tl.constexpr = 7 if its_type == tl.float16 else 4
        if number % 2 == 0:
            pair = ((words << 8) & -0x7FFF8000) | ((words << MOVED) & (0x007F007F << MOVED))
        else:
            pair = (words & -0x7FFF8000) | ((words >> (8 - MOVED)) & (0x007F007F << MOVED))
        value = (pair >> 16 * (number // 2)).to(tl.int16).to(its_type, bitcast=True)
    return value
