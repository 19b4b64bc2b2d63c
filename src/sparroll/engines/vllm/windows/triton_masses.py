"""`masses` from the logits of both policies, in one kernel. A program reads the two rows of one position: once for what
normalises them, once for A, and once for the acceptance of q~, which follows from A."""

# N positions, V vocabulary, R requests, W rows of the longest window

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.engines.vllm.windows.masses import Masses

TILE, WARPS = 2048, 8


def masses_of_logits(
    dense_logits_NV: Tensor,
    draft_logits_RWV: Tensor,
    request_N: Tensor,
    place_N: Tensor,
    heat_N: Tensor,
    ids_N: Tensor,
    floor: float,
) -> Masses:
    """dense_logits_NV, draft_logits_RWV: of any float dtype, before temperature; -inf has probability 0.  request_N,
    place_N: int64, where the draft's row of each position lies; places behind the last have the last one's.  heat_N:
    float32 temperatures.  ids_N: int64 tokens."""
    count, vocabulary = dense_logits_NV.shape
    out_5N = torch.empty(5, count, dtype=torch.float32, device=dense_logits_NV.device)
    if count:
        _masses[(count,)](
            dense_logits_NV.contiguous(),
            draft_logits_RWV,
            request_N,
            place_N,
            heat_N.contiguous(),
            ids_N,
            out_5N,
            floor,
            vocabulary,
            draft_logits_RWV.stride(0),
            draft_logits_RWV.stride(1),
            draft_logits_RWV.shape[1] - 1,
            count,
            TILE=min(TILE, triton.next_power_of_2(vocabulary)),
            num_warps=WARPS,
        )
    return Masses(*out_5N)


@triton.jit(do_not_specialize=["vocabulary", "request_stride", "place_stride", "last_place", "count"])
@no_type_check
def _masses(
    dense_logits,
    draft_logits,
    requests,
    places,
    heats,
    ids,
    found,
    floor,
    vocabulary,
    request_stride,
    place_stride,
    last_place,
    count,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.minimum(tl.load(places + row), last_place)
    dense_row = dense_logits + row * vocabulary
    draft_row = draft_logits + tl.load(requests + row) * request_stride + place * place_stride
    cold = 1.0 / tl.load(heats + row)
    tile = tl.arange(0, TILE)

    # A finite start, because -inf - -inf is NaN where a tile holds nothing else.
    dense_most = tl.full((TILE,), -1e38, tl.float32)
    draft_most = tl.full((TILE,), -1e38, tl.float32)
    dense_sum = tl.zeros((TILE,), tl.float32)
    draft_sum = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        inside = start + tile < vocabulary
        dense = tl.load(dense_row + start + tile, mask=inside, other=-float("inf")).to(tl.float32) * cold
        draft = tl.load(draft_row + start + tile, mask=inside, other=-float("inf")).to(tl.float32) * cold
        most = tl.maximum(dense_most, dense)
        dense_sum = dense_sum * tl.exp(dense_most - most) + tl.exp(dense - most)
        dense_most = most
        most = tl.maximum(draft_most, draft)
        draft_sum = draft_sum * tl.exp(draft_most - most) + tl.exp(draft - most)
        draft_most = most
    dense_top, draft_top = tl.max(dense_most, axis=0), tl.max(draft_most, axis=0)
    dense_share = 1.0 / tl.sum(dense_sum * tl.exp(dense_most - dense_top), axis=0)
    draft_share = 1.0 / tl.sum(draft_sum * tl.exp(draft_most - draft_top), axis=0)
    more = 1.0 / floor

    both_sum = tl.zeros((TILE,), tl.float32)
    kept_sum = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        inside = start + tile < vocabulary
        dense = tl.load(dense_row + start + tile, mask=inside, other=-float("inf")).to(tl.float32) * cold
        draft = tl.load(draft_row + start + tile, mask=inside, other=-float("inf")).to(tl.float32) * cold
        p = tl.exp(dense - dense_top) * dense_share
        q = tl.exp(draft - draft_top) * draft_share
        both_sum += tl.minimum(p, q)
        kept_sum += tl.minimum(q, p * more)
    accepted = tl.minimum(tl.sum(kept_sum, axis=0), 1.0)
    left = 1.0 - floor * accepted
    share = tl.where(left > 0, (1.0 - accepted) / left, 0.0)

    sampled_sum = tl.zeros((TILE,), tl.float32)
    for start in range(0, vocabulary, TILE):
        inside = start + tile < vocabulary
        dense = tl.load(dense_row + start + tile, mask=inside, other=-float("inf")).to(tl.float32) * cold
        draft = tl.load(draft_row + start + tile, mask=inside, other=-float("inf")).to(tl.float32) * cold
        p = tl.exp(dense - dense_top) * dense_share
        q = tl.exp(draft - draft_top) * draft_share
        sampled = tl.minimum(q, p * more) + share * tl.maximum(p - floor * q, 0.0)
        sampled_sum += tl.minimum(p, sampled)

    token = tl.load(ids + row)
    dense = tl.load(dense_row + token).to(tl.float32) * cold
    draft = tl.load(draft_row + token).to(tl.float32) * cold
    found += row
    tl.store(found, tl.exp(dense - dense_top) * dense_share)
    tl.store(found + count, tl.exp(draft - draft_top) * draft_share)
    tl.store(found + 2 * count, tl.sum(both_sum, axis=0))
    tl.store(found + 3 * count, accepted)
    tl.store(found + 4 * count, tl.minimum(tl.sum(sampled_sum, axis=0), 1.0))
