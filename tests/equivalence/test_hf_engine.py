"""HFEngine against model.generate and against the oracle; what a batch, a refill or a shared prompt must not change."""

from __future__ import annotations

import pytest
import torch

from equivalence.models import ARCHITECTURES, prompts, tiny_model
from equivalence.oracle import sparse_logp
from sparroll.attention.selectors import PageMean
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step

SMALL_PAGES = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
RISING = Schedule(
    steps=(Step(0, 16), Step(20, 20), Step(33, 28)), selector=SMALL_PAGES, dense_layers=(1,), name="rising"
)
ODD_LENGTHS = [5, 1, 37, 16, 3]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dense_and_full_budget_equal_greedy_generate(architecture: str) -> None:
    model, asked = tiny_model(architecture), prompts(ODD_LENGTHS)
    expected = [
        model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist() for ids in asked
    ]
    assert len({tuple(ids) for ids in expected}) == len(asked), "greedy outputs that are all alike would prove nothing"
    engine = HFEngine(model, max_batch=3)
    for schedule in (None, Schedule.fixed(1024), Schedule.fixed(64, SMALL_PAGES)):
        engine.set_schedule(schedule)
        rollouts = engine.generate(asked, max_new_tokens=24, temperature=0)
        assert [rollout.response_ids for rollout in rollouts] == expected
        assert {rollout.attention for rollout in rollouts} == {"dense"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sparse_engine_equals_the_oracle(architecture: str) -> None:
    model, asked = tiny_model(architecture), prompts([5, 37])
    engine = HFEngine(model, schedule=RISING, max_batch=2)
    for rollout in engine.generate(asked, n=2, max_new_tokens=41, seed=7):
        assert rollout.attention == "sparse"
        expected = sparse_logp(
            model,
            rollout.prompt_ids + rollout.response_ids,
            len(rollout.prompt_ids),
            RISING.kv_budget_tokens,
            page=4,
            first_pages=1,
            recent_pages=2,
            dense_layers=RISING.dense_layers,
        )
        torch.testing.assert_close(rollout.sparse_logp, expected, atol=1e-5, rtol=0)


def test_of_equal_scores_engine_and_replay_read_the_lowest_units() -> None:
    model = tiny_model()
    for layer in model.model.layers:
        # Queries of zeros score all units alike, and attend to what is read in equal parts.
        layer.self_attn.q_proj.weight.data.zero_()
    rollouts = HFEngine(model, schedule=RISING, max_batch=2).generate(prompts([5, 37]), max_new_tokens=41, seed=7)
    for rollout, score in zip(rollouts, Scorer(model).sparse(rollouts, RISING), strict=True):
        # Python's sort, by which the oracle ranks units, leaves equal ones in their order.
        expected = sparse_logp(
            model,
            rollout.prompt_ids + rollout.response_ids,
            len(rollout.prompt_ids),
            RISING.kv_budget_tokens,
            page=4,
            first_pages=1,
            recent_pages=2,
            dense_layers=RISING.dense_layers,
        )
        torch.testing.assert_close(rollout.sparse_logp, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(score.logp, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["qwen3", "gemma"])
def test_replay_equals_the_engine(architecture: str) -> None:
    model = tiny_model(architecture)
    engine = HFEngine(model, schedule=RISING, max_batch=4)
    rollouts = engine.generate(prompts(ODD_LENGTHS), n=2, max_new_tokens=45, temperature=0.7, top_k=5)
    scores = Scorer(model, batch_tokens=150, logit_chunk_tokens=17).sparse(rollouts, RISING, temperature=0.7, top_k=5)
    for rollout, score in zip(rollouts, scores, strict=True):
        torch.testing.assert_close(score.logp, rollout.sparse_logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(score.top_k.logp, rollout.top_k.logp, atol=1e-5, rtol=0)


def test_a_batch_of_one_equals_a_batch_of_many() -> None:
    model, asked = tiny_model(), prompts(ODD_LENGTHS)
    together = HFEngine(model, schedule=RISING, max_batch=64).generate(asked, n=3, max_new_tokens=30, seed=5)
    alone = HFEngine(model, schedule=RISING, max_batch=1).generate(asked, n=3, max_new_tokens=30, seed=5)
    for one, many in zip(alone, together, strict=True):
        assert one.response_ids == many.response_ids
        torch.testing.assert_close(one.sparse_logp, many.sparse_logp, atol=1e-5, rtol=0)


def test_rows_that_end_early_are_refilled_and_change_nothing() -> None:
    model, asked = tiny_model(), prompts([9, 14, 23, 6, 31, 2])
    stops = [3, 17, 40, 41]
    engine = HFEngine(model, schedule=RISING, max_batch=4)
    rollouts = engine.generate(asked, n=4, max_new_tokens=50, seed=2, stop_ids=stops)
    lengths = {len(rollout.response_ids) for rollout in rollouts}
    assert len(lengths) > 5 and {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout in rollouts:
        assert (rollout.response_ids[-1] in stops) == (rollout.finish_reason == "stop")
        assert not set(rollout.response_ids[:-1]) & set(stops)
    scores = Scorer(model).sparse(rollouts, RISING)
    for rollout, score in zip(rollouts, scores, strict=True):
        torch.testing.assert_close(score.logp, rollout.sparse_logp, atol=1e-5, rtol=0)
    again = engine.generate(asked, n=4, max_new_tokens=50, seed=2, stop_ids=stops)
    assert [r.response_ids for r in again] == [r.response_ids for r in rollouts]
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(p, s) for p in range(6) for s in range(4)]


def test_dense_scores_equal_the_dense_engine() -> None:
    model = tiny_model()
    rollouts = HFEngine(model).generate(prompts(ODD_LENGTHS), n=2, max_new_tokens=33, top_k=6)
    for rollout, score in zip(rollouts, Scorer(model, batch_tokens=99).dense(rollouts, top_k=6), strict=True):
        torch.testing.assert_close(score.logp, rollout.sparse_logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(score.top_k.logp, rollout.top_k.logp, atol=1e-5, rtol=0)


def test_dense_scores_at_given_ids_are_those_of_the_whole_distribution() -> None:
    model = tiny_model()
    rollouts = HFEngine(model, schedule=RISING).generate(prompts(ODD_LENGTHS), n=2, max_new_tokens=33, top_k=6)
    ids = [rollout.top_k.ids for rollout in rollouts]
    scorer = Scorer(model, batch_tokens=99, logit_chunk_tokens=7)
    whole = scorer.dense(rollouts, temperature=0.7, top_k=model.config.vocab_size)
    asked = scorer.dense(rollouts, temperature=0.7, at_ids=ids)
    for every, score, listed in zip(whole, asked, ids, strict=True):
        logp_of = torch.empty_like(every.top_k.logp).scatter_(1, every.top_k.ids, every.top_k.logp)
        assert torch.equal(score.logp_at_ids, logp_of.gather(1, listed))
        assert torch.equal(score.logp, every.logp)
        assert every.logp_at_ids is None and score.top_k is None
    with pytest.raises(UserError, match=r"at_ids must hold \[T, K\] ids for each rollout"):
        scorer.dense(rollouts, at_ids=ids[1:])
    with pytest.raises(UserError, match="with one K"):
        scorer.dense(rollouts, at_ids=[ids[0][:, :2], *ids[1:]])


def test_report_counts_what_was_read() -> None:
    engine = HFEngine(tiny_model(), schedule=RISING)
    (rollout,) = engine.generate(prompts([10]), max_new_tokens=31)
    contexts = list(range(11, 41))
    pages = [(c + 3) // 4 for c in contexts]
    read = [min(RISING.kv_budget_tokens(c) // 4, p) * 4 - (4 * p - c) for c, p in zip(contexts, pages, strict=True)]
    sparse, dense = engine.report().layers[0], engine.report().layers[1]
    assert (sparse.context_tokens, sparse.read_tokens) == (sum(contexts), sum(read))
    assert sparse.sparse_steps == sum(r < c for r, c in zip(read, contexts, strict=True))
    assert (dense.dense_steps, dense.sparse_steps, dense.kv_read_share) == (len(contexts), 0, 1.0)
    assert rollout.kv_read_share == pytest.approx((2 * sum(read) + sum(contexts)) / (3 * sum(contexts)))
    assert sparse.index_read_share == pytest.approx((16 * 2 / 4) / (2 * 16 * 4))
