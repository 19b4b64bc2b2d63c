"""No correction: every token counts once, as if the sparse policy were the dense one. The baseline that collapses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparroll.corrections.base import CorrectionResult, LogRatio, per_token, result


@dataclass(frozen=True)
class NoCorrection:
    """w_t = 1."""

    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        ones_BT, none_BT = torch.ones_like(ratio.values_BT), torch.zeros_like(ratio.mask_BT)
        return result(ratio, per_token(ratio), ones_BT, ~none_BT, none_BT)
