"""StreamingLLM (arXiv 2309.17453): keep the first tokens, which are attention sinks, and the last ones. Nothing is
scored."""

# R requests, H kv heads, B budget

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.compression.base import Compression


@dataclass(frozen=True)
class StreamingLLM(Compression):
    """Keeps the first `first_tokens` tokens of the context and the last budget_tokens - first_tokens ones.

    The original assigns new, consecutive positions to the tokens that stay. Here they keep their positions, as under
    the other policies: a key stays as it was computed, so eviction is the only difference from dense attention.
    """

    kind = "streaming"

    first_tokens: int = 4
    """Tokens at the start of the context that stay."""

    @property
    def always_kept_tokens(self) -> int:
        return self.first_tokens

    def keep(self, keys: Tensor, queries: Tensor | None, tokens: Tensor, scale: float) -> Tensor:
        slots_B = torch.arange(self.budget_tokens, device=keys.device)
        dropped_R1 = (tokens - self.budget_tokens)[:, None]
        slots_RB = torch.where(slots_B < self.first_tokens, slots_B, slots_B + dropped_R1)
        return slots_RB[:, None].expand(-1, keys.shape[1], -1)
