"""The policy update: clipped, corrected loss over micro batches and processes, then one AdamW step per epoch."""

# B rollouts, T response tokens (right-padded)

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparroll.engines.scoring import response_logp
from sparroll.errors import UserError
from sparroll.train.apply_correction import Corrected
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.update.loss import LossSettings, LossSums, policy_loss
from sparroll.train.update.micro_batches import micro_batches, padded, take
from sparroll.train.update.optimizer import learning_rate, make_optimizer
from sparroll.types import StepReport, TokenBatch

_PROBE_TOKENS = 32
"""Enough for dropout in attention alone to show; every model has room for them."""


class PolicyUpdate:
    """The policy's optimizer, and how a batch moves it."""

    def __init__(self, model: PreTrainedModel, settings: TrainSection, temperature: float, ranks: Ranks):
        self.model = model
        self.settings = settings
        self.temperature = temperature
        self.ranks = ranks
        self.loss_settings = LossSettings(settings.clip_low, settings.clip_high, settings.kl_coefficient)
        self.optimizer = make_optimizer(model, settings)
        if settings.gradient_checkpointing:
            _refuse_dropout(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def __call__(
        self,
        batch: TokenBatch | None,
        corrected: Corrected,
        reference_logp: list[Tensor] | None,
        step: int,
        before_weights_move: Callable[[], None],
    ) -> StepReport:
        """One update per epoch, none where no kept token can move a weight; `step` counts from 1. batch None: this process
        has no rollouts. Calls `before_weights_move` right before weights change."""
        rows = self._rows(batch)
        trained = sum(self.ranks.gather([len(rows)]))
        report = {
            "policy/trained_rollouts": float(trained),
            "policy/kept_tokens": float(corrected.kept_tokens),
            "policy/learning_rate": learning_rate(self.settings, step),
        }
        for _ in range(self.settings.epochs_per_batch if trained else 0):
            sums = self._gradients(batch, rows, corrected, reference_logp)
            report |= self._report(sums) | {"policy/gradient_norm": self._clip(step)}
            if not sums.tokens:
                # AdamW would go on with the steps before, and with the weight decay.
                break
            before_weights_move()
            for group in self.optimizer.param_groups:
                group["lr"] = report["policy/learning_rate"]
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return report

    def _rows(self, batch: TokenBatch | None) -> list[int]:
        """Rollouts whose loss can move a weight. The others cost no forward pass, and stay in the denominator."""
        if batch is None:
            return []
        assert batch.advantage_B is not None, "the batch needs advantages"
        if self.settings.kl_coefficient > 0:
            return list(range(len(batch.advantage_B)))
        return batch.advantage_B.nonzero()[:, 0].tolist()

    def _gradients(
        self, batch: TokenBatch | None, rows: list[int], corrected: Corrected, reference_logp: list[Tensor] | None
    ) -> LossSums:
        """Leave the gradient of the whole step's token-mean loss in the parameters, on every process."""
        self.optimizer.zero_grad(set_to_none=True)
        sums = LossSums()
        if batch is not None and rows:
            settings = self.settings
            with self._training_mode():
                for members in micro_batches(batch, rows, settings.micro_batch_tokens, settings.micro_batch_rollouts):
                    sums.add(self._one_pass(batch, members, corrected, reference_logp))
        self.ranks.sum_gradients(self.model.parameters())
        total = LossSums()
        for part in self.ranks.gather([sums]):
            total.add(part)
        return total

    def _one_pass(
        self, batch: TokenBatch, members: list[int], corrected: Corrected, reference_logp: list[Tensor] | None
    ) -> LossSums:
        device = self.model.device
        micro = take(batch, members, device)
        assert micro.dense_logp_BT is not None, "the batch needs dense log-probabilities"
        assert micro.advantage_B is not None, "the batch needs advantages"
        tokens_T = micro.sparse_logp_BT.shape[1]
        reference_BT = None
        if reference_logp is not None:
            reference_BT = padded([reference_logp[row] for row in members]).to(device)
        with autocast(self.settings.dtype, device):
            now_logp_BT = response_logp(self.model, micro, self.temperature)
        loss, sums = policy_loss(
            now_logp_BT,
            micro.dense_logp_BT,
            micro.advantage_B,
            corrected.weights(members, now_logp_BT),
            corrected.kept_BT[members, :tokens_T].to(device),
            corrected.kept_tokens,
            self.loss_settings,
            reference_BT,
        )
        loss.backward()
        return sums

    def _clip(self, step: int) -> float:
        """Gradient norm before clipping. Raises UserError where it is not finite; no weight has moved then."""
        limit = self.settings.max_gradient_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient of step {step} is not finite (norm {norm})",
                "start a new run from the last checkpoint's model/ with a lower train.lr",
            )
        return norm

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

    @contextlib.contextmanager
    def _training_mode(self) -> Iterator[None]:
        # transformers checkpoints activations only in training mode; otherwise the policy stays as the scorer runs it.
        self.model.train(self.settings.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()


@torch.inference_mode()
def _refuse_dropout(model: PreTrainedModel) -> None:
    """Raise UserError where training mode, which checkpointing needs, makes another policy of the model: the ratio to the
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
            f"train.gradient_checkpointing runs {type(model).__name__} in training mode, where its dropout makes it another "
            "policy than the one that is scored",
            "set the dropout probabilities in the model's config.json to 0, or --set train.gradient_checkpointing=false",
        )


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 arithmetic on fp32 weights, or nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()
