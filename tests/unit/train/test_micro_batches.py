"""Micro batches: bounded, complete, and without padding that nobody needs."""

from __future__ import annotations

import pytest
import torch

from sparroll.train.update.micro_batches import micro_batches, padded, take
from sparroll.types import Rollout, TokenBatch


def batch(lengths: list[tuple[int, int]]) -> TokenBatch:
    rollouts = [
        Rollout(list(range(1, p + 1)), list(range(100, 100 + t)), torch.full((t,), -float(i)), "stop")
        for i, (p, t) in enumerate(lengths)
    ]
    made = TokenBatch.from_rollouts(rollouts, pad_id=0)
    made.dense_logp_BT = made.sparse_logp_BT - 1
    made.advantage_B = torch.arange(float(len(lengths)))
    return made


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


def test_taken_rows_lose_the_padding_of_the_others() -> None:
    made = batch(LENGTHS)
    part = take(made, [2, 0], torch.device("cpu"))
    assert part.input_ids_BS.tolist() == [[1, 2, 100, 101, 0, 0, 0, 0], [1, 2, 3, 100, 101, 102, 103, 104]]
    assert part.sparse_logp_BT.shape == (2, 5)
    assert part.dense_logp_BT is not None
    assert torch.equal(part.dense_logp_BT, part.sparse_logp_BT - 1)
    assert part.advantage_B is not None
    assert part.advantage_B.tolist() == [2.0, 0.0]
    assert part.mask_BT.sum(dim=1).tolist() == [2, 5]


def test_padding_is_zeros_on_the_right() -> None:
    assert padded([torch.tensor([1.0]), torch.tensor([2.0, 3.0])]).tolist() == [[1.0, 0.0], [2.0, 3.0]]
