"""Page means in few bits: a channel takes 8 to 1 bits where page_mean has 16, so smaller units become affordable. This
file defines the row format and the score; the kernels write and read the same bytes, and compute the same scores."""

# R requests, Q query positions, H kv heads, G query heads per kv head, U units, D head dimension, W index row width

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.row_bytes import (
    SCALE_BYTES,
    as_bytes,
    from_fp8,
    largest_channel,
    mean_in_order,
    scale_in,
    to_fp8,
)
from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError
from sparroll.types import is_whole

MOST_UNIT_TOKENS = 16
FIXED_MOST = 2047
"""Largest value in the fixed-point copy of a row. The sum of 512 squares then fits int32, and the order of an integer
sum does not matter."""
QUERY_MOST = 127
"""Largest magnitude of a query's channel in whole numbers."""
STEP_PER_RMS = {4: 0.3352, 2: 0.9957, 1: 1.5958}
"""Distance between neighbouring levels with the least error for a Gaussian (Max, 1960), in units of its root mean
square."""


@dataclass(frozen=True)
class QuantizedMean(Selector):
    """Scored like page_mean, below 8 bits with a rounded query; a row is the mean's channels in `bits` bits each and
    one scale.

    Row: channel c in bits c * bits and up, low bits first, then zeros up to whole 4 bytes; the scale as little-endian
    fp32; zeros up to `row_align`. At 8 bits a channel is e4m3 and means itself times the scale. Below, a channel n
    means the level 2 n + 1 - 2 ** bits times the scale, which keeps the row's norm. In a block of a paged cache, the
    channels of all units of a head come first, and their scales behind them (`cut_at`).

    Score at 8 bits: the group's mean query times the mean that the row stands for, in fp32. Below, it is defined to the
    last bit, so that everything that scores a unit chooses the same ones:

    - The mean query: fp32, the group's heads added in their order, times 1 / G.
    - The query in whole numbers: each channel times (127 / largest), rounded to the nearest, halves to the even one;
      `largest` is the mean query's largest magnitude, and at least 2 ** -100, so that a query of zeros becomes zeros
      and scores 0 everywhere. One scale for each KV head: largest * (1 / 127). Where the mean query holds an infinity
      or a NaN, all its scores are NaN.
    - The score: the sum over channels of whole number times level, which is exact; as fp32, times the scale of the
      unit, times the scale of the query, in this order.

    What a remainder estimates below 8 bits (`estimated_products`) is the same with each query head's own query in whole
    numbers, rounded as the mean query is.
    """

    kind = "quantized_mean"
    no_remainder = ""
    index_dtype: ClassVar[torch.dtype] = torch.uint8

    bits: int = 8
    """Bits per channel: 8 (fp8, e4m3), 4, 2 or 1. Index bytes per byte of bf16 K and V: a little over bits / (32 *
    unit)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.bits) or self.bits not in (8, 4, 2, 1):
            raise UserError(f"bits must be 8, 4, 2 or 1, got {self.bits!r}")
        if self.page_tokens > MOST_UNIT_TOKENS:
            raise UserError(
                f"quantized_mean takes pages of up to {MOST_UNIT_TOKENS} tokens, got {self.page_tokens}",
                "few bits are meant for small pages: 4 tokens at 4 bits read what page_mean reads at 16",
            )

    @property
    def row_align(self) -> int:
        """Rows are padded to a multiple of this many bytes: of whole words, at 8 bits of the 16 bytes that a thread
        loads at a time, and of the unit, because some caches spread a row over the unit's tokens."""
        return math.lcm(16 if self.bits == 8 else 4, self.unit_tokens)

    def scale_at(self, head_dim: int) -> int:
        """The byte of a row at which its scale begins."""
        return -(-head_dim * self.bits // 32) * 4

    def index_width(self, head_dim: int) -> int:
        return -(-(self.scale_at(head_dim) + SCALE_BYTES) // self.row_align) * self.row_align

    def cut_at(self, head_dim: int) -> int:
        # Scales between the channels would leave these unaligned.
        return self.index_width(head_dim) if self.bits == 8 else self.scale_at(head_dim)

    def build_index(self, keys: Tensor) -> Tensor:
        mean = mean_in_order(keys.detach())
        codes, scale = to_fp8(mean) if self.bits == 8 else _levels(mean, self.bits)
        row = torch.cat([_packed(codes, self.bits, self.scale_at(keys.shape[-1])), as_bytes(scale)], dim=-1)
        return F.pad(row, (0, self.index_width(keys.shape[-1]) - row.shape[-1]))

    def means(self, index: Tensor, head_dim: int) -> Tensor:
        """The means that rows [..., W] stand for: [..., D] float32."""
        if self.bits == 8:
            return from_fp8(index[..., :head_dim], self._scale(index, head_dim))
        return self.levels(index, head_dim) * self._scale(index, head_dim)

    def levels(self, index: Tensor, head_dim: int) -> Tensor:
        """Below 8 bits: the odd whole numbers that the channels of rows [..., W] stand for: [..., D] float32."""
        first_bits = torch.arange(0, 8, self.bits, device=index.device)
        codes = index[..., : self.scale_at(head_dim), None].int() >> first_bits & 2**self.bits - 1
        return (2 * codes.flatten(-2)[..., :head_dim] + 1 - 2**self.bits).float()

    def mean_keys(self, index: Tensor, head_dim: int) -> Tensor:
        return self.means(index, head_dim)

    @property
    def weighed_with_scores(self) -> bool:
        return self.bits < 8

    def estimated_products(self, query: Tensor, index: Tensor) -> Tensor:
        """Below 8 bits of the query in whole numbers; its gradient is that of the query itself (straight through)."""
        if self.bits == 8:
            return super().estimated_products(query, index)
        codes, query_scale = in_whole_numbers(query.detach().float())
        # Exact, as in `score`.
        with torch.autocast(query.device.type, enabled=False):
            whole = torch.einsum("rqhgd,rhud->rqhgu", codes, self.levels(index, query.shape[-1]))
        products = whole * self._scale(index, query.shape[-1])[..., 0][:, None, :, None] * query_scale
        if torch.is_grad_enabled() and query.requires_grad:
            smooth = super().estimated_products(query, index)
            products = products + (smooth - smooth.detach())
        return products

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        dim = query.shape[-1]
        if self.bits == 8:
            return torch.einsum("rqhd,rhud->rqhu", query.float().mean(3), self.means(index, dim))
        codes, query_scale = rounded_query(query)
        # Every product and every sum is a whole number below 2 ** 24, so no order of adding them rounds.
        with torch.autocast(query.device.type, enabled=False):
            whole = torch.einsum("rqhd,rhud->rqhu", codes, self.levels(index, dim))
        return whole * self._scale(index, dim)[..., 0][:, None] * query_scale

    def _scale(self, index: Tensor, head_dim: int) -> Tensor:
        return scale_in(index, self.scale_at(head_dim))


def rounded_query(query: Tensor) -> tuple[Tensor, Tensor]:
    """query [..., G, D] -> the group's mean in whole numbers [..., D], and its scale [..., 1]; see QuantizedMean."""
    return in_whole_numbers(mean_in_order(query))


def in_whole_numbers(vector: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., D] -> its channels in whole numbers -127..127 [..., D], and their scale [..., 1], both float32; see
    QuantizedMean."""
    largest = largest_channel(vector)
    codes = (vector * (torch.full_like(largest, QUERY_MOST) / largest)).round()
    return torch.where(largest.isfinite(), codes, 0.0), largest * (1 / QUERY_MOST)


def _levels(mean: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The codes, and the scale with which the levels have the norm of the row."""
    # Divided by Python numbers as row_bytes says.
    largest = largest_channel(mean)
    fixed = (mean / largest * FIXED_MOST).int()
    squares = fixed.square().sum(-1, keepdim=True, dtype=torch.int32).float()
    step = (_sqrt(squares * (1 / mean.shape[-1])) * STEP_PER_RMS[bits]).clamp_min(1.0)
    codes = (fixed / step).floor().int().add(2 ** (bits - 1)).clamp(0, 2**bits - 1)
    of_levels = (2 * codes + 1 - 2**bits).square().sum(-1, keepdim=True, dtype=torch.int32).float()
    return codes.to(torch.uint8), _sqrt(squares / of_levels) * (largest * (1 / FIXED_MOST))


def _sqrt(value: Tensor) -> Tensor:
    # The root is taken in fp64, because torch's fp32 root is off by one rounding on some CPUs.
    return value.double().sqrt().float()


def _packed(codes: Tensor, bits: int, into_bytes: int) -> Tensor:
    channels = into_bytes * 8 // bits
    codes = F.pad(codes, (0, channels - codes.shape[-1])).unflatten(-1, (into_bytes, 8 // bits))
    first_bits = torch.arange(0, 8, bits, device=codes.device)
    return (codes.int() << first_bits).sum(-1).to(torch.uint8)
