"""Shares the work of a step: running sums of each request's tiles, in which every program finds its stretch. The sums are
the same in all layers with the same budgets, so they are computed once a step.

Programs that score take equal stretches. Those that read do so, too, or each of them reads for a single (request, head):
one that goes on with another begins anew, and the parts of those that are cut must be added up. Where there are more
(request, head) than programs that run at a time, each has a program of its own if all lists are shorter than what beginning
anew takes. The plan takes what should be faster (benchmarks/reading_plans.py times all of them)."""

# R requests, L layers with budgets of their own

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.selectors.base import Selector

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import LayerPlans, StepWorkspace

_ANEW_TILES = tl.constexpr(6)
"""What a program could read while it begins anew and adds up parts, in tiles: 64 tokens each on an H200."""


def request_lanes(requests: int) -> int:
    """A constant that kernels are compiled for: as many lanes as there are requests, or more, because a start captures CUDA
    graphs of every batch size and would wait for a compiler at each new one. So these are powers of two. Up to 32 lanes are
    one register of each thread; with 256 lanes instead of 128 a sparse layer of 63 requests takes 1 % longer (LOG.md)."""
    return max(32, triton.next_power_of_2(requests))


def plan_step(
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor | None,
    selector: Selector,
    most_units: int,
    workspace: StepWorkspace,
) -> None:
    """See paged.plan_step. Without budgets every unit of `most_units` is scored, existing or not."""
    budgets_1R = None if kv_budget_tokens_R is None else kv_budget_tokens_R[None]
    plans = workspace.read_before_R[None], workspace.scored_before_R[None]
    _launch(context_tokens_R, budgets_1R, selector, most_units, workspace, *plans)


def plan_layers(
    context_tokens_R: Tensor, kv_budget_tokens_LR: Tensor, selector: Selector, most_units: int, plans: LayerPlans
) -> None:
    """See paged.plan_layers."""
    before = plans.read_before_LR, plans.scored_before_LR
    _launch(context_tokens_R, kv_budget_tokens_LR, selector, most_units, plans.workspaces[0], *before)


def _launch(
    context_tokens_R: Tensor,
    kv_budget_tokens_LR: Tensor | None,
    selector: Selector,
    most_units: int,
    workspace: StepWorkspace,
    read_before_LR: Tensor,
    scored_before_LR: Tensor,
) -> None:
    """Write a plan for each row of budgets. The workspace says in which tiles programs read and score."""
    requests = len(context_tokens_R)
    if requests:
        _plan[(len(read_before_LR),)](
            context_tokens_R,
            context_tokens_R if kv_budget_tokens_LR is None else kv_budget_tokens_LR,
            read_before_LR,
            scored_before_LR,
            0 if kv_budget_tokens_LR is None else kv_budget_tokens_LR.stride(0),
            read_before_LR.stride(0),
            scored_before_LR.stride(0),
            requests,
            most_units,
            workspace.sharing(requests),
            workspace.programs(requests),
            OWN=workspace.own_programs(requests),
            HEADS=workspace.kv_heads,
            UNIT=selector.unit_tokens,
            READ_TILE=workspace.tile.tokens,
            SCORED_TILE=workspace.scored_tile_units,
            WITH_BUDGETS=kv_budget_tokens_LR is not None,
            LANES_R=request_lanes(requests),
            num_warps=4,
        )
        # Not in the kernel above: after a kernel that does not overlap, the next one may read the plan at once.
        workspace.flags.zero_()


