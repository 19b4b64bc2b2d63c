"""One gradient step of both losses: micro batches add up, nothing moves without tokens where that is asked for, and an error
names the setting that mends it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparroll.errors import UserError
from sparroll.train.config.training import TrainSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.update.gradient_step import GradientStep
from sparroll.train.update.loss import LossSums
from sparroll.types import Rollout, TokenBatch

SETTINGS = {"lr": 0.5, "weight_decay": 0.0, "max_gradient_norm": None, "gradient_checkpointing": False}


class Scale(nn.Module):
    """One weight, as a model."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))


def made(**settings: Any) -> GradientStep:
    train = TrainSection(**(SETTINGS | settings))
    return GradientStep(Scale(), train, Ranks("cpu"), named="the gradient", lr_key="train.lr")  # type: ignore[arg-type]


def batch() -> TokenBatch:
    """Rollouts of 1, 2, 3 and 4 tokens of log-probability -1."""
    return TokenBatch.from_rollouts([Rollout([1], [2] * t, -torch.ones(t), "stop") for t in (1, 2, 3, 4)], pad_id=0)


def loss_of(step: GradientStep, factor: float = 1.0) -> Any:
    """weight * factor * the sum of the log-probabilities: the gradient is that sum."""

    def loss(micro: TokenBatch) -> tuple[Tensor, LossSums]:
        total = factor * (step.model.weight * micro.sparse_logp_BT).sum()  # type: ignore[operator]
        return total, LossSums(loss=float(total.detach()), tokens=float(micro.mask_BT.sum()))

    return loss


@pytest.mark.parametrize("most_rollouts", [None, 1, 3])
def test_micro_batches_add_up_to_the_gradient_of_the_whole(most_rollouts: int | None) -> None:
    step = made(micro_batch_rollouts=most_rollouts)
    sums = step.gradient(batch(), [0, 1, 2, 3], loss_of(step))
    assert (sums.loss, sums.tokens) == (-20.0, 10.0)
    assert step.model.weight.grad.tolist() == [-10.0]
    step.gradient(batch(), [1, 3], loss_of(step))
    assert step.model.weight.grad.tolist() == [-6.0]


def test_each_epoch_is_an_update_and_the_last_one_is_reported() -> None:
    """AdamW's first steps on a constant gradient are of the learning rate each."""
    step, moves = made(epochs_per_batch=3, warmup_steps=2), []
    sums, norm = step(batch(), [3], loss_of(step), 1, lambda: moves.append(1), needs_tokens=True)
    assert len(moves) == 3
    assert norm == 4.0
    assert step.model.weight.item() == pytest.approx(2.0 + 3 * 0.25, abs=1e-6)
    assert sums.loss == pytest.approx(-4.0 * (2.0 + 2 * 0.25), abs=1e-5)
    assert step.model.weight.grad is None


def test_the_norm_is_that_before_clipping() -> None:
    step = made(max_gradient_norm=0.1)
    step.gradient(batch(), [3], loss_of(step))
    assert step._clip(1) == 4.0
    assert step.model.weight.grad.tolist() == pytest.approx([-0.1], rel=1e-4)


@pytest.mark.parametrize("needs_tokens", [True, False])
def test_without_a_token_only_a_loss_that_needs_none_moves_on(needs_tokens: bool) -> None:
    step, moves = made(epochs_per_batch=2), []
    step(batch(), [3], loss_of(step), 1, lambda: None, needs_tokens=True)
    before = step.model.weight.item()
    step(batch(), [], loss_of(step), 2, lambda: moves.append(1), needs_tokens=needs_tokens)
    assert len(moves) == (0 if needs_tokens else 2)
    assert (step.model.weight.item() == before) == needs_tokens


def test_a_gradient_that_is_not_finite_moves_nothing_and_names_the_learning_rate() -> None:
    step = made()
    with pytest.raises(UserError, match=r"(?s)the gradient of step 7 is not finite \(norm inf\).*lower train\.lr"):
        step(batch(), [0], loss_of(step, float("inf")), 7, pytest.fail, needs_tokens=True)
    assert step.model.weight.item() == 2.0
