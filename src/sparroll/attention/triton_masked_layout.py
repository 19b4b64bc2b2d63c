"""Tiles of the masked attention kernels. No kernel here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from sparroll.attention.paged import ROOMY
from sparroll.attention.unit_words import WORD_POSITIONS


@dataclass(frozen=True)
class MaskedTile:
    """How much a program holds. Changes the speed, and the result no more than rounding does."""

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
        """What compiles without spilling registers, by the bytes of a row and the query heads of a KV head. Devices with
        less shared memory than an A100 take the next smaller tile."""
        if element_bytes == 4:
            # Without tensor cores, whoever multiplies holds its operands in registers: larger tiles spill kilobytes.
            return MaskedTile(32, 32, 32, 32, 8, 1, 8, 1, 8, 1)
        row_bytes = triton.next_power_of_2(dim) * element_bytes
        if device.type == "cuda" and torch.cuda.get_device_capability(device) not in ROOMY:
            row_bytes *= 2
        if row_bytes <= 256:
            # Tiles of 128 rows spill with 4 warps, and those of 64, which smaller groups have, are shared badly by 8.
            warps = 8 if group > 2 else 4
            return MaskedTile(128, 64, 64, 64, warps, 3, warps, 2, 8, 2)
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
