"""What all corrections share: checked log ratios, levels (whether a weight belongs to a token or a rollout), actions
(what happens to extreme weights), and the metrics. Any level can be combined with any action. Nothing here knows the
loss."""

# B rollouts, T response tokens (right-padded), G = T for token-level weights and 1 for sequence-level ones

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch.acceptance import check_logp
from sparroll.types import NowWeights, StepReport, check_tensors

LOG_RATIO_CLAMP = 20.0
"""Largest |log ratio| that is ever exponentiated. Comparisons use the raw log ratio."""


@dataclass
class CorrectionResult:
    """The weights that the loss is multiplied by, and what it leaves out.

    >>> result = correction("icepop")(dense_logp=dense_logp_BT, sparse_logp=sparse_logp_BT, mask=mask_BT)
    >>> loss = -(result.weights * surrogate_BT)[result.kept(mask_BT)].sum() / result.kept(mask_BT).sum()
    """

    weights: Tensor
    """[B, T], no gradient; 0 on padding and on everything dropped."""
    keep: Tensor
    """[B, T] or [B] bool: the tokens or rollouts that stay in the loss. Those that are dropped leave the numerator and
    the denominator, which counts kept tokens. A kept token of weight 0 leaves only the numerator."""
    metrics: StepReport = field(default_factory=dict)
    now_weights: NowWeights | None = None
    """Set where weights depend on the policy being updated. It then takes the place of `weights` at each update."""

    def kept(self, mask: Tensor) -> Tensor:
        """[B, T] bool: response tokens that stay in the loss, whichever shape `keep` has."""
        return mask.bool() & (self.keep if self.keep.dim() == 2 else self.keep[:, None])


class Correction(Protocol):
    """Turns the difference between the dense and the sparse policy into weights, and says which tokens to keep."""

    needs: ClassVar[tuple[str, ...]]
    """Arguments that it needs in addition to the three below. `check_needs` refuses a run that cannot provide them."""

    def __call__(self, *, dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> CorrectionResult: ...


@dataclass(frozen=True)
class LogRatio:
    """log(p_dense / p_sparse) of the sampled tokens, checked. It is -inf where the dense policy gives the token
    probability 0."""

    values_BT: Tensor
    """Raw, never clamped; 0 on padding."""
    mask_BT: Tensor

    @staticmethod
    @torch.no_grad()
    def of(dense_logp: Tensor, sparse_logp: Tensor, mask: Tensor) -> LogRatio:
        """Raises UserError for unequal shapes, NaN, values above 0, and a sampled token to which the sparse policy
        gives probability 0."""
        check_tensors(dense_logp=dense_logp, sparse_logp=sparse_logp, mask=mask)
        if not dense_logp.shape == sparse_logp.shape == mask.shape or mask.dim() != 2:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (dense_logp, sparse_logp, mask))
            raise UserError(
                f"dense_logp, sparse_logp and mask must have one shape [B, T], got {shapes}",
                "pad all responses to one length, with a mask that is 0 on padding; one response alone is [1, T]",
            )
        mask_BT = mask.bool()
        dtype = torch.promote_types(torch.promote_types(dense_logp.dtype, sparse_logp.dtype), torch.float32)
        dense_BT = dense_logp.detach().to(dtype).masked_fill(~mask_BT, 0.0)
        sparse_BT = sparse_logp.detach().to(dtype).masked_fill(~mask_BT, 0.0)
        check_tokens(dense_BT, "dense_logp")
        check_tokens(sparse_BT, "sparse_logp")
        _refuse(torch.isneginf(sparse_BT), "sparse_logp is -inf on a sampled token")
        return LogRatio(dense_BT - sparse_BT, mask_BT)


def check_tokens(logp_BT: Tensor, name: str) -> None:
    """Raise UserError where a log-probability is NaN or above 0; -inf is allowed."""
    _refuse(torch.isnan(logp_BT) | torch.isposinf(logp_BT), f"{name} is NaN or +inf")
    check_logp(logp_BT, name)


def _refuse(bad_BT: Tensor, what: str) -> None:
    if bad_BT.any():
        row, token = (int(index) for index in bad_BT.nonzero()[0])
        raise UserError(
            f"{what} (rollout {row}, token {token}; {int(bad_BT.sum())} in all)",
            "the engine or the trainer computed broken log-probabilities; check the weights for NaN",
        )


# -- levels: log ratio -> the log of what one weight stands for ----------------------------------------------------------

Level = Callable[[LogRatio], Tensor]
"""-> [B, G]: G = T where each token has its own weight, 1 where a whole rollout has one."""


def per_token(ratio: LogRatio) -> Tensor:
    """Each token's own ratio."""
    return ratio.values_BT


def per_sequence(ratio: LogRatio) -> Tensor:
    """The product of a rollout's ratios. Log ratios are summed in fp64, because there are thousands of tokens; the ends of
    an interval are met as exactly as the log-probabilities themselves are known."""
    return ratio.values_BT.sum(dim=1, keepdim=True, dtype=torch.float64)


def geometric_mean(ratio: LogRatio) -> Tensor:
    """The geometric mean of a rollout's ratios, which has the same scale at any length."""
    return per_sequence(ratio) / ratio.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


LEVELS: dict[str, Level] = {"token": per_token, "sequence": per_sequence, "geometric": geometric_mean}


