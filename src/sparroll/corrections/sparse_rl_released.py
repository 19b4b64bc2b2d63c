"""Sparse-RL as in its released code: weights are truncated, masked and normalised, in addition to the paper's veto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparroll.corrections.base import (
    CorrectionResult,
    LogRatio,
    exponential,
    inside,
    log,
    per_token,
    result,
    share_of_rollouts,
)
from sparroll.corrections.veto import vetoed


@dataclass(frozen=True)
class SparseRLReleased:
    """w_t = min(p_dense / p_sparse, weight_max) / mean, on tokens with a ratio inside [keep_min, keep_max], ends
    included, of responses without a ratio under veto_below; other tokens are dropped.

    The mean is taken over the kept tokens of one call, so the call must see the whole step. The trainer gathers the
    step's rollouts from all processes before it corrects them; micro batches are cut from the result.
    """

    weight_max: float = 1.5
    """Largest ratio before normalisation. It matters only where keep_max is larger."""
    keep_min: float = 0.5
    """Smallest ratio that is kept."""
    keep_max: float = 1.5
    """Largest ratio that is kept."""
    veto_below: float = 1e-4
    """A ratio strictly below this drops the response, whether or not the token itself is kept."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        vetoed_B = vetoed(ratio, self.veto_below)
        keep_BT = inside(ratio.values_BT, self.keep_min, self.keep_max) & ~vetoed_B[:, None]
        weight_BT = exponential(ratio.values_BT).clamp(max=self.weight_max)
        mean = _mean(weight_BT[keep_BT & ratio.mask_BT])
        cut_BT = (ratio.values_BT > log(self.weight_max)) & keep_BT
        made = result(ratio, per_token(ratio), weight_BT / mean, keep_BT, cut_BT)
        made.metrics["correction/vetoed_sequence_share"] = share_of_rollouts(ratio, vetoed_B)
        made.metrics["correction/weight_mean_normalised_away"] = mean
        return made


def _mean(weight_N: Tensor) -> float:
    """The mean weight, or 1 where no token is kept or all weights are 0, because there is nothing to normalise then."""
    mean = float(weight_N.double().mean()) if weight_N.numel() else 0.0
    return mean or 1.0
