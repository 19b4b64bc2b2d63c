"""Masked attention on a GPU, backward: probabilities are computed again from the saved log-sums (FlashAttention-2,
arXiv 2307.08691, algorithm 2). One kernel computes dq over the lists of the forward pass. The other computes dk and dv
over lists of the blocks of positions that read any unit of a tile of keys. Every sum is made by one program in one
order, without atomics, so results are the same to the bit."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.masked.triton_tiles import (
    Layout,
    MaskedTile,
    listed_keys,
    load_rows,
    reads,
    rows_of,
    store_rows,
)
from sparroll.attention.masked.triton_unit_lists import readers_of

_LOG2_E = 1.4426950408889634


def backward(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    words: Tensor,
    listed: Tensor,
    counts: Tensor,
    out: Tensor,
    log_sum: Tensor,
    grad_out: Tensor,
    unit: int,
    scale: float,
    tile: MaskedTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, keys and values, in their dtypes."""
    grad_query, grad_keys, grad_values = (torch.empty_like(given) for given in (query, keys, values))
    if query.numel():
        product = torch.empty_like(log_sum)
        query_gradient(
            query, keys, values, words, listed, counts, out, grad_out, log_sum, product, grad_query, unit, scale, tile
        )
        layout = Layout.of(query, keys.shape[1], unit, tile.owning_rows, tile.owned_key_lanes)
        readers, reader_counts = readers_of(words, unit, layout.tile_units)
        key_gradient(
            query, keys, values, words, readers, reader_counts, grad_out, log_sum, product, grad_keys, grad_values,
            layout, scale, tile,
        )  # fmt: skip
    return grad_query, grad_keys, grad_values


def query_gradient(
    query: Tensor, keys: Tensor, values: Tensor, words: Tensor, listed: Tensor, counts: Tensor, out: Tensor,
    grad_out: Tensor, log_sum: Tensor, product: Tensor, grad_query: Tensor, unit: int, scale: float, tile: MaskedTile,
) -> None:  # fmt: skip
    """grad_query; also each row's sum of out * grad_out into `product`, for the other kernel."""
    (batch, heads, tokens, _), (blocks, units) = keys.shape, words.shape[2:]
    layout = Layout.of(query, heads, unit, tile.rows, tile.key_lanes)
    _query_gradient[(-(-tokens // layout.positions), heads, batch)](
        query, keys, values, words, listed, counts, out, grad_out, log_sum, product, grad_query,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:3], *grad_out.stride()[:3],
        *grad_query.stride()[:3], scale, scale * _LOG2_E, tokens, blocks, units, listed.shape[3], **layout.constants(),
        num_warps=tile.query_warps, num_stages=tile.query_stages,
    )  # fmt: skip


def key_gradient(
    query: Tensor, keys: Tensor, values: Tensor, words: Tensor, readers: Tensor, reader_counts: Tensor,
    grad_out: Tensor, log_sum: Tensor, product: Tensor, grad_keys: Tensor, grad_values: Tensor,
    layout: Layout, scale: float, tile: MaskedTile,
) -> None:  # fmt: skip
    """grad_keys and grad_values. `layout` has the tiles of keys that `readers` are listed for."""
    (batch, heads, tokens, _), (blocks, units) = keys.shape, words.shape[2:]
    _key_gradient[(readers.shape[2], heads, batch)](
        query, keys, values, words, readers, reader_counts, grad_out, log_sum, product, grad_keys, grad_values,
        *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *grad_out.stride()[:3],
        *grad_keys.stride()[:3], *grad_values.stride()[:3],
        scale, scale * _LOG2_E, tokens, blocks, units, readers.shape[3], **layout.constants(),
        num_warps=tile.key_warps, num_stages=tile.key_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "blocks", "units", "listed_columns"])
