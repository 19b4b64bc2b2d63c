"""DistillSparse: the adapter's update, which comes after the policy's and leaves the policy alone. The adapted policy
reads what the rollouts read. Its loss follows the rewards as the policy's does, unless the objective is the KL alone,
and pulls it towards the dense log-probabilities that the step has anyway."""

# B rollouts, T response tokens (right-padded)

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparroll.engines.adapter import Adapter
from sparroll.engines.scoring import response_logp, response_logp_of
from sparroll.schedule import Schedule
from sparroll.train.config.adapter import DistillSection, PPOWithKLSection
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.update.gradient_step import GradientStep, autocast
from sparroll.train.update.loss import LossSettings, LossSums, policy_loss, top_k_kl
from sparroll.train.update.optimizer import learning_rate
from sparroll.types import StepReport, TokenBatch, TopK

LR_TIMES_POLICY = 5.0
"""The adapter's default learning rate, as a multiple of the policy's (published)."""
MOST_NATS_OFF = 2.0
"""A token whose log-probability differs from the rollout's by more than this was sampled from other units: in bf16, two
kernels may choose differently near a tie. It is left out of the rewards and of the k3, because its k3 alone can outweigh
a whole step. A list's KL has no such tokens."""


class AdapterUpdate:
    """The adapter's optimizer, and how a batch moves it. The gradient never reaches the policy: its weights are frozen
    views in the adapted module."""

    def __init__(
        self, adapter: Adapter, settings: DistillSection, train: TrainSection, temperature: float, ranks: Ranks
    ):
        self.adapter, self.settings, self.temperature, self.ranks = adapter, settings, temperature, ranks
        own = {
            "lr": LR_TIMES_POLICY * train.lr if settings.lr is None else settings.lr,
            "weight_decay": 0.0,
            "max_gradient_norm": settings.max_gradient_norm,
            "epochs_per_batch": settings.epochs_per_batch,
        }
        self.train = train.model_copy(update=own)
        """The policy's settings, with the adapter's own values where it has them."""
        kl_coefficient = settings.kl_coefficient if isinstance(settings, PPOWithKLSection) else 1.0
        self.loss_settings = LossSettings(train.clip_low, train.clip_high, kl_coefficient)
        self.gradient_step = GradientStep(
            adapter.adapted, self.train, ranks, named="the adapter's gradient", lr_key="distill.lr"
        )
        self.optimizer = self.gradient_step.optimizer

    def __call__(
        self, batch: TokenBatch, schedule: Schedule, step: int, before_weights_move: Callable[[], None]
    ) -> StepReport:
        """Make one update per epoch; `step` counts from 1. The batch was sampled under `schedule`, and has dense scores
        and, unless the objective is the KL alone, advantages. `before_weights_move` is called right before weights
        change."""
        self.adapter.check_shared()
        tokens = sum(self.ranks.gather([int(batch.mask_BT.sum())]))
        rows, loss = list(range(len(batch))), partial(self.loss, schedule=schedule, tokens=tokens)
        sums, norm = self.gradient_step(batch, rows, loss, step, before_weights_move, needs_tokens=False)
        rate = {"distill/learning_rate": learning_rate(self.train, step)}
        return rate | self._report(sums, tokens) | {"distill/gradient_norm": norm}

    def loss(self, micro: TokenBatch, schedule: Schedule, tokens: int) -> tuple[Tensor, LossSums]:
        """A micro batch's part of the loss: its sum over `tokens`, the response tokens of the step over all
        processes."""
        assert micro.dense_logp_BT is not None, "the batch needs dense log-probabilities"
        now_logp_BT, kl_sum = self._forward(micro, schedule)
        # These tokens, and those with dense probability 0 (-inf), stay in the denominator and move nothing by rewards or k3.
        off_BT = (now_logp_BT.detach() - micro.sparse_logp_BT).abs() > MOST_NATS_OFF
        kept_BT = micro.mask_BT & torch.isfinite(micro.dense_logp_BT) & ~off_BT
        loss, sums = policy_loss(
            now_logp_BT,
            micro.sparse_logp_BT,
            self._advantages(micro),
            torch.ones_like(now_logp_BT),
            kept_BT,
            tokens,
            self.loss_settings,
            micro.dense_logp_BT.masked_fill(~kept_BT, 0.0) if kl_sum is None else None,
        )
        if kl_sum is not None:
            share = self.loss_settings.kl_coefficient * kl_sum / tokens
            loss = loss + share
            sums.loss, sums.kl = sums.loss + float(share.detach()), float(kl_sum.detach())
        return loss, sums

    def _advantages(self, micro: TokenBatch) -> Tensor:
        if self.settings.objective == "kl":
            return torch.zeros(len(micro), device=micro.sparse_logp_BT.device)
        assert micro.advantage_B is not None, "the batch needs advantages"
        return micro.advantage_B

    def _forward(self, micro: TokenBatch, schedule: Schedule) -> tuple[Tensor, Tensor | None]:
        """-> ([B, T] log-probabilities of the response under the adapted policy, sum of the top-k KL or None)"""
        model = self.adapter.adapted
        with autocast(self.train.dtype, model.device):
            if self.settings.kl == "k3":
                return response_logp(model, micro, self.temperature, schedule), None
            listed = [lists for lists in micro.dense_top_k or () if lists is not None]
            assert len(listed) == len(micro), "the dense scores need top-k lists"
            dense = TopK.cat(listed).to(model.device)
            now_logp_BT, now_logp_NK = response_logp_of(model, micro, dense.ids, self.temperature, schedule)
        return now_logp_BT, top_k_kl(dense.logp, now_logp_NK).sum()

    def _report(self, sums: LossSums, tokens: int) -> StepReport:
        counted = max(sums.tokens, 1.0)
        return {
            "distill/loss": sums.loss,
            # The KL over top-k lists is known for every token, left out or not.
            "distill/kl": sums.kl / (max(tokens, 1) if self.settings.kl == "top_k" else counted),
            "distill/left_out_share": 1.0 - sums.tokens / max(tokens, 1),
            "distill/ratio_mean": sums.ratio / counted,
            "distill/ratio_max": sums.ratio_max,
            "distill/clipped_share": sums.clipped / counted,
            "distill/tokens": float(tokens),
        }
