"""Tiles of the masked attention kernels: their sizes, and jit helpers for their rows and keys. No kernel here."""

# N rows or keys of a tile, D head dimension

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparroll.attention.decode.workspace import ROOMY
from sparroll.attention.masked.unit_bitmap import WORD_POSITIONS


@dataclass(frozen=True)
class MaskedTile:
    """How much a program holds. It changes the speed, and the result only by rounding."""

    rows: int
    """Most rows of queries (positions x group) in a tile."""
    key_lanes: int
    """Keys in a tile; as many whole units as fit, a power of two of them."""
    owned_key_lanes: int
    """The same where a program owns the gradients of its keys: the more of them, the more positions read any."""
    owning_rows: int
    """Most rows of queries that such a program takes at a time."""
    forward_warps: int
    forward_stages: int
    query_warps: int
    query_stages: int
    key_warps: int
    key_stages: int

    @staticmethod
    def default(dim: int, group: int, element_bytes: int, device: torch.device) -> MaskedTile:
        """A tile that compiles without spilling registers, chosen by the bytes of a row and the query heads of a KV
        head. Devices with less shared memory than an A100 take the next smaller tile."""
        if element_bytes == 4:
            # Without tensor cores, whoever multiplies holds its operands in registers: larger tiles spill kilobytes.
            return MaskedTile(32, 32, 32, 32, 8, 1, 8, 1, 8, 1)
        row_bytes = triton.next_power_of_2(dim) * element_bytes
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
        if capability not in ROOMY:
            row_bytes *= 2
        if row_bytes <= 256:
            # Tiles of 128 rows spill with 4 warps, and those of 64, which smaller groups have, are shared badly by 8.
            warps = 8 if group > 2 else 4
            # Three stages are right where warp groups multiply (wgmma: Hopper, from 64 rows on: two query heads of 32
            # positions). With fewer rows they gave garbage on an H200 (Triton 3.6), so other devices do not get them.
            stages = 3 if capability[0] == 9 and group > 1 else 2
            return MaskedTile(128, 64, 64, 64, warps, stages, warps, 2, 4, 2)
        if row_bytes <= 512:
            return MaskedTile(64, 32, 32, 64, 4, 2, 4, 1, 8, 1)
        return MaskedTile(32, 32, 32, 32, 4, 1, 4, 1, 8, 1)


@dataclass(frozen=True)
class Layout:
    """Sizes that a kernel is compiled for."""

    unit: int
    tile_units: int
    key_lanes: int
    group: int
    lanes_g: int
    dim: int
    lanes_d: int
    positions: int
    """Positions of a tile: a power of two, at most those of a word."""

    @staticmethod
    def of(query: Tensor, heads: int, unit: int, rows: int, most_key_lanes: int) -> Layout:
        group, dim = query.shape[1] // heads, query.shape[-1]
        lanes_g = triton.next_power_of_2(group)
        fits = max(1, most_key_lanes // unit)
        tile_units = min(1 << (fits.bit_length() - 1), WORD_POSITIONS)
        return Layout(
            unit=unit,
            tile_units=tile_units,
            key_lanes=max(16, triton.next_power_of_2(tile_units * unit)),
            group=group,
            lanes_g=lanes_g,
            dim=dim,
            lanes_d=max(16, triton.next_power_of_2(dim)),
            positions=max(1, min(WORD_POSITIONS, rows // lanes_g)),
        )

    def constants(self) -> dict[str, int]:
        return {
            "UNIT": self.unit, "TILE_UNITS": self.tile_units, "LANES_N": self.key_lanes, "G": self.group,
            "LANES_G": self.lanes_g, "D": self.dim, "LANES_D": self.lanes_d, "POSITIONS": self.positions,
        }  # fmt: skip


def rows_contiguous(given: Tensor) -> Tensor:
    return given if given.stride(-1) == 1 or given.shape[-1] == 1 else given.contiguous()


@triton.jit
@no_type_check
def rows_of(
    tile, tokens,
    G: tl.constexpr,
    LANES_G: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
    POSITIONS: tl.constexpr,
):  # fmt: skip
    """Of each row of the `tile`-th tile: its position, its query head within the group (those of one position are
    neighbours), whether there is such a row, and the last as a mask [N, LANES_D]."""
    row = tl.arange(0, POSITIONS * LANES_G)
    position = tile * POSITIONS + row // LANES_G
    member = row % LANES_G
    channel = tl.arange(0, LANES_D)
    real = (member < G) & (position < tokens)
    return position, member, real, real[:, None] & (channel < D)[None, :]


@triton.jit
@no_type_check
def listed_keys(
    listed, words, begin, count, tokens,
    UNIT: tl.constexpr,
    TILE_UNITS: tl.constexpr,
    LANES_N: tl.constexpr,
    D: tl.constexpr,
    LANES_D: tl.constexpr,
):  # fmt: skip
    """Of each key in the TILE_UNITS units that begin at the place `begin` of a list of `count`: its token, its unit's
    word, and whether there is such a key, as a mask [N, LANES_D]."""
    slot = tl.arange(0, LANES_N)
    column = begin + slot // UNIT
    given = (slot < TILE_UNITS * UNIT) & (column < count)
    unit = tl.load(listed + column, mask=given, other=0)
    word = tl.load(words + unit, mask=given, other=0)
    token = unit * UNIT + slot % UNIT
    channel = tl.arange(0, LANES_D)
    return token, word, (given & (token < tokens))[:, None] & (channel < D)[None, :]


@triton.jit
@no_type_check
def load_rows(start, real, LANES_D: tl.constexpr):
    """[N, LANES_D] from the pointers `start` [N, 1]; 0 where `real` [N, LANES_D] is not."""
    return tl.load(start + tl.arange(0, LANES_D)[None, :], mask=real, other=0.0)


@triton.jit
@no_type_check
def store_rows(start, given, real, LANES_D: tl.constexpr):
    """The [N, LANES_D] `given` to where load_rows reads it."""
    tl.store(start + tl.arange(0, LANES_D)[None, :], given.to(start.dtype.element_ty), mask=real)


@triton.jit
@no_type_check
def reads(position, real, token, word):
    """Whether a row at `position` reads `token`, of whose unit `word` is. Rows lie along one axis, keys along the
    other."""
    return (((word >> (position % 32)) & 1) != 0) & (token <= position) & real
