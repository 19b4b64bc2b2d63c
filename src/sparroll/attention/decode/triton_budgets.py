"""Computes the KV budget of each request in each layer from its context length, in one small kernel that runs once a
step."""

# R requests, S steps of a schedule, L layers

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


def budgets(
    context_tokens_R: Tensor, starts_S: Tensor, budgets_LS: Tensor, reads_all_R: Tensor, unlimited: int, out_LR: Tensor
) -> None:
    """Schedule.kv_budget_tokens of each layer on the device: the budget of the last step that starts at or below each
    context, and 0 for context 0. Requests for which reads_all_R (bool) is true get the budget `unlimited`. All others are
    int32; starts ascend, unused steps start above every context; S is a power of two. The last axis of each tensor is
    contiguous, and rows of budgets_LS stand one after the other."""
    requests = len(context_tokens_R)
    if requests and len(out_LR):
        _look_up[(triton.cdiv(requests, 64), len(out_LR))](
            context_tokens_R, starts_S, budgets_LS, reads_all_R, out_LR, out_LR.stride(0), requests, S=len(starts_S),
            UNLIMITED=unlimited, TILE=64, num_warps=4,
        )  # fmt: skip


@triton.jit
@no_type_check
def _look_up(
    context_tokens,
    starts,
    step_budgets,
    reads_all,
    out,
    out_stride,
    requests,
    S: tl.constexpr,
    UNLIMITED: tl.constexpr,
    TILE: tl.constexpr,
):
    step_budgets += tl.program_id(1) * S
    out += tl.program_id(1) * out_stride
    request = tl.program_id(0) * TILE + tl.arange(0, TILE)
    step = tl.arange(0, S)
    context = tl.load(context_tokens + request, mask=request < requests, other=0)
    begun = (tl.load(starts + step)[None, :] <= context[:, None]).to(tl.int32)
    last = tl.sum(begun, axis=1) - 1
    chosen = tl.where(step[None, :] == last[:, None], tl.load(step_budgets + step)[None, :], 0)
    budget = tl.where(context > 0, tl.sum(chosen, axis=1), 0)
    budget = tl.where(tl.load(reads_all + request, mask=request < requests, other=0) != 0, UNLIMITED, budget)
    tl.store(out + request, budget, mask=request < requests)