@triton.jit(do_not_specialize=["budget_stride", "read_stride", "scored_stride", "requests", "sharing", "programs"])
@no_type_check
def _plan(
    context_tokens,
    kv_budget_tokens,
    read_before,
    scored_before,
    budget_stride,
    read_stride,
    scored_stride,
    requests,
    most_units,
    sharing,
    programs,
    OWN: tl.constexpr,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    READ_TILE: tl.constexpr,
    SCORED_TILE: tl.constexpr,
    WITH_BUDGETS: tl.constexpr,
    LANES_R: tl.constexpr,
):
    kv_budget_tokens += tl.program_id(0) * budget_stride
    read_before += tl.program_id(0) * read_stride
    scored_before += tl.program_id(0) * scored_stride
    request = tl.arange(0, LANES_R)
    context = tl.load(context_tokens + request, mask=request < requests, other=0).to(tl.int32)
    budget = tl.load(kv_budget_tokens + request, mask=request < requests, other=0).to(tl.int32)
    units = (context + UNIT - 1) // UNIT
    chosen_units = tl.minimum(tl.where(budget >= context, units, budget // UNIT), most_units)
    read = (chosen_units * UNIT + READ_TILE - 1) // READ_TILE
    if WITH_BUDGETS:
        # Within its budget a request is not scored.
        scored = tl.where(budget >= context, 0, (units + SCORED_TILE - 1) // SCORED_TILE)
    else:
        scored = tl.where(request < requests, (most_units + SCORED_TILE - 1) // SCORED_TILE, 0)
    total = tl.sum(read, axis=0) * HEADS
    share = tl.maximum((total + sharing - 1) // sharing, 1)
    if OWN is not None:
        if OWN == "one":
            own = tl.maximum(tl.max(read, axis=0), 1)
            better = own <= _ANEW_TILES
        else:
            own = _share_of_own(read, share, programs, HEADS)
            better = own <= share + _ANEW_TILES
        if better:
            share = own
            read = (read + own - 1) // own * own
    tl.store(read_before + request + 1, tl.cumsum(read, axis=0), mask=request < requests)
    tl.store(read_before + requests + 1, share)
    tl.store(scored_before + request + 1, tl.cumsum(scored, axis=0), mask=request < requests)
    tl.store(read_before, 0)
    tl.store(scored_before, 0)


@triton.jit
@no_type_check
def _share_of_own(tiles_R, equal, programs, HEADS: tl.constexpr):
    """The shortest stretch with which so many programs suffice if each reads for a single (request, head). There are at
    least as many of them, and none is shorter than an equal one."""
    share, enough = equal, tl.maximum(tl.max(tiles_R, axis=0), equal)
    while share < enough:
        middle = (share + enough) // 2
        if tl.sum((tiles_R + middle - 1) // middle, axis=0) * HEADS <= programs:
            enough = middle
        else:
            share = middle + 1
    return share


@triton.jit
@no_type_check
def by_request(numbers, requests, LANES_R: tl.constexpr):
    """A number of each request; 0 in lanes without one. A program holds what it must know of requests from its beginning on:
    it would wait for memory at each step of a search there."""
    each = tl.arange(0, LANES_R)
    return tl.load(numbers + each, mask=each < requests, other=0).to(tl.int32)


@triton.jit
@no_type_check
def number_of(request, numbers_R, LANES_R: tl.constexpr):
    """A request's own one of the numbers that `by_request` holds."""
    return tl.sum(tl.where(tl.arange(0, LANES_R) == request, numbers_R, 0), axis=0)


@triton.jit
@no_type_check
def stretch(ends_R, heads, share):
    """Where this program's stretch of all tiles of all heads begins and ends. ends_R: where the tiles of each request end in
    the row of one head.  share: tiles in a stretch; None where all are equal."""
    total = tl.max(ends_R, axis=0) * heads
    if share is None:
        share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    begins = tl.program_id(0) * share
    return begins, tl.minimum(begins + share, total)


@triton.jit
@no_type_check
def request_at(place, ends_R, requests, heads, LANES_R: tl.constexpr):
    """The request that a tile belongs to, where its own tiles begin and how many it has in each head, as planned."""
    # The tiles of a request's heads follow each other, so its tiles are here in the row of one head, too.
    in_row = place // heads
    ended = ends_R <= in_row
    # A request without tiles ends where the one before it does; lanes without a request end at 0.
    request = tl.sum(ended.to(tl.int32), axis=0) - (LANES_R - requests)
    begins = tl.max(tl.where(ended, ends_R, 0), axis=0)
    ends = tl.min(tl.where(ended, 0x7FFFFFFF, ends_R), axis=0)
    return request, begins * heads, ends - begins


@triton.jit
@no_type_check
def competes(unit, units, FIRST: tl.constexpr, RECENT: tl.constexpr):
    """Neither past the context nor read anyway. The row of an incomplete unit was never written; it is read anyway."""
    return (unit < units) & (unit >= FIRST) & (unit < units - RECENT)


@triton.jit
@no_type_check
def blocks_of(table_row, unit, units, UNITS_PER_BLOCK: tl.constexpr, FIRST: tl.constexpr, RECENT: tl.constexpr):
    """The blocks of units that compete."""
    wanted = competes(unit, units, FIRST, RECENT)
    return tl.load(table_row + unit // UNITS_PER_BLOCK, mask=wanted, other=0).to(tl.int64)
