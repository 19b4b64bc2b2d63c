"""`row_scores` in two kernels, for lists of up to MOST_LISTED tokens.

The first reads the logits once, with many programs a row: the largest logit of each chunk of 64 tokens, and each block's
part of the sum that normalises the row and of the rank. The second has one program a row. It takes the K chunks with the
largest logits, of equal ones the lower, which hold the K likeliest tokens: a chunk that is left out has K before it, and
each of those holds a token that comes before all of its own. Among the tokens of these chunks it takes the best K times.

`torch.topk` takes several passes over each row and a sort, whatever the K."""

# N rows, V vocabulary, K listed tokens, W = 1 + K columns

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.choice.triton_threshold import ordered_bits
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.engines.vllm.scores.reference import MOST_LISTED, RowScores

_CHUNK, _CHUNKS_OF_BLOCK = 64, 64
_BLOCK = _CHUNK * _CHUNKS_OF_BLOCK
_LARGEST_ID = tl.constexpr(0xFFFFFFFF)
_TAKEN = tl.constexpr(-(1 << 63))
"""Below the key of every token and chunk."""


def row_scores(logits_NV: Tensor, sampled_N: Tensor, top_k: int) -> RowScores:
    """As reference.row_scores, to rounding; a row's tokens must lie next to each other. top_k: at most MOST_LISTED."""
    rows, vocabulary = logits_NV.shape
    assert top_k <= min(MOST_LISTED, vocabulary), f"lists of {top_k} tokens from {vocabulary}"
    assert logits_NV.stride(1) == 1, "a row's logits do not lie next to each other"
    device = logits_NV.device
    ids_NW = torch.empty(rows, 1 + top_k, dtype=torch.int64, device=device)
    logp_NW = torch.empty(rows, 1 + top_k, dtype=torch.float32, device=device)
    ranks_N = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return RowScores(ids_NW, logp_NW, ranks_N)
    blocks = triton.cdiv(vocabulary, _BLOCK)
    chunks = blocks * _CHUNKS_OF_BLOCK
    # Of each row: the chunks' largest logits, then of its blocks the largest, the sums, and how many reach the token.
    parts = torch.empty(rows, chunks + 3 * blocks, dtype=torch.float32, device=device)
    sampled_N = sampled_N.contiguous()
    shared = (logits_NV, sampled_N, parts, vocabulary, logits_NV.stride(0), blocks)
    _scores_of_blocks[(rows, blocks)](
        *shared,
        CHUNK=_CHUNK,
        CHUNKS_OF_BLOCK=_CHUNKS_OF_BLOCK,
        num_warps=4,
        **overlapping(logits_NV),
    )
    _scores_of_rows[(rows,)](
        *shared,
        ids_NW,
        logp_NW,
        ranks_N,
        top_k,
        CHUNK=_CHUNK,
        CHUNKS_OF_BLOCK=_CHUNKS_OF_BLOCK,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCKS=triton.next_power_of_2(blocks),
        # Two programs are compiled: one with lists and one without.
        LISTED=MOST_LISTED // 2 if 0 < top_k <= MOST_LISTED // 2 else triton.next_power_of_2(top_k) if top_k else 0,
        num_warps=8 if top_k else 4,
        **overlapping(logits_NV),
    )
    return RowScores(ids_NW, logp_NW, ranks_N)


