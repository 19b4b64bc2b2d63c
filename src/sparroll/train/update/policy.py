"""The policy update: the clipped, corrected loss over the rollouts that can move a weight. gradient_step.py has how a
loss moves weights, and loss.py its formula."""

# B rollouts, T response tokens (right-padded)

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparroll.engines.scoring import response_logp
from sparroll.errors import UserError
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.update.gradient_step import GradientStep, autocast
from sparroll.train.update.loss import LossSettings, LossSums, policy_loss
from sparroll.train.update.optimizer import learning_rate
from sparroll.types import StepReport, TokenBatch

_PROBE_TOKENS = 32
"""Enough tokens for dropout in attention to show, and few enough for every model."""


class PolicyUpdate:
    """The policy's optimizer, and how a batch moves it."""

    def __init__(self, model: PreTrainedModel, settings: TrainSection, temperature: float, ranks: Ranks):
        self.model = model
        self.settings = settings
        self.temperature = temperature
        self.ranks = ranks
        self.loss_settings = LossSettings(settings.clip_low, settings.clip_high, settings.kl_coefficient)
        if settings.gradient_checkpointing:
            _refuse_dropout(model)
        self.gradient_step = GradientStep(model, settings, ranks, named="the gradient", lr_key="train.lr")
        self.optimizer = self.gradient_step.optimizer

    def __call__(self, batch: TokenBatch, step: int, before_weights_move: Callable[[], None]) -> StepReport:
        """Make one update per epoch, or none where no kept token can move a weight; `step` counts from 1. The batch
        needs advantages, dense log-probabilities, weights and kept tokens. `before_weights_move` is called right before
        weights change."""
        rows = self._rows(batch)
        trained = sum(self.ranks.gather([len(rows)]))
        report = {
            "policy/trained_rollouts": float(trained),
            "policy/kept_tokens": float(batch.kept_tokens),
            "policy/learning_rate": learning_rate(self.settings, step),
        }
        if not trained:
            return report
        sums, norm = self.gradient_step(batch, rows, self.loss, step, before_weights_move, needs_tokens=True)
        return report | self._report(sums) | {"policy/gradient_norm": norm}

    def _rows(self, batch: TokenBatch) -> list[int]:
        """Rollouts whose loss can move a weight. The others are not run through the model, but stay in the
        denominator."""
        assert batch.advantage_B is not None, "the batch needs advantages"
        if self.settings.kl_coefficient > 0:
            return list(range(len(batch)))
        return batch.advantage_B.nonzero()[:, 0].tolist()

    def loss(self, micro: TokenBatch) -> tuple[Tensor, LossSums]:
        """A micro batch's part of the whole step's token-mean loss."""
        assert micro.dense_logp_BT is not None, "the batch needs dense log-probabilities"
        assert micro.advantage_B is not None, "the batch needs advantages"
        assert micro.kept_BT is not None, "the batch needs kept tokens"
        with autocast(self.settings.dtype, self.model.device):
            now_logp_BT = response_logp(self.model, micro, self.temperature)
        return policy_loss(
            now_logp_BT,
            micro.dense_logp_BT,
            micro.advantage_B,
            micro.weight_at(now_logp_BT),
            micro.kept_BT,
            micro.kept_tokens,
            self.loss_settings,
            micro.reference_logp_BT,
        )

    def _report(self, sums: LossSums) -> StepReport:
        tokens = max(sums.tokens, 1.0)
        report = {
            "policy/loss": sums.loss,
            "policy/ratio_mean": sums.ratio / tokens,
            "policy/ratio_max": sums.ratio_max,
            "policy/weight_mean": sums.weight / tokens,
            "policy/clipped_share": sums.clipped / tokens,
            "policy/trained_tokens": sums.tokens,
        }
        return report | ({"policy/kl_to_reference": sums.kl / tokens} if self.settings.kl_coefficient else {})


@torch.inference_mode()
def _refuse_dropout(model: PreTrainedModel) -> None:
    """Raise UserError where the model's outputs differ in training mode, which checkpointing needs. The ratio to the
    dense log-probabilities would be noise from the first update on."""
    ids = torch.arange(_PROBE_TOKENS, device=model.device)[None] % model.config.vocab_size
    plain = model(input_ids=ids, use_cache=False).logits
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        model.train()
        try:
            noisy = model(input_ids=ids, use_cache=False).logits
        finally:
            model.eval()
    if not torch.allclose(plain, noisy, equal_nan=True):
        raise UserError(
            f"train.gradient_checkpointing runs {type(model).__name__} in training mode, where dropout makes it a different "
            "policy from the one that is scored",
            "set the dropout probabilities in the model's config.json to 0, or --set train.gradient_checkpointing=false",
        )
