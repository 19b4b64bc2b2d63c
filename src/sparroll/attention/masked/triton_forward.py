"""Masked attention on a GPU, forward: FlashAttention-2's online softmax (arXiv 2307.08691) over the list of units that
any of a block's 32 positions reads. The query heads of a group are rows of the same tile, since they read the same
units. A unit that no row of the block reads is never loaded. The backward pass is in triton_backward.py."""

# B sequences, S positions, A query heads, H kv heads, G query heads per kv head, U units, P blocks of 32,
# D head dimension

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparroll.attention.masked import triton_backward
from sparroll.attention.masked.triton_tiles import (
    Layout,
    MaskedTile,
    listed_keys,
    load_rows,
    reads,
    rows_contiguous,
    rows_of,
    store_rows,
)
from sparroll.attention.masked.triton_unit_lists import units_read
from sparroll.errors import UserError

_LOG2_E = 1.4426950408889634
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def masked_attention(
    query_BASD: Tensor,
    keys_BHSD: Tensor,
    values_BHSD: Tensor,
    words_BHPU: Tensor,
    unit_tokens: int,
    scale: float,
    tile: MaskedTile | None = None,
) -> Tensor:
    """See api.masked_attention. `tile` is for measurements."""
    dim, group = query_BASD.shape[-1], query_BASD.shape[1] // keys_BHSD.shape[1]
    if query_BASD.dtype not in _DTYPES:
        raise UserError(f"the triton kernels take bf16, fp16 and fp32, got {query_BASD.dtype}", 'impl="reference"')
    if dim > 256 or group > 32:
        raise UserError(f"the triton kernels take heads of up to 256 and groups of up to 32, got {dim} and {group}")
    tile = tile or MaskedTile.default(dim, group, query_BASD.element_size(), query_BASD.device)
    mixed: Tensor = _Masked.apply(query_BASD, keys_BHSD, values_BHSD, words_BHPU, unit_tokens, scale, tile)
    return mixed


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        words: Tensor,
        unit: int,
        scale: float,
        tile: MaskedTile,
    ) -> Tensor:
        query, keys, values = (rows_contiguous(given) for given in (query, keys, values))
        words = words.contiguous()
        batch, heads, tokens, _ = keys.shape
        layout = Layout.of(query, heads, unit, tile.rows, tile.key_lanes)
        # The memory is [B, S, A, D] behind the view, which transformers' layers flatten next.
        out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        log_sum = torch.empty(batch, heads, tokens, layout.group, dtype=torch.float32, device=query.device)
        listed, counts = units_read(words, unit)
        if out.numel():
            _forward[(-(-tokens // layout.positions), heads, batch)](
                query, keys, values, words, listed, counts, out, log_sum,
                *query.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *out.stride()[:3],
                scale * _LOG2_E, tokens, words.shape[2], words.shape[3], listed.shape[3], **layout.constants(),
                num_warps=tile.forward_warps, num_stages=tile.forward_stages,
            )  # fmt: skip
        ctx.save_for_backward(query, keys, values, words, listed, counts, out, log_sum)
        ctx.unit, ctx.scale, ctx.tile = unit, scale, tile
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, words, listed, counts, out, log_sum = ctx.saved_tensors
        grads = triton_backward.backward(
            query,
            keys,
            values,
            words,
            listed,
            counts,
            out,
            log_sum,
            rows_contiguous(grad_out),
            ctx.unit,
            ctx.scale,
            ctx.tile,
        )
        return *grads, None, None, None, None


@triton.jit(do_not_specialize=["tokens", "blocks", "units", "listed_columns"])
@no_type_check
def _forward(
    query, keys, values, words, listed, counts, out, log_sum,
    query_per_request, query_per_head, query_per_position,
    keys_per_request, keys_per_head, keys_per_position,
    values_per_request, values_per_head, values_per_position,
    out_per_request, out_per_head, out_per_position,
    scale_log2, tokens, blocks, units, listed_columns,
    UNIT: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    LANES_N: tl.constexpr,
    G: tl.constexpr,
    LANES_G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    # The last positions read most, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    position, member, real, readable = rows_of(tile, tokens, G, LANES_G, D, LANES_D, POSITIONS)
    query_head = head * G + member
    at = query + request * query_per_request + query_head * query_per_head + position * query_per_position
    query_tile = load_rows(at[:, None], readable, LANES_D)

    pair = (request * tl.num_programs(1) + head) * blocks + tile * POSITIONS // 32
    count = tl.load(counts + pair)
    listed += pair * listed_columns
    words += pair * units
    keys += request * keys_per_request + head * keys_per_head
    values += request * values_per_request + head * values_per_head
    top = tl.full([POSITIONS * LANES_G], float("-inf"), tl.float32)
    total = tl.zeros([POSITIONS * LANES_G], tl.float32)
    mix = tl.zeros([POSITIONS * LANES_G, LANES_D], tl.float32)
    for begin in range(0, count, TILE_UNITS):
        token, word, present = listed_keys(listed, words, begin, count, tokens, UNIT, TILE_UNITS, LANES_N, D, LANES_D)
        key = load_rows(keys + (token * keys_per_position)[:, None], present, LANES_D)
        logit = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale_log2
        visible = reads(position[:, None], real[:, None], token[None, :], word[None, :])
        logit = tl.where(visible, logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, axis=1))
        # Nothing seen yet: -inf minus -inf would be NaN.
        anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - anchor[:, None])
        shrink = tl.exp2(top - anchor)
        value = load_rows(values + (token * values_per_position)[:, None], present, LANES_D)
        total = total * shrink + tl.sum(weight, axis=1)
        mix = mix * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        top = new_top
    divisor = tl.where(total > 0.0, total, 1.0)
    mix = mix / divisor[:, None]
    target = out + request * out_per_request + query_head * out_per_head + position * out_per_position
    store_rows(target[:, None], mix, readable, LANES_D)
    log_total = tl.where(total > 0.0, top + tl.log2(divisor), float("-inf"))
    at_sum = ((request * tl.num_programs(1) + head) * tokens + position) * G + member
    tl.store(log_sum + at_sum, log_total, mask=real)
