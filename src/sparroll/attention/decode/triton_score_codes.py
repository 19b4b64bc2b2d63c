"""Scores units of quantized_mean below 8 bits, to the last bit as the selector defines them: channels of a few bits times
whole numbers of 8 bits, four at a time (dp4a), and one multiplication by the scales for each unit. Nothing is converted
to floating point before the sum is complete, so the index is read at the speed of memory.

The work is split as in triton_score.py. A tile is made of groups of units that are neighbours in a block, whose channels
lie in one stretch of memory (256 bytes for 16 tokens of 128 channels at 4 x 4, 2 x 2 or 1 x 1 bits). Most tiles hold
nothing but units that compete; for these, nothing is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention import row_bytes
from sparroll.attention.decode.choice.triton_threshold import ordered_bits
from sparroll.attention.decode.triton_index import loaded_bytes, words_of
from sparroll.attention.decode.triton_launch import let_next_begin, overlapping, wait_for_previous
from sparroll.attention.decode.triton_work_split import (
    by_request,
    competes,
    number_of,
    request_at,
    request_lanes,
    stretch,
)
from sparroll.attention.decode.workspace import MOST_SCORED_UNITS, MOST_SCORED_UNITS_OF_2_BITS, PEAK_UNITS
from sparroll.attention.selectors import quantized_mean
from sparroll.attention.selectors.quantized_mean import QuantizedMean

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import StepWorkspace

_QUERY_MOST = tl.constexpr(float(quantized_mean.QUERY_MOST))
_PER_QUERY_MOST = tl.constexpr(1 / quantized_mean.QUERY_MOST)
_LEAST_LARGEST = tl.constexpr(row_bytes.LEAST_LARGEST)
_REGISTERS = 65536
"""Of a multiprocessor."""
_MOST_GROUP = 16
"""Most units of a group."""
_PEAK = tl.constexpr(PEAK_UNITS)
_INFINITY_BITS = tl.constexpr(0x7F800000)
# 1.5 * 2 ** 23: neighbouring floats are 1 apart there, so that adding it rounds to a whole number, halves to even.
_WHOLE = tl.constexpr(12582912.0)
_WHOLE_BITS = tl.constexpr(0x4B400000)


@dataclass(frozen=True)
class ScoreLayout:
    """How the programs of a launch are laid out. It changes the speed and never the result."""

    warps: int = 4
    programs_per_multiprocessor: int = 6

    @staticmethod
    def default(tile_units: int, bits: int, lanes: int) -> ScoreLayout:
        """Measured on an H200 for 128 channels and 32 requests. What the threads of a tile hand to each other goes through
        shared memory, and a program of one warp waits for no other one there. Units of 2 bits gain more by that than many
        small programs cost; for those of 1 bit two warps are best, for those of 4 bits four. lanes: those for requests.
        With more of them there are only so many programs that no register is spilled, and that all of a tile's loads are
        on their way at once: with too few registers a load waits for the one before it."""
        if bits == 2 and tile_units <= MOST_SCORED_UNITS_OF_2_BITS:
            return ScoreLayout(1, {32: 20, 256: 20}.get(lanes, 10))
        if bits == 1 and tile_units <= MOST_SCORED_UNITS:
            return ScoreLayout(2, {32: 14, 256: 12}.get(lanes, 8))
        return ScoreLayout()

    @property
    def most_registers(self) -> int:
        """Of a thread: as many as let all programs run at a time. Otherwise the last ones would begin when the first ones
        end."""
        threads = 32 * self.warps * self.programs_per_multiprocessor
        return min(_REGISTERS // threads // 8 * 8, 248)


def score_units(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    block_table_RM: Tensor,
    context_tokens_R: Tensor,
    selector: QuantizedMean,
    scores_RHU: Tensor,
    workspace: StepWorkspace,
    peaks_RHK: Tensor | None = None,
    layout: ScoreLayout | None = None,
    programs: int | None = None,
) -> None:
    """See triton_score.score_units; the step is planned already. `layout` and `programs` are for measurements."""
    requests, heads, group, dim = query_RHGD.shape
    words = words_of(index_PSHW, selector, dim)
    unit, held, row_words = selector.unit_tokens, selector.scale_at(dim) // 4, words.shape[3]
    align, units_per_block = loaded_bytes(selector, dim) // 4, index_PSHW.shape[1]
    tile = workspace.scored_tile_units
    lanes = request_lanes(requests)
    layout = layout or ScoreLayout.default(tile, selector.bits, lanes)
    compiled = query_RHGD.is_cuda and torch.version.hip is None
    _score_codes[(programs or workspace.processors * layout.programs_per_multiprocessor,)](
        query_RHGD,
        words,
        block_table_RM,
        context_tokens_R,
        workspace.scored_before_R,
        scores_RHU,
        scores_RHU if peaks_RHK is None else peaks_RHK,
        *query_RHGD.stride()[:3],
        words.stride(0) // align,
        words.stride(2) // align,
        block_table_RM.stride(0),
        *scores_RHU.stride()[:2],
        *(scores_RHU if peaks_RHK is None else peaks_RHK).stride()[:2],
        scores_RHU.shape[2],
        requests,
        UNIT=unit,
        UNITS_PER_BLOCK=units_per_block,
        # The largest power of two that divides a block.
        GROUP=min(units_per_block & -units_per_block, _MOST_GROUP, tile),
        FIRST=selector.first_tokens // unit,
        RECENT=selector.recent_tokens // unit,
        HEADS=heads,
        G=group,
        D=dim,
        W=held,
        ROW_WORDS=row_words,
        LANES_W=triton.next_power_of_2(held),
        LANES_R=lanes,
        TILE=tile,
        BITS=selector.bits,
        ALIGN=align,
        WITH_PEAKS=peaks_RHK is not None,
        DP4A=compiled,
        num_warps=layout.warps,
        maxnreg=layout.most_registers,
        # A product and a sum in one instruction would round once where the specification rounds twice.
        enable_fp_fusion=False,
        **overlapping(query_RHGD),
    )


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _score_codes(
    query,
    words,
    block_table,
    context_tokens,
    scored_before,
    scores,
    peaks,
    query_per_request,
    query_per_head,
    query_per_member,
    words_per_block,
    words_per_head,
    table_per_request,
    scores_per_request,
    scores_per_head,
    peaks_per_request,
    peaks_per_head,
    units_held,
    requests,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    W: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES_W: tl.constexpr,
    LANES_R: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    ALIGN: tl.constexpr,
    WITH_PEAKS: tl.constexpr,
    DP4A: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    let_next_begin(launch_pdl)
    ends_R = by_request(scored_before + 1, requests, LANES_R)
    contexts_R = by_request(context_tokens, requests, LANES_R)
    at, end = stretch(ends_R, HEADS, share=None)
    PARTS: tl.constexpr = 8 // BITS
    while at < end:
        its_lane, request_begins, tiles = request_at(at, ends_R, requests, HEADS, LANES_R)
        units = (number_of(its_lane, contexts_R, LANES_R) + UNIT - 1) // UNIT
        request = its_lane.to(tl.int64)
        head = (at - request_begins) // tiles
        head_begins = request_begins + head * tiles
        last = tl.minimum(end, head_begins + tiles)
        head_words = words + head * words_per_head * ALIGN
        table_row = block_table + request * table_per_request
        target = scores + request * scores_per_request + head * scores_per_head
        peaks_row = peaks + request * peaks_per_request + head * peaks_per_head
        group = (at - head_begins) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        block = _block_of(table_row, group, units, GROUP, UNITS_PER_BLOCK)
        wait_for_previous(launch_pdl)
        packed, of_all, query_scale = _rounded_query(
            query + request * query_per_request + head * query_per_head, query_per_member, G, D, LANES_W, PARTS
        )
        part_lane = tl.arange(0, PARTS)
        query_parts = ()
        for part in tl.static_range(PARTS):
            its_words = tl.sum(tl.where(part_lane[None, :] == part, packed, 0), axis=1)
            # Spread here, because the layout of its threads would otherwise be changed in every tile.
            query_parts += (tl.broadcast_to(its_words[None, None, :], [TILE // GROUP, GROUP, LANES_W]),)
        for tile in range(at - head_begins, last - head_begins):
            group_words = head_words + block * words_per_block * ALIGN
            # One tile early, so that its rows wait for no other load.
            following = _block_of(table_row, group + TILE // GROUP, units, GROUP, UNITS_PER_BLOCK)
            if (tile * TILE >= FIRST) & ((tile + 1) * TILE <= units - RECENT):
                _score_tile(
                    group_words, target, peaks_row, tile, group, query_parts, of_all, query_scale, units, units_held,
                    UNITS_PER_BLOCK, GROUP, TILE, FIRST, RECENT, W, ROW_WORDS, LANES_W, BITS, WITH_PEAKS, DP4A,
                    MASKED=False,
                )  # fmt: skip
            else:
                _score_tile(
                    group_words, target, peaks_row, tile, group, query_parts, of_all, query_scale, units, units_held,
                    UNITS_PER_BLOCK, GROUP, TILE, FIRST, RECENT, W, ROW_WORDS, LANES_W, BITS, WITH_PEAKS, DP4A,
                    MASKED=True,
                )  # fmt: skip
            group += TILE // GROUP
            block = following
        at = last
    wait_for_previous(launch_pdl)


@triton.jit
@no_type_check
def _block_of(table_row, group, units, GROUP: tl.constexpr, UNITS_PER_BLOCK: tl.constexpr):
    """The blocks that groups of units lie in, as far as the context goes."""
    return tl.load(table_row + group // (UNITS_PER_BLOCK // GROUP), mask=group * GROUP < units, other=0).to(tl.int64)


@triton.jit
@no_type_check
def _score_tile(
    group_words,
    target,
    peaks_row,
    tile,
    group,
    query_parts,
    of_all,
    query_scale,
    units,
    units_held,
    UNITS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    W: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES_W: tl.constexpr,
    BITS: tl.constexpr,
    WITH_PEAKS: tl.constexpr,
    DP4A: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of the units of each group, which are those of a tile. group_words: where the words of the group's block and head
    begin. MASKED: whether some of the units do not compete."""
    lane = tl.arange(0, LANES_W)[None, None, :]
    inside = tl.arange(0, GROUP)
    # Of a group's first unit: its place in the block.
    first = group % (UNITS_PER_BLOCK // GROUP) * GROUP
    unit = group[:, None] * GROUP + inside[None, :]
    held_at = (group_words + first * W)[:, None, None] + (inside[None, :, None] * W + lane)
    scale_at = (group_words + UNITS_PER_BLOCK * W + first * (ROW_WORDS - W))[:, None]
    scale_at += inside[None, :] * (ROW_WORDS - W)
    if MASKED:
        candidate = competes(unit, units, FIRST, RECENT)
        held = tl.load(held_at, mask=candidate[:, :, None] & (lane < W), other=0)
        scale = tl.load(scale_at, mask=candidate, other=0)
    else:
        held = tl.load(held_at, mask=lane < W, other=0) if W != LANES_W else tl.load(held_at)
        scale = tl.load(scale_at)
    products = tl.zeros(held.shape, tl.int32)
    for part in tl.static_range(8 // BITS):
        # Byte j of the word: its channel 8 // BITS * j + part.
        codes = (held >> (part * BITS)) & (0x01010101 * (2**BITS - 1))
        products = _add_products(codes, query_parts[part], products, DP4A)
    # The level of a code n is 2 n + 1 - 2 ** BITS: what does not depend on the code is taken out of the sum.
    whole = 2 * tl.sum(products, axis=2) - (2**BITS - 1) * of_all
    score = whole.to(tl.float32) * scale.to(tl.float32, bitcast=True) * query_scale
    if MASKED:
        score = tl.where(candidate, score, tl.where(unit < units, float("inf"), float("-inf")))
        tl.store(target + unit, score, mask=unit < units_held)
    else:
        tl.store(target + unit, score)
    if WITH_PEAKS:
        best = ordered_bits(score)
        if GROUP < _PEAK:
            # Of a group first. Up to triton 3.6 threads can hand their numbers to the wrong ones where a maximum is over
            # what was two dimensions before.
            best = tl.max(best, axis=1)
        best = tl.max(tl.reshape(best, [TILE // _PEAK, _PEAK // GROUP if GROUP < _PEAK else _PEAK]), axis=1)
        peak = tile * (TILE // _PEAK) + tl.arange(0, TILE // _PEAK)
        if MASKED:
            tl.store(peaks_row + peak, best, mask=peak * _PEAK < units_held)
        else:
            tl.store(peaks_row + peak, best)


@triton.jit
@no_type_check
def _rounded_query(
    query, query_per_member, G: tl.constexpr, D: tl.constexpr, LANES_W: tl.constexpr, PARTS: tl.constexpr
):
    """quantized_mean.rounded_query: whole numbers as bytes [LANES_W, PARTS], placed like the codes of a row's words;
    their sum; the scale."""
    word = tl.arange(0, LANES_W)[:, None, None]
    byte = tl.arange(0, 4)[None, :, None]
    part = tl.arange(0, PARTS)[None, None, :]
    channel = (word * 4 + byte) * PARTS + part
    total = tl.load(query + channel, mask=channel < D, other=0.0).to(tl.float32)
    for member in tl.static_range(1, G):
        total += tl.load(query + member * query_per_member + channel, mask=channel < D, other=0.0).to(tl.float32)
    mean = total * (1.0 / G)
    # As whole numbers, magnitudes have the order of floats, with NaN on top.
    size = mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_size = tl.max(tl.max(tl.max(size, axis=2), axis=1), axis=0)
    largest = tl.where(
        largest_size > _INFINITY_BITS,
        float("nan"),
        tl.maximum(largest_size.to(tl.float32, bitcast=True), _LEAST_LARGEST),
    )
    codes = (mean * tl.div_rn(_QUERY_MOST, largest) + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
    codes = tl.where(largest_size < _INFINITY_BITS, codes, 0)
    packed = tl.sum((codes & 0xFF) << (8 * byte), axis=1)
    return packed, tl.sum(tl.sum(tl.sum(codes, axis=2), axis=1), axis=0), largest * _PER_QUERY_MOST


@triton.jit
@no_type_check
def _add_products(codes, query_bytes, products, DP4A: tl.constexpr):
    """products + the sum over four bytes of an unsigned code times a signed number."""
    if DP4A:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [codes, query_bytes, products],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    for byte in tl.static_range(4):
        products += ((codes >> (8 * byte)) & 0xFF) * ((query_bytes << (24 - 8 * byte)) >> 24)
    return products
