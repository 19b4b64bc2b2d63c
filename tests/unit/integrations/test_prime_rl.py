"""prime-rl's custom loss: summed over responses and divided by prime-rl's own count, it is our policy loss."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparroll import records
from sparroll.corrections import correction, names
from sparroll.corrections.sparse_rl_released import SparseRLReleased
from sparroll.errors import UserError
from sparroll.integrations import prime_rl
from sparroll.integrations.corrections import correct
from sparroll.train.update.loss import LossSettings, policy_loss

B, T = 5, 8
RECORD = Path(__file__).parents[3] / "benchmarks" / "results" / "other-trainers-cpu.json"
USABLE = [name for name in names() if not correction(name).needs and not isinstance(correction(name), SparseRLReleased)]


READ_AT = "559b44772e471d1538537b8805cc77f3824a5e64"
"""The commit of prime-rl whose fields these are. A record of the real ones is compared with them below."""


@dataclass(slots=True)
class Inputs:
    """prime-rl's `LossInputs`: its fields in their order, one sequence's tensors [T]. It has nothing else, so a loss that
    reads another name fails."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass(slots=True)
class Outputs:
    """prime-rl's `LossOutputs`: a loss without dimensions, and tensors by name."""

    loss: Tensor
    metrics: dict[str, Tensor]


def inputs(dense_T: Tensor, sparse_T: Tensor, advantage_T: Tensor, mask_T: Tensor, **more: Tensor) -> Inputs:
    """Of a run without a reference model."""
    return Inputs(dense_T, sparse_T, None, advantage_T, mask_T, **more)


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
        prime_rl.loss(inputs(dense[row], sparse[row], advantage[row].expand(T), mask[row]), **kwargs)
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


def test_the_fields_are_those_of_prime_rls_own_dataclasses() -> None:
    found = records.read(RECORD, "other-trainers")["results"]["prime-rl"]
    assert found["read_at"] == READ_AT
    for kind, name in ((Inputs, "loss_inputs"), (Outputs, "loss_outputs")):
        ours = [{"name": each.name, "optional": each.default is not MISSING} for each in fields(kind)]
        assert ours == found[name]


def test_the_loss_reads_no_more_of_a_sequence_than_it_says() -> None:
    dense, sparse, advantage, mask = sequences()
    read: set[str] = set()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            read.add(name)
            return getattr(plain, name)

    plain = inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0])
    prime_rl.loss(Watched())
    assert read == {field.name for field in fields(Inputs)} - {"ref_logprobs"}


def test_inside_prime_rls_own_code_every_usable_correction_has_the_gradient_of_ours() -> None:
    found = records.read(RECORD, "other-trainers")["results"]["prime-rl"]
    rows = {row["ours"]: row for row in found["corrections"]}
    assert rows.keys() == set(USABLE)
    assert all(row["difference"] < 1e-6 for row in rows.values())
    assert 0.1 < rows["mis"]["kept_share"] < rows["icepop"]["kept_share"] < 0.95
    assert found["metrics_are_floats"]


def test_settings_reach_the_correction_and_metrics_have_our_names() -> None:
    dense, sparse, advantage, mask = sequences()
    loose, tight = (summed(dense, sparse, advantage, mask, weight_max=most) for most in (100.0, 0.01))
    assert abs(float(tight)) < 0.02 * abs(float(loose))
    metrics = prime_rl.loss(inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0])).metrics
    assert "mismatch/kl_sparse_to_dense" in metrics
    # prime-rl stacks them and takes their mean, which integers do not have.
    assert all(value.dim() == 0 and value.dtype == torch.float32 for value in metrics.values())
    assert any(name.startswith("correction/") for name in metrics)


def test_a_components_weights_multiply_and_a_sequence_without_tokens_still_has_a_gradient() -> None:
    dense, sparse, advantage, mask = sequences()
    plain = inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0])
    halved = inputs(dense[0], sparse[0], advantage[:1].expand(T), mask[0], loss_weights=torch.full((T,), 0.5))
    torch.testing.assert_close(prime_rl.loss(halved).loss * 2, prime_rl.loss(plain).loss)
    now = dense[0].clone().requires_grad_()
    empty = prime_rl.loss(inputs(now, sparse[0], advantage[:1].expand(T), torch.zeros(T, dtype=torch.bool)))
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
