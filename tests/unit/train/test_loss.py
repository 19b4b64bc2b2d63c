"""The clipped loss: plain loops, where the correction stands, and micro batches that add up to one batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sparroll.train.update.loss import LossSettings, LossSums, k3, policy_loss, top_k_kl

SETTINGS = LossSettings(clip_low=0.2, clip_high=0.28)


def inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dense = -2 * torch.rand(6, 11, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([11, 4, 1, 9, 6, 2])
    return {
        "now_logp_BT": (dense + 0.3 * torch.randn(6, 11, generator=generator, dtype=torch.float64)).requires_grad_(),
        "dense_logp_BT": dense,
        "advantage_B": torch.randn(6, generator=generator, dtype=torch.float64),
        "weights_BT": torch.rand(6, 11, generator=generator, dtype=torch.float64) * 2,
        "kept_BT": (torch.arange(11) < lengths[:, None]) & (torch.rand(6, 11, generator=generator) > 0.2),
    }


def test_the_loss_equals_a_plain_loop_with_the_weight_outside_the_clip() -> None:
    given = inputs()
    tokens = int(given["kept_BT"].sum())
    loss, sums = policy_loss(**given, kept_tokens=tokens, settings=SETTINGS)
    expected, clipped = 0.0, 0
    for b in range(6):
        for t in range(11):
            if given["kept_BT"][b, t]:
                ratio = math.exp(float(given["now_logp_BT"].detach()[b, t] - given["dense_logp_BT"][b, t]))
                advantage = float(given["advantage_B"][b])
                plain, bounded = ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage
                expected -= float(given["weights_BT"][b, t]) * min(plain, bounded)
                clipped += bounded < plain
    assert loss.item() == pytest.approx(expected / tokens, rel=1e-12)
    assert sums.clipped == clipped > 0
    assert sums.tokens == tokens


def test_on_policy_the_gradient_is_minus_weight_times_advantage_over_tokens() -> None:
    given = inputs(1)
    given["now_logp_BT"] = given["dense_logp_BT"].clone().requires_grad_()
    tokens = int(given["kept_BT"].sum())
    loss, sums = policy_loss(**given, kept_tokens=tokens, settings=SETTINGS)
    loss.backward()
    expected = -given["weights_BT"] * given["advantage_B"][:, None] / tokens * given["kept_BT"]
    assert torch.allclose(given["now_logp_BT"].grad, expected, rtol=1e-12, atol=0)
    assert sums.ratio == pytest.approx(tokens)


def test_a_clipped_token_moves_nothing_and_the_other_direction_still_does() -> None:
    now = torch.tensor([[math.log(1.5)], [math.log(1.5)]], requires_grad=True)
    zero = torch.zeros(2, 1)
    loss, _ = policy_loss(now, zero, torch.tensor([1.0, -1.0]), torch.ones(2, 1), torch.ones(2, 1).bool(), 2, SETTINGS)
    loss.backward()
    assert now.grad[0, 0] == 0.0
    assert now.grad[1, 0] == pytest.approx(1.5 / 2)


def test_micro_batches_add_up_to_one_batch_exactly() -> None:
    given = inputs(2)
    tokens = int(given["kept_BT"].sum())
    whole, whole_sums = policy_loss(**given, kept_tokens=tokens, settings=SETTINGS)
    whole.backward()
    gradient = given["now_logp_BT"].grad.clone()
    given["now_logp_BT"].grad = None
    sums = LossSums()
    for rows in ([4], [0, 5], [1, 2, 3]):
        loss, part = policy_loss(**{k: v[rows] for k, v in given.items()}, kept_tokens=tokens, settings=SETTINGS)
        loss.backward()
        sums.add(part)
    assert torch.equal(given["now_logp_BT"].grad, gradient)
    assert sums.loss == pytest.approx(whole_sums.loss, rel=1e-12)
    assert (sums.tokens, sums.clipped, sums.ratio_max) == (whole_sums.tokens, whole_sums.clipped, whole_sums.ratio_max)


def test_dropped_tokens_and_padding_may_hold_anything() -> None:
    given = inputs(3)
    tokens = int(given["kept_BT"].sum())
    clean, _ = policy_loss(**given, kept_tokens=tokens, settings=SETTINGS)
    given["dense_logp_BT"] = given["dense_logp_BT"].masked_fill(~given["kept_BT"], math.nan)
    given["now_logp_BT"] = given["now_logp_BT"].detach().masked_fill(~given["kept_BT"], -math.inf).requires_grad_()
    loss, _ = policy_loss(**given, kept_tokens=tokens, settings=SETTINGS)
    loss.backward()
    assert loss.item() == clean.item()
    assert torch.isfinite(given["now_logp_BT"].grad).all()


def test_a_token_that_dense_cannot_say_counts_but_moves_nothing() -> None:
    now = torch.tensor([[-math.inf, -1.0]], requires_grad=True)
    dense = torch.tensor([[-math.inf, -1.0]])
    kept = torch.ones(1, 2, dtype=torch.bool)
    loss, sums = policy_loss(now, dense, torch.tensor([1.0]), torch.ones(1, 2), kept, 2, SETTINGS)
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)
    assert now.grad.tolist() == [[0.0, -0.5]]
    assert sums.tokens == 2


def test_k3_is_zero_at_equality_positive_elsewhere_and_right_in_the_mean() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    kept = torch.ones(1, 3, dtype=torch.bool)
    estimate = k3(p.log()[None], q.log()[None], kept)[0]
    assert (estimate > 0).all()
    assert float((p * estimate).sum()) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-12)
    assert not k3(p.log()[None], p.log()[None], kept).any()


def test_the_kl_term_is_added_with_its_coefficient() -> None:
    given = inputs(4)
    tokens = int(given["kept_BT"].sum())
    reference = given["dense_logp_BT"] - 0.5
    plain, _ = policy_loss(**given, kept_tokens=tokens, settings=SETTINGS)
    with_kl, sums = policy_loss(
        **given, kept_tokens=tokens, settings=LossSettings(0.2, 0.28, 0.1), reference_logp_BT=reference
    )
    expected = k3(given["now_logp_BT"], reference, given["kept_BT"])[given["kept_BT"]].sum()
    assert float(with_kl - plain) == pytest.approx(0.1 * float(expected) / tokens, rel=1e-9)
    assert sums.kl == pytest.approx(float(expected), rel=1e-9)


def test_the_top_k_kl_of_whole_lists_is_the_kl() -> None:
    torch.manual_seed(0)
    dense, now = (torch.randn(5, 7, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = (dense.exp() * (dense - now)).sum(-1)
    assert torch.allclose(top_k_kl(dense, now), expected, atol=1e-8)
    assert torch.allclose(top_k_kl(dense, dense), torch.zeros(5, dtype=torch.float64))


def test_the_top_k_kl_of_shorter_lists_puts_the_rest_into_one_bucket() -> None:
    dense, now = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log(), torch.tensor([[0.25, 0.25, 0.1, 0.4]]).log()
    expected = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert float(top_k_kl(dense[:, :1], now[:, :1])) == pytest.approx(expected, rel=1e-5)
    longer = [float(top_k_kl(dense[:, :k], now[:, :k])) for k in (1, 2, 3, 4)]
    assert longer == sorted(longer)


def test_the_top_k_kl_takes_tokens_that_dense_cannot_say_and_has_a_gradient_towards_dense() -> None:
    dense = torch.tensor([[0.6, 0.4, 0.0]]).log()
    logits = torch.zeros(1, 4, requires_grad=True)
    loss = top_k_kl(dense, logits.log_softmax(-1)[:, :3]).sum()
    loss.backward()
    assert logits.grad is not None
    # Softmax minus dense: what the KL to (0.6, 0.4, 0, 0) gives, up to the least rest.
    assert torch.allclose(logits.grad, torch.tensor([[-0.35, -0.15, 0.25, 0.25]]), atol=1e-4)


def test_the_expected_gradient_of_k3_is_that_of_the_kl_from_dense() -> None:
    """Over tokens drawn from `now`: the sum over the vocabulary of now(v) times the gradient of k3 at v."""
    torch.manual_seed(1)
    dense = torch.randn(6, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    now = logits.log_softmax(-1)
    drawn = now.detach().exp()
    (by_k3,) = torch.autograd.grad((drawn * k3(now, dense, torch.ones(6, dtype=torch.bool))).sum(), logits)
    (by_kl,) = torch.autograd.grad(top_k_kl(dense[None], logits.log_softmax(-1)[None]).sum(), logits)
    assert torch.allclose(by_k3, by_kl, atol=1e-8)


def test_a_policy_that_ran_far_away_has_a_finite_loss() -> None:
    """Ratios are cut at exp(20), for the surrogate and for the KL term."""
    one = torch.ones(1, 1)
    loss, *_ = policy_loss(
        torch.tensor([[-1.0]]), torch.tensor([[-31.0]]), torch.tensor([-1.0]), one, one.bool(), 1, LossSettings()
    )
    assert float(loss) == pytest.approx(math.exp(20), rel=1e-3)
    now = torch.tensor([[-100.0, -1.0]], requires_grad=True)
    far = k3(now, torch.tensor([[-1.0, -100.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert far.tolist()[0] == pytest.approx([math.exp(20) - 21, 98.0], rel=1e-3)
    far.sum().backward()
    assert now.grad.tolist() == [[0.0, 1.0]], "the first is past the cut; the second comes down to the reference"
