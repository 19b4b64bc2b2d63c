"""prime-rl's custom loss: summed over responses and divided by prime-rl's own count, it is our policy loss."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll.corrections import correction, names
from sparroll.corrections.sparse_rl_released import SparseRLReleased
from sparroll.errors import UserError
from sparroll.integrations import prime_rl
from sparroll.integrations.corrections import correct
from sparroll.train.update.loss import LossSettings, policy_loss

B, T = 5, 8
USABLE = [name for name in names() if not correction(name).needs and not isinstance(correction(name), SparseRLReleased)]


@dataclass
class Inputs:
    """The fields of prime-rl's `LossInputs`."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    ref_logprobs: Tensor | None = None
    loss_weights: Tensor | None = None


@dataclass
class Outputs:
    """prime-rl's `LossOutputs`."""

    loss: Tensor
    metrics: dict[str, Tensor]


@pytest.fixture(autouse=True)
def prime_rl_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """prime-rl is in no registry, so its module is stood in for by the one class that is used."""
    for name in ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.trainer.rl.loss"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["prime_rl.trainer.rl.loss"].LossOutputs = Outputs  # type: ignore[attr-defined]


def sequences(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities [B, T] of both policies, advantages [B] and the mask; a prompt's place holds zeros."""
    made = torch.Generator().manual_seed(seed)
    sparse = -3 * torch.rand(B, T, generator=made)
    dense = (sparse + 0.8 * torch.randn(B, T, generator=made)).clamp(max=-1e-3)
    mask = torch.arange(T) >= torch.tensor([2, 3, 1, 6, 2])[:, None]
    return dense * mask, sparse * mask, torch.randn(B, generator=made), mask


def summed(dense: Tensor, sparse: Tensor, advantage: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    parts = [
        prime_rl.loss(Inputs(dense[row], sparse[row], advantage[row].expand(T), mask[row]), **kwargs)
        for row in range(B)
    ]
    return torch.stack([part.loss for part in parts]).sum() / mask.sum()


@pytest.mark.parametrize("name", USABLE)
def test_the_sum_over_responses_is_our_policy_loss_but_for_the_tokens_that_prime_rl_counts(name: str) -> None:
    dense, sparse, advantage, mask = sequences()
    now, ours = (dense.clone().requires_grad_() for _ in range(2))
    corrected = correct(correction(name), dense_logp=dense, sparse_logp=sparse, response_mask=mask)
    expected, _ = policy_loss(
        ours, dense, advantage, corrected.weights_BT, corrected.kept_BT, int(mask.sum()), LossSettings()
    )
    found = summed(now, sparse, advantage, mask, correction=name)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    found.backward()
    expected.backward()
    torch.testing.assert_close(now.grad, ours.grad, atol=1e-7, rtol=0)


def test_settings_reach_the_correction_and_metrics_have_our_names() -> None:
    dense, sparse, advantage, mask = sequences()
    loose, tight = (summed(dense, sparse, advantage, mask, weight_max=most) for most in (100.0, 0.01))
    assert abs(float(tight)) < 0.02 * abs(float(loose))
    metrics = prime_rl.loss(Inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0])).metrics
    assert metrics["mismatch/kl_sparse_to_dense"].dim() == 0
    assert any(name.startswith("correction/") for name in metrics)


def test_a_components_weights_multiply_and_a_sequence_without_tokens_still_has_a_gradient() -> None:
    dense, sparse, advantage, mask = sequences()
    plain = Inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0])
    halved = Inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0], loss_weights=torch.full((T,), 0.5))
    torch.testing.assert_close(prime_rl.loss(halved).loss * 2, prime_rl.loss(plain).loss)
    now = dense[0].clone().requires_grad_()
    empty = prime_rl.loss(Inputs(now, sparse[0], advantage[:1].expand(T), torch.zeros(T, dtype=torch.bool)))
    empty.loss.backward()
    assert float(empty.loss.detach()) == 0 and now.grad is not None and not now.grad.any()


@pytest.mark.parametrize("name", ["jackpot", "sparse_rl_released"])
def test_what_one_response_cannot_serve_is_refused(name: str) -> None:
    dense, sparse, advantage, mask = sequences()
    with pytest.raises(UserError, match="needs|whole step"):
        summed(dense, sparse, advantage, mask, correction=name)


def test_a_setting_that_the_correction_does_not_have_is_refused() -> None:
    dense, sparse, advantage, mask = sequences()
    with pytest.raises(UserError, match="weight_limit"):
        summed(dense, sparse, advantage, mask, weight_limit=2.0)
