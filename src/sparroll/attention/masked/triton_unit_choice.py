"""Chooses the units of every position of whole sequences by page means, on a GPU. Scores of a stretch of positions go
through a scratch tensor of bounded size: tensor cores compute them, each position's threshold (its k-th best score) is
found by bisection, without a sort, and units above it become bits.

Scores are as exact as fp32 sums: the group's mean query is cut into three bf16 numbers that add up to it, landmarks are
bf16, and products of two bf16 numbers are exact in fp32. Units are chosen by the rule of decode/reference.py: of equal
scores, the lowest. So the choice differs from an engine's only where two scores are equal up to the rounding of their
sums.
"""

# B sequences, S positions, A query heads, H kv heads, G query heads per kv head, U units, P blocks of 32,
# D head dimension

from __future__ import annotations

from collections.abc import Iterator
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from sparroll.attention.decode.choice.triton_threshold import LEAST, best_threshold, ordered_bits
from sparroll.attention.masked.triton_tiles import rows_contiguous
from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS
from sparroll.attention.selectors.page_mean import PageMean
from sparroll.errors import UserError

SCRATCH_BYTES = 1 << 26
"""Of the scores that exist at one time, as long as those of 32 positions of one sequence take no more."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EVERYTHING = tl.constexpr(1 << 30)


def chosen_words(
    query_BASD: Tensor,
    keys_BHSD: Tensor,
    dense_BS: Tensor,
    kv_budget_tokens_S: Tensor,
    selector: PageMean,
    warps: int | None = None,
) -> Tensor:
    """See unit_choice.chosen_words; page means need no scale. `warps` (of a program that finds a threshold) is for
    measurements."""
    batch, heads, tokens, _ = keys_BHSD.shape
    if query_BASD.dtype not in _DTYPES:
        raise UserError(f"the triton kernels take bf16, fp16 and fp32, got {query_BASD.dtype}", 'impl="reference"')
    unit, query = selector.unit_tokens, rows_contiguous(query_BASD)
    complete, units, blocks = tokens // unit, -(-tokens // unit), -(-tokens // WORD_POSITIONS)
    words = torch.zeros(batch, heads, blocks, units, dtype=torch.int32, device=query.device)
    if not words.numel():
        return words
    # An incomplete unit is among the recent ones, which are read without a score.
    index = selector.build_index(keys_BHSD[:, :, : complete * unit].unflatten(2, (complete, unit)))
    wanted = torch.where(dense_BS, _EVERYTHING.value, kv_budget_tokens_S // unit).to(torch.int32).contiguous()
    together = max(1, min(batch, SCRATCH_BYTES // (4 * heads * units * WORD_POSITIONS)))
    for some in (slice(at, at + together) for at in range(0, batch, together)):
        _choose(query[some], index[some], wanted[some], words[some], selector, warps)
    return words


def _choose(query: Tensor, index: Tensor, wanted: Tensor, words: Tensor, selector: PageMean, warps: int | None) -> None:
    (requests, heads), (tokens, dim) = words.shape[:2], query.shape[2:]
    pairs, unit = requests * heads, selector.unit_tokens
    stretches = list(_stretches(tokens, unit, SCRATCH_BYTES // (4 * pairs)))
    scratch = torch.empty(pairs * max((end - begin) * row for begin, end, row in stretches), device=query.device)
    most = max(end - begin for begin, end, _ in stretches)
    limits = torch.empty(pairs, most, 2, dtype=torch.int32, device=query.device)
    lanes_d = max(16, triton.next_power_of_2(dim))
    rows, lanes_u, span = 64 if lanes_d <= 128 else 32, 128, 4
    sizes = {"HEADS": heads, "UNIT": unit, "RECENT": selector.recent_tokens // unit}
    forced = {**sizes, "FIRST": selector.first_tokens // unit}
    for begin, end, row in stretches:
        seen = -(-end // unit)
        _score[(triton.cdiv(end - begin, rows), triton.cdiv(seen, lanes_u * span), pairs)](
            query, index, wanted, scratch, *query.stride()[:3], *index.stride()[:3], row, begin, end, tokens,
            G=query.shape[1] // heads, D=dim, LANES_D=lanes_d, ROWS=rows, LANES_U=lanes_u, SPAN=span,
            # The interpreter multiplies the bits of bf16 matrices instead of their values.
            DOT=tl.float32 if knobs.runtime.interpret else tl.bfloat16, **sizes, num_warps=4, num_stages=2,
        )  # fmt: skip
        lanes = max(256, triton.next_power_of_2(seen))
        _limit[(end - begin, pairs)](
            scratch, wanted, limits, row, most, begin, end, tokens, LANES=lanes, **forced,
            num_warps=warps or min(max(1, lanes // 1024), 16),
        )  # fmt: skip
        _mark[(triton.cdiv(end - begin, WORD_POSITIONS), triton.cdiv(seen, lanes_u), pairs)](
            scratch, limits, words, *words.stride()[:3], row, most, begin, end, LANES_U=lanes_u, **forced, num_warps=4
        )


def _stretches(tokens: int, unit: int, room: int) -> Iterator[tuple[int, int, int]]:
    """Begin and end of stretches of whole words, and the length of a row of scores in each: as many positions as have
    room for their rows, and at least 32."""
    begin = 0
    while begin < tokens:
        end = min(begin + WORD_POSITIONS, tokens)
        while end < tokens and (end + WORD_POSITIONS - begin) * _row(end + WORD_POSITIONS, unit) <= room:
            end = min(end + WORD_POSITIONS, tokens)
        yield begin, end, _row(end, unit)
        begin = end


def _row(tokens: int, unit: int) -> int:
    """Of scores: whole cache lines, so that one compilation serves all lengths."""
    return -(-tokens // unit // 32) * 32


@triton.jit(do_not_specialize=["begin", "end", "tokens"])
@no_type_check
def _score(
    query, index, wanted, scores,
    query_per_request, query_per_head, query_per_position,
    index_per_request, index_per_head, index_per_unit,
    scores_per_position, begin, end, tokens,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    RECENT: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    ROWS: tl.constexpr,
    LANES_U: tl.constexpr,
    SPAN: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Of ROWS positions with SPAN tiles of units, as far as a unit competes at any of the positions."""
    pair = tl.program_id(2)
    request, head = (pair // HEADS).to(tl.int64), pair % HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    position = begin + row
    real = position < end
    units = position // UNIT + 1
    its_wanted = tl.load(wanted + request * tokens + position, mask=real, other=_EVERYTHING)
    competing = tl.max(tl.where(real & (its_wanted < units), units - RECENT, 0), axis=0)
    first = tl.program_id(1) * (SPAN * LANES_U)
    last = tl.minimum(first + SPAN * LANES_U, competing)
    if first < last:
        channel = tl.arange(0, LANES_D)
        mean = tl.zeros([ROWS, LANES_D], tl.float32)
        for member in tl.static_range(G):
            at = query + request * query_per_request + (head * G + member) * query_per_head
            at += position * query_per_position
            mine = tl.load(at[:, None] + channel[None, :], mask=real[:, None] & (channel < D)[None, :], other=0.0)
            mean += mine.to(tl.float32)
        mean = mean / G
        high = _upper_half(mean)
        middle = _upper_half(mean - high)
        low = (mean - high) - middle
        index += request * index_per_request + head * index_per_head
        scores += pair.to(tl.int64) * (end - begin) * scores_per_position
        for tile in range(first, last, LANES_U):
            unit = tile + tl.arange(0, LANES_U)
            there = unit < last
            landmark = tl.load(
                index + (unit * index_per_unit)[:, None] + channel[None, :],
                mask=there[:, None] & (channel < D)[None, :],
                other=0.0,
            )
            landmark = tl.trans(landmark.to(DOT))
            score = tl.dot(low.to(DOT), landmark, input_precision="ieee")
            score = tl.dot(middle.to(DOT), landmark, score, input_precision="ieee")
            score = tl.dot(high.to(DOT), landmark, score, input_precision="ieee")
            target = scores + (row * scores_per_position)[:, None] + unit[None, :]
            tl.store(target, score, mask=real[:, None] & there[None, :])


@triton.jit
@no_type_check
def _upper_half(number):
    """A bf16 number, as fp32, and at most one unit in its last place nearer to zero; the rest has 8 bits fewer."""
    return (number.to(tl.int32, bitcast=True) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["most", "begin", "end", "tokens"])
@no_type_check
def _limit(
    scores, wanted, limits, scores_per_position, most, begin, end, tokens,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """What one position reads: scores above a threshold, and those equal to it up to a last unit."""
    row = tl.program_id(0)
    pair = tl.program_id(1)
    position = begin + row
    units = position // UNIT + 1
    its_wanted = tl.load(wanted + (pair // HEADS).to(tl.int64) * tokens + position)
    threshold = tl.full([], LEAST, tl.int32)
    last = tl.full([], _EVERYTHING, tl.int32)
    if its_wanted < units:
        unit = tl.arange(0, LANES)
        exists = unit < units
        scores += (pair.to(tl.int64) * (end - begin) + row) * scores_per_position
        ordered = _ordered(scores + unit, unit, units, exists, FIRST, RECENT)
        ordered = tl.where(exists, ordered, LEAST)
        threshold = best_threshold(ordered, exists, its_wanted)
        equal = exists & (ordered == threshold)
        above = tl.sum((ordered > threshold).to(tl.int32), axis=0)
        last = tl.max(tl.where(equal, unit, -1), axis=0)
        if above + tl.sum(equal.to(tl.int32), axis=0) > its_wanted:
            # The lowest unit up to which there are as many equal scores as are still wanted.
            lowest = tl.full([], -1, tl.int32)
            while lowest < last:
                half_way = (lowest + last) >> 1
                enough = above + tl.sum((equal & (unit <= half_way)).to(tl.int32), axis=0) >= its_wanted
                last = tl.where(enough, half_way, last)
                lowest = tl.where(enough, lowest, half_way + 1)
    at = (pair * most + row) * 2
    tl.store(limits + at, threshold)
    tl.store(limits + at + 1, last)


@triton.jit(do_not_specialize=["most", "begin", "end"])
@no_type_check
def _mark(
    scores, limits, words, words_per_request, words_per_head, words_per_block,
    scores_per_position, most, begin, end,
    HEADS: tl.constexpr,
    UNIT: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    LANES_U: tl.constexpr,
):  # fmt: skip
    """Words of a block of 32 positions for LANES_U units."""
    pair = tl.program_id(2)
    bit = tl.arange(0, 32)
    row = tl.program_id(0) * 32 + bit
    position = begin + row
    real = position < end
    unit = tl.program_id(1) * LANES_U + tl.arange(0, LANES_U)
    units = position // UNIT + 1
    at = (pair * most + row) * 2
    threshold = tl.load(limits + at, mask=real, other=0)
    last = tl.load(limits + at + 1, mask=real, other=-1)
    exists = real[:, None] & (unit[None, :] < units[:, None])
    all_of_them = (threshold == LEAST) & (last == _EVERYTHING)
    scores += pair.to(tl.int64) * (end - begin) * scores_per_position
    target = scores + (row * scores_per_position)[:, None] + unit[None, :]
    needed = exists & ~all_of_them[:, None]
    ordered = _ordered(target, unit[None, :], units[:, None], needed, FIRST, RECENT)
    read = (ordered > threshold[:, None]) | ((ordered == threshold[:, None]) & (unit[None, :] <= last[:, None]))
    read = exists & (read | all_of_them[:, None])
    word = tl.sum(read.to(tl.int32) << bit[:, None], axis=0)
    words += (pair // HEADS).to(tl.int64) * words_per_request + (pair % HEADS) * words_per_head
    words += (begin // 32 + tl.program_id(0)).to(tl.int64) * words_per_block
    tl.store(words + unit, word, mask=unit < (end + UNIT - 1) // UNIT)


@triton.jit
@no_type_check
def _ordered(at, unit, units, needed, FIRST: tl.constexpr, RECENT: tl.constexpr):
    """Signed integers in the order of the scores, of which units that are read anyway have the highest."""
    competes = needed & (unit >= FIRST) & (unit < units - RECENT)
    score = tl.load(at, mask=competes, other=float("inf"))
    return ordered_bits(score)
