"""Numbers in rows of bytes, as the index of quantized_mean and the groups of a remainder hold them: means that do not
depend on what computes them, and e4m3 with one fp32 scale. What a row consists of is defined where it is built."""

# N vectors, D head dimension, W row width

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
FP8_MOST = 448.0
"""Largest finite e4m3."""
LEAST_LARGEST = 2.0**-100
"""A vector of zeros is scaled as if its largest channel were this: any number that is not zero will do."""

# Divisions by a Python number are written as products with its reciprocal: torch divides so on GPUs, but not on CPUs.


def mean_in_order(vectors: Tensor) -> Tensor:
    """[..., N, D] -> [..., D] float32. The vectors are added in order: another order rounds differently, and neither rows
    nor scores must depend on what computes them."""
    total = vectors[..., 0, :].float()
    for number in range(1, vectors.shape[-2]):
        total = total + vectors[..., number, :].float()
    return total * (1 / vectors.shape[-2])


def largest_channel(vector: Tensor) -> Tensor:
    """[..., D] -> [..., 1]: the largest magnitude, at least LEAST_LARGEST."""
    return vector.abs().amax(-1, keepdim=True).clamp_min(LEAST_LARGEST)


def to_fp8(vector: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [..., D] -> its channels as the bytes of e4m3 [..., D], and their scale [..., 1] in float32."""
    scale = largest_channel(vector) * (1 / FP8_MOST)
    return as_bytes((vector / scale).to(torch.float8_e4m3fn)), scale


def from_fp8(channels: Tensor, scale: Tensor) -> Tensor:
    """What `to_fp8` gave, as float32 [..., D]."""
    return channels.contiguous().view(torch.float8_e4m3fn).float() * scale


def scale_in(rows: Tensor, at: int) -> Tensor:
    """The fp32 scale [..., 1] that begins at this byte of rows [..., W]."""
    return rows[..., at : at + SCALE_BYTES].contiguous().view(torch.float32)


def as_bytes(numbers: Tensor) -> Tensor:
    """The little-endian bytes of the last dimension's numbers, uint8."""
    return numbers.contiguous().view(torch.uint8)
