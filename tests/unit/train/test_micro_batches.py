"""Micro batches: bounded and complete."""

from __future__ import annotations

import pytest
import torch

from sparroll.train.update.micro_batches import micro_batches
from sparroll.types import Rollout, TokenBatch


def batch(lengths: list[tuple[int, int]]) -> TokenBatch:
    rollouts = [
        Rollout(list(range(1, p + 1)), list(range(100, 100 + t)), torch.full((t,), -float(i)), "stop")
        for i, (p, t) in enumerate(lengths)
    ]
    return TokenBatch.from_rollouts(rollouts, pad_id=0)


LENGTHS = [(3, 5), (10, 40), (2, 2), (7, 9), (1, 1), (4, 30)]


@pytest.mark.parametrize("most_tokens", [1, 20, 60, 100, 10_000])
@pytest.mark.parametrize("most_rollouts", [None, 1, 2])
def test_each_row_is_in_one_bounded_group(most_tokens: int, most_rollouts: int | None) -> None:
    made, rows = batch(LENGTHS), [0, 1, 3, 4, 5]
    groups = micro_batches(made, rows, most_tokens, most_rollouts)
    assert sorted(row for group in groups for row in group) == rows
    for group in groups:
        longest = max(sum(LENGTHS[row]) for row in group)
        assert len(group) == 1 or longest * len(group) <= most_tokens
        assert most_rollouts is None or len(group) <= most_rollouts
