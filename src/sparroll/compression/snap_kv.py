"""SnapKV (arXiv 2404.14469): keep the tokens that the most recent queries attend to, and their neighbours."""

# R requests, H kv heads, G query heads per kv head, C cache slots, W observed queries

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.compression.base import Scored, observed_attention
from sparroll.errors import UserError


@dataclass(frozen=True)
class SnapKV(Scored):
    """score = attention of the last `window_tokens` queries, summed over them, pooled over neighbouring tokens.

    As in the original, the softmax runs over the whole cache, causally within the window, and positions past either end
    count as 0 in the pooling. Two things differ. The original scores each query head by itself; with grouped queries,
    the heads that share K and V must agree, so their attention is summed as well. The original compresses the prompt
    once; here the cache is compressed again every `every_tokens` steps, as in Sparse-RL.
    """

    kind = "snap_kv"

    pool: Literal["max", "mean"] = "max"
    """How the scores of neighbouring tokens are pooled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool not in ("max", "mean"):
            raise UserError(f"compression 'snap_kv': unknown pool {self.pool!r}", "known: max, mean")

    def score(self, keys: Tensor, queries: Tensor, tokens: Tensor, scale: float) -> Tensor:
        slots_C, order_W = (torch.arange(n, device=keys.device) for n in (keys.shape[2], self.window_tokens))
        oldest_R11 = (tokens - self.window_tokens)[:, None, None]
        visible_RWC = slots_C <= oldest_R11 + order_W[:, None]
        logits_RHGWC = scale * queries @ keys[:, :, None].mT
        attention_RHC = observed_attention(logits_RHGWC, visible_RWC[:, None, None]).sum((2, 3))
        attention_RHC = attention_RHC.masked_fill(slots_C >= oldest_R11, 0.0)
        pool = F.max_pool1d if self.pool == "max" else F.avg_pool1d
        return pool(attention_RHC, self.pool_tokens, stride=1, padding=self.pool_tokens // 2)
