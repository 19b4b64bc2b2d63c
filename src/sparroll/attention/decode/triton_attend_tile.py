"""What both kernels of attention do: look up where listed units lie, take a tile of tokens into a running softmax, and add
up the parts of a pair that was cut."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def parted(number, PARTS: tl.constexpr):
    """Quotient and rest of numbers that are 0 or more, as unsigned ones: where PARTS is a power of two, that is a shift and
    a mask, four instructions less than for signed ones."""
    unsigned = number.to(tl.uint32, bitcast=True)
    quotient = (unsigned // PARTS).to(tl.int32)
    return quotient, number - quotient * PARTS


@triton.jit
@no_type_check
def look_up(
    ids_row,
    pages_row,
    table_row,
    slot,
    chosen_units,
    most_units,
    UNIT_SHIFT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    WITH_PAGES: tl.constexpr,
):
    """Where the units of listed tokens lie: block * units per block + unit in it. Past what is listed this is rubbish."""
    column = slot >> UNIT_SHIFT
    if WITH_PAGES:
        # Nothing is read at a page that is rubbish, so the load need not wait for the budget.
        page = tl.load(pages_row + column, mask=column < most_units, other=0)
    else:
        listed = column < chosen_units
        column, unit = parted(tl.load(ids_row + column, mask=listed, other=0), UNITS_PER_BLOCK)
        page = tl.load(table_row + column, mask=listed, other=0).to(tl.int32) * UNITS_PER_BLOCK + unit
    return page


@triton.jit
@no_type_check
def with_tile(
    top,
    total_weight,
    mix,
    query_tile,
    head_keys,
    head_values,
    page,
    slot,
    there,
    visible,
    channel,
    scale_log2,
    keys_per_block,
    keys_per_token,
    values_per_block,
    values_per_token,
    UNIT_SHIFT: tl.constexpr,
    UNITS_PER_BLOCK: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    ALIKE: tl.constexpr,
):
    """A running softmax with a tile of listed tokens. page: where the unit of each one lies, as `look_up` says.  there,
    visible: which of them exist, for the loads and for what comes of them.  ALIKE: keys and values have the same strides."""
    block, unit = parted(page, UNITS_PER_BLOCK)
    block = block.to(tl.int64)
    token = (unit << UNIT_SHIFT) + (slot & ((1 << UNIT_SHIFT) - 1))
    # Where D fills its lanes, the mask is one per row and each load stays 128 bits wide.
    readable = there[:, None]
    if D != LANES_D:
        readable = readable & (channel < D)[None, :]
    key_at = block * keys_per_block + token * keys_per_token
    key = tl.load(head_keys + (key_at[:, None] + channel[None, :]), mask=readable, other=0.0)
    logit = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale_log2
    logit = tl.where(visible[None, :], logit, float("-inf"))
    new_top = tl.maximum(top, tl.max(logit, axis=1))
    # Nothing seen yet: -inf minus -inf would be NaN.
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(logit - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    value_at = key_at
    if not ALIKE:
        value_at = block * values_per_block + token * values_per_token
    value = tl.load(head_values + (value_at[:, None] + channel[None, :]), mask=readable, other=0.0)
    total_weight = total_weight * shrink + tl.sum(weight, axis=1)
    mix = mix * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return new_top, total_weight, mix


@triton.jit
@no_type_check
def end_pair(
    top,
    total_weight,
    mix,
    mixed,
    log_sum,
    target,
    out_per_member,
    whole,
    first_tile,
    member,
    channel,
    in_group,
    G: tl.constexpr,
    D: tl.constexpr,
):
    """Write a pair's attention, or leave this program's part of it. whole: whether the program took all tiles of the pair.
    first_tile: the first one that it took."""
    divisor = tl.where(total_weight > 0.0, total_weight, 1.0)
    mix = mix / divisor[:, None]
    if whole:
        tl.store(
            target + member[:, None] * out_per_member + channel[None, :],
            mix.to(target.dtype.element_ty),
            mask=in_group,
        )
    else:
        # A program cuts at most two pairs: the one that it goes on with, and the one that it begins.
        part = (2 * tl.program_id(0) + (first_tile == 0).to(tl.int32)).to(tl.int64)
        log_total = tl.where(total_weight > 0.0, top + tl.log2(divisor), float("-inf"))
        tl.store(log_sum + part * G + member, log_total, mask=member < G)
        tl.store(mixed + part * (G * D) + member[:, None] * D + channel[None, :], mix, mask=in_group)


@triton.jit
@no_type_check
def arrive(
    mixed,
    log_sum,
    arrivals,
    target,
    out_per_member,
    begins,
    tiles,
    share,
    channel,
    G: tl.constexpr,
    D: tl.constexpr,
    ADDED_G: tl.constexpr,
    LANES_D: tl.constexpr,
):
    """Say that all threads have stored this program's part of a pair. The program that says so last adds up the parts."""
    # Only one pair goes on from a program to the next, so the program that it begins in stands for it.
    first = begins // share
    parts = (begins + tiles - 1) // share - first + 1
    if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == parts - 1:
        add_up(mixed, log_sum, first, parts, target, out_per_member, channel, G, D, ADDED_G, LANES_D)
        tl.store(arrivals + first, 0)


