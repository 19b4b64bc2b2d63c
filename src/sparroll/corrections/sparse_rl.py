"""Sparse-RL as in its paper: token weights, on responses that no token vetoes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, exponential
from sparroll.corrections.veto import vetoed, with_veto


@dataclass(frozen=True)
class SparseRL:
    """w_t = p_dense / p_sparse, not truncated, on responses without a ratio under veto_below; the others are dropped.

    A healthy correction/vetoed_sequence_share is about 0.07; over 0.15 the KV budget is too small.
    """

    veto_below: float = 1e-4
    """A ratio strictly below this drops the response. A higher value drops more."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        return with_veto(ratio, exponential(ratio.values_BT), vetoed(ratio, self.veto_below))
