"""Group advantages: known answers, and groups that say nothing."""

from __future__ import annotations

import pytest
import torch

from sparroll.train.sampling.advantages import group_advantages


def test_advantages_are_distances_from_the_groups_mean_in_standard_deviations() -> None:
    advantage = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64))
    assert advantage[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    spread = (1 / 3) ** 0.5
    assert advantage[1].tolist() == pytest.approx([0.5 / spread] * 2 + [-0.5 / spread] * 2, rel=1e-5)


def test_without_normalisation_only_the_mean_goes() -> None:
    advantage = group_advantages(torch.tensor([[3.0, 1.0, 2.0]]), normalise=False)
    assert advantage.tolist() == [[1.0, -1.0, 0.0]]


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e-8])
def test_groups_that_are_all_equal_get_exactly_zero(reward: float, normalise: bool) -> None:
    for samples in (1, 3, 7, 8):
        assert not group_advantages(torch.full((2, samples), reward), normalise).any()


def test_groups_do_not_see_each_other() -> None:
    rewards = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    whole = group_advantages(rewards)
    for row in range(5):
        assert torch.equal(whole[row], group_advantages(rewards[row : row + 1])[0])
    assert whole.sum(dim=1).abs().max() < 1e-5


def test_no_groups_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0, 0)).shape == (0, 0)
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


@pytest.mark.parametrize("scale", [-1e6, -3.0, 1e-3, 1e6])
def test_normalised_advantages_depend_on_no_scale_or_offset_of_the_rewards(scale: float) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.5, 0.0]])
    signed = group_advantages(rewards) * (1 if scale > 0 else -1)
    assert torch.allclose(group_advantages(scale * rewards), signed, rtol=0.01)
    assert torch.allclose(group_advantages(rewards - 2.0), group_advantages(rewards), atol=1e-5)


def test_a_rollout_without_a_reward_has_no_advantage_and_the_others_are_judged_among_themselves() -> None:
    rewards = torch.tensor([[1.0, torch.nan, 0.0], [torch.nan] * 3, [1.0, 0.0, 0.0]])
    advantage = group_advantages(rewards)
    assert advantage[0].tolist() == [
        group_advantages(rewards[:1, [0, 2]])[0, 0],
        0,
        group_advantages(rewards[:1, [0, 2]])[0, 1],
    ]
    assert not advantage[1].any()
    assert torch.equal(advantage[2], group_advantages(rewards[2:])[0])
