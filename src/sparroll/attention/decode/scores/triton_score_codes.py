"""Scores units of quantized_mean below 8 bits, to the last bit as the selector defines them: channels of a few bits times
whole numbers of 8 bits, four at a time (dp4a), and one multiplication by the scales for each unit. Nothing is converted
to floating point before the sum is complete, so the index is read at the speed of memory.

The work is split as in triton_score.py. A tile is made of groups of units that are neighbours in a block, whose channels
lie in one stretch of memory (256 bytes for 16 tokens of 128 channels at 4 x 4, 2 x 2 or 1 x 1 bits). Most tiles hold
nothing but units that compete; for these, nothing is masked.

With a remainder, the same codes also meet each query head's own query, which tells how much every group of units weighs if
none of them is read (remainder_reference.py). remainder/triton_unread.py takes those that are read out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.choice.triton_threshold import ordered_bits
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.decode.scores.triton_new_tokens import arguments_of, store_new_tokens
from sparroll.attention.decode.triton_codes import (
    LOG2_E,
    logit_of,
    products_of,
    rounded_heads,
    rounded_mean,
    spread_over_units,
    whole_of,
    words_apart,
)
from sparroll.attention.decode.triton_index import loaded_bytes, words_of
from sparroll.attention.decode.triton_launch import let_next_begin, overlapping, runs_ptx, wait_for_previous
from sparroll.attention.decode.triton_work_split import (
    by_request,
    competes,
    number_of,
    request_at,
    request_lanes,
    stretch,
)
from sparroll.attention.decode.workspace import MOST_SCORED_UNITS, MOST_SCORED_UNITS_OF_2_BITS, PEAK_UNITS
from sparroll.attention.selectors.quantized_mean import QuantizedMean

if TYPE_CHECKING:
    from sparroll.attention.decode.workspace import StepWorkspace

REGISTERS = 65536
"""Of a multiprocessor."""
_MOST_GROUP = 16
"""Most units of a group."""
_PEAK = tl.constexpr(PEAK_UNITS)


@dataclass(frozen=True)
class ScoreLayout:
    """How the programs of a launch are laid out. It changes the speed and never the result."""

    warps: int = 4
    programs_per_multiprocessor: int = 6

    @staticmethod
    def default(tile_units: int, bits: int, lanes: int, heads: int = 0) -> ScoreLayout:
        """Measured on an H200 for 128 channels and 32 requests. What the threads of a tile hand to each other goes through
        shared memory, and a program of one warp waits for no other one there. Units of 2 bits gain more by that than many
        small programs cost; for those of 1 bit two warps are best, for those of 4 bits four. lanes: those for requests.
        With more of them there are only so many programs that no register is spilled, and that all of a tile's loads are
        on their way at once: with too few registers a load waits for the one before it. heads: how many query heads'
        groups are weighed, too; their queries take registers, and the numbers come from those. More programs were up to a
        fifth faster on an H200 (LOG.md)."""
        if heads:
            warps = 4 if bits == 4 else 1
            # Warps that run at a time: as many as let no register be spilled for up to 2 and 5 heads.
            few, some = (12, 8) if bits == 1 or lanes > 32 else (16, 12)
            return ScoreLayout(warps, (few if heads <= 2 else some if heads <= 5 else 8) // warps)
        if bits == 2 and tile_units <= MOST_SCORED_UNITS_OF_2_BITS:
            return ScoreLayout(1, 20 if lanes <= 256 else 10)
        if bits == 1 and tile_units <= MOST_SCORED_UNITS:
            return ScoreLayout(2, 14 if lanes <= 32 else 12 if lanes <= 256 else 8)
        return ScoreLayout()

    @property
    def most_registers(self) -> int:
        """Of a thread: as many as let all programs run at a time. Otherwise the last ones would begin when the first ones
        end."""
        threads = 32 * self.warps * self.programs_per_multiprocessor
        return min(REGISTERS // threads // 8 * 8, 248)


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
    groups_PSHV: Tensor | None = None,
    log_weights_RHGN: Tensor | None = None,
    scale: float = 1.0,
    new_tokens: NewTokens | None = None,
) -> None:
    """See triton_score.score_units; the step is planned already. `layout` and `programs` are for measurements. scale: what
    the model multiplies q.k with; only weights of groups depend on it."""
    requests, heads, group, dim = query_RHGD.shape
    words = words_of(index_PSHW, selector, dim)
    unit, held, row_words = selector.unit_tokens, selector.scale_at(dim) // 4, words.shape[3]
    align, units_per_block = loaded_bytes(selector, dim) // 4, index_PSHW.shape[1]
    tile = workspace.scored_tile_units
    lanes = request_lanes(requests)
    remainder = selector.remainder if log_weights_RHGN is not None else None
    per_group = spreads_at = 0
    if remainder is not None:
        per_group, spreads_at = selector.units_per_group, remainder.spreads_at(dim)
        assert tile % per_group == 0, f"a tile of {tile} units does not hold whole groups of {per_group}"
    layout = layout or ScoreLayout.default(tile, selector.bits, lanes, group if per_group else 0)
    compiled = runs_ptx(query_RHGD)
    _score_codes[(programs or workspace.processors * layout.programs_per_multiprocessor,)](
        query_RHGD,
        words,
        block_table_RM,
        context_tokens_R,
        workspace.scored_before_R,
        scores_RHU,
        scores_RHU if peaks_RHK is None else peaks_RHK,
        None if groups_PSHV is None else groups_PSHV.view(torch.bfloat16),
        log_weights_RHGN,
        *query_RHGD.stride()[:3],
        words.stride(0) // align,
        words.stride(2) // align,
        block_table_RM.stride(0),
        *scores_RHU.stride()[:2],
        *(scores_RHU if peaks_RHK is None else peaks_RHK).stride()[:2],
        *((0, 0, 0) if groups_PSHV is None else groups_PSHV.stride()[:3]),
        *((0, 0, 0, 0) if log_weights_RHGN is None else (*log_weights_RHGN.stride()[:3], log_weights_RHGN.shape[3])),
        scores_RHU.shape[2],
        scale * LOG2_E,
        0.5 * scale * scale * LOG2_E,
        *arguments_of(new_tokens),
        requests,
        UNIT=unit,
        UNITS_PER_BLOCK=units_per_block,
        # The largest power of two that divides a block.
        GROUP=min(units_per_block & -units_per_block, _MOST_GROUP, tile, per_group or tile),
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
        PER_GROUP=per_group,
        SPREADS_AT=spreads_at,
        DP4A=compiled,
        BLOCK_TOKENS=0 if new_tokens is None else new_tokens.keys_PBHD.shape[1],
        num_warps=layout.warps,
        maxnreg=layout.most_registers,
        # A product and a sum in one instruction would round once where the specification rounds twice.
        enable_fp_fusion=False,
        **overlapping(query_RHGD),
    )


@triton.jit(do_not_specialize=["new_tokens", "requests"])
@no_type_check
def _score_codes(
    query,
    words,
    block_table,
    context_tokens,
    scored_before,
    scores,
    peaks,
    groups_bf16,
    log_weights,
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
    groups_per_block,
    groups_per_row,
    groups_per_head,
    weights_per_request,
    weights_per_head,
    weights_per_member,
    groups_held,
    units_held,
    scale_log2,
    scale_spread,
    new,
    new_tokens,
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
    PER_GROUP: tl.constexpr,
    SPREADS_AT: tl.constexpr,
    DP4A: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """PER_GROUP: units in a group of the remainder; 0 without one.  scale_log2, scale_spread: what turns q.m' and |q|^2 v
    into base-2 logarithms of weights."""
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
        query_rows = query + request * query_per_request + head * query_per_head
        APART: tl.constexpr = words_apart(LANES_W) if PER_GROUP else 1
        packed, of_all, query_scale = rounded_mean(query_rows, query_per_member, G, D, LANES_W, PARTS)
        query_parts = spread_over_units(packed, (), TILE // GROUP, GROUP, LANES_W, PARTS, APART)
        head_sums, head_scales, half_norms = (), (), ()
        groups_of_head, weights_row = groups_bf16, log_weights
        if PER_GROUP:
            query_parts, head_sums, head_scales, half_norms = rounded_heads(
                query_rows, query_parts, query_per_member, scale_log2, scale_spread, TILE // GROUP, GROUP, G, D, LANES_W,
                PARTS, APART,
            )  # fmt: skip
            # A row's bytes are even.
            groups_of_head = groups_bf16 + (head * groups_per_head + SPREADS_AT) // 2
            weights_row = log_weights + request * weights_per_request + head * weights_per_head
        for tile in range(at - head_begins, last - head_begins):
            group_words = head_words + block * words_per_block * ALIGN
            spreads = groups_of_head
            if PER_GROUP and UNIT > 1:
                spreads += block * groups_per_block // 2
            # One tile early, so that its rows wait for no other load.
            following = _block_of(table_row, group + TILE // GROUP, units, GROUP, UNITS_PER_BLOCK)
            if (tile * TILE >= FIRST) & ((tile + 1) * TILE <= units - RECENT):
                _score_tile(
                    group_words, target, peaks_row, tile, group, query_parts, of_all, query_scale, units, units_held,
                    spreads, groups_per_row, weights_row, weights_per_member, groups_held, head_sums, head_scales,
                    half_norms, UNIT, UNITS_PER_BLOCK, GROUP, TILE, FIRST, RECENT, G, W, ROW_WORDS, LANES_W, BITS,
                    WITH_PEAKS, PER_GROUP, APART, DP4A, MASKED=False,
                )  # fmt: skip
            else:
                _score_tile(
                    group_words, target, peaks_row, tile, group, query_parts, of_all, query_scale, units, units_held,
                    spreads, groups_per_row, weights_row, weights_per_member, groups_held, head_sums, head_scales,
                    half_norms, UNIT, UNITS_PER_BLOCK, GROUP, TILE, FIRST, RECENT, G, W, ROW_WORDS, LANES_W, BITS,
                    WITH_PEAKS, PER_GROUP, APART, DP4A, MASKED=True,
                )  # fmt: skip
            group += TILE // GROUP
            block = following
        at = last
    wait_for_previous(launch_pdl)
    if BLOCK_TOKENS:
        store_new_tokens(new, new_tokens, BLOCK_TOKENS, HEADS, D)


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
    spreads,
    groups_per_row,
    weights_row,
    weights_per_member,
    groups_held,
    head_sums,
    head_scales,
    half_norms,
    UNIT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    RECENT: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES_W: tl.constexpr,
    BITS: tl.constexpr,
    WITH_PEAKS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    APART: tl.constexpr,
    DP4A: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of the units of each group, which are those of a tile. group_words: where the words of the group's block and head
    begin.  query_parts: of the mean query, then of those of the heads.  spreads: of the first units of these blocks.
    MASKED: whether some of the units do not compete."""
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
    if PER_GROUP and UNIT > 1:
        spread_at = spreads + first // PER_GROUP * (groups_per_row // 2) + first % PER_GROUP
        spread_at = spread_at[:, None] + inside[None, :]
        spread = tl.load(spread_at, mask=candidate, other=0.0) if MASKED else tl.load(spread_at)
    # Together they may meet the same codes.
    products = products_of(held, query_parts, 1 + G if PER_GROUP else 1, BITS, APART, DP4A)
    whole = whole_of(products[0], of_all, BITS)
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
    for member in tl.static_range(G if PER_GROUP else 0):
        whole = whole_of(products[1 + member], head_sums[member], BITS)
        logit = logit_of(whole, scale, head_scales[member])
        if UNIT > 1:
            logit += spread.to(tl.float32) * half_norms[member]
        if MASKED:
            logit = tl.where(candidate, logit, float("-inf"))
        weight = _log_weights(logit, UNIT, GROUP, PER_GROUP, TILE, MASKED)
        number = tile * (TILE // PER_GROUP) + tl.arange(0, TILE // PER_GROUP)
        weight_at = weights_row + member * weights_per_member + number
        if GROUP == PER_GROUP:
            # By the first of the threads that hold a group's logits: others would have to be told first.
            storing = (inside == 0)[None, :] & (number < groups_held)[:, None]
            tl.store(weight_at[:, None] + inside[None, :], tl.broadcast_to(weight[:, None], logit.shape), mask=storing)
        elif MASKED:
            tl.store(weight_at, weight, mask=number < groups_held)
        else:
            tl.store(weight_at, weight)


@triton.jit
@no_type_check
def _log_weights(
    logit,
    UNIT: tl.constexpr,
    GROUP: tl.constexpr,
    PER_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Base-2 logarithms of the weights of a tile's groups of PER_GROUP units, from the logits of its units."""
    # Units that stand together first; see `WITH_PEAKS` above for why not all at once.
    top = tl.max(logit, axis=1)
    # Nothing competes: -inf minus -inf would be NaN.
    anchor = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    total = tl.sum(tl.exp2(logit - anchor[:, None]), axis=1)
    if GROUP < PER_GROUP:
        tops = tl.reshape(top, [TILE // PER_GROUP, PER_GROUP // GROUP])
        totals = tl.reshape(total, [TILE // PER_GROUP, PER_GROUP // GROUP])
        top = tl.max(tops, axis=1)
        anchor = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        total = tl.sum(totals * tl.exp2(tops - anchor[:, None]), axis=1)
    if MASKED:
        # There top is -inf, and so is the result.
        total = tl.where(total == 0.0, 1.0, total)
    return top + tl.log2(total * UNIT)
