"""Jackpot: tokens are kept at random, with probabilities that make the kept ones look as if a policy closer to the
dense one had sampled them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparroll.corrections.accepted_mass import AcceptedMass, TopKLists, accepted_mass
from sparroll.corrections.base import (
    CorrectionResult,
    LogRatio,
    check_tokens,
    exponential,
    log,
    per_token,
    result,
)
from sparroll.errors import UserError
from sparroll.types import NowWeights, check_tensors


@dataclass(frozen=True)
class Jackpot:
    """Optimal budgeted rejection sampling, token by token, with p = p_dense and q = p_sparse (Jackpot, arXiv
    2602.06107).

    A token is kept with probability min(1, p / (scale * q)), so kept tokens are distributed as min(q, p / scale) / Z
    with Z = sum_v min(q_v, p_v / scale). Their weight is min(Z * max(scale, p_now / q), weight_max) * min(p / p_now,
    drift_max). At the first update of a step p_now = p, and untruncated weights lead from that distribution to p. Kept
    tokens and Z stay the same for all updates of a step; p_now changes with each of them. The first factor is meant to
    lead to the policy being updated and the second from there to the dense policy, where the PPO ratio starts. They do
    so only for tokens with p and p_now of at least scale * q, so later updates are biased at any scale that rejects.

    Z comes from top-k lists and is too small by what they leave out. So it is multiplied by (kept share) / (mean Z)
    over the response tokens of one call. The call must see the whole step, as it does in the trainer.
    """

    scale: float = 1.0
    """The paper's lambda. Larger rejects more and leaves the kept tokens closer to the dense policy."""
    weight_max: float = 3.0
    """Largest Z * max(scale, p_now / q), the paper's c1. Lower is steadier and more biased."""
    drift_max: float = 3.0
    """Largest p / p_now, the paper's c2. It has an effect only from the second update on the same rollouts, on tokens
    that the first one made less likely. No published value was found, so the default is that of weight_max."""
    mass: Literal["token", "step"] = "token"
    """token: each token has the Z of its own position. step: all have the share of the step's tokens that was kept, an
    ablation that says what Z is worth."""
    needs: ClassVar[tuple[str, ...]] = ("uniforms", "top_k")

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise UserError(f"correction 'jackpot': scale must be a positive number, got {self.scale!r}")

    def __call__(
        self,
        *,
        dense_logp: Tensor,
        sparse_logp: Tensor,
        mask: Tensor,
        uniforms: Tensor | None = None,
        top_k: TopKLists | AcceptedMass | None = None,
        now_logp: Tensor | None = None,
    ) -> CorrectionResult:
        """uniforms: [B, T] in [0, 1), one draw per token. top_k: lists [B, T, K], or what `accepted_mass` made of them,
        [B, T]. now_logp: [B, T] log-probabilities under the policy being updated; default, those of the dense
        policy."""
        if uniforms is None:
            hint = "pass one draw from [0, 1) a token, e.g. uniforms=torch.rand(mask.shape)"
            raise UserError("correction 'jackpot' needs uniforms, which it was not given", hint)
        if top_k is None:
            hint = "pass top_k=TopKLists(...), the most likely tokens of both policies at each position"
            raise UserError("correction 'jackpot' needs top_k, which it was not given", hint)
        ratio = LogRatio.of(dense_logp, sparse_logp, mask)
        check_tensors(uniforms=uniforms, now_logp=dense_logp if now_logp is None else now_logp)
        mass = self._mass(top_k, ratio.mask_BT)
        _check(ratio, uniforms, mass, now_logp)
        keep_BT = ratio.mask_BT & (uniforms < (ratio.values_BT.double() - math.log(self.scale)).exp())
        if self.mass == "step":
            mass = AcceptedMass(ratio.mask_BT.double(), mass.whole)
        calibration = _calibration(keep_BT, mass, ratio.mask_BT)
        weights = NowWeights(
            self._weights,
            (
                ratio.values_BT,
                dense_logp.detach().to(ratio.values_BT.dtype).masked_fill(~keep_BT, 0.0),
                (mass.values * calibration).to(ratio.values_BT.dtype),
                keep_BT,
            ),
        )
        now_logp = dense_logp if now_logp is None else now_logp
        cut_BT = self._truncated(now_logp.detach(), *weights.columns_BT)
        made = result(ratio, per_token(ratio), weights(now_logp), keep_BT, cut_BT)
        made.now_weights = weights
        made.metrics |= _metrics(mass, calibration, ratio.mask_BT)
        return made

    def condense(self, lists: TopKLists) -> AcceptedMass:
        """The part of the lists that this correction uses: one number per token instead of 2 k entries."""
        return accepted_mass(lists, self.scale)

    def _mass(self, top_k: TopKLists | AcceptedMass, mask_BT: Tensor) -> AcceptedMass:
        """[B, T]; 0 on padding, whatever its lists hold."""
        tokens = top_k.sparse.ids.shape[:-1] if isinstance(top_k, TopKLists) else top_k.values.shape
        if tokens != mask_BT.shape:
            what = "lists" if isinstance(top_k, TopKLists) else "a mass"
            shape = list(mask_BT.shape)
            raise UserError(f"top_k must hold {what} for each token, [B, T] = {shape}, got {list(tokens)}")
        if isinstance(top_k, TopKLists):
            found = self.condense(top_k.at(mask_BT))
            empty_BT = found.values.new_zeros(mask_BT.shape)
            top_k = AcceptedMass(
                empty_BT.masked_scatter(mask_BT, found.values), mask_BT.clone().masked_scatter(mask_BT, found.whole)
            )
        return AcceptedMass(top_k.values.double().masked_fill(~mask_BT, 0.0), top_k.whole & mask_BT)

    def _parts(self, now_BT: Tensor, log_ratio_BT: Tensor, dense_BT: Tensor, keep_BT: Tensor) -> tuple[Tensor, Tensor]:
        """log(p / p_now), and log max(scale, p_now / q). Both come from the same difference, so the drift is exactly 1
        where p_now = p."""
        log_drift_BT = (dense_BT - now_BT.to(dense_BT.dtype)).masked_fill(~keep_BT, 0.0)
        return log_drift_BT, (log_ratio_BT - log_drift_BT).clamp(min=log(self.scale))

    def _weights(
        self, now_BT: Tensor, log_ratio_BT: Tensor, dense_BT: Tensor, mass_BT: Tensor, keep_BT: Tensor
    ) -> Tensor:
        log_drift_BT, log_reach_BT = self._parts(now_BT, log_ratio_BT, dense_BT, keep_BT)
        reach_BT = (mass_BT * exponential(log_reach_BT)).clamp(max=self.weight_max)
        return (reach_BT * exponential(log_drift_BT).clamp(max=self.drift_max)).masked_fill(~keep_BT, 0.0)

    def _truncated(
        self, now_BT: Tensor, log_ratio_BT: Tensor, dense_BT: Tensor, mass_BT: Tensor, keep_BT: Tensor
    ) -> Tensor:
        log_drift_BT, log_reach_BT = self._parts(now_BT, log_ratio_BT, dense_BT, keep_BT)
        cut_BT = (mass_BT * exponential(log_reach_BT) > self.weight_max) | (log_drift_BT > log(self.drift_max))
        return cut_BT & keep_BT


