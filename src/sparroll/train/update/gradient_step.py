"""How a loss moves weights: its gradient is added up over the micro batches of all processes, checked and clipped, and
AdamW makes a step. The callers, policy.py and distill/adapter_update.py, bring their losses."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparroll.errors import UserError
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.update.loss import LossSums
from sparroll.train.update.micro_batches import micro_batches
from sparroll.train.update.optimizer import learning_rate, make_optimizer
from sparroll.types import TokenBatch

Loss = Callable[[TokenBatch], tuple[Tensor, LossSums]]
"""Gives one micro batch's part of the step's loss, with gradient, and its sums for the metrics. The parts of all micro
batches and processes add up to the whole loss."""


class GradientStep:
    """The optimizer of a model's trainable weights, and how a loss moves them.

    named: what an error calls the gradient.  lr_key: the setting of the learning rate, for the error's hint.
    """

    def __init__(
        self, model: PreTrainedModel, settings: TrainSection, ranks: Ranks, *, named: str, lr_key: str
    ) -> None:
        self.model, self.settings, self.ranks = model, settings, ranks
        self.named, self.lr_key = named, lr_key
        self.optimizer = make_optimizer(model, settings)
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def __call__(
        self,
        batch: TokenBatch,
        rows: list[int],
        loss: Loss,
        step: int,
        before_weights_move: Callable[[], None],
        *,
        needs_tokens: bool,
    ) -> tuple[LossSums, float]:
        """Make one update per epoch on these rows of this process's batch; `step` counts from 1. `before_weights_move`
        is called right before weights change. -> (sums over all processes, gradient norm before clipping) of the last
        update

        needs_tokens: where the loss counted no token, no weight moves.
        """
        sums, norm = LossSums(), 0.0
        for _ in range(self.settings.epochs_per_batch):
            sums = self.gradient(batch, rows, loss)
            norm = self._clip(step)
            if needs_tokens and not sums.tokens:
                # Even with a zero gradient, AdamW would move weights by its memory of earlier gradients and by weight
                # decay.
                break
            before_weights_move()
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.settings, step)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums, norm

    def gradient(self, batch: TokenBatch, rows: list[int], loss: Loss) -> LossSums:
        """Put the gradient of the whole step's loss into `.grad` of the weights, on every process. -> the loss's sums
        over all processes"""
        self.optimizer.zero_grad(set_to_none=True)
        sums, settings = LossSums(), self.settings
        with self._training_mode():
            for members in micro_batches(batch, rows, settings.micro_batch_tokens, settings.micro_batch_rollouts):
                part, part_sums = loss(batch.take(members, self.model.device))
                part.backward()
                sums.add(part_sums)
        self.ranks.sum_gradients(self.model.parameters())
        total = LossSums()
        for each in self.ranks.gather([sums]):
            total.add(each)
        return total

    def _clip(self, step: int) -> float:
        """Clip the gradient; -> its norm before that. Raises UserError where the norm is not finite, before any weight
        moves."""
        limit = self.settings.max_gradient_norm or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        if not math.isfinite(norm):
            raise UserError(
                f"{self.named} of step {step} is not finite (norm {norm})",
                f"start a new run from the last checkpoint's model/ with a lower {self.lr_key}",
            )
        return norm

    @contextlib.contextmanager
    def _training_mode(self) -> Iterator[None]:
        # transformers checkpoints activations only in training mode. Without checkpointing the model stays in eval
        # mode, in which the scorer runs it, too.
        self.model.train(self.settings.gradient_checkpointing)
        try:
            yield
        finally:
            self.model.eval()


def autocast(dtype: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context with bf16 arithmetic on fp32 weights for "bf16"; for other dtypes it does nothing."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()