# -- actions: extreme weights -> result ----------------------------------------------------------------------------------


def as_is(ratio: LogRatio, level: Level) -> CorrectionResult:
    """The weight is used as it is, however large; nothing is dropped."""
    return truncate(ratio, level, None)


def truncate(ratio: LogRatio, level: Level, weight_max: float | None) -> CorrectionResult:
    """min(weight, weight_max); nothing is dropped. weight_max None: no weight is truncated."""
    log_weight_BG = level(ratio)
    weight_BG = exponential(log_weight_BG)
    cut_BG = torch.zeros_like(weight_BG, dtype=torch.bool)
    if weight_max is not None:
        cut_BG = log_weight_BG > log(weight_max)
        weight_BG = weight_BG.clamp(max=weight_max)
    return result(ratio, log_weight_BG, weight_BG, torch.ones_like(cut_BG), cut_BG)


def drop_outside(
    ratio: LogRatio, level: Level, weight_min: float, weight_max: float, weighted: bool = True
) -> CorrectionResult:
    """A token (or rollout) whose weight is outside of [weight_min, weight_max] is dropped; the ends are inside. Inside
    it keeps its weight, or has weight 1 where the interval is only a test (`weighted` false)."""
    log_weight_BG = level(ratio)
    weight_BG = exponential(log_weight_BG) if weighted else torch.ones_like(log_weight_BG)
    keep_BG = inside(log_weight_BG, weight_min, weight_max)
    return result(ratio, log_weight_BG, weight_BG, keep_BG, torch.zeros_like(keep_BG))


def inside(log_weight: Tensor, weight_min: float, weight_max: float) -> Tensor:
    return (log_weight >= log(weight_min)) & (log_weight <= log(weight_max))


def exponential(log_weight: Tensor) -> Tensor:
    """exp of the log ratio clamped to +-LOG_RATIO_CLAMP; exactly 0 for -inf."""
    weight = log_weight.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return weight.masked_fill(torch.isneginf(log_weight), 0.0)


def log(weight: float) -> float:
    return math.log(weight) if weight > 0 else -math.inf


# -- the result and its metrics ------------------------------------------------------------------------------------------


def result(
    ratio: LogRatio, log_weight_BG: Tensor, weight_BG: Tensor, keep_BG: Tensor, cut_BG: Tensor
) -> CorrectionResult:
    """Weights on kept response tokens and zero elsewhere, with the metrics that every correction reports.

    `log_weight_BG` is what the weights were made from; the metrics that end in _before use it. Each argument may have a
    different G.
    """
    mask_BT = ratio.mask_BT
    kept_BT = mask_BT & keep_BG
    weights_BT = weight_BG.to(ratio.values_BT.dtype).expand_as(mask_BT).masked_fill(~kept_BT, 0.0)
    keep = kept_BT if keep_BG.shape == mask_BT.shape else keep_BG[:, 0]
    return CorrectionResult(weights_BT, keep, metrics(ratio, log_weight_BG, weights_BT, kept_BT, mask_BT & cut_BG))


def metrics(ratio: LogRatio, log_weight_BG: Tensor, weights_BT: Tensor, kept_BT: Tensor, cut_BT: Tensor) -> StepReport:
    """Metrics of the weights of kept tokens and, under names that end in _before, of the weights of all response tokens
    before anything was truncated, dropped or normalised. Shares are of all response tokens, or of all rollouts with a
    response."""
    mask_BT = ratio.mask_BT
    tokens = max(int(mask_BT.sum()), 1)
    clamped_BG = torch.isfinite(log_weight_BG) & (log_weight_BG.abs() > LOG_RATIO_CLAMP)
    after = _weight_metrics(weights_BT[kept_BT], tokens)
    before = _weight_metrics(exponential(log_weight_BG).expand_as(mask_BT)[mask_BT], tokens)
    return {
        **{f"correction/{name}": value for name, value in after.items()},
        **{f"correction/{name}_before": value for name, value in before.items()},
        "correction/truncated_share": int(cut_BT.sum()) / tokens,
        "correction/truncated_sequence_share": share_of_rollouts(ratio, cut_BT.any(dim=1)),
        "correction/masked_token_share": int((mask_BT & ~kept_BT).sum()) / tokens,
        "correction/masked_sequence_share": share_of_rollouts(ratio, ~kept_BT.any(dim=1)),
        "correction/clamped_share": int((mask_BT & clamped_BG).sum()) / tokens,
    }


def share_of_rollouts(ratio: LogRatio, which_B: Tensor) -> float:
    """The share of these rollouts among those that have a response token."""
    written_B = ratio.mask_BT.any(dim=1)
    return int((written_B & which_B).sum()) / max(int(written_B.sum()), 1)


def _weight_metrics(weight_N: Tensor, tokens: int) -> StepReport:
    weight_N = weight_N.double()
    squares = float((weight_N**2).sum())
    effective = float(weight_N.sum()) ** 2 / squares if squares else 0.0
    return {
        "weight_mean": float(weight_N.mean()) if weight_N.numel() else 0.0,
        "weight_max": float(weight_N.max()) if weight_N.numel() else 0.0,
        "effective_sample_size": effective,
        "effective_sample_share": effective / tokens,
    }
