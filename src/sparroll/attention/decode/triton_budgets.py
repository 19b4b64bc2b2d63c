"""Computes the KV budget of each request from its context length, in one small kernel that runs once a step."""

# R requests, S steps of a schedule

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor


def budgets(context_tokens_R: Tensor, starts_S: Tensor, budgets_S: Tensor, out_R: Tensor) -> None:
    """Schedule.kv_budget_tokens on the device: the budget of the last step that starts at or below each context, 0 for
    context 0. All int32; starts ascend, unused steps start above every context; S is a power of two."""
    requests = len(context_tokens_R)
    if requests:
        _look_up[(triton.cdiv(requests, 64),)](
            context_tokens_R, starts_S, budgets_S, out_R, requests, S=len(starts_S), TILE=64, num_warps=4
        )


@triton.jit
@no_type_check
def _look_up(context_tokens, starts, step_budgets, out, requests, S: tl.constexpr, TILE: tl.constexpr):
    request = tl.program_id(0) * TILE + tl.arange(0, TILE)
    step = tl.arange(0, S)
    context = tl.load(context_tokens + request, mask=request < requests, other=0)
    begun = (tl.load(starts + step)[None, :] <= context[:, None]).to(tl.int32)
    last = tl.sum(begun, axis=1) - 1
    chosen = tl.where(step[None, :] == last[:, None], tl.load(step_budgets + step)[None, :], 0)
    budget = tl.where(context > 0, tl.sum(chosen, axis=1), 0)
    tl.store(out + request, budget, mask=request < requests)
