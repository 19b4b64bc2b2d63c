"""What the rule needs to know of the two distributions at a position: five numbers. On a GPU one kernel reads both rows of
logits three times and writes nothing else; the same in PyTorch's operators moves ten times as many bytes."""

# N positions, V vocabulary, R requests, W rows of the longest window

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.draft_check import acceptance_of_sampled


@dataclass(frozen=True)
class Masses:
    """[N] float32 each."""

    dense_N: Tensor
    """p of the token."""
    draft_N: Tensor
    """q of the token."""
    draft_acceptance_N: Tensor
    """sum_v min(p, q)."""
    accepted_N: Tensor
    """A = sum_v min(q, p / floor), what the rule keeps."""
    acceptance_N: Tensor
    """sum_v min(p, q~)."""


def masses(dense_NV: Tensor, draft_NV: Tensor, ids_N: Tensor, floor: float) -> Masses:
    """The specification, from probabilities."""
    dense_N, draft_N = (each.gather(-1, ids_N[:, None])[:, 0] for each in (dense_NV, draft_NV))
    draft_acceptance_N = torch.minimum(dense_NV, draft_NV).sum(-1)
    return Masses(dense_N, draft_N, draft_acceptance_N, *acceptance_of_sampled(dense_NV, draft_NV, floor))
