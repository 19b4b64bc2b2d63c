"""A framework that takes our weights and masks gets our own loss, and what its batch cannot serve is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparroll.corrections import correction, names
from sparroll.errors import UserError
from sparroll.integrations.corrections import CorrectedBatch, check_usable, correct
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.step_correction import correct_step
from sparroll.train.update.loss import LossSettings, policy_loss
from sparroll.types import Rollout, TokenBatch, TokenScores

B, T = 6, 9
USABLE = [name for name in names() if not correction(name).needs]


def batch(seed: int = 0) -> tuple[list[Rollout], list[TokenScores], Tensor, Tensor]:
    """Rollouts of different lengths with their dense scores, advantages [B], and now_logp [B, T]."""
    generator = torch.Generator().manual_seed(seed)
    rollouts, scores = [], []
    for row in range(B):
        tokens = 3 + row if row < B - 1 else T
        sparse_T = -3 * torch.rand(tokens, generator=generator)
        dense_T = (sparse_T + 0.7 * torch.randn(tokens, generator=generator)).clamp(max=-1e-3)
        rollouts.append(Rollout([1, 2], [5] * tokens, sparse_T, "length", prompt_index=row))
        scores.append(TokenScores(dense_T))
    now_BT = -3 * torch.rand(B, T, generator=generator)
    return rollouts, scores, torch.randn(B, generator=generator), now_BT


def framework_loss(batch: CorrectedBatch, dense_BT: Tensor, now_BT: Tensor, advantage_B: Tensor) -> Tensor:
    """The usual token mean of a framework: weights on the clipped loss, one mask in numerator and denominator."""
    ratio_BT = (now_BT - dense_BT).exp()
    advantage_B1 = advantage_B[:, None]
    clipped_BT = ratio_BT.clamp(0.8, 1.28)
    token_BT = -torch.minimum(ratio_BT * advantage_B1, clipped_BT * advantage_B1) * batch.weights_BT
    mask_BT = batch.kept_BT.float()
    return (token_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)


@pytest.mark.parametrize("name", USABLE)
def test_a_frameworks_token_mean_is_our_own_loss(name: str) -> None:
    rollouts, scores, advantage_B, now_BT = batch()
    ours = TokenBatch.from_rollouts(rollouts, pad_id=0)
    dense_BT = torch.zeros(B, T)
    for row, score in enumerate(scores):
        dense_BT[row, : len(score.logp)] = score.logp
    ours.left_out_B = torch.tensor([False, True, *[False] * (B - 2)])
    made = correction(name)
    metrics = correct_step(made, ours, rollouts, scores, Ranks(), 0, 1)
    assert ours.weight_BT is not None and ours.kept_BT is not None
    expected, _ = policy_loss(
        now_BT, dense_BT, advantage_B, ours.weight_BT, ours.kept_BT, ours.kept_tokens, LossSettings(0.2, 0.28)
    )
    padding = torch.full((B, T), torch.nan)
    corrected = correct(
        made,
        dense_logp=torch.where(ours.mask_BT, dense_BT, padding),
        sparse_logp=torch.where(ours.mask_BT, ours.sparse_logp_BT, padding),
        response_mask=ours.mask_BT.long(),
        left_out=ours.left_out_B,
    )
    torch.testing.assert_close(corrected.weights_BT, ours.weight_BT, atol=1e-6, rtol=0)
    assert torch.equal(corrected.kept_BT, ours.kept_BT) and corrected.kept_tokens == ours.kept_tokens
    found = framework_loss(corrected, dense_BT, now_BT, advantage_B)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    metrics.pop("policy/left_out_rollouts")
    assert corrected.report == pytest.approx(metrics)


def test_where_every_token_is_dropped_the_denominator_is_one() -> None:
    logp_BT, mask_BT = torch.full((1, 3), -1.0), torch.ones(1, 3)
    made = correction("icepop")
    corrected = correct(made, dense_logp=logp_BT - 9, sparse_logp=logp_BT, response_mask=mask_BT)
    assert not corrected.kept_BT.any() and corrected.kept_tokens == 1


def test_a_correction_that_needs_lists_is_refused_by_name() -> None:
    assert set(names()) - set(USABLE) == {"jackpot"}
    with pytest.raises(UserError, match=r"Jackpot needs .* of every token"):
        check_usable(correction("jackpot"))
