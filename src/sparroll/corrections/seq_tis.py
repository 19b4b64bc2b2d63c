"""Truncated importance sampling with one weight per response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, per_sequence, truncate


@dataclass(frozen=True)
class SeqTIS:
    """w = min(product of p_dense / p_sparse over the response, weight_max), on each of its tokens. Without the bound
    this is the exact dense policy gradient, with a variance that grows with the length."""

    weight_max: float = 2.0
    """Largest weight of one response. Lower is steadier and more biased; published settings are 2 to 10."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        return truncate(LogRatio.of(dense_logp, sparse_logp, mask), per_sequence, self.weight_max)
