"""Writes the rows of the groups that new tokens complete: the mean of V over a group, and how far the keys of each of its
units spread (selectors/remainder.py). A program looks at a few tokens of one head, as in triton_index.py."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention import row_bytes
from sparroll.attention.decode.triton_index import MOST_PROGRAMS, completed, e4m3
from sparroll.attention.decode.triton_launch import after_previous, overlapping
from sparroll.attention.selectors.base import Selector


def update_groups(
    keys_PBHD: Tensor, values_PBHD: Tensor, groups_PSHV: Tensor, slots_T: Tensor, selector: Selector
) -> None:
    """See paged.update_groups."""
    _, block_tokens, heads, dim = keys_PBHD.shape
    tokens, remainder = slots_T.numel(), selector.remainder
    assert remainder is not None, "a selector without a remainder"
    if tokens == 0:
        return
    tokens_each = triton.cdiv(tokens, MOST_PROGRAMS)
    halves = groups_PSHV.view(torch.bfloat16)
    _groups[(triton.cdiv(tokens, tokens_each), heads)](
        keys_PBHD,
        values_PBHD,
        groups_PSHV,
        halves,
        groups_PSHV.view(torch.float32),
        slots_T,
        *keys_PBHD.stride()[:3],
        *values_PBHD.stride()[:3],
        *groups_PSHV.stride()[:3],
        slots_T.stride(0),
        tokens,
        tokens_each,
        BLOCK_TOKENS=block_tokens,
        GROUP=remainder.group_tokens,
        UNIT=selector.unit_tokens,
        D=dim,
        LANES_D=triton.next_power_of_2(dim),
        FP8=remainder.values == "fp8",
        SPREADS_AT=remainder.spreads_at(dim),
        FP8_PER_MOST=1 / row_bytes.FP8_MOST,
        LEAST_LARGEST=row_bytes.LEAST_LARGEST,
        num_warps=4,
        **overlapping(keys_PBHD),
    )


@triton.jit(do_not_specialize=["tokens", "tokens_each"])
@no_type_check
def _groups(
    keys,
    values,
    groups,
    groups_bf16,
    groups_fp32,
    slots,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    values_per_block,
    values_per_token,
    values_per_head,
    groups_per_block,
    groups_per_row,
    groups_per_head,
    slots_apart,
    tokens,
    tokens_each,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    FP8: tl.constexpr,
    SPREADS_AT: tl.constexpr,
    FP8_PER_MOST: tl.constexpr,
    LEAST_LARGEST: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    """The means are those of Remainder.build_rows bit for bit; spreads differ by the order of their sums. Padding of a row
    is left as it is. groups_bf16, groups_fp32: the same memory."""
    after_previous(launch_pdl)
    head = tl.program_id(1)
    first = tl.program_id(0) * tokens_each
    channel = tl.arange(0, LANES_D)
    for place in range(first, tl.minimum(first + tokens_each, tokens)):
        completes, block, last = completed(slots + place * slots_apart, BLOCK_TOKENS, GROUP)
        if completes:
            begins = last - (GROUP - 1)
            row = block * groups_per_block + (last // GROUP) * groups_per_row + head * groups_per_head
            value = values + block * values_per_block + head * values_per_head + begins * values_per_token + channel
            total = tl.load(value, mask=channel < D, other=0.0).to(tl.float32)
            for token in range(1, GROUP):
                total += tl.load(value + token * values_per_token, mask=channel < D, other=0.0).to(tl.float32)
            mean = total * (1.0 / GROUP)
            if FP8:
                # As whole numbers, magnitudes have the order of floats, with NaN on top.
                size = tl.max(mean.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
                largest = tl.maximum(size.to(tl.float32, bitcast=True), LEAST_LARGEST)
                scale = tl.where(size > 0x7F800000, float("nan"), largest) * FP8_PER_MOST
                tl.store(groups + row + channel, e4m3(tl.div_rn(mean, scale)).to(tl.uint8), mask=channel < D)
                tl.store(groups_fp32 + row // 4 + (SPREADS_AT // 4 - 1), scale)
            else:
                tl.store(groups_bf16 + row // 2 + channel, mean.to(tl.bfloat16), mask=channel < D)
            unit = tl.arange(0, GROUP // UNIT)
            token = begins + unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
            key = keys + block * keys_per_block + head * keys_per_head + token[:, :, None] * keys_per_token
            unit_keys = tl.load(key + channel[None, None, :], mask=(channel < D)[None, None, :], other=0.0)
            unit_keys = unit_keys.to(tl.float32)
            away = unit_keys - (tl.sum(unit_keys, axis=1) * (1.0 / UNIT))[:, None, :]
            spread = tl.sum(tl.sum(away * away, axis=2), axis=1) * (1.0 / (UNIT * D))
            tl.store(groups_bf16 + row // 2 + SPREADS_AT // 2 + unit, spread.to(tl.bfloat16))
