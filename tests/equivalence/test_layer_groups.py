"""Schedules with budgets per group of layers: HFEngine against the oracle, and the training pass against HFEngine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from equivalence.models import prompts, tiny_model
from equivalence.oracle import sparse_logp
from sparroll.attention.selectors import PageMean
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer, response_logp
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step
from sparroll.types import TokenBatch

SMALL_PAGES = PageMean(page_tokens=4, first_tokens=4, recent_tokens=8)
PLAIN = Schedule((Step(0, 16), Step(20, 20), Step(33, 28)), SMALL_PAGES, dense_layers=(1,), name="plain")
GROUPED = Schedule(
    (Step(0, (16, 24)), Step(20, (28, 24)), Step(50, (28, 40))),
    SMALL_PAGES,
    dense_layers=(1,),
    layer_groups=((0,), (2,)),
    name="grouped",
)
ASKED = [5, 37, 16]


@pytest.mark.parametrize("check", [False, True], ids=["", "checked"])
def test_equal_budgets_in_all_groups_are_no_groups(check: bool) -> None:
    model = tiny_model()
    steps = tuple(Step(step.from_context_tokens, (step.kv_budget_tokens,) * 2) for step in PLAIN.steps)
    rollouts, reports = [], []
    for each in (
        PLAIN,
        replace(PLAIN, layer_groups=((0,), (2,))),
        replace(PLAIN, steps=steps, layer_groups=((2,), (0,))),
    ):
        engine = HFEngine(model, schedule=each.checked(5, 0.2) if check else each, max_batch=4)
        rollouts.append(engine.generate(prompts(ASKED), n=2, max_new_tokens=40, seed=3))
        reports.append(engine.report())
    for others, report in zip(rollouts[1:], reports[1:], strict=True):
        assert report.layers == reports[0].layers and report.checks == reports[0].checks
        for one, other in zip(rollouts[0], others, strict=True):
            assert one.response_ids == other.response_ids and torch.equal(one.sparse_logp, other.sparse_logp)
            assert (one.kv_read_share, one.attention) == (other.kv_read_share, other.attention)


def test_each_group_reads_its_own_budget_as_the_oracle_says_and_the_training_pass_reads_the_same() -> None:
    model = tiny_model()
    engine = HFEngine(model, schedule=GROUPED, max_batch=4)
    rollouts = engine.generate(prompts(ASKED), n=2, max_new_tokens=41, seed=7)
    budgets = {layer: GROUPED.of_layer(layer).kv_budget_tokens for layer in (0, 2)}
    batch = TokenBatch.from_rollouts(rollouts, 0)
    trained_BT = response_logp(model, batch, 1.0, GROUPED).detach()
    replayed = Scorer(model).sparse(rollouts, GROUPED)
    for row, rollout in enumerate(rollouts):
        expected = sparse_logp(
            model,
            rollout.prompt_ids + rollout.response_ids,
            len(rollout.prompt_ids),
            budgets,
            page=4,
            first_pages=1,
            recent_pages=2,
            dense_layers=(1,),
        )
        torch.testing.assert_close(rollout.sparse_logp, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(trained_BT[row, : len(expected)], expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(replayed[row].logp, expected, atol=1e-5, rtol=0)


def test_read_tokens_are_counted_layer_by_layer() -> None:
    engine = HFEngine(tiny_model(), schedule=GROUPED, max_batch=4)
    rollouts = engine.generate(prompts(ASKED), max_new_tokens=41)
    contexts = np.concatenate([rollout.context_tokens[1:].numpy() for rollout in rollouts])
    read = [contexts, contexts, contexts]
    for layer in (0, 2):
        read[layer] = SMALL_PAGES.read_tokens(
            contexts, np.array([_budget(layer, context) for context in contexts.tolist()])
        )
    for found, expected in zip(engine.report().layers, read, strict=True):
        assert (found.context_tokens, found.read_tokens) == (contexts.sum(), expected.sum())
        assert found.sparse_steps == (expected < contexts).sum()
        assert found.dense_steps == (expected == contexts).sum()
    assert engine.report().kv_read_share == sum(each.sum() for each in read) / (3 * contexts.sum())
    mine = rollouts[1]
    own = mine.context_tokens[1:].numpy()
    unread = int(GROUPED.unread_tokens(own, 3).sum())
    assert unread > 0 and mine.kv_read_share == (3 * own.sum() - unread) / (3 * own.sum())


def _budget(layer: int, context: int) -> int:
    """As the file says it."""
    return {0: (16, 28, 28), 2: (24, 24, 40)}[layer][(context >= 20) + (context >= 50)]


def test_groups_switch_between_generates_and_those_of_another_model_are_refused() -> None:
    engine, settings = HFEngine(tiny_model(), schedule=PLAIN), dict(max_new_tokens=30, temperature=0)
    before = engine.generate(prompts(ASKED), **settings)
    engine.set_schedule(GROUPED)
    grouped = engine.generate(prompts(ASKED), **settings)
    engine.set_schedule(PLAIN)
    again = engine.generate(prompts(ASKED), **settings)
    assert [each.response_ids for each in again] == [each.response_ids for each in before]
    assert any(not torch.equal(a.sparse_logp, b.sparse_logp) for a, b in zip(grouped, again, strict=True))
    with pytest.raises(UserError, match="layer_groups names layer 3, but the model has layers 0..2"):
        engine.set_schedule(replace(GROUPED, layer_groups=((0,), (2, 3))))
    assert engine.schedule is PLAIN
