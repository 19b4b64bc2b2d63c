"""Compression policies: what they keep equals plain loops; settings that make no sense are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparroll.compression.r_kv as r_kv
from plain_policies import kept
from sparroll.compression import RKV, Compression, SnapKV, StreamingLLM, compression_kinds, make_compression
from sparroll.errors import UserError

POLICIES = [
    StreamingLLM(budget_tokens=9, every_tokens=4),
    StreamingLLM(budget_tokens=9, every_tokens=4, first_tokens=1),
    SnapKV(budget_tokens=9, every_tokens=4, window_tokens=4),
    SnapKV(budget_tokens=9, every_tokens=5, window_tokens=1, pool_tokens=1),
    SnapKV(budget_tokens=12, every_tokens=4, window_tokens=3, pool_tokens=5, pool="mean"),
    RKV(budget_tokens=9, every_tokens=4, window_tokens=4),
    RKV(budget_tokens=12, every_tokens=4, window_tokens=2, pool_tokens=3, similarity_threshold=0.2),
    RKV(budget_tokens=12, every_tokens=4, window_tokens=2, importance_weight=0.0, similarity_threshold=-1.0),
]


def names(policy: Compression) -> str:
    return repr(policy)


def a_layer(tokens: list[int], window: int, heads: int = 2, group: int = 3, dim: int = 8) -> dict[str, torch.Tensor]:
    """Random keys and queries; what no request holds is large, so that reading it shows."""
    generator = torch.Generator().manual_seed(sum(tokens))
    keys = torch.randn(len(tokens), heads, max(tokens) + 3, dim, generator=generator)
    # Some keys resemble each other, as those of repeated tokens do.
    keys[:, :, 1::3] = keys[:, :, 1:2] + 0.3 * keys[:, :, 1::3]
    for row, count in enumerate(tokens):
        keys[row, :, count:] = 1e4
    queries = torch.randn(len(tokens), heads, group, max(window, 1), dim, generator=generator)
    return {"keys": keys, "queries": queries}


@pytest.mark.parametrize("policy", POLICIES, ids=names)
@pytest.mark.parametrize("more", [1, 2, 20])
def test_kept_tokens_equal_plain_loops(policy: Compression, more: int) -> None:
    tokens = [policy.budget_tokens + more, policy.budget_tokens + 1, policy.budget_tokens + 9]
    layer = a_layer(tokens, policy.query_tokens)
    slots = policy.keep(layer["keys"], layer["queries"], torch.tensor(tokens), 0.7)
    assert slots.shape == (3, 2, policy.budget_tokens)
    for row, count in enumerate(tokens):
        for head in range(2):
            keys = layer["keys"][row, head, :count].tolist()
            expected = kept(policy, keys, layer["queries"][row, head].tolist(), 0.7)
            assert slots[row, head].tolist() == expected
            assert len(set(expected)) == policy.budget_tokens


@pytest.mark.parametrize("policy", [SnapKV(budget_tokens=9, window_tokens=4), RKV(budget_tokens=9, window_tokens=4)])
def test_heads_choose_for_themselves_and_the_window_stays(policy: Compression) -> None:
    layer = a_layer([40], 4)
    slots = policy.keep(layer["keys"], layer["queries"], torch.tensor([40]), 0.7)
    assert slots[0, 0].tolist() != slots[0, 1].tolist()
    assert slots[0, :, -4:].tolist() == [[36, 37, 38, 39]] * 2


def test_of_equal_keys_r_kv_keeps_the_latest() -> None:
    """Ten tokens, the same key at 0, 2 and 5: its last occurrence is the least redundant of the three."""
    keys = torch.eye(12)[:10].clone()
    keys[[2, 5]] = keys[0].clone()
    redundancy = RKV().redundancy(keys[None, None], torch.tensor([10]))[0, 0]
    assert redundancy.sum() == pytest.approx(1.0)
    assert redundancy[5] < redundancy[0]
    # The two others resemble 5, which is left out; 5's own latest is 2, so 0 is resembled by 2 and by 5.
    assert torch.softmax(torch.tensor([2, 0, 1, 0, 0, 0, 0, 0, 0, 0]) / 10, 0).tolist() == pytest.approx(
        redundancy.tolist()
    )


@pytest.mark.parametrize("threshold", [-1.0, 0.5])
def test_empty_slots_change_no_score(threshold: float) -> None:
    policy, layer, tokens = RKV(similarity_threshold=threshold), a_layer([40, 23], 4), torch.tensor([40, 23])
    together = policy.redundancy(layer["keys"], tokens)
    for row, count in enumerate(tokens.tolist()):
        alone = policy.redundancy(layer["keys"][row : row + 1, :, :count], tokens[row : row + 1])
        torch.testing.assert_close(together[row, :, :count], alone[0], rtol=1e-6, atol=0)
        assert not together[row, :, count:].any()


def test_similarities_in_pieces_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = a_layer([40, 23], 4)
    policy, tokens = RKV(budget_tokens=9, window_tokens=4), torch.tensor([40, 23])
    whole = policy.redundancy(layer["keys"], tokens)
    monkeypatch.setattr(r_kv, "_SIMILARITY_ELEMENTS", 7 * layer["keys"][..., 0].numel())
    torch.testing.assert_close(policy.redundancy(layer["keys"], tokens), whole, rtol=1e-6, atol=0)


def test_the_defaults_are_sparse_rls() -> None:
    for kind in compression_kinds():
        policy = make_compression(kind)
        assert (policy.budget_tokens, policy.every_tokens, policy.most_tokens) == (512, 128, 640)
        assert make_compression(**policy.table()) == policy
    assert (RKV().window_tokens, SnapKV().window_tokens, StreamingLLM().query_tokens) == (8, 8, 0)
    assert make_compression("r_kv", budget_tokens=64).name == "r_kv-64"


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("rkv", {}, r"(?s)unknown compression 'rkv'.*did you mean 'r_kv'"),
        ("r_kv", {"budget": 4}, r"(?s)no setting 'budget'.*budget_tokens"),
        ("streaming", {"window_tokens": 8}, "no setting 'window_tokens'"),
        ("r_kv", {"budget_tokens": 0}, "budget_tokens must be a whole number from 1 on, got 0"),
        ("r_kv", {"every_tokens": 1.5}, "every_tokens must be a whole number from 1 on, got 1.5"),
        ("r_kv", {"window_tokens": True}, "window_tokens must be a whole number"),
        ("r_kv", {"budget_tokens": 8}, r"(?s)above the 8 tokens that always stay, got 8.*use 9"),
        ("streaming", {"budget_tokens": 4}, "above the 4 tokens that always stay, got 4"),
        ("snap_kv", {"every_tokens": 7}, r"every_tokens must be at least window_tokens \(8\), got 7"),
        ("snap_kv", {"pool_tokens": 4}, "pool_tokens must be odd, got 4"),
        ("snap_kv", {"pool": "sum"}, r"(?s)unknown pool 'sum'.*max, mean"),
        ("r_kv", {"importance_weight": 1.1}, r"importance_weight must lie in 0\.\.1, got 1.1"),
        ("r_kv", {"similarity_threshold": "high"}, r"similarity_threshold must lie in -1\.\.1, got 'high'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_compression(kind, **settings)
