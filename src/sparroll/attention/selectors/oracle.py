"""Exact scores, for studies of how good selection could be if scoring were free. They read every key, so they save
nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError


@dataclass(frozen=True)
class OraclePage(Selector):
    """A page's score is the attention mass its tokens would get among the competing ones, summed over the group."""

    kind = "oracle_page"
    no_remainder = "its rows are all keys, and with these a step could as well read everything"
    # The index is the keys themselves; rounding them would make the scores inexact.
    index_dtype: ClassVar[torch.dtype] = torch.float32

    def index_width(self, head_dim: int) -> int:
        return self.unit_tokens * head_dim

    def build_index(self, keys: Tensor) -> Tensor:
        return keys.flatten(-2).to(self.index_dtype)

    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        keys = index.unflatten(-1, (self.unit_tokens, -1))
        logits = scale * torch.einsum("rqhgd,rhutd->rqhgut", query.float(), keys)
        logits = logits.masked_fill(~candidates[:, :, :, None, :, None], -torch.inf)
        mass = logits.flatten(-2).softmax(-1).unflatten(-1, logits.shape[-2:]).sum(-1)
        return torch.nan_to_num(mass, nan=0.0).sum(3)


@dataclass(frozen=True)
class OracleToken(OraclePage):
    """The same with units of one token, which bounds what any selector can reach at the same budget."""

    kind = "oracle_token"

    page_tokens: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_tokens != 1:
            raise UserError(
                f"oracle_token selects single tokens, got page_tokens {self.page_tokens}", "use oracle_page"
            )
