"""verl's own loss on our fields is our own loss, for each correction, in several micro batches."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
from verl.workers.config import ActorConfig
from verl.workers.utils.padding import response_to_nested

from sparroll.corrections import correction, names
from sparroll.integrations.verl.loss_fields import corrected_fields
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.step_correction import correct_step
from sparroll.train.update.loss import LossSettings, policy_loss
from sparroll.types import Rollout, TokenBatch, TokenScores

LENGTHS = (3, 9, 5, 7, 1, 8)


@pytest.mark.parametrize("name", [name for name in names() if not correction(name).needs])
def test_verls_loss_is_our_own(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    sparse = [-2 * torch.rand(length, generator=generator) for length in LENGTHS]
    dense = [(row + 0.6 * torch.randn(len(row), generator=generator)).clamp(max=-1e-3) for row in sparse]
    advantage_B = torch.randn(len(LENGTHS), generator=generator)
    rollouts = [Rollout([1], [5] * len(row), row, "length", prompt_index=n) for n, row in enumerate(sparse)]
    ours = TokenBatch.from_rollouts(rollouts, pad_id=0)
    correct_step(correction(name), ours, rollouts, [TokenScores(row) for row in dense], Ranks(), 0, 1)
    nested = {
        "old_log_probs": torch.nested.as_nested_tensor(dense, layout=torch.jagged),
        "rollout_log_probs": torch.nested.as_nested_tensor(sparse, layout=torch.jagged),
        "response_mask": torch.nested.as_nested_tensor(
            [torch.ones(length, dtype=torch.int64) for length in LENGTHS], layout=torch.jagged
        ),
    }
    nested["advantages"] = response_to_nested(
        advantage_B[:, None].expand(-1, max(LENGTHS)).contiguous(), nested["response_mask"]
    )
    written = corrected_fields(correction(name), nested, [list(range(len(LENGTHS)))]).nested
    batch = TensorDict(nested | written, batch_size=len(LENGTHS)).to_padded_tensor()
    dense_BT = batch["old_log_probs"]
    now_BT = (dense_BT + 0.3 * torch.randn(dense_BT.shape, generator=generator)).requires_grad_()
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=1e9,
    )
    # As verl's engine does: the denominator is the number of ones in loss_mask, over all micro batches.
    config.global_batch_info.update(dp_size=1, batch_num_tokens=int(written["loss_mask"].values().sum()))
    total = torch.zeros(())
    for rows in ([0, 1], [2, 3], [4, 5]):
        loss, _ = compute_policy_loss_vanilla(
            old_log_prob=dense_BT[rows],
            log_prob=now_BT[rows],
            advantages=batch["advantages"][rows],
            response_mask=batch["response_mask"][rows].bool(),
            config=config,
            rollout_is_weights=batch["rollout_is_weights"][rows],
        )
        total = total + loss
    assert ours.weight_BT is not None and ours.kept_BT is not None
    expected, _ = policy_loss(
        now_BT, dense_BT, advantage_B, ours.weight_BT, ours.kept_BT, ours.kept_tokens, LossSettings(0.2, 0.28)
    )
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=0)
    (theirs,) = torch.autograd.grad(total, now_BT, retain_graph=True)
    (own,) = torch.autograd.grad(expected, now_BT)
    torch.testing.assert_close(theirs, own, atol=1e-6, rtol=0)
