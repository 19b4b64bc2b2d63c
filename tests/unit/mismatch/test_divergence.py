"""KL and impossible tokens from lists: known answers, and bounds where a list does not show everything."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sparroll.errors import UserError
from sparroll.mismatch.divergence import NATS, Divergence, token_divergence
from sparroll.types import Rollout, TokenScores, TopK

P = torch.tensor([0.7, 0.2, 0.09999, 1e-5])
Q = torch.tensor([0.5, 0.1, 0.3, 0.1])
KL = float((Q * (Q / P).log()).sum())


def read(q: torch.Tensor, k: int, sampled: int = 0, tokens: int = 1) -> Rollout:
    best = q.log().topk(k)
    lists = TopK(best.indices.expand(tokens, k), best.values.expand(tokens, k))
    return Rollout([1] * 8, [sampled] * tokens, q[sampled].log().expand(tokens), "stop", top_k=lists)


def scored(p: torch.Tensor, k: int, of: Rollout, at_ids: bool = False) -> TokenScores:
    best, tokens = p.log().topk(k), len(of.response_ids)
    lists = TopK(best.indices.expand(tokens, k), best.values.expand(tokens, k))
    return TokenScores(p[of.response_ids].log(), lists, p[of.top_k.ids].log() if at_ids else None)


def test_whole_lists_give_the_kl_of_the_distributions() -> None:
    rollout = read(Q, 4)
    for scores in (scored(P, 4, rollout), scored(P, 4, rollout, at_ids=True)):
        kl_T, over_TN = token_divergence(rollout, scores)
        assert float(kl_T) == pytest.approx(KL, rel=1e-4)
        # The last token has .1 here and 1e-5 there: 9.2 nats.
        assert over_TN[0].tolist() == pytest.approx([0.1, 0.1, 0, 0], abs=1e-6)


def test_the_same_policy_has_neither() -> None:
    rollout = read(P, 2)
    kl_T, over_TN = token_divergence(rollout, scored(P, 2, rollout))
    assert float(kl_T) == pytest.approx(0, abs=1e-9) and not over_TN.any()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_shorter_lists_give_less_and_never_more(k) -> None:
    rollout = read(Q, k)
    known, listed = (float(token_divergence(rollout, scored(P, k, rollout, at_ids=at))[0]) for at in (True, False))
    assert 0 <= listed <= known + 1e-9 <= KL + 2e-9
    q, p = (torch.cat([of[rollout.top_k.ids[0]], 1 - of[rollout.top_k.ids[0]].sum(0, True)]) for of in (Q, P))
    assert known == pytest.approx(float((q * (q / p).log()).sum()), abs=1e-6), "the list and one bucket"


def test_a_bucket_holds_what_is_on_no_list() -> None:
    rollout = read(Q, 1)
    expected = 0.5 * math.log(0.5 / 0.7) + 0.5 * math.log(0.5 / 0.3)
    assert float(token_divergence(rollout, scored(P, 1, rollout, at_ids=True))[0]) == pytest.approx(expected, abs=1e-5)


def test_a_sampled_token_outside_of_the_list_counts_whole_but_not_in_a_replay() -> None:
    rollout = read(Q, 2, sampled=3)
    scores = scored(P, 2, rollout)
    assert token_divergence(rollout, scores)[1][0].tolist() == [1, 1, 0, 0]
    assert token_divergence(rollout, scores, sampled_it=False)[1][0].tolist() == [0, 0, 0, 0]


def test_a_token_that_the_dense_policy_excludes_keeps_the_means_finite() -> None:
    sure = torch.tensor([1.0, 0.0, 0.0, 0.0])
    rollout = read(Q, 4)
    kl_T, over_TN = token_divergence(rollout, scored(sure, 4, rollout, at_ids=True))
    assert math.isfinite(float(kl_T)) and float(kl_T) > 40
    assert over_TN[0].tolist() == pytest.approx([0.5] * 4, abs=1e-6)


def test_bins_and_their_file() -> None:
    found = Divergence(bin_tokens=10)
    far, near = read(Q, 4, tokens=4), read(P, 4, tokens=4)
    for rollout in (far, near):
        found.add(rollout, scored(P, 4, rollout))
    # Contexts of 8 to 11 tokens: two of each rollout in each bin.
    bins = found.bins()
    assert [each.tokens for each in bins.values()] == [4, 4] and list(bins) == [0, 10]
    assert bins[0].kl == pytest.approx(KL / 2, rel=1e-4) == found.overall().kl
    assert bins[10].over(5) == pytest.approx(0.05) and bins[10].over(10) == 0
    again = Divergence.from_table(json.loads(json.dumps(found.table())))
    assert again == found
    with pytest.raises(TypeError, match="not over"):
        Divergence.from_table({**found.table(), "nats": [1]})
    assert found.table()["overall"]["over_5_nats_share"] == found.overall().over_nats[NATS.index(5)]


def listed(ids: list[int], q: list[float], sampled: int, q_sampled: float) -> Rollout:
    """One token, sampled from a policy that shows these probabilities."""
    top_k = TopK(torch.tensor([ids]), torch.tensor([q]).log())
    return Rollout([1], [sampled], torch.tensor([q_sampled]).log(), "stop", top_k=top_k)


def dense(p_sampled: float, ids: list[int], p: list[float], at_ids: list[float] | None = None) -> TokenScores:
    asked = None if at_ids is None else torch.tensor([at_ids]).log()
    return TokenScores(torch.tensor([p_sampled]).log(), TopK(torch.tensor([ids]), torch.tensor([p]).log()), asked)


def test_padding_of_a_list_is_no_token() -> None:
    """Token 0 fills up the dense list with a probability of 0; it has at most the .5 that the list leaves over."""
    kl, _ = token_divergence(listed([1, 0], [0.6, 0.4], 1, 0.6), dense(0.5, [1, 0], [0.5, 0.0]))
    assert float(kl[0]) == pytest.approx(0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.5), abs=1e-3)


def test_the_sampled_token_counts_with_its_own_probability() -> None:
    """It is not on the dense list, and .01 is known of it."""
    kl, shares = token_divergence(listed([1, 0], [0.6, 0.4], 0, 0.4), dense(0.01, [1], [0.5]))
    assert float(kl[0]) == pytest.approx(0.6 * math.log(0.6 / 0.5) + 0.4 * math.log(0.4 / 0.01), abs=2e-3)
    assert float(shares[0, 0]) == pytest.approx(0.4)


@pytest.mark.parametrize(("p", "least"), [(0.9, 0.1), (0.3, 0.3)])
def test_an_unlisted_token_has_at_most_what_is_left_and_at_most_the_least_listed(p: float, least: float) -> None:
    kl, _ = token_divergence(listed([1, 0], [0.6, 0.4], 1, 0.6), dense(p, [1], [p]))
    assert float(kl[0]) == pytest.approx(0.6 * math.log(0.6 / p) + 0.4 * math.log(0.4 / least), abs=1e-3)


def test_without_a_token_there_is_no_divergence() -> None:
    with pytest.raises(UserError, match="no token was counted"):
        Divergence(2000).table()


def test_shares_of_impossible_tokens_never_exceed_one() -> None:
    rollout, scores = listed([1, 0], [0.5, 0.45], 9, 0.05), dense(1e-9, [5], [0.999], [1e-9, 1e-9])
    assert token_divergence(rollout, scores)[1][0].tolist() == pytest.approx([1, 1, 1, 0.5], abs=1e-3)
