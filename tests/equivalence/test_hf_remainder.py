"""HFEngine with a remainder: what it generates is what scoring the same rollouts anew finds, and what dense attention finds
where nothing is unread. Checked drafts overwrite K and V, and the rows of groups with them."""

from __future__ import annotations

import pytest
import torch

from equivalence.models import prompts, tiny_model
from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder, Selector
from sparroll.engines import HFEngine
from sparroll.engines.hf.kv_cache import KVCache
from sparroll.engines.scoring import Scorer, response_logp
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.types import TokenBatch

ODD_LENGTHS = [5, 37, 16]
RECENT = {"first_tokens": 4, "recent_tokens": 32}


@pytest.mark.parametrize(
    "selector",
    [
        QuantizedMean(page_tokens=4, bits=4, **RECENT, remainder=Remainder(16, "fp8")),
        QuantizedMean(page_tokens=1, bits=2, **RECENT, remainder=Remainder(32)),
        PageMean(page_tokens=2, **RECENT, remainder=Remainder(16)),
    ],
    ids=["4x4-fp8", "1x2", "page_mean"],
)
def test_replay_equals_the_engine(selector: Selector) -> None:
    model = tiny_model()
    schedule = Schedule((Step(0, 40), Step(70, 48)), selector, dense_layers=(1,))
    engine = HFEngine(model, schedule=schedule, max_batch=4)
    rollouts = engine.generate(prompts(ODD_LENGTHS), max_new_tokens=64, temperature=0.7)
    assert {rollout.attention for rollout in rollouts} == {"sparse"}
    remainder = selector.remainder
    assert remainder is not None
    # To choose units and to weigh those that were not chosen, index rows are read twice, or once for both.
    times = 2 if isinstance(selector, PageMean) else 1
    rows = (
        times * selector.index_row_bytes(16) / selector.unit_tokens + selector.group_width(16) / remainder.group_tokens
    )
    assert engine.report().layers[0].index_read_share == pytest.approx(rows / (2 * 16 * 4))
    scored = Scorer(model).sparse(rollouts, schedule, temperature=0.7)
    # A query's channel halfway between two whole numbers may become the one here and the other there.
    close = 1e-4 if selector.weighed_with_scores else 1e-5
    for rollout, score in zip(rollouts, scored, strict=True):
        torch.testing.assert_close(rollout.sparse_logp, score.logp, atol=close, rtol=0)


def test_within_the_budget_it_is_dense() -> None:
    model, asked = tiny_model(), prompts(ODD_LENGTHS)
    dense = HFEngine(model).generate(asked, max_new_tokens=20, temperature=0)
    selector = QuantizedMean(page_tokens=4, bits=4, **RECENT, remainder=Remainder(16))
    whole = HFEngine(model, schedule=Schedule.fixed(60, selector)).generate(asked, max_new_tokens=20, temperature=0)
    for got, want in zip(whole, dense, strict=True):
        assert got.response_ids == want.response_ids and got.attention == "dense"
        assert torch.equal(got.sparse_logp, want.sparse_logp)


def test_drafts_with_a_remainder_are_checked_and_taken_back() -> None:
    model, asked = tiny_model(), prompts([37, 5])
    dense = HFEngine(model).generate(asked, max_new_tokens=60, temperature=0)
    selector = PageMean(page_tokens=4, **RECENT, remainder=Remainder(16))
    engine = HFEngine(model, schedule=Schedule.fixed(40, selector, (1,)).checked(window_tokens=7, floor=1.0))
    verified = engine.generate(asked, max_new_tokens=60, temperature=0)
    assert [rollout.response_ids for rollout in verified] == [rollout.response_ids for rollout in dense]
    assert engine.report().checks.cut_windows > 0


def test_rows_of_groups_follow_every_way_to_write_a_cache() -> None:
    selector = PageMean(page_tokens=4, **RECENT, remainder=Remainder(16))
    keys, values = torch.randn(2, 2, 64, 8, generator=torch.Generator().manual_seed(0))

    def empty() -> KVCache:
        cache = KVCache(1, 2, 2, 8, 64, selector, frozenset({0}), torch.float32, torch.device("cpu"))
        cache.reserve(64)
        return cache

    whole, pieces = empty(), empty()
    whole.write_prompt(0, 0, keys, values)
    pieces.write_prompt(0, 0, -keys[:, :20], -values[:, :20])
    for position in range(20, 50):
        at = torch.tensor([position])
        completed = torch.tensor([0]) if position % 4 == 3 else None
        pieces.append(0, keys[None, :, position], values[None, :, position], at, completed)
    pieces.rewrite(0, 0, 0, keys[:, :7], values[:, :7])
    assert not torch.equal(pieces.groups[0][0, :, 0], whole.groups[0][0, :, 0])
    pieces.rewrite(0, 0, 7, keys[:, 7:34], values[:, 7:34])
    pieces.rewrite(0, 0, 45, keys[:, 45:], values[:, 45:])
    assert torch.equal(pieces.groups[0][0], whole.groups[0][0])
    pieces.copy_row(0, 1, 50)
    assert torch.equal(pieces.groups[0][1, :, :3], whole.groups[0][0, :, :3])
    assert not pieces.groups[0][1, :, 3].any()


def test_an_adapter_is_not_trained_under_a_remainder() -> None:
    selector = PageMean(page_tokens=4, **RECENT, remainder=Remainder(16))
    schedule = Schedule.fixed(40, selector)
    model = tiny_model()
    rollouts = HFEngine(model, schedule=schedule).generate(prompts([50]), max_new_tokens=10, temperature=1.0)
    with pytest.raises(UserError, match="has no gradient"):
        response_logp(model, TokenBatch.from_rollouts(rollouts, 0), 1.0, schedule)
