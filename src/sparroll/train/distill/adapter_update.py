"""DistillSparse: the adapter's update, after the policy's and with the policy frozen. The adapted policy reads what the
rollouts read, is held to the rewards like the policy, and to the dense log-probabilities that the step has anyway."""

# B rollouts, T response tokens (right-padded)

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparroll.engines.adapter import Adapter
from sparroll.engines.scoring import response_logp, response_logp_of
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train.config.sections import DistillSection, TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.update.loss import LossSettings, LossSums, policy_loss, top_k_kl
from sparroll.train.update.micro_batches import micro_batches, take
from sparroll.train.update.optimizer import learning_rate, make_optimizer
from sparroll.train.update.policy import autocast
from sparroll.types import StepReport, TokenBatch, TokenScores, TopK

LR_TIMES_POLICY = 5.0
"""The adapter's learning rate over the policy's, where none is given (as published)."""
MOST_NATS_OFF = 2.0
"""A token further from what the rollouts said of it, either way, was sampled from other units: in bf16 two kernels may
choose differently near a tie. Its k3 alone can outweigh a whole step."""


class AdapterUpdate:
    """The adapter's optimizer, and how a batch moves it. The gradient never reaches the policy: its weights are frozen
    views in the adapted module."""

    def __init__(
        self, adapter: Adapter, settings: DistillSection, train: TrainSection, temperature: float, ranks: Ranks
    ):
        self.adapter, self.settings, self.temperature, self.ranks = adapter, settings, temperature, ranks
        lr = LR_TIMES_POLICY * train.lr if settings.lr is None else settings.lr
        self.train = train.model_copy(update={"lr": lr, "weight_decay": 0.0})
        alone = settings.objective == "kl"
        self.loss_settings = LossSettings(train.clip_low, train.clip_high, 1.0 if alone else settings.kl_coefficient)
        self.optimizer = make_optimizer(adapter.adapted, self.train)
        if train.gradient_checkpointing:
            adapter.adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def __call__(
        self,
        batch: TokenBatch | None,
        dense: list[TokenScores],
        schedule: Schedule,
        step: int,
        before_weights_move: Callable[[], None],
    ) -> StepReport:
        """One update per epoch; `step` counts from 1. batch: sampled under `schedule`, with dense log-probabilities and
        advantages; None: this process has no rollouts. dense: the batch's dense scores with top-k lists. Calls
        `before_weights_move` before the first weight changes."""
        self.adapter.check_shared()
        tokens = sum(self.ranks.gather([int(batch.mask_BT.sum()) if batch is not None else 0]))
        report = {"distill/learning_rate": learning_rate(self.train, step)}
        for _ in range(self.settings.epochs_per_batch):
            sums = self._gradients(batch, dense, schedule, tokens)
            report |= self._report(sums, tokens) | {"distill/gradient_norm": self._clip(step)}
            before_weights_move()
            for group in self.optimizer.param_groups:
                group["lr"] = report["distill/learning_rate"]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _gradients(
        self, batch: TokenBatch | None, dense: list[TokenScores], schedule: Schedule, tokens: int
    ) -> LossSums:
        """Leave the gradient of the whole step's token-mean loss in the adapter, on every process."""
        self.optimizer.zero_grad(set_to_none=True)
        sums, train = LossSums(), self.train
        if batch is not None:
            rows = list(range(len(batch.prompt_tokens_B)))
            # transformers checkpoints activations only in training mode; the adapted module's mode is its own.
            self.adapter.adapted.train(train.gradient_checkpointing)
            try:
                for members in micro_batches(batch, rows, train.micro_batch_tokens, train.micro_batch_rollouts):
                    micro = take(batch, members, self.adapter.model.device)
                    sums.add(self._one_pass(micro, [dense[row] for row in members], schedule, tokens))
            finally:
                self.adapter.adapted.eval()
        self.ranks.sum_gradients(self.adapter.parameters)
        total = LossSums()
        for part in self.ranks.gather([sums]):
            total.add(part)
        return total

    def _one_pass(self, micro: TokenBatch, dense: list[TokenScores], schedule: Schedule, tokens: int) -> LossSums:
        assert micro.dense_logp_BT is not None, "the batch needs dense log-probabilities"
        assert micro.advantage_B is not None, "the batch needs advantages"
        advantage_B = torch.zeros_like(micro.advantage_B) if self.settings.objective == "kl" else micro.advantage_B
        now_logp_BT, kl_sum = self._forward(micro, dense, schedule)
        # These, and tokens that the dense policy cannot say (-inf), count and move nothing.
        off_BT = (now_logp_BT.detach() - micro.sparse_logp_BT).abs() > MOST_NATS_OFF
        kept_BT = micro.mask_BT & torch.isfinite(micro.dense_logp_BT) & ~off_BT
        loss, sums = policy_loss(
            now_logp_BT,
            micro.sparse_logp_BT,
            advantage_B,
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
        loss.backward()
        return sums

    def _forward(self, micro: TokenBatch, dense: list[TokenScores], schedule: Schedule) -> tuple[Tensor, Tensor | None]:
        """-> ([B, T] log-probabilities of the response under the adapted policy, sum of the top-k KL or None)"""
        device, model = self.adapter.model.device, self.adapter.adapted
        with autocast(self.train.dtype, device):
            if self.settings.kl == "k3":
                return response_logp(model, micro, self.temperature, schedule), None
            lists = TopK.cat([score.top_k for score in dense if score.top_k is not None]).to(device)
            now_logp_BT, now_logp_NK = response_logp_of(model, micro, lists.ids, self.temperature, schedule)
        return now_logp_BT, top_k_kl(lists.logp, now_logp_NK).sum()

    def _clip(self, step: int) -> float:
        """Gradient norm before clipping. Raises UserError where it is not finite; the adapter has not moved then."""
        limit = self.settings.max_gradient_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.adapter.parameters, limit))
        if not math.isfinite(norm):
            raise UserError(
                f"the adapter's gradient of step {step} is not finite (norm {norm})",
                "start a new run from the last checkpoint's model/ with a lower distill.lr",
            )
        return norm

    def _report(self, sums: LossSums, tokens: int) -> StepReport:
        counted = max(sums.tokens, 1.0)
        return {
            "distill/loss": sums.loss,
            # Over lists every token has its KL.
            "distill/kl": sums.kl / (max(tokens, 1) if self.settings.kl == "top_k" else counted),
            "distill/left_out_share": 1.0 - sums.tokens / max(tokens, 1),
            "distill/ratio_mean": sums.ratio / counted,
            "distill/ratio_max": sums.ratio_max,
            "distill/clipped_share": sums.clipped / counted,
            "distill/tokens": float(tokens),
        }
