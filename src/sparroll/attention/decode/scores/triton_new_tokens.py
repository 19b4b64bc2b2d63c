"""Stores keys and values of new tokens from within a kernel that scores. Its programs share (token, head) among them."""

from __future__ import annotations

from typing import Any, no_type_check

import triton
import triton.language as tl

from sparroll.attention.decode.new_tokens import NewTokens


def arguments_of(new: NewTokens | None) -> tuple[Any, int]:
    """Two arguments of a kernel: a tuple of tensors and strides, and how many tokens there are. Triton compiles for the
    kinds of the first; the second is kept out of specialization, because it changes from step to step."""
    if new is None:
        return None, 0
    held = new.keys_THD, new.values_THD, new.keys_PBHD, new.values_PBHD
    strides = (each.stride()[:-1] for each in held)
    return (*held, new.slots_T, *strides, new.slots_T.stride(0)), new.slots_T.numel()


@triton.jit
@no_type_check
def store_new_tokens(new, tokens, BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr):
    """Store this program's share of the new keys and values. new: the tuple that `arguments_of` returns."""
    keys, values, cache_keys, cache_values, slots = new[0], new[1], new[2], new[3], new[4]
    of_keys, of_values, of_cache_keys, of_cache_values, slots_apart = new[5], new[6], new[7], new[8], new[9]
    LANES_D: tl.constexpr = triton.next_power_of_2(D)
    channel = tl.arange(0, LANES_D)
    for pair in range(tl.program_id(0), tokens * HEADS, tl.num_programs(0)):
        token, head = pair // HEADS, pair % HEADS
        slot = tl.load(slots + token * slots_apart).to(tl.int64)
        # These wait for no slot.
        key = tl.load(keys + token * of_keys[0] + head * of_keys[1] + channel, mask=channel < D, other=0.0)
        value = tl.load(values + token * of_values[0] + head * of_values[1] + channel, mask=channel < D, other=0.0)
        block, place = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        stored = channel < tl.where(slot >= 0, D, 0)
        key_at = cache_keys + block * of_cache_keys[0] + place * of_cache_keys[1] + head * of_cache_keys[2]
        tl.store(key_at + channel, key, mask=stored)
        value_at = cache_values + block * of_cache_values[0] + place * of_cache_values[1] + head * of_cache_values[2]
        tl.store(value_at + channel, value, mask=stored)