@no_type_check
def _query_gradient(
    query, keys, values, words, listed, counts, out, grad_out, log_sum, product, grad_query,
    query_per_request, query_per_head, query_per_position,
    keys_per_request, keys_per_head, keys_per_position,
    values_per_request, values_per_head, values_per_position,
    out_per_request, out_per_head, out_per_position,
    grad_out_per_request, grad_out_per_head, grad_out_per_position,
    grad_query_per_request, grad_query_per_head, grad_query_per_position,
    scale, scale_log2, tokens, blocks, units, listed_columns,
    UNIT: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    LANES_N: tl.constexpr,
    G: tl.constexpr,
    LANES_G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """dq of a tile of rows; also leaves each row's sum of out * grad_out in `product`, for the other kernel."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    position, member, real, readable = rows_of(tile, tokens, G, LANES_G, D, LANES_D, POSITIONS)
    query_head = head * G + member
    at = query + request * query_per_request + query_head * query_per_head + position * query_per_position
    query_tile = load_rows(at[:, None], readable, LANES_D)
    at = grad_out + request * grad_out_per_request + query_head * grad_out_per_head + position * grad_out_per_position
    grad_tile = load_rows(at[:, None], readable, LANES_D)
    at = out + request * out_per_request + query_head * out_per_head + position * out_per_position
    out_tile = load_rows(at[:, None], readable, LANES_D)
    row_product = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), axis=1)
    at_sum = ((request * tl.num_programs(1) + head) * tokens + position) * G + member
    tl.store(product + at_sum, row_product, mask=real)
    log_total = tl.load(log_sum + at_sum, mask=real, other=0.0)
    log_total = tl.where(log_total == float("-inf"), 0.0, log_total)

    pair = (request * tl.num_programs(1) + head) * blocks + tile * POSITIONS // 32
    count = tl.load(counts + pair)
    listed += pair * listed_columns
    words += pair * units
    keys += request * keys_per_request + head * keys_per_head
    values += request * values_per_request + head * values_per_head
    gradient = tl.zeros([POSITIONS * LANES_G, LANES_D], tl.float32)
    for begin in range(0, count, TILE_UNITS):
        token, word, present = listed_keys(listed, words, begin, count, tokens, UNIT, TILE_UNITS, LANES_N, D, LANES_D)
        key = load_rows(keys + (token * keys_per_position)[:, None], present, LANES_D)
        value = load_rows(values + (token * values_per_position)[:, None], present, LANES_D)
        logit = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale_log2
        visible = reads(position[:, None], real[:, None], token[None, :], word[None, :])
        weight = tl.where(visible, tl.exp2(logit - log_total[:, None]), 0.0)
        grad_weight = tl.dot(grad_tile, tl.trans(value), input_precision="ieee")
        grad_logit = weight * (grad_weight - row_product[:, None])
        gradient += tl.dot(grad_logit.to(key.dtype), key, input_precision="ieee")
    target = grad_query + request * grad_query_per_request + query_head * grad_query_per_head
    target += position * grad_query_per_position
    store_rows(target[:, None], gradient * scale, readable, LANES_D)


@triton.jit(do_not_specialize=["tokens", "blocks", "units", "reader_columns"])
@no_type_check
def _key_gradient(
    query, keys, values, words, readers, reader_counts, grad_out, log_sum, product, grad_keys, grad_values,
    query_per_request, query_per_head, query_per_position,
    keys_per_request, keys_per_head, keys_per_position,
    values_per_request, values_per_head, values_per_position,
    grad_out_per_request, grad_out_per_head, grad_out_per_position,
    grad_keys_per_request, grad_keys_per_head, grad_keys_per_position,
    grad_values_per_request, grad_values_per_head, grad_values_per_position,
    scale, scale_log2, tokens, blocks, units, reader_columns,
    UNIT: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    LANES_N: tl.constexpr,
    G: tl.constexpr,
    LANES_G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of TILE_UNITS units, summed over the query heads of the group."""
    # The first keys are read by most positions, so their programs start first.
    tile = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    slot = tl.arange(0, LANES_N)
    unit = tile * TILE_UNITS + slot // UNIT
    token = unit * UNIT + slot % UNIT
    given = (slot < TILE_UNITS * UNIT) & (unit < units) & (token < tokens)
    channel = tl.arange(0, LANES_D)
    present = given[:, None] & (channel < D)[None, :]
    at = keys + request * keys_per_request + head * keys_per_head + token * keys_per_position
    key = load_rows(at[:, None], present, LANES_D)
    at = values + request * values_per_request + head * values_per_head + token * values_per_position
    value = load_rows(at[:, None], present, LANES_D)

    row = tl.arange(0, POSITIONS * LANES_G)
    member = row % LANES_G
    query_head = head * G + member
    query += request * query_per_request
    grad_out += request * grad_out_per_request
    pair = request * tl.num_programs(1) + head
    words += pair * blocks * units
    log_sum += pair * tokens * G
    product += pair * tokens * G
    of_tile = pair * tl.num_programs(0) + tile
    count = tl.load(reader_counts + of_tile)
    readers += of_tile * reader_columns
    grad_key = tl.zeros([LANES_N, LANES_D], tl.float32)
    grad_value = tl.zeros([LANES_N, LANES_D], tl.float32)
    PARTS: tl.constexpr = 32 // POSITIONS
    for step in range(count * PARTS):
        block = tl.load(readers + step // PARTS)
        position = block * 32 + step % PARTS * POSITIONS + row // LANES_G
        real = (member < G) & (position < tokens)
        readable = real[:, None] & (channel < D)[None, :]
        offset = query_head * query_per_head + position * query_per_position
        query_tile = load_rows(query + offset[:, None], readable, LANES_D)
        offset = query_head * grad_out_per_head + position * grad_out_per_position
        grad_tile = load_rows(grad_out + offset[:, None], readable, LANES_D)
        log_total = tl.load(log_sum + position * G + member, mask=real, other=0.0)
        log_total = tl.where(log_total == float("-inf"), 0.0, log_total)
        row_product = tl.load(product + position * G + member, mask=real, other=0.0)
        word = tl.load(words + block.to(tl.int64) * units + unit, mask=given, other=0)
        visible = reads(position[None, :], real[None, :], token[:, None], word[:, None])
        logit = tl.dot(key, tl.trans(query_tile), input_precision="ieee") * scale_log2
        weight = tl.where(visible, tl.exp2(logit - log_total[None, :]), 0.0)
        grad_value += tl.dot(weight.to(grad_tile.dtype), grad_tile, input_precision="ieee")
        grad_weight = tl.dot(value, tl.trans(grad_tile), input_precision="ieee")
        grad_logit = weight * (grad_weight - row_product[None, :])
        grad_key += tl.dot(grad_logit.to(query_tile.dtype), query_tile, input_precision="ieee")
    target = grad_keys + request * grad_keys_per_request + head * grad_keys_per_head + token * grad_keys_per_position
    store_rows(target[:, None], grad_key * scale, present, LANES_D)
    target = grad_values + request * grad_values_per_request + head * grad_values_per_head
    target += token * grad_values_per_position
    store_rows(target[:, None], grad_value, present, LANES_D)
