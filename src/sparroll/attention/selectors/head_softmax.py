"""Page means, scored per query head: the softmax over the competing pages, then the maximum over the group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.attention.selectors.page_mean import PageMean


@dataclass(frozen=True)
class HeadSoftmax(PageMean):
    """The maximum keeps a page that only one head of the group needs, where a mean over heads would drop it."""

    kind = "head_softmax"

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        logits = scale * torch.einsum("rqhgd,rhud->rqhgu", query.float(), index.float())
        logits = logits.masked_fill(~candidates[:, :, :, None], -torch.inf)
        # In a row without candidates the softmax is NaN. Its scores do not count, so any number will do.
        return torch.nan_to_num(logits.softmax(-1), nan=0.0).amax(3)
