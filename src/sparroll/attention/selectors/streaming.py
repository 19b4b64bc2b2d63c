"""No selection: the first tokens and the most recent ones, as many as the budget allows (StreamingLLM's pattern)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector


@dataclass(frozen=True)
class Streaming(Selector):
    """Keeps no index. A later unit scores higher, so the budget beyond the units that are always read extends the
    recent window."""

    kind = "streaming"
    no_remainder = "it keeps no index from which logits could be estimated"

    def index_width(self, head_dim: int) -> int:
        return 0

    def build_index(self, keys: Tensor) -> Tensor:
        return keys[..., 0, :0].to(self.index_dtype)

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        requests, positions, heads = query.shape[:3]
        units = index.shape[2]
        later = torch.arange(units, dtype=torch.float32, device=query.device)
        return later.expand(requests, positions, heads, units)
