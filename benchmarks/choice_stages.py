"""The present kernel for the choice of units, cut off after each of its stages, to be timed (choice_sweep.py)."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from choice_kernels import STAGES
from torch import Tensor

from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_threshold import LEAST, ordered_bits, threshold_within
from sparroll.attention.decode.triton_top_k import _ordered
from sparroll.attention.selectors.base import Selector


@triton.jit
@no_type_check
def _present_stages(
    scores,
    context_tokens,
    kv_budget_tokens,
    unit_ids,
    candidates,
    scores_per_request,
    scores_per_head,
    ids_per_request,
    ids_per_head,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    LANES: tl.constexpr,
    LOADED: tl.constexpr,
    STAGE: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """The steps of triton_top_k._choose_candidates, up to one of them."""
    after_previous(launch_pdl)
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    units = (tl.load(context_tokens + request).to(tl.int32) + UNIT - 1) // UNIT
    wanted = tl.load(kv_budget_tokens + request).to(tl.int32) // UNIT
    scores_row = scores + request * scores_per_request + head * scores_per_head
    ids_row = unit_ids + request * ids_per_request + head * ids_per_head
    listed_row = candidates + (request * tl.num_programs(0) + head) * LANES
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], LEAST, tl.int32)
    for start in range(0, units, CHUNK):
        unit = start + tl.arange(0, CHUNK // LANES)[:, None] * LANES + lane[None, :]
        best = tl.maximum(best, tl.max(_ordered(scores_row, unit, units, LOADED), axis=0))
    if STAGE == 0:
        tl.store(ids_row, tl.max(best, axis=0))
    else:
        least = tl.min(tl.where(lane < units, best, 0x7FFFFFFF), axis=0)
        highest = tl.max(best, axis=0)
        enough = tl.where((units > LANES) & (4 * wanted <= LANES), wanted + wanted // 2, wanted)
        reached = threshold_within(best, least, highest, wanted, enough, FAR=True)
        if STAGE == 1:
            tl.store(ids_row, reached)
        else:
            count = tl.zeros([], tl.int32)
            for start in range(0, units, CHUNK):
                each = start + tl.arange(0, CHUNK)
                reaches = (_ordered(scores_row, each, units, LOADED) >= reached).to(tl.int32)
                place = count + tl.cumsum(reaches, axis=0) - 1
                tl.store(listed_row + place, each, mask=(reaches != 0) & (place < LANES))
                count += tl.sum(reaches, axis=0)
            tl.debug_barrier()
            unit = tl.load(listed_row + lane, mask=lane < count, other=0)
            score = tl.load(scores_row + unit, mask=lane < count, other=0.0)
            ordered = tl.where(lane < count, ordered_bits(score), LEAST)
            if STAGE == 2:
                tl.store(ids_row + lane, ordered, mask=lane < wanted)
            else:
                threshold = threshold_within(ordered, reached, highest, wanted, wanted, FAR=False)
                tl.store(ids_row + lane, threshold, mask=lane < wanted)


def present_until(
    stage: str,
    scores_RHU: Tensor,
    context_tokens_R: Tensor,
    kv_budget_tokens_R: Tensor,
    selector: Selector,
    unit_ids_RHN: Tensor,
    chunk: int = 4096,
    lanes: int = 2048,
    warps: int = 8,
) -> None:
    """The present kernel's work up to a stage before the last, of requests with more than `lanes` units and more than their
    budgets. What it writes has no meaning."""
    requests, heads, _ = scores_RHU.shape
    listed = torch.empty(requests, heads, lanes, dtype=torch.int32, device=scores_RHU.device)
    _present_stages[(heads, requests)](
        scores_RHU, context_tokens_R, kv_budget_tokens_R, unit_ids_RHN, listed, *scores_RHU.stride()[:2],
        *unit_ids_RHN.stride()[:2], UNIT=selector.unit_tokens, CHUNK=chunk, LANES=lanes,
        LOADED=4 if scores_RHU.stride(1) % 4 == 0 and scores_RHU.stride(0) % 4 == 0 else 1,
        STAGE=STAGES.index(stage), num_warps=warps, **overlapping(scores_RHU),
    )  # fmt: skip
