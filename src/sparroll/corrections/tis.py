"""Truncated importance sampling, token by token (FlashRL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, per_token, truncate


@dataclass(frozen=True)
class TIS:
    """w_t = min(p_dense / p_sparse, weight_max)."""

    weight_max: float = 2.0
    """Largest weight of one token. Lower is steadier and more biased; published settings are 2 to 8."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        return truncate(LogRatio.of(dense_logp, sparse_logp, mask), per_token, self.weight_max)
