"""The acceptance of whole rollouts: each estimator against its definition, and what a rollout must bring for it."""

from __future__ import annotations

import pytest
import torch

from sparroll.errors import UserError
from sparroll.mismatch import acceptance_of, acceptance_sampled, acceptance_top_k
from sparroll.types import Rollout, TokenScores, TopK

VOCABULARY = 9


def policy(seed: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(tokens, VOCABULARY, generator=generator)).log_softmax(-1)


def top_k(logp_TV: torch.Tensor, k: int = 4) -> TopK:
    best = logp_TV.topk(k)
    return TopK(best.indices, best.values)


def sampled(tokens: int) -> tuple[Rollout, TokenScores]:
    sparse, dense = policy(tokens, tokens), policy(tokens + 1, tokens)
    ids = sparse.argmax(-1)
    logp, dense_logp = (side.gather(-1, ids[:, None])[:, 0] for side in (sparse, dense))
    rollout = Rollout([1, 2], ids.tolist(), logp, "stop", top_k=top_k(sparse))
    return rollout, TokenScores(dense_logp, top_k(dense))


def test_each_rollout_gets_the_estimate_of_its_own_lists() -> None:
    rollouts, scores = zip(*(sampled(tokens) for tokens in (5, 1, 12)), strict=True)
    for place, name in enumerate(("top_k_lower", "top_k_upper")):
        found = acceptance_of(rollouts, scores, name)
        assert [len(acceptance_T) for acceptance_T in found] == [5, 1, 12]
        for acceptance_T, rollout, score in zip(found, rollouts, scores, strict=True):
            bounds = acceptance_top_k(score.top_k.ids, score.top_k.logp, rollout.top_k.ids, rollout.top_k.logp)
            assert torch.equal(acceptance_T, bounds[place])
    for acceptance_T, rollout, score in zip(acceptance_of(rollouts, scores, "sampled"), rollouts, scores, strict=True):
        assert torch.equal(acceptance_T, acceptance_sampled(score.logp, rollout.sparse_logp))


def test_a_rollout_that_the_dense_policy_reads_again_is_accepted_whole() -> None:
    rollout, score = sampled(7)
    replayed = rollout.read_by(score)
    assert replayed.response_ids == rollout.response_ids
    (lower_T,) = acceptance_of([replayed], [score], "top_k_lower")
    torch.testing.assert_close(lower_T, score.top_k.logp.exp().sum(-1))
    assert acceptance_of([replayed], [score], "sampled")[0].tolist() == [1.0] * 7


def test_what_an_estimator_cannot_read_is_refused_with_a_way_out() -> None:
    rollout, score = sampled(3)
    without, unscored = Rollout([1], [2], rollout.sparse_logp[:1], "stop"), TokenScores(score.logp)
    with pytest.raises(UserError, match=r"(?s)both sides, and the rollouts have none.*top_k=20"):
        acceptance_of([without], [score], "top_k_lower")
    with pytest.raises(UserError, match="and the scores have none"):
        acceptance_of([rollout], [unscored], "top_k_upper")
    with pytest.raises(UserError, match=r"whole distributions.*"):
        acceptance_of([rollout], [score], "exact")
    with pytest.raises(UserError, match=r"(?s)unknown estimator 'top_k'.*did you mean"):
        acceptance_of([rollout], [score], "top_k")
    with pytest.raises(UserError, match=r"one shape \[T, K\], got \[3, 4\] and \[3, 2\]"):
        TopK(rollout.top_k.ids, rollout.top_k.logp[:, :2])


def test_lists_put_together_come_apart_as_they_were() -> None:
    parts = [top_k(policy(tokens, tokens)) for tokens in (4, 1, 6)]
    whole = TopK.cat(parts)
    assert whole.ids.shape == (11, 4)
    assert whole.k == 4
    for before, after in zip(parts, whole.split([4, 1, 6]), strict=True):
        assert torch.equal(before.ids, after.ids)
        assert torch.equal(before.logp, after.logp)
    some = whole[torch.tensor([10, 0])]
    assert torch.equal(some.ids, torch.stack([parts[2].ids[-1], parts[0].ids[0]]))
    assert torch.equal(some.logp, torch.stack([parts[2].logp[-1], parts[0].logp[0]]))
