"""Computes the KV budget of each request in each layer from its context length, in one small kernel that runs once a
step."""

# R requests, V schedules, S steps of a schedule, L layers, X = 1 + L: where steps start, then layers

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


def budgets(context_tokens_R: Tensor, steps_VXS: Tensor, which_R: Tensor, unlimited: int, out_LR: Tensor) -> None:
    """Schedule.kv_budget_tokens of each layer on the device: the budget of the last step that starts at or below each
    context, and 0 for context 0. All tensors are int32.

    steps_VXS: contiguous; of each schedule where its steps start, and below that the budgets of each layer. Starts ascend,
    unused steps start above every context; S is a power of two.  which_R: the number of each request's schedule; those
    with a number below 0 get the budget `unlimited`. The last axis of each tensor is contiguous."""
    requests = len(context_tokens_R)
    if requests and len(out_LR):
        _, rows, steps = steps_VXS.shape
        _look_up[(triton.cdiv(requests, 8), len(out_LR))](
            context_tokens_R, steps_VXS, which_R, out_LR, out_LR.stride(0), requests, X=rows, S=steps,
            UNLIMITED=unlimited, TILE=8, num_warps=4,
        )  # fmt: skip


@triton.jit
@no_type_check
def _look_up(
    context_tokens,
    steps,
    which,
    out,
    out_stride,
    requests,
    X: tl.constexpr,
    S: tl.constexpr,
    UNLIMITED: tl.constexpr,
    TILE: tl.constexpr,
):
    layer = tl.program_id(1)
    request = tl.program_id(0) * TILE + tl.arange(0, TILE)
    step = tl.arange(0, S)
    context = tl.load(context_tokens + request, mask=request < requests, other=0)
    number = tl.load(which + request, mask=request < requests, other=0)
    starts = steps + tl.maximum(number, 0)[:, None] * (X * S) + step[None, :]
    begun = (tl.load(starts) <= context[:, None]).to(tl.int32)
    last = tl.sum(begun, axis=1) - 1
    chosen = tl.where(step[None, :] == last[:, None], tl.load(starts + (1 + layer) * S), 0)
    budget = tl.where(context > 0, tl.sum(chosen, axis=1), 0)
    budget = tl.where(number < 0, UNLIMITED, budget)
    tl.store(out + layer * out_stride + request, budget, mask=request < requests)
