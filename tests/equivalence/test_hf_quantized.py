"""HFEngine with an index of few bits: what it generates is what scoring the same rollouts anew finds."""

from __future__ import annotations

import pytest
import torch

from equivalence.models import prompts, tiny_model
from sparroll.attention.selectors import QuantizedMean
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.schedule import Schedule

ODD_LENGTHS = [5, 1, 37, 16, 3]


@pytest.mark.parametrize(("unit", "bits"), [(4, 8), (4, 4), (2, 2), (1, 1), (3, 4)])
def test_replay_equals_the_engine(unit: int, bits: int) -> None:
    model = tiny_model()
    selector = QuantizedMean(page_tokens=unit, first_tokens=unit, recent_tokens=2 * unit, bits=bits)
    schedule = Schedule.fixed(24, selector, dense_layers=(1,))
    engine = HFEngine(model, schedule=schedule, max_batch=4)
    rollouts = engine.generate(prompts(ODD_LENGTHS), max_new_tokens=45, temperature=0.7)
    assert {rollout.attention for rollout in rollouts} == {"sparse"}
    share = selector.index_width(16) / (unit * 2 * 16 * 4)
    assert engine.report().layers[0].index_read_share == pytest.approx(share)
    scored = Scorer(model).sparse(rollouts, schedule, temperature=0.7)
    for rollout, score in zip(rollouts, scored, strict=True):
        torch.testing.assert_close(rollout.sparse_logp, score.logp, atol=1e-5, rtol=0)
