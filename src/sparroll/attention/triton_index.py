"""Index rows of the units that new tokens complete: one program per (token, head), nearly all of which end at once."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.selectors.base import Selector
from sparroll.attention.triton_launch import after_previous, overlapping


def update_index(keys_PBHD: Tensor, index_PSHW: Tensor, slots_T: Tensor, selector: Selector) -> None:
    """See paged.update_index."""
    _, block_tokens, heads, dim = keys_PBHD.shape
    if slots_T.numel() == 0:
        return
    _page_mean[(slots_T.numel(), heads)](
        keys_PBHD,
        index_PSHW,
        slots_T,
        *keys_PBHD.stride()[:3],
        *index_PSHW.stride()[:3],
        slots_T.stride(0),
        BLOCK_TOKENS=block_tokens,
        UNIT=selector.unit_tokens,
        D=dim,
        LANES_D=triton.next_power_of_2(dim),
        num_warps=2,
        **overlapping(keys_PBHD),
    )


@triton.jit
@no_type_check
def _page_mean(
    keys,
    index,
    slots,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    index_per_block,
    index_per_unit,
    index_per_head,
    slots_apart,
    BLOCK_TOKENS: tl.constexpr,
    UNIT: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    launch_pdl: tl.constexpr = False,
):
    after_previous(launch_pdl)
    slot = tl.load(slots + tl.program_id(0).to(tl.int64) * slots_apart).to(tl.int64)
    head = tl.program_id(1)
    # Of a negative slot the remainder may be negative or not; the first test keeps padding out either way.
    if (slot >= 0) & (slot % UNIT == UNIT - 1):
        block = slot // BLOCK_TOKENS
        last = (slot % BLOCK_TOKENS).to(tl.int32)
        channel = tl.arange(0, LANES_D)
        token = last - (UNIT - 1) + tl.arange(0, UNIT)
        unit_keys = tl.load(
            keys + block * keys_per_block + head * keys_per_head + token[:, None] * keys_per_token + channel[None, :],
            mask=(channel < D)[None, :],
            other=0.0,
        )
        mean = tl.sum(unit_keys.to(tl.float32), axis=0) / UNIT
        row = index + block * index_per_block + (last // UNIT) * index_per_unit + head * index_per_head
        tl.store(row + channel, mean.to(index.dtype.element_ty), mask=channel < D)
