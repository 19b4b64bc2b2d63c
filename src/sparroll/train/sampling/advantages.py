"""Group advantages (GRPO): a rollout is compared with the other rollouts of its own prompt. There is no value model.

With `normalise=False` the group's mean is subtracted, but nothing is divided (Dr. GRPO). The rewards of easy and hard
prompts vary little, and the division would give them the weight of the others.
"""

# G prompts (groups), N rollouts per prompt

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def group_advantages(reward_GN: Tensor, normalise: bool = True) -> Tensor:
    """[G, N] -> [G, N]: (reward - mean) / (std + 1e-6) within each row; std is the sample's (N - 1).

    A group whose rewards are all equal does not tell which rollout was better, so its advantages are exactly 0. A
    reward of NaN means ungraded: that rollout's advantage is 0, and the others of its group are compared among
    themselves.

    >>> group_advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[ 0.7071, -0.7071], [0.0, 0.0]])
    """
    assert reward_GN.dim() == 2, f"rewards must be [G, N], got {tuple(reward_GN.shape)}"
    if not reward_GN.numel():
        return torch.zeros_like(reward_GN)
    if reward_GN.isnan().any():
        return torch.stack([_among_the_graded(reward_N, normalise) for reward_N in reward_GN])
    centred_GN = reward_GN - reward_GN.mean(dim=1, keepdim=True)
    if normalise and reward_GN.shape[1] > 1:
        centred_GN = centred_GN / (reward_GN.std(dim=1, keepdim=True) + EPSILON)
    # The mean of equal numbers can differ from them in the last bit, and the division would turn that into an
    # advantage.
    equal_G1 = (reward_GN == reward_GN[:, :1]).all(dim=1, keepdim=True)
    return torch.where(equal_G1, torch.zeros_like(centred_GN), centred_GN)


def _among_the_graded(reward_N: Tensor, normalise: bool) -> Tensor:
    graded_N = ~reward_N.isnan()
    advantage_N = torch.zeros_like(reward_N)
    if graded_N.any():
        advantage_N[graded_N] = group_advantages(reward_N[graded_N][None], normalise)[0]
    return advantage_N
