"""The published selector: a page is scored by the group's mean query against the mean of the page's keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector


@dataclass(frozen=True)
class PageMean(Selector):
    """Landmark = mean of the page's keys after RoPE (Sparrow, section 3), accumulated in fp32 and stored in bf16."""

    kind = "page_mean"
    no_remainder = ""

    def index_width(self, head_dim: int) -> int:
        return head_dim

    def build_index(self, keys: Tensor) -> Tensor:
        return keys.float().mean(-2).to(self.index_dtype)

    def mean_keys(self, index: Tensor, head_dim: int) -> Tensor:
        return index.float()

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        return torch.einsum("rqhd,rhud->rqhu", query.float().mean(3), index.float())
