"""The batch that travels through a step: cut by rows with every field, without the padding that only other rows needed."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from sparroll.types import NowWeights, Rollout, TokenBatch, TokenScores, TopK, padded

LENGTHS = [(3, 5), (10, 40), (2, 2)]


def whole_batch() -> TokenBatch:
    """Every field filled in; each value of [B, T] says which row and token it is of."""
    rollouts = [
        Rollout(list(range(1, p + 1)), list(range(100, 100 + t)), -row - torch.arange(t) / 100, "stop")
        for row, (p, t) in enumerate(LENGTHS)
    ]
    batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
    lists = [TopK(torch.full((t, 4), row), torch.full((t, 4), -float(row))) for row, (_, t) in enumerate(LENGTHS)]
    batch.add_scores([TokenScores(r.sparse_logp - 1, top_k) for r, top_k in zip(rollouts, lists, strict=True)])
    batch.advantage_B, batch.left_out_B = torch.arange(3.0), torch.tensor([False, True, False])
    batch.reference_logp_BT, batch.weight_BT = batch.sparse_logp_BT - 2, batch.sparse_logp_BT + 9
    batch.kept_BT, batch.kept_tokens = batch.mask_BT & (batch.sparse_logp_BT > -2.01), 42
    batch.now_weights = NowWeights(lambda now_BT, column_BT: column_BT * now_BT, (batch.weight_BT,))
    return batch


def test_every_field_of_the_batch_is_filled_in_here() -> None:
    assert [each.name for each in fields(TokenBatch) if getattr(whole_batch(), each.name) is None] == []


def test_taken_rows_lose_the_padding_of_the_others() -> None:
    part = whole_batch().take([2, 0])
    assert len(part) == 2
    assert part.input_ids_BS.tolist() == [[1, 2, 100, 101, 0, 0, 0, 0], [1, 2, 3, 100, 101, 102, 103, 104]]
    assert part.prompt_tokens_B.tolist() == [2, 3]
    assert part.mask_BT.sum(dim=1).tolist() == [2, 5]
    assert part.context_tokens_BT.tolist() == [[2, 3, 4, 5, 6], [3, 4, 5, 6, 7]]


def test_taken_rows_keep_every_field_of_theirs() -> None:
    whole, part = whole_batch(), whole_batch().take([2, 0])
    for each in fields(TokenBatch):
        if each.name.endswith("_BT"):
            assert torch.equal(getattr(part, each.name), getattr(whole, each.name)[[2, 0], :5]), each.name
    assert part.advantage_B.tolist() == [2.0, 0.0]
    assert part.left_out_B.tolist() == [False, False]
    assert [lists.ids.tolist() for lists in part.dense_top_k] == [[[2] * 4] * 2, [[0] * 4] * 5]
    assert part.kept_tokens == 42


def test_weights_that_follow_the_policy_follow_it_in_the_taken_rows() -> None:
    part = whole_batch().take([2, 0])
    now_BT = torch.full((2, 5), -0.5, requires_grad=True)
    assert torch.equal(part.weight_at(now_BT), -0.5 * part.weight_BT)
    assert not part.weight_at(now_BT).requires_grad
    part.now_weights = None
    assert part.weight_at(now_BT) is part.weight_BT


def test_a_process_without_rollouts_has_a_batch_of_none() -> None:
    batch = TokenBatch.from_rollouts([], pad_id=0)
    batch.add_scores([])
    assert len(batch) == 0
    assert batch.mask_BT.shape == batch.dense_logp_BT.shape == (0, 0)
    assert batch.dense_top_k == []


def test_padding_is_zeros_on_the_right() -> None:
    assert padded([torch.tensor([1.0]), torch.tensor([2.0, 3.0])]).tolist() == [[1.0, 0.0], [2.0, 3.0]]


def test_a_rollout_shows_itself_on_one_line() -> None:
    ids = list(range(20_000))
    rollout = Rollout(ids[:100], ids, torch.zeros(20_000), "stop", prompt_index=2, sample_index=7)
    assert repr(rollout) == "Rollout(prompt 2, sample 7: 100 + 20000 tokens, stop, dense)"
    sparse = replace(rollout, attention="sparse", kv_read_share=0.314, text="a word " * 500)
    assert repr(sparse).startswith(
        "Rollout(prompt 2, sample 7: 100 + 20000 tokens, stop, sparse, 32% of the KV read, 'a word "
    )
    assert len(repr(sparse)) < 130
