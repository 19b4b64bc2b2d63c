"""Shares the work of a step: running sums of each request's tiles, in which every program finds its equal stretch. The
sums are the same in all layers with the same budgets, so they are computed once a step."""

# R requests, L layers with budgets of their own

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.selectors.base import Selector

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import LayerPlans, StepWorkspace


def request_lanes(requests: int) -> int:
    """A constant that kernels are compiled for: a power of two of at least as many lanes as there are requests. There are
    few of them, 32, 256, 2048 and so on, because a start captures CUDA graphs of every batch size and would wait for a
    compiler at each new one. Up to 32 lanes are one warp, and eight times as many are no more than a few instructions."""
    lanes = 32
    while lanes < requests:
        lanes *= 8
    return lanes


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
            workspace.arrivals_X,
            0 if kv_budget_tokens_LR is None else kv_budget_tokens_LR.stride(0),
            read_before_LR.stride(0),
            requests,
            most_units,
            UNIT=selector.unit_tokens,
            READ_TILE=workspace.tile.tokens,
            SCORED_TILE=workspace.scored_tile_units,
            WITH_BUDGETS=kv_budget_tokens_LR is not None,
            LANES_R=request_lanes(requests),
            PROGRAMS=workspace.programs,
            LANES_X=triton.next_power_of_2(workspace.programs),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["budget_stride", "plan_stride", "requests"])
@no_type_check
def _plan(
    context_tokens,
    kv_budget_tokens,
    read_before,
    scored_before,
    arrivals,
    budget_stride,
    plan_stride,
    requests,
    most_units,
    UNIT: tl.constexpr,
    READ_TILE: tl.constexpr,
    SCORED_TILE: tl.constexpr,
    WITH_BUDGETS: tl.constexpr,
    LANES_R: tl.constexpr,
    PROGRAMS: tl.constexpr,
    LANES_X: tl.constexpr,
):
    if tl.program_id(0) == 0:
        program = tl.arange(0, LANES_X)
        tl.store(arrivals + program, tl.zeros([LANES_X], tl.int32), mask=program < PROGRAMS)
    kv_budget_tokens += tl.program_id(0) * budget_stride
    read_before += tl.program_id(0) * plan_stride
    scored_before += tl.program_id(0) * plan_stride
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
    tl.store(read_before + request + 1, tl.cumsum(read, axis=0), mask=request < requests)
    tl.store(scored_before + request + 1, tl.cumsum(scored, axis=0), mask=request < requests)
    tl.store(read_before, 0)
    tl.store(scored_before, 0)


@triton.jit
@no_type_check
def stretch(before, requests, heads):
    """Where this program's stretch of all tiles of all heads begins and ends."""
    total = tl.load(before + requests) * heads
    share = (total + tl.num_programs(0) - 1) // tl.num_programs(0)
    begins = tl.program_id(0) * share
    return begins, tl.minimum(begins + share, total)


@triton.jit
@no_type_check
def request_at(place, before, requests, heads, LANES_R: tl.constexpr):
    """The request that a tile belongs to, where its own tiles begin and how many it has in each head."""
    each = tl.arange(0, LANES_R)
    starts = tl.load(before + each, mask=each < requests, other=0) * heads
    # The last one that starts here or before: a request without tiles starts where the next one does.
    request = (tl.sum(((starts <= place) & (each < requests)).to(tl.int32), axis=0) - 1).to(tl.int64)
    its_first = tl.load(before + request)
    return request, its_first * heads, tl.load(before + request + 1) - its_first


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