@triton.jit(do_not_specialize=["blocks"])
@no_type_check
def _scores_of_blocks(
    logits,
    sampled,
    parts,
    vocabulary,
    row_stride,
    blocks,
    CHUNK: tl.constexpr,
    CHUNKS_OF_BLOCK: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Of one block: its chunks' largest logits, its largest, its sum and how many of its tokens reach the sampled one."""
    after_previous(launch_pdl)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_row = logits + row * row_stride
    chunk = block * CHUNKS_OF_BLOCK + tl.arange(0, CHUNKS_OF_BLOCK)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = tl.load(of_row + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    of_sampled = tl.load(of_row + tl.load(sampled + row)).to(tl.float32)
    largest_C = tl.max(value, 1)
    largest = tl.max(largest_C, 0)
    # A block without any probability adds exp(-inf) and not exp(-inf + inf).
    total = tl.sum(tl.sum(tl.exp(value - tl.where(largest == float("-inf"), 0.0, largest)), 1), 0)
    reaching = tl.sum(tl.sum(((value >= of_sampled) & (token < vocabulary)).to(tl.float32), 1), 0)
    of_parts = parts + row * (blocks * CHUNKS_OF_BLOCK + 3 * blocks)
    tl.store(of_parts + chunk, largest_C)
    of_blocks = of_parts + blocks * CHUNKS_OF_BLOCK + block
    tl.store(of_blocks, largest)
    tl.store(of_blocks + blocks, total)
    tl.store(of_blocks + 2 * blocks, reaching)


@triton.jit(do_not_specialize=["blocks", "top_k"])
@no_type_check
def _scores_of_rows(
    logits,
    sampled,
    parts,
    vocabulary,
    row_stride,
    blocks,
    ids,
    logp,
    ranks,
    top_k,
    CHUNK: tl.constexpr,
    CHUNKS_OF_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    LISTED: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """The scores of one row from its parts. LISTED: lanes for the list, 0 for none."""
    after_previous(launch_pdl)
    row = tl.program_id(0).to(tl.int64)
    of_row, chunks = logits + row * row_stride, blocks * CHUNKS_OF_BLOCK
    of_parts = parts + row * (chunks + 3 * blocks)
    block = tl.arange(0, BLOCKS)
    of_blocks, exists = of_parts + chunks + block, block < blocks
    largest_B = tl.load(of_blocks, mask=exists, other=float("-inf"))
    total_B = tl.load(of_blocks + blocks, mask=exists, other=0.0)
    reaching_B = tl.load(of_blocks + 2 * blocks, mask=exists, other=0.0)
    largest = tl.max(largest_B, 0)
    log_total = tl.log(tl.sum(total_B * tl.exp(largest_B - largest), 0))
    token = tl.load(sampled + row)
    out = row * (1 + top_k)
    tl.store(ids + out, token)
    tl.store(logp + out, tl.load(of_row + token).to(tl.float32) - largest - log_total)
    tl.store(ranks + row, tl.sum(reaching_B, 0).to(tl.int64))
    if LISTED:
        lane = tl.arange(0, LISTED)
        place = tl.arange(0, CHUNKS)
        best_of_chunk = tl.load(of_parts + place, mask=place < chunks, other=float("-inf"))
        chosen, _ = _best(_keys(best_of_chunk, place, place < chunks), top_k, lane, chunks)
        candidate = chosen[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        candidate = tl.reshape(candidate, (LISTED * CHUNK,))
        value = tl.load(of_row + candidate, mask=candidate < vocabulary, other=float("-inf")).to(tl.float32)
        listed, value = _best(_keys(value, candidate, candidate < vocabulary), top_k, lane, vocabulary)
        tl.store(ids + out + 1 + lane, listed.to(tl.int64), mask=lane < top_k)
        tl.store(logp + out + 1 + lane, value - largest - log_total, mask=lane < top_k)


@triton.jit
@no_type_check
def _keys(value, number, exists):
    """Signed integers in the order of the values, and of equal ones with the lower number first."""
    return tl.where(exists, (ordered_bits(value).to(tl.int64) << 32) | (number.to(tl.int64) ^ _LARGEST_ID), _TAKEN)


@triton.jit
@no_type_check
def _best(key, wanted, lane, nothing):
    """Numbers and values of the `wanted` largest keys, by lane; `nothing` where there is no further one."""
    numbers = tl.zeros_like(lane) + nothing
    bits = tl.zeros_like(lane)
    for place in range(wanted):
        best = tl.max(key, 0)
        here = (lane == place) & (best != _TAKEN)
        numbers = tl.where(here, ((best & _LARGEST_ID) ^ _LARGEST_ID).to(tl.int32), numbers)
        bits = tl.where(here, (best >> 32).to(tl.int32), bits)
        key = tl.where(key == best, _TAKEN, key)
    bits ^= (bits >> 31) & 0x7FFFFFFF
    return numbers, bits.to(tl.float32, bitcast=True)
