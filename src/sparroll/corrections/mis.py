"""Masked importance sampling: responses on which the two policies disagree too much leave the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, drop_outside, per_sequence


@dataclass(frozen=True)
class MIS:
    """w = product of p_dense / p_sparse over the response, on each of its tokens, if it lies inside [weight_min,
    weight_max], ends included; else the response is dropped. Long responses rarely stay inside, so watch
    correction/masked_sequence_share."""

    weight_min: float = 0.5
    """Smallest product that is kept."""
    weight_max: float = 2.0
    """Largest product that is kept."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        return drop_outside(ratio, per_sequence, self.weight_min, self.weight_max)
