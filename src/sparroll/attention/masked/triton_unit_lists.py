"""The lists that the masked attention kernels walk: units that any position of a block reads, and blocks in which any
position reads a tile of units. Units that causality rules out are neither looked at nor listed."""

# B sequences, H kv heads, U units, P blocks of 32 positions, K tiles of keys

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512
"""Units that a program looks at together."""
READER_TILE = 256
"""Blocks of positions that a program looks at together, for all units of its tile."""


def units_read(words_BHPU: Tensor, unit_tokens: int) -> tuple[Tensor, Tensor]:
    """int32 [B, H, P, U]: units with any bit in the block's word, in order (entries after them are undefined); [B, H,
    P]: their number."""
    batch, heads, blocks, units = words_BHPU.shape
    listed = torch.empty_like(words_BHPU)
    counts = torch.empty(batch, heads, blocks, dtype=torch.int32, device=words_BHPU.device)
    if listed.numel():
        _list_units[(blocks, batch * heads)](
            words_BHPU, listed, counts, blocks, units, UNIT=unit_tokens, TILE=TILE, num_warps=4
        )
    return listed, counts


def readers_of(words_BHPU: Tensor, unit_tokens: int, tile_units: int) -> tuple[Tensor, Tensor]:
    """int32 [B, H, K, P]: blocks that read any of the tile's units, in order (entries after them are undefined); [B, H,
    K]: their number."""
    batch, heads, blocks, units = words_BHPU.shape
    tiles = triton.cdiv(units, tile_units)
    readers = torch.empty(batch, heads, tiles, blocks, dtype=torch.int32, device=words_BHPU.device)
    counts = torch.empty(batch, heads, tiles, dtype=torch.int32, device=words_BHPU.device)
    if readers.numel():
        _list_readers[(tiles, batch * heads)](
            words_BHPU, readers, counts, blocks, units,
            UNIT=unit_tokens, TILE_UNITS=tile_units, TILE=READER_TILE, num_warps=4,
        )  # fmt: skip
    return readers, counts


@triton.jit(do_not_specialize=["blocks", "units"])
@no_type_check
def _list_units(words, listed, counts, blocks, units, UNIT: tl.constexpr, TILE: tl.constexpr):
    block = tl.program_id(0)
    at = tl.program_id(1).to(tl.int64) * blocks + block
    words += at * units
    listed += at * units
    visible = tl.minimum(units, (block * 32 + 31) // UNIT + 1)
    count = tl.zeros([], tl.int32)
    for begin in range(0, visible, TILE):
        unit = begin + tl.arange(0, TILE)
        word = tl.load(words + unit, mask=unit < visible, other=0)
        flag = (word != 0).to(tl.int32)
        place = count + tl.cumsum(flag, axis=0) - 1
        tl.store(listed + place, unit, mask=flag != 0)
        count += tl.sum(flag, axis=0)
    tl.store(counts + at, count)


@triton.jit(do_not_specialize=["blocks", "units"])
@no_type_check
def _list_readers(
    words, readers, counts, blocks, units, UNIT: tl.constexpr, TILE_UNITS: tl.constexpr, TILE: tl.constexpr
):
    tile = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    at = pair * tl.num_programs(0) + tile
    words += pair * blocks * units
    readers += at * blocks
    count = tl.zeros([], tl.int32)
    for begin in range(tile * TILE_UNITS * UNIT // 32, blocks, TILE):
        block = begin + tl.arange(0, TILE)
        row = words + block.to(tl.int64) * units
        seen = tl.zeros([TILE], tl.int32)
        for unit in tl.static_range(TILE_UNITS):
            there = (block < blocks) & (tile * TILE_UNITS + unit < units)
            seen |= tl.load(row + tile * TILE_UNITS + unit, mask=there, other=0)
        flag = (seen != 0).to(tl.int32)
        place = count + tl.cumsum(flag, axis=0) - 1
        tl.store(readers + place, block, mask=flag != 0)
        count += tl.sum(flag, axis=0)
    tl.store(counts + at, count)
