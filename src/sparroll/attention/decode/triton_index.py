"""Writes the index rows of the units that new tokens complete, of one layer or of several in one launch. A program looks
at a few tokens of one head; most programs find no completed unit and end at once."""

from __future__ import annotations

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention import row_bytes
from sparroll.attention.decode.layers_apart import ALIGNED_BYTES
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.selectors import quantized_mean
from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.quantized_mean import QuantizedMean
from sparroll.errors import UserError

MOST_PROGRAMS = 1024
"""Most programs per head. A decode step has fewer tokens than that; a prefill would otherwise start thousands of
programs."""
FEW_PROGRAMS = 4096
"""About as many as an H200 holds at a time. Of many more, most would be started only to end at once."""
MOST_LAYERS_EACH = 2
"""Layers that a program writes one after the other, where there would otherwise be too many programs."""


def update_index(
    keys_PBHD: Tensor,
    index_PSHW: Tensor,
    slots_T: Tensor,
    selector: Selector,
    apart_2L: Tensor | None,
    beside: bool = False,
) -> None:
    """See paged.update_index."""
    _, block_tokens, heads, dim = keys_PBHD.shape
    if slots_T.numel() == 0:
        return
    tokens = slots_T.numel()
    tokens_each = triton.cdiv(tokens, MOST_PROGRAMS)
    places, layers = triton.cdiv(tokens, tokens_each), 1 if apart_2L is None else apart_2L.shape[1]
    layers_each = max(1, min(places * heads * layers // FEW_PROGRAMS, MOST_LAYERS_EACH))
    grid = (places, heads, triton.cdiv(layers, layers_each))
    launch = {"ALIGNED_BYTES": ALIGNED_BYTES, "num_warps": 2, **({} if beside else overlapping(keys_PBHD))}
    if not isinstance(selector, QuantizedMean):
        _page_mean[grid](
            keys_PBHD,
            index_PSHW,
            slots_T,
            apart_2L,
            *keys_PBHD.stride()[:3],
            *index_PSHW.stride()[:3],
            slots_T.stride(0),
            tokens,
            tokens_each,
            layers,
            layers_each,
            BLOCK_TOKENS=block_tokens,
            UNIT=selector.unit_tokens,
            D=dim,
            LANES_D=triton.next_power_of_2(dim),
            **launch,
        )
        return
    words = words_of(index_PSHW, selector, dim)
    _quantized_mean[grid](
        keys_PBHD,
        words,
        slots_T,
        apart_2L,
        *keys_PBHD.stride()[:3],
        *words.stride()[:3],
        slots_T.stride(0),
        tokens,
        tokens_each,
        layers,
        layers_each,
        BLOCK_TOKENS=block_tokens,
        UNIT=selector.unit_tokens,
        D=dim,
        BITS=selector.bits,
        SCALE_AT=selector.scale_at(dim) // 4,
        CUT=selector.cut_at(dim) // 4,
        UNITS_PER_BLOCK=block_tokens // selector.unit_tokens,
        ROW_WORDS=words.shape[3],
        LANES=triton.next_power_of_2(words.shape[3]),
        FP8_PER_MOST=1 / row_bytes.FP8_MOST,
        FIXED_MOST=float(quantized_mean.FIXED_MOST),
        PER_FIXED_MOST=1 / quantized_mean.FIXED_MOST,
        PER_D=1 / dim,
        STEP_PER_RMS=quantized_mean.STEP_PER_RMS.get(selector.bits, 0.0),
        **launch,
    )


def loaded_bytes(selector: QuantizedMean, dim: int) -> int:
    """What a thread loads of a row's channels at a time, and so what their place must be a multiple of."""
    return 16 if selector.bits == 8 else math.gcd(16, selector.cut_at(dim))


def words_of(index_PSHW: Tensor, selector: QuantizedMean, dim: int) -> Tensor:
    """The same memory as int32. Raises UserError where wide loads of it would not be aligned, and where rows that are
    cut do not stand together."""
    align, (_, units, _, width) = loaded_bytes(selector, dim), index_PSHW.shape
    per_block, per_unit, per_head, _ = index_PSHW.stride()
    if units > 1 and per_unit != width and (selector.bits < 8 or per_unit % align):
        raise UserError(
            "index rows of quantized_mean must follow each other in a block, those of one head after those of another; "
            f"got strides {index_PSHW.stride()}",
            "allocate [blocks, heads, units, width] and pass it with units and heads exchanged",
        )
    if any(place % align for place in (per_block, per_head, index_PSHW.storage_offset())):
        raise UserError(
            f"index rows of quantized_mean must lie at multiples of {align} bytes, got strides {index_PSHW.stride()}",
            "allocate rows of index_width(head_dim) bytes one after the other",
        )
    return index_PSHW.view(torch.int32)


@triton.jit
@no_type_check
def completed(slot_at, BLOCK_TOKENS: tl.constexpr, UNIT: tl.constexpr):
    """Whether a token completes its unit, its block, and its place in there."""
    slot = tl.load(slot_at).to(tl.int64)
    # Of a negative slot the remainder may be negative or not; the first test keeps padding out either way.
    return (slot >= 0) & (slot % UNIT == UNIT - 1), slot // BLOCK_TOKENS, (slot % BLOCK_TOKENS).to(tl.int32)


@triton.jit
@no_type_check
def of_layer(keys, index, apart, layer, layers, ALIGNED_BYTES: tl.constexpr):
    """Where the keys and the index of a layer lie."""
    if apart is not None:
        KEY_BYTES: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth // 8
        INDEX_BYTES: tl.constexpr = index.dtype.element_ty.primitive_bitwidth // 8
        # The compiler does not know that these are multiples, and would load single numbers.
        keys += tl.multiple_of(tl.load(apart + layer) // KEY_BYTES, ALIGNED_BYTES // KEY_BYTES)
        index += tl.multiple_of(tl.load(apart + layers + layer) // INDEX_BYTES, ALIGNED_BYTES // INDEX_BYTES)
    return keys, index


@triton.jit(do_not_specialize=["tokens", "tokens_each", "layers", "layers_each"])
@no_type_check
def _page_mean(
    keys,
    index,
    slots,
    apart,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    index_per_block,
    index_per_unit,
    index_per_head,
    slots_apart,
    tokens,
    tokens_each,
    layers,
    layers_each,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    head = tl.program_id(1)
    first, first_layer = tl.program_id(0) * tokens_each, tl.program_id(2) * layers_each
    for place in range(first, tl.minimum(first + tokens_each, tokens)):
        completes, block, last = completed(slots + place * slots_apart, BLOCK_TOKENS, UNIT)
        if completes:
            for layer in range(first_layer, tl.minimum(first_layer + layers_each, layers)):
                layer_keys, layer_index = of_layer(keys, index, apart, layer, layers, ALIGNED_BYTES)
                channel = tl.arange(0, LANES_D)
                token = last - (UNIT - 1) + tl.arange(0, UNIT)
                unit_keys = tl.load(
                    layer_keys
                    + block * keys_per_block
                    + head * keys_per_head
                    + token[:, None] * keys_per_token
                    + channel[None, :],
                    mask=(channel < D)[None, :],
                    other=0.0,
                )
                mean = tl.sum(unit_keys.to(tl.float32), axis=0) / UNIT
                row = layer_index + block * index_per_block + (last // UNIT) * index_per_unit + head * index_per_head
                tl.store(row + channel, mean.to(index.dtype.element_ty), mask=channel < D)


@triton.jit(do_not_specialize=["tokens", "tokens_each", "layers", "layers_each"])
@no_type_check
def _quantized_mean(
    keys,
    words,
    slots,
    apart,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    words_per_block,
    words_per_unit,
    words_per_head,
    slots_apart,
    tokens,
    tokens_each,
    layers,
    layers_each,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_AT: tl.constexpr,
    CUT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    LANES: tl.constexpr,
    FP8_PER_MOST: tl.constexpr,
    FIXED_MOST: tl.constexpr,
    PER_FIXED_MOST: tl.constexpr,
    PER_D: tl.constexpr,
    STEP_PER_RMS: tl.constexpr,
    ALIGNED_BYTES: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """Bit for bit what QuantizedMean.build_index writes: the same operations, and sums in its order or of integers."""
    after_previous(launch_pdl)
    head = tl.program_id(1)
    first, first_layer = tl.program_id(0) * tokens_each, tl.program_id(2) * layers_each
    for place in range(first, tl.minimum(first + tokens_each, tokens)):
        completes, block, last = completed(slots + place * slots_apart, BLOCK_TOKENS, UNIT)
        if completes:
            for layer in range(first_layer, tl.minimum(first_layer + layers_each, layers)):
                layer_keys, layer_words = of_layer(keys, words, apart, layer, layers, ALIGNED_BYTES)
                PER_WORD: tl.constexpr = 32 // BITS
                word = tl.arange(0, LANES)
                part = tl.arange(0, PER_WORD)
                channel = word[:, None] * PER_WORD + part[None, :]
                first_key = layer_keys + block * keys_per_block + head * keys_per_head
                key = first_key + (last - (UNIT - 1)) * keys_per_token + channel
                total = tl.load(key, mask=channel < D, other=0.0).to(tl.float32)
                for token in tl.static_range(1, UNIT):
                    total += tl.load(key + token * keys_per_token, mask=channel < D, other=0.0).to(tl.float32)
                mean = total * (1.0 / UNIT)
                largest = tl.maximum(tl.max(tl.max(tl.abs(mean), axis=1), axis=0), 2.0**-100)
                if BITS == 8:
                    scale = largest * FP8_PER_MOST
                    codes = e4m3(tl.div_rn(mean, scale))
                else:
                    fixed = (tl.div_rn(mean, largest) * FIXED_MOST).to(tl.int32)
                    squares = tl.sum(tl.sum(fixed * fixed, axis=1), axis=0).to(tl.float32)
                    step = tl.maximum(tl.sqrt_rn(squares * PER_D) * STEP_PER_RMS, 1.0)
                    codes = tl.floor(tl.div_rn(fixed.to(tl.float32), step)).to(tl.int32) + 2 ** (BITS - 1)
                    codes = tl.minimum(tl.maximum(codes, 0), 2**BITS - 1)
                    level = 2 * codes + (1 - 2**BITS)
                    of_levels = tl.sum(tl.sum(tl.where(channel < D, level * level, 0), axis=1), axis=0).to(tl.float32)
                    scale = tl.sqrt_rn(tl.div_rn(squares, of_levels)) * (largest * PER_FIXED_MOST)
                packed = tl.sum(codes << (BITS * part)[None, :], axis=1)
                packed = tl.where(word < SCALE_AT, packed, 0)
                packed = tl.where(word == SCALE_AT, scale.to(tl.int32, bitcast=True), packed)
                unit = last // UNIT
                if CUT == ROW_WORDS:
                    inside = unit * words_per_unit + word
                else:
                    behind = UNITS_PER_BLOCK * CUT + unit * (ROW_WORDS - CUT) + word - CUT
                    inside = tl.where(word < CUT, unit * CUT + word, behind)
                row = layer_words + block * words_per_block + head * words_per_head
                tl.store(row + inside, packed, mask=word < ROW_WORDS)


@triton.jit
@no_type_check
def e4m3(value):
    """The byte of the nearest e4m3, ties to even. In integers, because not every GPU converts."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Below 2 ** -6 neighbours lie 2 ** -9 apart, as fp32 does from 2 ** 14 on: adding that rounds.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (size + 0x7FFFF + ((size >> 20) & 1) - 0x3C000000) >> 20
    return tl.where(size < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)