def _calibration(keep_BT: Tensor, mass: AcceptedMass, mask_BT: Tensor) -> float:
    """(Kept share) / (mean mass), or 1 where the mass is 0, because there is nothing to scale then."""
    total = float(mass.values[mask_BT].sum())
    return int(keep_BT.sum()) / total if total else 1.0


def _metrics(mass: AcceptedMass, calibration: float, mask_BT: Tensor) -> dict[str, float]:
    tokens = max(int(mask_BT.sum()), 1)
    return {
        "correction/accepted_mass_mean": float(mass.values[mask_BT].sum()) / tokens,
        "correction/accepted_mass_calibration": calibration,
        "correction/whole_union_share": int((mass.whole & mask_BT).sum()) / tokens,
    }


def _check(ratio: LogRatio, uniforms: Tensor, mass: AcceptedMass, now_logp: Tensor | None) -> None:
    for name, value in (("uniforms", uniforms), ("now_logp", now_logp)):
        if value is not None and value.shape != ratio.mask_BT.shape:
            shape = list(ratio.mask_BT.shape)
            raise UserError(f"{name} must have the shape [B, T] of the mask, {shape}, got {list(value.shape)}")
    if now_logp is not None:
        check_tokens(now_logp.detach().masked_fill(~ratio.mask_BT, 0.0), "now_logp")
    drawn_N, mass_N = uniforms[ratio.mask_BT], mass.values[ratio.mask_BT]
    if not bool(((drawn_N >= 0) & (drawn_N < 1)).all()):
        raise UserError("uniforms must lie in [0, 1)", "draw them with torch.rand, one a token")
    if not bool(((mass_N >= 0) & torch.isfinite(mass_N)).all()):
        raise UserError("the mass of top_k must be finite and not negative", "make it with accepted_mass(lists, scale)")
