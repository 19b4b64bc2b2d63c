"""IcePop: tokens on which the two policies disagree too much leave the loss, in both directions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, drop_outside, per_token


@dataclass(frozen=True)
class IcePop:
    """w_t = p_dense / p_sparse inside [weight_min, weight_max], ends included; outside, the token is dropped."""

    weight_min: float = 0.5
    """Smallest ratio that is kept. Higher drops more of what the dense policy finds unlikely."""
    weight_max: float = 5.0
    """Largest ratio that is kept. Lower drops more of what the sparse policy found unlikely."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        return drop_outside(ratio, per_token, self.weight_min, self.weight_max)
