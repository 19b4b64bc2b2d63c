"""Scores all units of each (request, head). The speed limit is reading the index once, so the work is split evenly: the
tiles of units of all (request, head) pairs form one row, and every program takes an equal stretch of it.

Index rows are floating-point numbers of any type, or words of packed codes. A code is never converted. Masked out of
its word, it already is the bit pattern of a float that differs from its value by a power of two, and the query is
multiplied by that power beforehand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.triton_index import words_of
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_work_split import plan_step, request_at, stretch
from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.quantized_mean import QuantizedMean

if TYPE_CHECKING:
    from sparroll.attention.decode.paged import StepWorkspace

PROGRAMS_PER_MULTIPROCESSOR = 8
"""Each program has 8 KB of the index in flight. More programs could run at a time, but their stretches would be too
short."""


def score_units(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    block_table_RM: Tensor,
    context_tokens_R: Tensor,
    selector: Selector,
    scores_RHU: Tensor,
    kv_budget_tokens_R: Tensor | None,
    scale: float,
    workspace: StepWorkspace,
    planned: bool,
    programs: int | None = None,
) -> None:
    """See paged.score_units. Page means need no scale; `programs` is for measurements."""
    requests, heads, group, dim = query_RHGD.shape
    units, unit = scores_RHU.shape[2], selector.unit_tokens
    if requests == 0:
        return
    if not planned:
        plan_step(context_tokens_R, kv_budget_tokens_R, selector, units, workspace)
    bits, align, rows = 0, 1, index_PSHW
    if isinstance(selector, QuantizedMean):
        bits, align, rows = selector.bits, selector.row_align // 4, words_of(index_PSHW, selector)
    held = dim * bits // 32 if bits else rows.shape[3]
    lanes = triton.next_power_of_2(held)
    _mean_query[(programs or workspace.processors * PROGRAMS_PER_MULTIPROCESSOR,)](
        query_RHGD,
        rows,
        block_table_RM,
        context_tokens_R,
        workspace.scored_before_R,
        scores_RHU,
        *query_RHGD.stride()[:3],
        *(stride // align for stride in rows.stride()[:3]),
        block_table_RM.stride(0),
        *scores_RHU.stride()[:2],
        units,
        requests,
        UNIT=unit,
        UNITS_PER_BLOCK=index_PSHW.shape[1],
        FIRST=selector.first_tokens // unit,
        RECENT=selector.recent_tokens // unit,
        HEADS=heads,
        G=group,
        W=held,
        LANES_G=triton.next_power_of_2(group),
        LANES_W=lanes,
        LANES_R=triton.next_power_of_2(requests),
        TILE=workspace.scored_tile_units,
        BITS=bits,
        ALIGN=align,
        num_warps=4,
        **overlapping(query_RHGD),
    )


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _mean_query(
    query,
    index,
    block_table,
    context_tokens,
    scored_before,
    scores,
    query_per_request,
    query_per_head,
    query_per_member,
    index_per_block,
    index_per_unit,
    index_per_head,
    table_per_request,
    scores_per_request,
    scores_per_head,
    units_held,
    requests,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_W: tl.constexpr,
    LANES_R: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    ALIGN: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    at, end = stretch(scored_before, requests, HEADS)
    lane = tl.arange(0, LANES_W)
    # Bits of a word that lie in the mantissa of a float, as far as they are whole codes.
    LOW_BITS: tl.constexpr = 0 if BITS == 0 else 23 // BITS * BITS
    while at < end:
        request, request_begins, tiles = request_at(at, scored_before, requests, HEADS, LANES_R)
        units = (tl.load(context_tokens + request) + UNIT - 1) // UNIT
        head = (at - request_begins) // tiles
        head_begins = request_begins + head * tiles
        last = tl.minimum(end, head_begins + tiles)
        first_query = query + request * query_per_request + head * query_per_head
        if BITS == 0:
            mean = _group_mean(first_query, query_per_member, lane, lane < W, G, LANES_G)
        else:
            # Unpacking wants each channel's query in a register of its own.
            means = ()
            summed = tl.zeros([LANES_W], tl.float32)
            for part in tl.static_range(32 // BITS):
                channels = lane * (32 // BITS) + part
                its_mean = _group_mean(first_query, query_per_member, channels, lane < W, G, LANES_G)
                summed += its_mean
                means += (its_mean * 2.0 ** (60 if BITS == 8 else 64 - part * BITS % LOW_BITS),)
            of_all = tl.sum(summed, axis=0)
        head_index = index + head * index_per_head * ALIGN
        table_row = block_table + request * table_per_request
        target = scores + request * scores_per_request + head * scores_per_head
        unit = (at - head_begins) * TILE + tl.arange(0, TILE)
        block = _look_up(table_row, unit, units, UNITS_PER_BLOCK, FIRST, RECENT)
        for _ in range(at, last):
            candidate = _competes(unit, units, FIRST, RECENT)
            row = head_index + block * index_per_block * ALIGN + (unit % UNITS_PER_BLOCK) * index_per_unit * ALIGN
            # One tile early, so that its rows wait for no other load.
            block = _look_up(table_row, unit + TILE, units, UNITS_PER_BLOCK, FIRST, RECENT)
            held = tl.load(row[:, None] + lane[None, :], mask=candidate[:, None] & (lane < W)[None, :], other=0)
            if BITS == 0:
                score = tl.sum(held.to(tl.float32) * mean[None, :], axis=1)
            else:
                products = tl.zeros([TILE, LANES_W], tl.float32)
                for part in tl.static_range(32 // BITS):
                    products += _as_float(held, part, BITS, LOW_BITS) * means[part][None, :]
                score = tl.sum(products, axis=1)
                if BITS == 8:
                    score *= 2.0**60
                else:
                    score = score * 2.0**86 - (2**BITS - 1) * of_all
                score *= tl.load(row + W, mask=candidate, other=0).to(tl.float32, bitcast=True)
            score = tl.where(candidate, score, tl.where(unit < units, float("inf"), float("-inf")))
            tl.store(target + unit, score, mask=unit < units_held)
            unit += TILE
        at = last


@triton.jit
@no_type_check
def _competes(unit, units, FIRST: tl.constexpr, RECENT: tl.constexpr):
    """Neither past the context nor read anyway. The row of an incomplete unit was never written; it is read anyway."""
    return (unit < units) & (unit >= FIRST) & (unit < units - RECENT)


@triton.jit
@no_type_check
def _look_up(table_row, unit, units, UNITS_PER_BLOCK: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr):
    """The blocks of units that compete."""
    competes = _competes(unit, units, FIRST, RECENT)
    return tl.load(table_row + unit // UNITS_PER_BLOCK, mask=competes, other=0).to(tl.int64)


@triton.jit
@no_type_check
def _group_mean(query, query_per_member, channel, wanted, G: tl.constexpr, LANES_G: tl.constexpr):
    """One vector: the group's mean query at these channels."""
    member = tl.arange(0, LANES_G)
    group_queries = tl.load(
        query + member[:, None] * query_per_member + channel[None, :],
        mask=(member < G)[:, None] & wanted[None, :],
        other=0.0,
    )
    return tl.sum(group_queries.to(tl.float32), axis=0) / G


@triton.jit
@no_type_check
def _as_float(words, part: tl.constexpr, BITS: tl.constexpr, LOW_BITS: tl.constexpr):
    """Code number `part` of each word: times 2 ** -120 if e4m3, else times 2 ** (part * BITS % LOW_BITS - 149)."""
    if BITS == 8:
        # Sign to bit 31, the other seven bits to the lower exponent and the upper mantissa of fp32; the sign's copies
        # that the shift leaves between them are masked out, by 0x87F00000.
        codes = ((words << (24 - 8 * part)) >> 4) & -0x78100000
    else:
        # The mantissa of a subnormal number. Words are shifted only to bring further codes below bit 23.
        SHIFT: tl.constexpr = part * BITS // LOW_BITS * LOW_BITS
        codes = (words >> SHIFT) & ((2**BITS - 1) << (part * BITS - SHIFT))
    return codes.to(tl.float32, bitcast=True)
