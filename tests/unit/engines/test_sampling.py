"""The distribution that tokens are drawn from: temperature, and top-p as vLLM defines it."""

from __future__ import annotations

import pytest
import torch

from sparroll.engines import HFEngine
from sparroll.engines.sampling import log_probs
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError

P = torch.tensor([0.15, 0.5, 0.05, 0.3])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1.0, [0.15, 0.5, 0.05, 0.3]),
        (0.96, [0.15, 0.5, 0.05, 0.3]),
        (0.94, [0.15, 0.5, 0, 0.3]),
        (0.79, [0, 0.5, 0, 0.3]),
        (0.49, [0, 0.5, 0, 0]),
        (1e-6, [0, 0.5, 0, 0]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_with_that_mass_and_renormalises(top_p: float, kept: list[float]) -> None:
    expected = torch.tensor(kept) / sum(kept)
    torch.testing.assert_close(log_probs(P.log(), 1.0, top_p).exp(), expected)
    # At temperature 0.5 the probabilities are squared, so fewer tokens are enough.
    squares = P**2 / (P**2).sum()
    assert torch.equal(log_probs(P.log(), 0.5, 0.9).exp() > 0, torch.tensor([False, True, False, True]))
    torch.testing.assert_close(log_probs(P.log(), 0.5).exp(), squares)


def test_rows_are_cut_each_for_itself_and_nan_stays_nan() -> None:
    logits = torch.stack([P.log(), P.flip(0).log(), torch.full((4,), torch.nan), torch.zeros(4)])
    found = log_probs(logits[:, None], 1.0, 0.45)[:, 0]
    assert found[2].isnan().all()
    assert torch.equal(found[1], log_probs(logits[1], 1.0, 0.45))
    assert int((found[3] > -torch.inf).sum()) == 2


@pytest.fixture(scope="module")
def engine() -> HFEngine:
    return HFEngine("tiny-reasoner", dtype=torch.float32, device="cpu")


def test_an_engine_draws_from_the_cut_distribution_and_says_its_log_probs(engine: HFEngine) -> None:
    asked = [[5, 9, 20, 33], [7, 8, 9]]
    rollouts = engine.generate(asked, 4, max_new_tokens=30, temperature=1.3, top_p=0.6, stop_ids=[], top_k=8)
    scorer = Scorer(engine.model)
    cut, whole = (scorer.dense(rollouts, temperature=1.3, top_p=top_p, top_k=8) for top_p in (0.6, 1.0))
    for rollout, same, full in zip(rollouts, cut, whole, strict=True):
        torch.testing.assert_close(rollout.sparse_logp, same.logp, atol=1e-4, rtol=0)
        assert rollout.top_k is not None and same.top_k is not None
        torch.testing.assert_close(rollout.top_k.logp, same.top_k.logp, atol=1e-4, rtol=0)
        # The tokens that are left share the mass of those that are not, at most 1 / top_p.
        gained = rollout.sparse_logp - full.logp
        assert (gained > -1e-4).all() and (gained < -torch.log(torch.tensor(0.6)) + 1e-4).all()
    assert any((rollout.top_k.logp == -torch.inf).any() for rollout in rollouts if rollout.top_k is not None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"top_p": float("nan")}, "got nan"),
        ({"top_p": 0.9, "temperature": 0.0}, "top_p = 0.9 does nothing at temperature 0"),
    ],
)
def test_a_top_p_without_a_meaning_is_refused(engine: HFEngine, settings: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        engine.generate([[5]], max_new_tokens=2, **settings)
