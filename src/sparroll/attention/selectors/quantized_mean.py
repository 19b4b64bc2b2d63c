"""Page means in few bits: a channel takes 8 to 1 bits where page_mean has 16, so smaller units become affordable. This
file defines the row format; the kernels write and read the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError

SCALE_BYTES = 4
MOST_UNIT_TOKENS = 16
FP8_MOST = 448.0
"""Largest finite e4m3."""
FIXED_MOST = 2047
"""Largest value in the fixed-point copy of a row. The sum of 512 squares then fits int32, and the order of an integer
sum does not matter."""
STEP_PER_RMS = {4: 0.3352, 2: 0.9957, 1: 1.5958}
"""Distance between neighbouring levels with the least error for a Gaussian (Max, 1960), in units of its root mean
square."""


@dataclass(frozen=True)
class QuantizedMean(Selector):
    """Scored like page_mean; a row is the mean's channels in `bits` bits each and one scale.

    Row: channel c in bits c * bits and up, low bits first, then zeros up to whole 4 bytes; the scale as little-endian
    fp32; zeros up to `row_align`. At 8 bits a channel is e4m3 and means itself times the scale. Below, a channel n
    means (2 n + 1 - 2 ** bits) times the scale, which keeps the row's norm.
    """

    kind = "quantized_mean"
    no_remainder = ""
    index_dtype: ClassVar[torch.dtype] = torch.uint8

    bits: int = 8
    """Bits per channel: 8 (fp8, e4m3), 4, 2 or 1. Index bytes per byte of bf16 K and V: a little over bits / (32 *
    unit)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (8, 4, 2, 1) or isinstance(self.bits, bool):
            raise UserError(f"bits must be 8, 4, 2 or 1, got {self.bits!r}")
        if self.page_tokens > MOST_UNIT_TOKENS:
            raise UserError(
                f"quantized_mean takes pages of up to {MOST_UNIT_TOKENS} tokens, got {self.page_tokens}",
                "few bits are meant for small pages: 4 tokens at 4 bits read what page_mean reads at 16",
            )

    @property
    def row_align(self) -> int:
        """Rows are padded to a multiple of this many bytes. It is a multiple of what one thread loads at a time (32
        channels, at most 16 bytes) and of the unit, because some caches spread a row over the unit's tokens."""
        return math.lcm(min(4 * self.bits, 16), self.unit_tokens)

    def scale_at(self, head_dim: int) -> int:
        """The byte of a row at which its scale begins."""
        return -(-head_dim * self.bits // 32) * 4

    def index_width(self, head_dim: int) -> int:
        return -(-(self.scale_at(head_dim) + SCALE_BYTES) // self.row_align) * self.row_align

    def build_index(self, keys: Tensor) -> Tensor:
        mean = _mean(keys.detach())
        codes, scale = _fp8(mean) if self.bits == 8 else _levels(mean, self.bits)
        row = torch.cat([_packed(codes, self.bits, self.scale_at(keys.shape[-1])), _bytes(scale)], dim=-1)
        return F.pad(row, (0, self.index_width(keys.shape[-1]) - row.shape[-1]))

    def means(self, index: Tensor, head_dim: int) -> Tensor:
        """The means that rows [..., W] stand for: [..., D] float32."""
        at = self.scale_at(head_dim)
        scale = index[..., at : at + SCALE_BYTES].contiguous().view(torch.float32)
        if self.bits == 8:
            return index[..., :head_dim].contiguous().view(torch.float8_e4m3fn).float() * scale
        first_bits = torch.arange(0, 8, self.bits, device=index.device)
        codes = index[..., :at, None].int() >> first_bits & 2**self.bits - 1
        return (2 * codes.flatten(-2)[..., :head_dim] + 1 - 2**self.bits).float() * scale

    def mean_keys(self, index: Tensor, head_dim: int) -> Tensor:
        return self.means(index, head_dim)

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        return torch.einsum("rqhd,rhud->rqhu", query.float().mean(3), self.means(index, query.shape[-1]))


# Below, divisions by a Python number are written as products with its reciprocal: torch divides so on GPUs, but not on
# CPUs.


def _mean(keys: Tensor) -> Tensor:
    # Keys are added in the order of the tokens. Another order rounds differently, and rows must not depend on what
    # writes them.
    total = keys[..., 0, :].float()
    for token in range(1, keys.shape[-2]):
        total = total + keys[..., token, :].float()
    return total * (1 / keys.shape[-2])


def _fp8(mean: Tensor) -> tuple[Tensor, Tensor]:
    scale = _largest(mean) * (1 / FP8_MOST)
    return (mean / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale


def _levels(mean: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes, and the scale with which the levels have the norm of the row."""
    largest = _largest(mean)
    fixed = (mean / largest * FIXED_MOST).int()
    squares = fixed.square().sum(-1, keepdim=True, dtype=torch.int32).float()
    step = (_sqrt(squares * (1 / mean.shape[-1])) * STEP_PER_RMS[bits]).clamp_min(1.0)
    codes = (fixed / step).floor().int().add(2 ** (bits - 1)).clamp(0, 2**bits - 1)
    of_levels = (2 * codes + 1 - 2**bits).square().sum(-1, keepdim=True, dtype=torch.int32).float()
    return codes.to(torch.uint8), _sqrt(squares / of_levels) * (largest * (1 / FIXED_MOST))


def _largest(mean: Tensor) -> Tensor:
    # For a row of zeros, any scale that is not zero will do.
    return mean.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)


def _sqrt(value: Tensor) -> Tensor:
    # The root is taken in fp64, because torch's fp32 root is off by one rounding on some CPUs.
    return value.double().sqrt().float()


def _packed(codes: Tensor, bits: int, into_bytes: int) -> Tensor:
    channels = into_bytes * 8 // bits
    codes = F.pad(codes, (0, channels - codes.shape[-1])).unflatten(-1, (into_bytes, 8 // bits))
    first_bits = torch.arange(0, 8, bits, device=codes.device)
    return (codes.int() << first_bits).sum(-1).to(torch.uint8)


def _bytes(scale: Tensor) -> Tensor:
    return scale.contiguous().view(torch.uint8)
