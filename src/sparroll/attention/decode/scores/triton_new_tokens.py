"""Stores keys and values of new tokens from within a kernel that scores. Its programs share (token, head) among them."""

from __future__ import annotations

from typing import Any, no_type_check

import triton
import triton.language as tl

from sparroll.attention.decode.new_tokens import NewTokens


def arguments(new: NewTokens | None) -> tuple[Any, ...]:
    """What kernels take of new tokens: `new_keys` and so on."""
    if new is None:
        return (None,) * 5 + (0,) * 12
    held = new.keys_THD, new.values_THD, new.keys_PBHD, new.values_PBHD
    strides = [stride for each in held for stride in each.stride()[:-1]]
    return (*held, new.slots_T, *strides, new.slots_T.stride(0), new.slots_T.numel())


def constants(new: NewTokens | None) -> dict[str, Any]:
    """What they are compiled for."""
    return {"BLOCK_TOKENS": 0 if new is None else new.keys_PBHD.shape[1]}


@triton.jit
@no_type_check
def store_new_tokens(
    new_keys,
    new_values,
    keys,
    values,
    slots,
    new_keys_per_token,
    new_keys_per_head,
    new_values_per_token,
    new_values_per_head,
    keys_per_block,
    keys_per_token,
    keys_per_head,
    values_per_block,
    values_per_token,
    values_per_head,
    slots_apart,
    tokens,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
):
    """Of the program's share of them."""
    LANES_D: tl.constexpr = triton.next_power_of_2(D)
    channel = tl.arange(0, LANES_D)
    for pair in range(tl.program_id(0), tokens * HEADS, tl.num_programs(0)):
        token, head = pair // HEADS, pair % HEADS
        slot = tl.load(slots + token * slots_apart).to(tl.int64)
        # These wait for no slot.
        new_key = tl.load(
            new_keys + token * new_keys_per_token + head * new_keys_per_head + channel, mask=channel < D, other=0.0
        )
        new_value = tl.load(
            new_values + token * new_values_per_token + head * new_values_per_head + channel,
            mask=channel < D,
            other=0.0,
        )
        block, place = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        stored = channel < tl.where(slot >= 0, D, 0)
        key_at = keys + block * keys_per_block + place * keys_per_token + head * keys_per_head
        tl.store(key_at + channel, new_key, mask=stored)
        value_at = values + block * values_per_block + place * values_per_token + head * values_per_head
        tl.store(value_at + channel, new_value, mask=stored)
