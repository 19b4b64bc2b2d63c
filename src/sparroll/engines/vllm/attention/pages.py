"""Lets FlashAttention 3 read other units for each head: a (request, KV head) pair becomes one sequence with one KV
head, and a page is one unit of one head, addressed inside vLLM's cache by an overlapping view. None of our attention
kernels is used."""

# R requests, H kv heads, N chosen units, S units per block, P blocks, B tokens per block, D head dimension

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE_TOKENS = 16
"""The smallest page that FlashAttention 3 reads; units of other sizes are refused."""


@dataclass(frozen=True)
class HeadPages:
    """Where the unit s of block p and head h starts in the cache: page number p * per_block + s * per_unit + h *
    per_head of a view whose pages lie `step` elements apart."""

    step: int
    per_block: int
    per_unit: int
    per_head: int

    @staticmethod
    def of(keys_PBHD: Tensor) -> HeadPages:
        block, token, head, _ = keys_PBHD.stride()
        step = math.gcd(block, token * PAGE_TOKENS, head)
        return HeadPages(step, block // step, token * PAGE_TOKENS // step, head // step)

    def view(self, held_PBHD: Tensor) -> Tensor:
        """Keys or values as [pages, 16, 1, D]. Pages overlap; only those that `number` gives are units."""
        blocks, block_tokens, heads, dim = held_PBHD.shape
        units = block_tokens // PAGE_TOKENS
        last = (blocks - 1) * self.per_block + (units - 1) * self.per_unit + (heads - 1) * self.per_head
        token = held_PBHD.stride(1)
        return held_PBHD.as_strided((last + 1, PAGE_TOKENS, 1, dim), (self.step, token, token, 1))

    def number(self, pages_RHN: Tensor, units_per_block: int, numbers_RHN: Tensor) -> None:
        """Page numbers of the physical units that `choose_units` wrote; 0 where there is none (-1)."""
        heads = pages_RHN.shape[1]
        heads_H1 = torch.arange(heads, dtype=torch.int32, device=pages_RHN.device)[:, None] * self.per_head
        torch.clamp(pages_RHN, min=0, out=numbers_RHN)
        if units_per_block == 1 or self.per_block == self.per_unit * units_per_block:
            numbers_RHN.mul_(self.per_block // units_per_block)
        else:
            inside_RHN = numbers_RHN.remainder(units_per_block)
            numbers_RHN.floor_divide_(units_per_block).mul_(self.per_block).add_(inside_RHN, alpha=self.per_unit)
        numbers_RHN.add_(heads_H1)
