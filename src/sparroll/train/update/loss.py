"""The clipped policy loss with the correction outside the clip, as a sum over one micro batch. No model, no optimizer.

There are three policies: `sparse` sampled the tokens, `dense` has the same weights with full attention, and `now` is
being updated. The PPO ratio is now/dense. The gap between dense and sparse is left to the correction, whose weight only
scales the loss of a token.
"""

# B rollouts of a micro batch, T response tokens (right-padded)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.corrections.base import LOG_RATIO_CLAMP, exponential

_LEAST_REST = 1e-6


@dataclass(frozen=True)
class LossSettings:
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0


@dataclass
class LossSums:
    """Sums over kept tokens. Those of micro batches and ranks add up to the sums of one big batch; `ratio_max` is a
    maximum."""

    loss: float = 0.0
    tokens: float = 0.0
    ratio: float = 0.0
    weight: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    ratio_max: float = 0.0

    def add(self, other: LossSums) -> None:
        for name in ("loss", "tokens", "ratio", "weight", "clipped", "kl"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ratio_max = max(self.ratio_max, other.ratio_max)


def policy_loss(
    now_logp_BT: Tensor,
    dense_logp_BT: Tensor,
    advantage_B: Tensor,
    weights_BT: Tensor,
    kept_BT: Tensor,
    kept_tokens: int,
    settings: LossSettings,
    reference_logp_BT: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """This micro batch's part of the token-mean loss: its sum over kept tokens, divided by `kept_tokens`.

    `kept_tokens` counts the kept tokens of the whole step: those of all micro batches and ranks, and of groups that are
    skipped because their advantages are zero. So the parts of all micro batches and ranks add up to the mean. -> (loss
    with gradient, sums for the metrics)
    """
    # A token with dense probability 0 (-inf) has no ratio: it counts as a token and moves nothing.
    kept_BT, counted_tokens = kept_BT & torch.isfinite(dense_logp_BT), float(kept_BT.sum())
    log_ratio_BT = (now_logp_BT - dense_logp_BT).masked_fill(~kept_BT, 0.0)
    ratio_BT = exponential(log_ratio_BT)
    clipped_BT = ratio_BT.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    advantage_B1 = advantage_B[:, None].to(ratio_BT.dtype)
    plain_BT, bounded_BT = ratio_BT * advantage_B1, clipped_BT * advantage_B1
    token_loss_BT = -weights_BT.to(ratio_BT.dtype) * torch.minimum(plain_BT, bounded_BT)
    kl_BT = torch.zeros_like(token_loss_BT)
    if reference_logp_BT is not None:
        kl_BT = k3(now_logp_BT, reference_logp_BT, kept_BT)
        token_loss_BT = token_loss_BT + settings.kl_coefficient * kl_BT
    loss = token_loss_BT.masked_fill(~kept_BT, 0.0).sum() / max(kept_tokens, 1)
    with torch.no_grad():
        kept_ratio = ratio_BT[kept_BT]
        sums = LossSums(
            loss=float(loss.detach()),
            tokens=counted_tokens,
            ratio=float(kept_ratio.sum()),
            weight=float(weights_BT[kept_BT].sum()),
            clipped=float(((bounded_BT < plain_BT) & kept_BT).sum()),
            kl=float(kl_BT.sum()),
            ratio_max=float(kept_ratio.max()) if kept_ratio.numel() else 0.0,
        )
    return loss, sums


def k3(now_logp_BT: Tensor, reference_logp_BT: Tensor, kept_BT: Tensor) -> Tensor:
    """Low-variance estimate of KL(now || reference) per token, never negative: r - log r - 1 with r = reference/now. A
    token more than LOG_RATIO_CLAMP nats below the reference counts as one at that distance and moves nothing."""
    log_ratio_BT = (reference_logp_BT - now_logp_BT).masked_fill(~kept_BT, 0.0).clamp(max=LOG_RATIO_CLAMP)
    return exponential(log_ratio_BT) - log_ratio_BT - 1.0


def top_k_kl(dense_logp_NK: Tensor, now_logp_NK: Tensor) -> Tensor:
    """[N] KL(dense || now) over the dense policy's K most likely tokens and one bucket for all others. It is never
    negative and at most the KL of the whole distributions. Both arguments are for the same tokens; the first has no
    gradient."""
    dense_NK, now_NK = dense_logp_NK.exp(), now_logp_NK.exp()
    listed_NK = dense_NK * (dense_logp_NK.masked_fill(dense_NK == 0, 0.0) - now_logp_NK).masked_fill(dense_NK == 0, 0.0)
    # A smaller rest is only the rounding error of the sum.
    rest_dense_N, rest_now_N = ((1.0 - mass_NK.sum(-1)).clamp_min(_LEAST_REST) for mass_NK in (dense_NK, now_NK))
    return listed_NK.sum(-1) + rest_dense_N * (rest_dense_N.log() - rest_now_N.log())
