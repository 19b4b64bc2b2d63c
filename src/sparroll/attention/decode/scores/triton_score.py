"""Scores all units of each (request, head). The speed limit is reading the index once, so the work is split evenly: the
tiles of units of all (request, head) pairs form one row, and every program takes an equal stretch of it.

Index rows are floating-point numbers of any type, or words of fp8 codes. A code is never converted. Masked out of its
word, it already is the bit pattern of a float that differs from its value by a power of two, and the query is multiplied
by that power beforehand. Codes of fewer bits are triton_score_codes.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.scores.triton_new_tokens import arguments_of, store_new_tokens
from sparroll.attention.decode.scores.triton_score_codes import REGISTERS
from sparroll.attention.decode.scores.triton_score_codes import score_units as score_codes
from sparroll.attention.decode.triton_index import loaded_bytes, words_of
from sparroll.attention.decode.triton_launch import let_next_begin, overlapping, wait_for_previous
from sparroll.attention.decode.triton_work_split import (
    blocks_of,
    by_request,
    competes,
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

WARPS, PROGRAMS_PER_MULTIPROCESSOR = 4, 8
"""Each program has 8 KB of the index in flight. More programs could run at a time, but their stretches would be too
short."""
MOST_REGISTERS = REGISTERS // (32 * WARPS * PROGRAMS_PER_MULTIPROCESSOR)
"""Of a thread. Unless told so, the assembler takes fewer than there are in blocks of more than one unit, and each of the
four loads of a tile waits for the one before it."""


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
    peaks_RHK: Tensor | None = None,
    programs: int | None = None,
    groups_PSHV: Tensor | None = None,
    log_weights_RHGN: Tensor | None = None,
    new_tokens: NewTokens | None = None,
) -> None:
    """See paged.score_units. Scores need no scale; `programs` is for measurements."""
    requests, heads, group, dim = query_RHGD.shape
    units, unit = scores_RHU.shape[2], selector.unit_tokens
    if requests == 0:
        return
    if not planned:
        plan_step(context_tokens_R, kv_budget_tokens_R, selector, units, workspace)
    fp8, align, rows, held = False, 1, index_PSHW, index_PSHW.shape[3]
    if isinstance(selector, QuantizedMean):
        if selector.bits < 8:
            score_codes(
                query_RHGD, index_PSHW, block_table_RM, context_tokens_R, selector, scores_RHU, workspace, peaks_RHK,
                programs=programs, groups_PSHV=groups_PSHV, log_weights_RHGN=log_weights_RHGN, scale=scale,
                new_tokens=new_tokens,
            )  # fmt: skip
            return
        fp8, align, rows, held = True, loaded_bytes(selector, dim) // 4, words_of(index_PSHW, selector, dim), dim // 4
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
        *arguments_of(new_tokens),
        requests,
        UNIT=unit,
        UNITS_PER_BLOCK=index_PSHW.shape[1],
        FIRST=selector.first_tokens // unit,
        RECENT=selector.recent_tokens // unit,
        HEADS=heads,
        G=group,
        W=held,
        LANES_G=triton.next_power_of_2(group),
        LANES_W=triton.next_power_of_2(held),
        LANES_R=request_lanes(requests),
        TILE=workspace.scored_tile_units,
        FP8=fp8,
        ALIGN=align,
        D=dim,
        BLOCK_TOKENS=0 if new_tokens is None else new_tokens.keys_PBHD.shape[1],
        num_warps=WARPS,
        maxnreg=MOST_REGISTERS,
        **overlapping(query_RHGD),
    )


@triton.jit(do_not_specialize=["new_tokens", "requests"])
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
    new,
    new_tokens,
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
    FP8: tl.constexpr,
    ALIGN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    let_next_begin(launch_pdl)
    ends_R = by_request(scored_before + 1, requests, LANES_R)
    contexts_R = by_request(context_tokens, requests, LANES_R)
    at, end = stretch(ends_R, HEADS, share=None)
    lane = tl.arange(0, LANES_W)
    while at < end:
        its_lane, request_begins, tiles = request_at(at, ends_R, requests, HEADS, LANES_R)
        units = (number_of(its_lane, contexts_R, LANES_R) + UNIT - 1) // UNIT
        request = its_lane.to(tl.int64)
        head = (at - request_begins) // tiles
        head_begins = request_begins + head * tiles
        last = tl.minimum(end, head_begins + tiles)
        head_index = index + head * index_per_head * ALIGN
        table_row = block_table + request * table_per_request
        target = scores + request * scores_per_request + head * scores_per_head
        unit = (at - head_begins) * TILE + tl.arange(0, TILE)
        block = blocks_of(table_row, unit, units, UNITS_PER_BLOCK, FIRST, RECENT)
        wait_for_previous(launch_pdl)
        first_query = query + request * query_per_request + head * query_per_head
        if FP8:
            # Unpacking wants each channel's query in a register of its own.
            means = ()
            for part in tl.static_range(4):
                its_mean = _group_mean(first_query, query_per_member, 4 * lane + part, lane < W, G, LANES_G)
                means += (its_mean * 2.0**60,)
        else:
            mean = _group_mean(first_query, query_per_member, lane, lane < W, G, LANES_G)
        for _ in range(at, last):
            candidate = competes(unit, units, FIRST, RECENT)
            row = head_index + block * index_per_block * ALIGN + (unit % UNITS_PER_BLOCK) * index_per_unit * ALIGN
            # One tile early, so that its rows wait for no other load.
            block = blocks_of(table_row, unit + TILE, units, UNITS_PER_BLOCK, FIRST, RECENT)
            held = tl.load(row[:, None] + lane[None, :], mask=candidate[:, None] & (lane < W)[None, :], other=0)
            if FP8:
                products = tl.zeros([TILE, LANES_W], tl.float32)
                for part in tl.static_range(4):
                    products += _fp8_as_float(held, part) * means[part][None, :]
                score = tl.sum(products, axis=1) * 2.0**60
                score *= tl.load(row + W, mask=candidate, other=0).to(tl.float32, bitcast=True)
            else:
                score = tl.sum(held.to(tl.float32) * mean[None, :], axis=1)
            score = tl.where(candidate, score, tl.where(unit < units, float("inf"), float("-inf")))
            tl.store(target + unit, score, mask=unit < units_held)
            unit += TILE
        at = last
    wait_for_previous(launch_pdl)
    if BLOCK_TOKENS:
        store_new_tokens(new, new_tokens, BLOCK_TOKENS, HEADS, D)


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
def _fp8_as_float(words, part: tl.constexpr):
    """Byte number `part` of each word, an e4m3 number, times 2 ** -120."""
    # Sign to bit 31, the other seven bits to the lower exponent and the upper mantissa of fp32; the sign's copies that
    # the shift leaves between them are masked out, by 0x87F00000.
    return (((words << (24 - 8 * part)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)
