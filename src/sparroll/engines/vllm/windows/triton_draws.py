"""A token for each row of logits, drawn at a given uniform number. One kernel measures the tiles of all rows: their largest
logit and the sum of exponentials. The other finds the tile of each row in which the draw falls, and the token in it."""

# N rows, R requests, V vocabulary, T tiles of it

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = 2048, 4


def draw_of_logits(logits_NV: Tensor, request_N: Tensor, heat_R: Tensor, greedy_R: Tensor, uniform_N: Tensor) -> Tensor:
    """[N] int64: the first token up to which the probabilities add up to more than `uniform_N`, or for greedy requests the
    first of the most likely ones.

    logits_NV: of any float dtype, before temperature; -inf is never drawn. Rows may lie apart.  request_N: int64, whose
    each row is.  heat_R: float32, what logits are divided by.  greedy_R: bool.  uniform_N: float64 in [0, 1), of any
    stride.
    """
    count, vocabulary = logits_NV.shape
    ids_N = torch.empty(count, dtype=torch.int64, device=logits_NV.device)
    if not count:
        return ids_N
    tile = min(TILE, triton.next_power_of_2(vocabulary))
    tiles = triton.cdiv(vocabulary, tile)
    if logits_NV.stride(1) != 1:
        logits_NV = logits_NV.contiguous()
    heat_R = heat_R.contiguous()
    most_NT, sum_NT = (torch.empty(count, tiles, dtype=torch.float32, device=logits_NV.device) for _ in range(2))
    row_stride = logits_NV.stride(0)
    _measure_tiles[(count, tiles)](
        logits_NV, request_N, heat_R, most_NT, sum_NT, vocabulary, row_stride, tiles, TILE=tile, num_warps=WARPS
    )
    _draw_tokens[(count,)](
        logits_NV,
        request_N,
        heat_R,
        greedy_R,
        uniform_N,
        most_NT,
        sum_NT,
        ids_N,
        vocabulary,
        row_stride,
        tiles,
        uniform_N.stride(0),
        TILE=tile,
        TILES=triton.next_power_of_2(tiles),
        num_warps=WARPS,
    )
    return ids_N


@triton.jit
@no_type_check
def _hot_tile(logits, row, number, cold, vocabulary, row_stride, TILE: tl.constexpr):
    """Logits of one tile after temperature; -inf behind the vocabulary."""
    token = number * TILE + tl.arange(0, TILE)
    raw = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=-float("inf"))
    return raw.to(tl.float32) * cold


@triton.jit(do_not_specialize=["vocabulary", "tiles"])
@no_type_check
def _measure_tiles(logits, requests, heats, tile_most, tile_sum, vocabulary, row_stride, tiles, TILE: tl.constexpr):
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cold = 1.0 / tl.load(heats + tl.load(requests + row))
    hot = _hot_tile(logits, row, number, cold, vocabulary, row_stride, TILE)
    # A finite bound, because -inf - -inf is NaN where a tile holds nothing else.
    most = tl.maximum(tl.max(hot, axis=0), -1e38)
    tl.store(tile_most + row * tiles + number, most)
    tl.store(tile_sum + row * tiles + number, tl.sum(tl.exp(hot - most), axis=0))


# A column of uniform numbers begins anywhere; compiled for one place, the kernel would be compiled again at the next.
@triton.jit(do_not_specialize=["vocabulary", "tiles", "uniform_stride"], do_not_specialize_on_alignment=["uniforms"])
@no_type_check
def _draw_tokens(
    logits,
    requests,
    heats,
    greedy,
    uniforms,
    tile_most,
    tile_sum,
    ids,
    vocabulary,
    row_stride,
    tiles,
    uniform_stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + row)
    cold = 1.0 / tl.load(heats + request)
    number = tl.arange(0, TILES)
    most = tl.load(tile_most + row * tiles + number, mask=number < tiles, other=-float("inf"))
    mass = tl.load(tile_sum + row * tiles + number, mask=number < tiles, other=0.0)
    top = tl.max(most, axis=0)
    mass = (mass * tl.exp(most - top)).to(tl.float64)
    ends = tl.cumsum(mass, axis=0)
    aim = tl.load(uniforms + row * uniform_stride) * tl.max(ends, axis=0)
    # Nothing without mass is drawn, also where rounding puts the aim behind the last sum.
    drawn = tl.minimum(tl.sum((ends <= aim).to(tl.int32), axis=0), tl.max(tl.where(mass > 0, number, 0), axis=0))
    before = tl.max(tl.where(number < drawn, ends, 0.0), axis=0)
    most_likely = tl.load(greedy + request)
    drawn = tl.where(most_likely, tl.argmax(most, axis=0), drawn)

    hot = _hot_tile(logits, row, drawn, cold, vocabulary, row_stride, TILE)
    mass = tl.exp(hot - top).to(tl.float64)
    lane = tl.arange(0, TILE)
    inside = tl.sum((tl.cumsum(mass, axis=0) + before <= aim).to(tl.int32), axis=0)
    inside = tl.minimum(inside, tl.max(tl.where(mass > 0, lane, 0), axis=0))
    inside = tl.where(most_likely, tl.argmax(hot, axis=0), inside)
    tl.store(ids + row, (drawn * TILE + inside).to(tl.int64))
