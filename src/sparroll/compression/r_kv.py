"""R-KV (arXiv 2505.24133): keep what the most recent queries attend to, unless later tokens have similar keys."""

# R requests, H kv heads, G query heads per kv head, C cache slots, W observed queries, D head dimension

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.compression.base import Scored, observed_attention
from sparroll.errors import UserError

_SIMILARITY_ELEMENTS = 1 << 25
"""How many similarities (request, head, key, key) exist at a time: about 0.5 GB with the tensors computed from them."""
_NORM_FLOOR = 1e-8


@dataclass(frozen=True)
class RKV(Scored):
    """score = importance_weight * importance - (1 - importance_weight) * redundancy.

    Importance: softmax attention of the last `window_tokens` queries, mean over them, maximum over the query heads of
    the group, max-pooled over neighbouring tokens. Redundancy: mean cosine similarity of a key with all others, softmax
    over tokens. Each key's similarity with the most recent key that resembles it (above `similarity_threshold`) is left
    out, so that the latest of many similar tokens stays.

    Where the paper does not say, this follows the authors' code: the attention's softmax runs over the tokens before
    the window; similarities are taken with all cached tokens, including the window, and averaged over the number of
    tokens. Three things differ from that code. Tokens stay in the order of their positions, so that "neighbouring" and
    "most recent" keep their meaning after the first compression. The maximum over the group is taken of attention
    weights, not of logits. For a key that resembles no other, nothing is left out, where the authors' code leaves out
    its similarity with the first token.
    """

    kind = "r_kv"

    importance_weight: float = 0.1
    """Weight of importance against redundancy, between 0 (redundancy alone) and 1 (importance alone)."""
    similarity_threshold: float = 0.5
    """Cosine similarity above which two keys resemble each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, low in (("importance_weight", 0.0), ("similarity_threshold", -1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= 1:
                raise UserError(f"compression 'r_kv': {name} must lie in {low:g}..1, got {value!r}")

    def score(self, keys: Tensor, queries: Tensor, tokens: Tensor, scale: float) -> Tensor:
        importance_RHC = self.importance(keys, queries, tokens, scale)
        redundancy_RHC = self.redundancy(keys, tokens)
        return self.importance_weight * importance_RHC - (1 - self.importance_weight) * redundancy_RHC

    def importance(self, keys: Tensor, queries: Tensor, tokens: Tensor, scale: float) -> Tensor:
        """[R, H, C] in [0, 1] for the tokens before the window. The arguments are those of `keep`."""
        older_RC = torch.arange(keys.shape[2], device=keys.device) < (tokens - self.window_tokens)[:, None]
        logits_RHGWC = scale * queries @ keys[:, :, None].mT
        attention_RHC = observed_attention(logits_RHGWC, older_RC[:, None, None, None]).mean(3).amax(2)
        return F.max_pool1d(attention_RHC, self.pool_tokens, stride=1, padding=self.pool_tokens // 2)

    def redundancy(self, keys: Tensor, tokens: Tensor) -> Tensor:
        """[R, H, C], summing to 1 over the filled slots: keys [R, H, C, D], tokens [R]."""
        slots_C = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device)
        filled_RC = slots_C < tokens[:, None]
        # Empty slots become the zero vector: it resembles nothing.
        unit_RHCD = keys / keys.norm(dim=-1, keepdim=True).clamp_min(_NORM_FLOOR)
        unit_RHCD = unit_RHCD.masked_fill(~filled_RC[:, None, :, None], 0.0)
        total_RHC = unit_RHCD.new_zeros(keys.shape[:3])
        chunk = max(1, _SIMILARITY_ELEMENTS // math.prod(keys.shape[:3]))
        for rows_N in slots_C.split(chunk):
            similarity_RHNC = unit_RHCD[:, :, rows_N] @ unit_RHCD.mT
            similarity_RHNC.masked_fill_(rows_N[:, None] == slots_C, 0.0)
            alike_RHNC = (similarity_RHNC > self.similarity_threshold) & (rows_N[:, None] != slots_C)
            alike_RHNC &= (filled_RC[:, None, :] & filled_RC[:, rows_N, None])[:, None]
            latest_RHN1 = torch.where(alike_RHNC, slots_C, -1).amax(-1, keepdim=True)
            total_RHC += similarity_RHNC.masked_fill_(latest_RHN1 == slots_C, 0.0).sum(2)
        mean_RHC = total_RHC / tokens[:, None, None]
        return torch.softmax(mean_RHC.masked_fill(~filled_RC[:, None], -torch.inf), dim=-1)
