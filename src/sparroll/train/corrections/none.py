"""No correction: every token counts once, as if the sparse policy were the dense one. The baseline that collapses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparroll.train.corrections.base import CorrectionResult, LogRatio, result


@dataclass(frozen=True)
class NoCorrection:
    """w_t = 1."""

    needs: ClassVar[tuple[str, ...]] = ()

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult:
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        return result(
            ratio, torch.ones_like(ratio.values_BT), torch.ones_like(ratio.mask_BT), torch.zeros_like(ratio.mask_BT)
        )
