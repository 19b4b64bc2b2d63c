"""An upper bound of each page's largest logit from the channel-wise minimum and maximum of its keys (Quest)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector


@dataclass(frozen=True)
class Quest(Selector):
    """Index = [channel maximum, channel minimum]; score = sum_d max(q_d max_d, q_d min_d), largest over the group."""

    kind = "quest"
    no_remainder = "its rows are bounds of the keys, and a bound of a logit is no estimate of it"

    def index_width(self, head_dim: int) -> int:
        return 2 * head_dim

    def build_index(self, keys: Tensor) -> Tensor:
        return torch.cat([keys.amax(-2), keys.amin(-2)], dim=-1).to(self.index_dtype)

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        highest, lowest = index.float().chunk(2, dim=-1)
        query = query.float()
        bound = torch.einsum("rqhgd,rhud->rqhgu", query.clamp_min(0), highest)
        bound += torch.einsum("rqhgd,rhud->rqhgu", query.clamp_max(0), lowest)
        return bound.amax(3)
