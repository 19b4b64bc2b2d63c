"""What every correction shares: checked log ratios, levels (what one weight stands for), actions (what happens to extreme
ones), and the metrics. A correction is one level and one action; nothing here knows the loss."""

# B rollouts, T response tokens (right-padded), G = T for token-level weights and 1 for sequence-level ones

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.types import StepReport

LOG_RATIO_CLAMP = 20.0
"""Largest |log ratio| that is ever exponentiated. Comparisons use the raw log ratio."""


@dataclass
class CorrectionResult:
    """What the loss multiplies by and leaves out.

    >>> result = correction("icepop")(dense_logp=dense_logp_BT, sparse_logp=sparse_logp_BT, mask=mask_BT)
    >>> loss = -(result.weights * surrogate_BT)[result.kept(mask_BT)].sum() / result.kept(mask_BT).sum()
    """

    weights: Tensor
    """[B, T], no gradient; 0 on padding and on everything dropped."""
    keep: Tensor
    """[B, T] or [B] bool: what stays in the loss. Dropped tokens leave its numerator and its denominator."""
    metrics: StepReport = field(default_factory=dict)

    def kept(self, mask: Tensor) -> Tensor:
        """[B, T] bool: response tokens that stay in the loss, whichever shape `keep` has."""
        return mask.bool() & (self.keep if self.keep.dim() == 2 else self.keep[:, None])


class Correction(Protocol):
    """Turns the distance between the dense and the sparse policy into weights and a kept set."""

    needs: ClassVar[tuple[str, ...]]
    """Further arguments it takes beside the three below, so that a missing one is an error before step 1."""

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult: ...


@dataclass(frozen=True)
class LogRatio:
    """log(p_dense / p_sparse) of the sampled tokens, checked. -inf where the dense policy cannot say the token at all."""

    values_BT: Tensor
    """Raw, never clamped; 0 on padding."""
    mask_BT: Tensor

    @staticmethod
    @torch.no_grad()
    def of(dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> LogRatio:
        """Raises UserError on unequal shapes, NaN, +inf, and a sampled token that the sparse policy gives no probability."""
        if not dense_logp.shape == sparse_logp.shape == mask.shape or mask.dim() != 2:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (dense_logp, sparse_logp, mask))
            raise UserError(f"dense_logp, sparse_logp and mask must have one shape [B, T], got {shapes}")
        mask_BT = mask.bool()
        dtype = torch.promote_types(torch.promote_types(dense_logp.dtype, sparse_logp.dtype), torch.float32)
        dense_BT = dense_logp.detach().to(dtype).masked_fill(~mask_BT, 0.0)
        sparse_BT = sparse_logp.detach().to(dtype).masked_fill(~mask_BT, 0.0)
        _refuse(torch.isnan(dense_BT) | torch.isposinf(dense_BT), "dense_logp is NaN or +inf")
        _refuse(torch.isnan(sparse_BT) | torch.isposinf(sparse_BT), "sparse_logp is NaN or +inf")
        _refuse(torch.isneginf(sparse_BT), "sparse_logp is -inf on a sampled token")
        return LogRatio(dense_BT - sparse_BT, mask_BT)


def _refuse(bad_BT: Tensor, what: str) -> None:
    if bad_BT.any():
        row, token = (int(index) for index in bad_BT.nonzero()[0])
        raise UserError(
            f"{what} (rollout {row}, token {token}; {int(bad_BT.sum())} in all)",
            "the engine or the trainer computed broken log-probabilities; check the weights for NaN",
        )


# -- levels: log ratio -> the log of what one weight stands for ----------------------------------------------------------

Level = Callable[[LogRatio], Tensor]
"""-> [B, G]: G = T when each token has its own weight, 1 when a rollout has one."""


def per_token(ratio: LogRatio) -> Tensor:
    return ratio.values_BT


# -- actions: extreme weights -> result ----------------------------------------------------------------------------------


def truncate(ratio: LogRatio, level: Level, weight_max: float | None) -> CorrectionResult:
    """min(weight, weight_max); nothing is dropped. None truncates nothing."""
    log_weight_BG = level(ratio)
    weight_BG = exponential(log_weight_BG)
    cut_BG = torch.zeros_like(weight_BG, dtype=torch.bool)
    if weight_max is not None:
        cut_BG = log_weight_BG > _log(weight_max)
        weight_BG = weight_BG.clamp(max=weight_max)
    return result(ratio, weight_BG, torch.ones_like(cut_BG), cut_BG)


def drop_outside(ratio: LogRatio, level: Level, weight_min: float, weight_max: float) -> CorrectionResult:
    """The weight itself inside [weight_min, weight_max], ends included; outside, the token (or rollout) is dropped."""
    log_weight_BG = level(ratio)
    keep_BG = (log_weight_BG >= _log(weight_min)) & (log_weight_BG <= _log(weight_max))
    return result(ratio, exponential(log_weight_BG), keep_BG, torch.zeros_like(keep_BG))


def exponential(log_weight: Tensor) -> Tensor:
    """exp, clamped to what can be trusted; exactly 0 for -inf."""
    weight = log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return weight.masked_fill(torch.isneginf(log_weight), 0.0)


def _log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


# -- the result and its metrics ------------------------------------------------------------------------------------------


def result(ratio: LogRatio, weight_BG: Tensor, keep_BG: Tensor, cut_BG: Tensor) -> CorrectionResult:
    """Weights on kept response tokens, zero elsewhere, with the metrics that every correction reports."""
    mask_BT = ratio.mask_BT
    kept_BT = mask_BT & keep_BG
    weights_BT = (weight_BG * torch.ones_like(ratio.values_BT)).masked_fill(~kept_BT, 0.0)
    keep = kept_BT if keep_BG.shape == mask_BT.shape else keep_BG[:, 0]
    return CorrectionResult(weights_BT, keep, metrics(ratio, weights_BT, kept_BT, mask_BT & cut_BG))


def metrics(ratio: LogRatio, weights_BT: Tensor, kept_BT: Tensor, cut_BT: Tensor) -> StepReport:
    """Weight mean, max and effective sample share over kept tokens; shares over all response tokens (or rollouts)."""
    mask_BT = ratio.mask_BT
    tokens = max(int(mask_BT.sum()), 1)
    written_B = mask_BT.any(dim=1)
    rollouts = max(int(written_B.sum()), 1)
    kept = weights_BT[kept_BT].double()
    squares = float((kept**2).sum())
    clamped_BT = mask_BT & torch.isfinite(ratio.values_BT) & (ratio.values_BT.abs() > LOG_RATIO_CLAMP)
    return {
        "correction/weight_mean": float(kept.mean()) if kept.numel() else 0.0,
        "correction/weight_max": float(kept.max()) if kept.numel() else 0.0,
        "correction/effective_sample_size": float(kept.sum()) ** 2 / squares if squares else 0.0,
        "correction/effective_sample_share": float(kept.sum()) ** 2 / squares / tokens if squares else 0.0,
        "correction/truncated_share": int(cut_BT.sum()) / tokens,
        "correction/masked_token_share": int((mask_BT & ~kept_BT).sum()) / tokens,
        "correction/masked_sequence_share": int((written_B & ~kept_BT.any(dim=1)).sum()) / rollouts,
        "correction/clamped_share": int(clamped_BT.sum()) / tokens,
    }