@triton.jit
@no_type_check
def clear_idle(
    read_before,
    out,
    requests,
    out_per_request,
    out_per_head,
    out_per_member,
    member,
    channel,
    in_group,
    HEADS: tl.constexpr,
    LANES_G: tl.constexpr,
    LANES_D: tl.constexpr,
):
    """A request that reads nothing, as padding rows do, is in nobody's stretch: its attention is 0."""
    for row in range(tl.program_id(0), requests, tl.num_programs(0)):
        if tl.load(read_before + row) == tl.load(read_before + row + 1):
            zeros = tl.zeros([LANES_G, LANES_D], out.dtype.element_ty)
            for head in range(HEADS):
                target = out + tl.cast(row, tl.int64) * out_per_request + head * out_per_head
                tl.store(target + member[:, None] * out_per_member + channel[None, :], zeros, mask=in_group)


@triton.jit
@no_type_check
def add_up(
    mixed,
    log_sum,
    first,
    parts,
    target,
    out_per_member,
    channel,
    G: tl.constexpr,
    D: tl.constexpr,
    ADDED_G: tl.constexpr,
    LANES_D: tl.constexpr,
):
    """The attention of a pair that begins in program `first`, from its parts. Whichever program adds them up, they are taken
    in their order."""
    member = tl.arange(0, ADDED_G)
    in_group = (member < G)[:, None] & (channel < D)[None, :]
    top = tl.full([ADDED_G], float("-inf"), tl.float32)
    total_weight = tl.zeros([ADDED_G], tl.float32)
    result = tl.zeros([ADDED_G, LANES_D], tl.float32)
    for part in range(0, parts, 4):
        # Loaded together: a program waits once for four of them.
        log_0, mixed_0 = _part(mixed, log_sum, first, part, parts, member, channel, in_group, G, D)
        log_1, mixed_1 = _part(mixed, log_sum, first, part + 1, parts, member, channel, in_group, G, D)
        log_2, mixed_2 = _part(mixed, log_sum, first, part + 2, parts, member, channel, in_group, G, D)
        log_3, mixed_3 = _part(mixed, log_sum, first, part + 3, parts, member, channel, in_group, G, D)
        top, total_weight, result = joined(
            top, total_weight, result, log_0, log_1, log_2, log_3, mixed_0, mixed_1, mixed_2, mixed_3
        )
    result = result / tl.where(total_weight > 0.0, total_weight, 1.0)[:, None]
    tl.store(target + member[:, None] * out_per_member + channel[None, :], result.to(target.dtype.element_ty), in_group)


@triton.jit
@no_type_check
def _part(mixed, log_sum, first, part, parts, member, channel, in_group, G: tl.constexpr, D: tl.constexpr):
    """What a program left of the pair, where it left it: see `end_pair`."""
    row = (2 * (first + part) + tl.where(part == 0, 1, 0)).to(tl.int64)
    return stored(mixed, log_sum, row, part < parts, member, channel, in_group, G, D)


@triton.jit
@no_type_check
def stored(mixed, log_sum, row, there, member, channel, in_group, G: tl.constexpr, D: tl.constexpr):
    """Logarithms of a part's softmax sums, and what it mixed; of one that is not there, what adds nothing. Other programs
    wrote it: it is read past this multiprocessor's own cache."""
    log_weight = tl.load(
        log_sum + row * G + member, mask=(member < G) & there, other=float("-inf"), cache_modifier=".cg"
    )
    its_mixed = tl.load(
        mixed + row * (G * D) + member[:, None] * D + channel[None, :],
        mask=in_group & there,
        other=0.0,
        cache_modifier=".cg",
    )
    return log_weight, its_mixed


@triton.jit
@no_type_check
def joined(top, total_weight, mix, log_0, log_1, log_2, log_3, mixed_0, mixed_1, mixed_2, mixed_3):
    """A running softmax with four more parts."""
    new_top = tl.maximum(tl.maximum(tl.maximum(log_0, log_1), tl.maximum(log_2, log_3)), top)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - anchor)
    weight_0, weight_1 = tl.exp2(log_0 - anchor), tl.exp2(log_1 - anchor)
    weight_2, weight_3 = tl.exp2(log_2 - anchor), tl.exp2(log_3 - anchor)
    total_weight = total_weight * shrink + ((weight_0 + weight_1) + (weight_2 + weight_3))
    mix = mix * shrink[:, None] + (
        (mixed_0 * weight_0[:, None] + mixed_1 * weight_1[:, None])
        + (mixed_2 * weight_2[:, None] + mixed_3 * weight_3[:, None])
    )
    return new_top, total_weight, mix
