"""Token veto: one token that the dense policy finds all but impossible removes the whole response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, log, per_token, result, share_of_rollouts


@dataclass(frozen=True)
class Veto:
    """w = 1 on responses without a token of p_dense / p_sparse < veto_below; the others are dropped."""

    veto_below: float = 1e-4
    """A ratio strictly below this vetoes its response. A higher value drops more responses; 0 drops none."""
    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        vetoed_B = vetoed(ratio, self.veto_below)
        return with_veto(ratio, torch.ones_like(ratio.values_BT), vetoed_B)


def vetoed(ratio: LogRatio, veto_below: float) -> Tensor:
    """[B] bool: the responses with a ratio below veto_below. Raw ratios count, before anything is truncated or masked;
    a dense log-probability of -inf is a ratio of 0."""
    return ((ratio.values_BT < log(veto_below)) & ratio.mask_BT).any(dim=1)


def with_veto(ratio: LogRatio, weight_BT: Tensor, vetoed_B: Tensor) -> CorrectionResult:
    """The result with these weights on responses that are not vetoed, and with the share of vetoed ones among its
    metrics."""
    cut_BT = torch.zeros_like(ratio.mask_BT)
    made = result(ratio, per_token(ratio), weight_BT, ~vetoed_B[:, None], cut_BT)
    made.metrics["correction/vetoed_sequence_share"] = share_of_rollouts(ratio, vetoed_B)
    return made
