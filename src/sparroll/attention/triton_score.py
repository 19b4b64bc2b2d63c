"""Scores of all units of each (request, head). Bound by reading the index once; neighbouring programs take neighbouring
heads, whose rows of the same unit lie side by side."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.selectors.base import Selector
from sparroll.attention.triton_launch import after_previous, overlapping

TILE_BYTES = 8192
"""Index bytes that one program has in flight."""
PROGRAMS = 2048
"""Aimed at, so that requests of different length even out."""


def score_units(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    block_table_RM: Tensor,
    context_tokens_R: Tensor,
    selector: Selector,
    scores_RHU: Tensor,
    kv_budget_tokens_R: Tensor | None,
    scale: float,
    tile_bytes: int = TILE_BYTES,
    programs: int = PROGRAMS,
) -> None:
    """See paged.score_units. Page means need no scale; `tile_bytes` and `programs` are for measurements."""
    requests, heads, group, _ = query_RHGD.shape
    units, width, unit = scores_RHU.shape[2], index_PSHW.shape[3], selector.unit_tokens
    if requests == 0:
        return
    lanes = triton.next_power_of_2(width)
    tile_units = min(max(tile_bytes // (lanes * index_PSHW.element_size()), 16), 256)
    shares = max(1, min(triton.cdiv(units, tile_units), triton.cdiv(programs, requests * heads)))
    _mean_query[(heads, shares, requests)](
        query_RHGD,
        index_PSHW,
        block_table_RM,
        context_tokens_R,
        context_tokens_R if kv_budget_tokens_R is None else kv_budget_tokens_R,
        scores_RHU,
        *query_RHGD.stride()[:3],
        *index_PSHW.stride()[:3],
        block_table_RM.stride(0),
        *scores_RHU.stride()[:2],
        units,
        UNIT=unit,
        UNITS_PER_BLOCK=index_PSHW.shape[1],
        FIRST=selector.first_tokens // unit,
        RECENT=selector.recent_tokens // unit,
        G=group,
        W=width,
        LANES_G=triton.next_power_of_2(group),
        LANES_W=lanes,
        TILE=tile_units,
        SKIP_WITHIN_BUDGET=kv_budget_tokens_R is not None,
        num_warps=4,
        **overlapping(query_RHGD),
    )


@triton.jit
@no_type_check
def _mean_query(
    query,
    index,
    block_table,
    context_tokens,
    kv_budget_tokens,
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
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_W: tl.constexpr,
    TILE: tl.constexpr,
    SKIP_WITHIN_BUDGET: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    head = tl.program_id(0)
    request = tl.program_id(2).to(tl.int64)
    context = tl.load(context_tokens + request)
    units = (context + UNIT - 1) // UNIT
    tiles = (units_held + TILE - 1) // TILE
    if SKIP_WITHIN_BUDGET:
        # Whoever gives budgets chooses among the units of the context alone.
        tiles = (tl.minimum(units, units_held) + TILE - 1) // TILE
        tiles = tl.where(tl.load(kv_budget_tokens + request) >= context, 0, tiles)

    channel = tl.arange(0, LANES_W)
    member = tl.arange(0, LANES_G)
    group_queries = tl.load(
        query
        + request * query_per_request
        + head * query_per_head
        + member[:, None] * query_per_member
        + channel[None, :],
        mask=(member < G)[:, None] & (channel < W)[None, :],
        other=0.0,
    )
    mean = tl.sum(group_queries.to(tl.float32), axis=0) / G

    for tile in range(tl.program_id(1), tiles, tl.num_programs(1)):
        unit = tile * TILE + tl.arange(0, TILE)
        exists = unit < units
        forced = (unit < FIRST) | (unit >= units - RECENT)
        # The row of an incomplete unit was never written; it is among the forced ones and not read.
        candidate = exists & (forced == 0)
        column = unit // UNITS_PER_BLOCK
        block = tl.load(block_table + request * table_per_request + column, mask=candidate, other=0).to(tl.int64)
        row = index + block * index_per_block + (unit % UNITS_PER_BLOCK) * index_per_unit + head * index_per_head
        landmark = tl.load(row[:, None] + channel[None, :], mask=candidate[:, None] & (channel < W)[None, :], other=0.0)
        score = tl.sum(landmark.to(tl.float32) * mean[None, :], axis=1)
        score = tl.where(forced, float("inf"), score)
        score = tl.where(exists, score, float("-inf"))
        tl.store(scores + request * scores_per_request + head * scores_per_head + unit, score, mask=unit < units_held)
