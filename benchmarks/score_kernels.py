"""Scores of units of 1 bit in another way than the engines' kernel (triton_score_codes.py). attention_sweep.py times them.

The query's whole numbers of 8 bits are taken apart into 8 planes of bits. A word of 32 channels times a plane is the
number of bits that both have, which the tensor cores count: nothing is unpacked, where the engines' kernel shifts, masks
and multiplies 8 times for each word, at half the rate of other instructions.

A matrix product of a warp (m16n8k256) adds up over four threads, which hold different units here. Each thread has two of
the eight columns to itself: the planes of the other threads' columns are 0 where its words are. So the sums for a
thread's unit come back to this thread. Thread and unit must belong together as `_planes_of_lanes` says. Triton lays out
16-byte loads so, and a test looks at it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.paged import StepWorkspace
from sparroll.attention.decode.triton_index import loaded_bytes, words_of
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.decode.triton_score_codes import ScoreLayout, _rounded_query
from sparroll.attention.decode.triton_work_split import competes, request_at, stretch
from sparroll.attention.selectors.quantized_mean import QuantizedMean

_WORDS = tl.constexpr(4)
_PARTS = tl.constexpr(8)


@dataclass(frozen=True)
class BitLayout:
    """A tile must be two units or more for each thread."""

    tile_units: int = 128
    warps: int = 2
    programs_per_multiprocessor: int = 16
    stages: int = 1
    """Tiles in flight. With more than one, all tiles are masked."""


def _product() -> str:
    """PTX for two units x and y of a thread, four words each. $0 to $7: four sums of x, whose sum is wanted, then of y;
    $8 to $15: their words; from $16, for each pair of planes, the words of x's and of y's planes, which are equal."""
    lines = [".reg .b32 zero, c<4>, t;", "mov.b32 zero, 0;"]
    product = "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc"
    for pair in range(4):
        before = "{zero, zero, zero, zero}"
        for word in (0, 2):
            a = ", ".join(f"${8 + 4 * unit + word + k}" for k in (0, 1) for unit in (0, 1))
            b = f"${16 + 8 * pair + word}, ${16 + 8 * pair + word + 1}"
            lines.append(f"{product} {{c0, c1, c2, c3}}, {{{a}}}, {{{b}}}, {before};")
            before = "{c0, c1, c2, c3}"
        for unit in (0, 1):
            # The last plane counts negatively.
            second = -2 if pair == 3 else 2
            lines.append(f"mad.lo.s32 t, c{2 * unit + 1}, {second}, c{2 * unit};")
            lines.append(f"shl.b32 ${4 * unit + pair}, t, {2 * pair};")
    return "{ " + " ".join(lines) + " }"


PRODUCT = tl.constexpr(_product())
CONSTRAINTS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 40))


def score_units(
    query_RHGD: Tensor,
    index_PSHW: Tensor,
    block_table_RM: Tensor,
    context_tokens_R: Tensor,
    selector: QuantizedMean,
    scores_RHU: Tensor,
    workspace: StepWorkspace,
    layout: BitLayout,
) -> None:
    """What triton_score_codes.score_units does, for 1 bit and 128 channels. The plan counts tiles of `tile_units`."""
    requests, heads, group, dim = query_RHGD.shape
    words, unit = words_of(index_PSHW, selector, dim), selector.unit_tokens
    align = loaded_bytes(selector, dim) // 4
    compiled = query_RHGD.is_cuda and torch.version.hip is None
    assert (selector.bits, dim, align) == (1, 128, 4), "only units of 1 bit and 128 channels"
    assert layout.tile_units == workspace.scored_tile_units and layout.tile_units >= 64 * layout.warps
    registers = ScoreLayout(layout.warps, layout.programs_per_multiprocessor).most_registers
    _score_bits[(workspace.processors * layout.programs_per_multiprocessor,)](
        query_RHGD, words, block_table_RM, context_tokens_R, workspace.scored_before_R, scores_RHU,
        *query_RHGD.stride()[:3], words.stride(0) // align, words.stride(2) // align, block_table_RM.stride(0),
        *scores_RHU.stride()[:2], scores_RHU.shape[2], requests, UNIT=unit, UNITS_PER_BLOCK=index_PSHW.shape[1],
        FIRST=selector.first_tokens // unit, RECENT=selector.recent_tokens // unit, HEADS=heads, G=group, D=dim,
        ROW_WORDS=words.shape[3], LANES_R=triton.next_power_of_2(requests), TILE=layout.tile_units, ALIGN=align,
        STAGES=layout.stages, TENSOR_CORES=compiled, num_warps=layout.warps, maxnreg=registers,
        # A product and a sum in one instruction would round once where the specification rounds twice.
        enable_fp_fusion=False, **overlapping(query_RHGD),
    )  # fmt: skip


@triton.jit(do_not_specialize=["requests"])
@no_type_check
def _score_bits(
    query,
    words,
    block_table,
    context_tokens,
    scored_before,
    scores,
    query_per_request,
    query_per_head,
    query_per_member,
    words_per_block,
    words_per_head,
    table_per_request,
    scores_per_request,
    scores_per_head,
    units_held,
    requests,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES_R: tl.constexpr,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    at, end = stretch(scored_before, requests, HEADS)
    # Always 0. Triton cannot know, and so leaves neighbouring scores in neighbouring threads, where they come from.
    nothing = tl.load(scored_before)
    while at < end:
        request, request_begins, tiles = request_at(at, scored_before, requests, HEADS, LANES_R)
        units = (tl.load(context_tokens + request).to(tl.int32) + UNIT - 1) // UNIT
        head = (at - request_begins) // tiles
        head_begins = request_begins + head * tiles
        last = tl.minimum(end, head_begins + tiles)
        head_words = words + head * words_per_head * ALIGN
        table_row = block_table + request * table_per_request
        target = scores + request * scores_per_request + head * scores_per_head + nothing
        unit = (at - head_begins) * TILE + tl.arange(0, TILE)
        block = tl.load(table_row + unit // UNITS_PER_BLOCK, mask=unit < units, other=0).to(tl.int64)
        packed, of_all, query_scale = _rounded_query(
            query + request * query_per_request + head * query_per_head, query_per_member, G, D, _WORDS, _PARTS
        )
        planes = _planes_of_lanes(packed, TILE, TENSOR_CORES)
        for tile in tl.range(at - head_begins, last - head_begins, num_stages=STAGES):
            unit_words = head_words + block * words_per_block * ALIGN
            # One tile early, so that its rows wait for no other load.
            following = unit + TILE
            block = tl.load(table_row + following // UNITS_PER_BLOCK, mask=following < units, other=0).to(tl.int64)
            place = unit % UNITS_PER_BLOCK
            held_at = (unit_words + place * _WORDS)[:, None] + tl.arange(0, _WORDS)[None, :]
            scale_at = unit_words + UNITS_PER_BLOCK * _WORDS + place * (ROW_WORDS - _WORDS)
            if STAGES > 1:
                _score_some(
                    held_at, scale_at, target, unit, planes, of_all, query_scale, units, units_held, FIRST, RECENT,
                    TENSOR_CORES,
                )  # fmt: skip
            elif (tile * TILE >= FIRST) & ((tile + 1) * TILE <= units - RECENT):
                whole = 2 * _sums(tl.load(held_at), planes, TENSOR_CORES) - of_all
                scale = tl.load(scale_at).to(tl.float32, bitcast=True)
                tl.store(target + unit, whole.to(tl.float32) * scale * query_scale)
            else:
                _score_some(
                    held_at, scale_at, target, unit, planes, of_all, query_scale, units, units_held, FIRST, RECENT,
                    TENSOR_CORES,
                )  # fmt: skip
            unit = following
        at = last


@triton.jit
@no_type_check
def _score_some(
    held_at,
    scale_at,
    target,
    unit,
    planes,
    of_all,
    query_scale,
    units,
    units_held,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
):
    """Of a tile some of whose units may not compete."""
    candidate = competes(unit, units, FIRST, RECENT)
    held = tl.load(held_at, mask=candidate[:, None], other=0)
    scale = tl.load(scale_at, mask=candidate, other=0).to(tl.float32, bitcast=True)
    whole = 2 * _sums(held, planes, TENSOR_CORES) - of_all
    score = whole.to(tl.float32) * scale * query_scale
    score = tl.where(candidate, score, tl.where(unit < units, float("inf"), float("-inf")))
    tl.store(target + unit, score, mask=unit < units_held)


@triton.jit
@no_type_check
def _planes_of_lanes(packed, TILE: tl.constexpr, TENSOR_CORES: tl.constexpr):
    """packed [words, parts]: the query's bytes as _rounded_query has them. For each pair of planes: the words [TILE, words]
    that the thread of a unit holds in the products, where unit u is held by thread u % 32 of a warp. Thread 4 g + t holds
    column g, which belongs to the four threads t of which 2 t or 2 t + 1 is g. Without tensor cores: all planes."""
    lane = tl.arange(0, TILE)[:, None] % 32
    column = lane // 4
    its_own = lane % 4 == column // 2
    part = tl.arange(0, _PARTS)[None, :]
    planes = ()
    for pair in tl.static_range(4):
        # Bit 8 j + p of a word is its channel 8 j + p: byte j of part p.
        even = tl.sum(((packed >> (2 * pair)) & 0x01010101) << part, axis=1)[None, :]
        odd = tl.sum(((packed >> (2 * pair + 1)) & 0x01010101) << part, axis=1)[None, :]
        if TENSOR_CORES:
            planes += (tl.where(its_own, tl.where(column % 2 == 0, even, odd), 0),)
        else:
            planes += (even, odd)
    return planes


@triton.jit
@no_type_check
def _sums(held, planes, TENSOR_CORES: tl.constexpr):
    """The sums of the query's numbers where the units' bits are set."""
    if TENSOR_CORES:
        sums = tl.inline_asm_elementwise(
            PRODUCT, CONSTRAINTS, [held, planes[0], planes[1], planes[2], planes[3]], dtype=tl.int32, is_pure=False,
            pack=8,
        )  # fmt: skip
    else:
        sums = tl.zeros(held.shape, tl.int32)
        for plane in tl.static_range(8):
            weight: tl.constexpr = -128 if plane == 7 else 2**plane
            sums += _bits(held & planes[plane]) * weight
    return tl.sum(sums, axis=1)


@triton.jit
@no_type_check
def _bits(word):
    """How many bits of 32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return (word & 0xFF) + ((word >> 8) & 0xFF) + ((word >> 16) & 0xFF) + ((word >> 24) & 0xFF)
