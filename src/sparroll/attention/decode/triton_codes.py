"""Products of units of few bits with queries in whole numbers, as quantized_mean defines them: dp4a takes four channels of a
few bits and four whole numbers of 8 bits at a time. What scores units, and what weighs them for a remainder, share these.

Kernels that call these must not fuse products and sums (`enable_fp_fusion=False`): the specification rounds twice.
"""

from __future__ import annotations

import math
from typing import no_type_check

import triton
import triton.language as tl

from sparroll.attention import row_bytes
from sparroll.attention.selectors import quantized_mean

LOG2_E = math.log2(math.e)
_QUERY_MOST = tl.constexpr(float(quantized_mean.QUERY_MOST))
_PER_QUERY_MOST = tl.constexpr(1 / quantized_mean.QUERY_MOST)
_LEAST_LARGEST = tl.constexpr(row_bytes.LEAST_LARGEST)
_INFINITY_BITS = tl.constexpr(0x7F800000)
# 1.5 * 2 ** 23: neighbouring floats are 1 apart there, so that adding it rounds to a whole number, halves to even.
_WHOLE = tl.constexpr(12582912.0)
_WHOLE_BITS = tl.constexpr(0x4B400000)


@triton.constexpr_function
@no_type_check
def words_apart(words):
    """Neighbouring words of a row that a thread loads at a time, of so many."""
    return min(words, 4)


@triton.jit
@no_type_check
def rounded_mean(query, query_per_member, G: tl.constexpr, D: tl.constexpr, LANES_W: tl.constexpr, PARTS: tl.constexpr):
    """quantized_mean.rounded_query, as `_in_whole_numbers` gives it."""
    total = _query_of(query, D, LANES_W, PARTS)
    for member in tl.static_range(1, G):
        total += _query_of(query + member * query_per_member, D, LANES_W, PARTS)
    return _in_whole_numbers(total * (1.0 / G))


@triton.jit
@no_type_check
def rounded_heads(
    query,
    parts,
    query_per_member,
    scale_log2,
    scale_spread,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    LANES_W: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
):
    """`parts` and those of each query head; the sums of their whole numbers; what makes base-2 logits of their products with
    units, and of the units' spreads."""
    sums, scales, half_norms = (), (), ()
    for member in tl.static_range(G):
        own = _query_of(query + member * query_per_member, D, LANES_W, PARTS)
        packed, own_sum, own_scale = _in_whole_numbers(own)
        parts = spread_over_units(packed, parts, GROUPS, GROUP, LANES_W, PARTS, APART)
        sums += (own_sum,)
        scales += (own_scale * scale_log2,)
        half_norms += (tl.sum(tl.sum(tl.sum(own * own, axis=2), axis=1), axis=0) * scale_spread,)
    return parts, sums, scales, half_norms


@triton.jit
@no_type_check
def spread_over_units(
    packed,
    parts,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    LANES_W: tl.constexpr,
    PARTS: tl.constexpr,
    APART: tl.constexpr,
):
    """`parts` and those of a query in whole numbers, for as many units as are multiplied at a time."""
    part_lane = tl.arange(0, PARTS)
    for part in tl.static_range(PARTS):
        its_words = tl.sum(tl.where(part_lane[None, :] == part, packed, 0), axis=1)
        # Spread here, because the layout of its threads would otherwise be changed in every tile.
        parts += _apart(tl.broadcast_to(its_words[None, None, :], [GROUPS, GROUP, LANES_W]), APART)
    return parts


@triton.jit
@no_type_check
def products_of(held, parts, QUERIES: tl.constexpr, BITS: tl.constexpr, APART: tl.constexpr, DP4A: tl.constexpr):
    """For each query the sums of its whole numbers times the codes of units, by words that are not added up yet. held: words
    of rows [groups, units of a group, words].  parts: of the queries, one after the other."""
    PLACES: tl.constexpr = 8 // BITS * APART
    # A thread holds neighbouring words, and adds their products up at once.
    words = _apart(held, APART)
    products = ()
    for _ in tl.static_range(QUERIES):
        products += (tl.zeros(words[0].shape, tl.int32),)
    for place in tl.static_range(PLACES):
        # Byte j of the word: its channel 8 // BITS * j + part.
        codes = (words[place % APART] >> (place // APART * BITS)) & (0x01010101 * (2**BITS - 1))
        added = ()
        for query in tl.static_range(QUERIES):
            added += (_add_products(codes, parts[query * PLACES + place], products[query], DP4A),)
        products = added
    return products


@triton.jit
@no_type_check
def whole_of(products, of_all, BITS: tl.constexpr):
    """The sum of whole numbers times levels. of_all: the sum of the query's whole numbers."""
    # The level of a code n is 2 n + 1 - 2 ** BITS: what does not depend on the code is taken out of the sum.
    return 2 * tl.sum(products, axis=2) - (2**BITS - 1) * of_all


@triton.jit
@no_type_check
def logit_of(whole, scale, head_scale):
    """Base-2 logits of units for one query head, but for their spreads. scale: of the units, as words."""
    return whole.to(tl.float32) * scale.to(tl.float32, bitcast=True) * head_scale


@triton.jit
@no_type_check
def _apart(words, APART: tl.constexpr):
    """Every APART-th of the words on the last axis, APART times."""
    UNITS: tl.constexpr = words.shape[0]
    GROUP: tl.constexpr = words.shape[1]
    LANES: tl.constexpr = words.shape[2] // APART
    if APART == 1:
        result = (words,)
    elif APART == 2:
        result = tl.split(tl.reshape(words, [UNITS, GROUP, LANES, 2]))
    else:
        even, odd = tl.split(tl.reshape(words, [UNITS, GROUP, LANES, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        result = (first, second, third, fourth)
    return result


@triton.jit
@no_type_check
def _query_of(query, D: tl.constexpr, LANES_W: tl.constexpr, PARTS: tl.constexpr):
    """A head's channels as fp32 [LANES_W, 4, PARTS], placed like the codes of a row's words."""
    word = tl.arange(0, LANES_W)[:, None, None]
    byte = tl.arange(0, 4)[None, :, None]
    part = tl.arange(0, PARTS)[None, None, :]
    channel = (word * 4 + byte) * PARTS + part
    return tl.load(query + channel, mask=channel < D, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _in_whole_numbers(vector):
    """quantized_mean.in_whole_numbers of what `_query_of` gives: whole numbers as bytes [LANES_W, PARTS]; their sum; the
    scale."""
    byte = tl.arange(0, 4)[None, :, None]
    # As whole numbers, magnitudes have the order of floats, with NaN on top.
    size = vector.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest_size = tl.max(tl.max(tl.max(size, axis=2), axis=1), axis=0)
    largest = tl.where(
        largest_size > _INFINITY_BITS,
        float("nan"),
        tl.maximum(largest_size.to(tl.float32, bitcast=True), _LEAST_LARGEST),
    )
    codes = (vector * tl.div_rn(_QUERY_MOST, largest) + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
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
