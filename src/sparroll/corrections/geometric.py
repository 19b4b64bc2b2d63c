"""Geometric mask: a response stays if the geometric mean of its ratios is near 1, at any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, drop_outside, geometric_mean


@dataclass(frozen=True)
class Geometric:
    """w = 1 where exp(mean log(p_dense / p_sparse)) lies inside [weight_min, weight_max], ends included; else the
    response is dropped. The mean is only a test: it is no importance weight, so nothing is multiplied by it."""

    weight_min: float = 0.9
    """Smallest mean ratio that is kept. The published interval of 0.99 to 1.01 is for numerical noise between two
    engines. Sparse rollouts are further away, and these defaults are a first guess for them."""
    weight_max: float = 1.1
    """Largest mean ratio that is kept."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        return drop_outside(ratio, geometric_mean, self.weight_min, self.weight_max, weighted=False)
