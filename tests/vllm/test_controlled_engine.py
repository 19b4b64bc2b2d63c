"""The controller's schedules in VLLMEngine: opened for the widest, it takes each new one between steps."""

from __future__ import annotations

import pytest

from sparroll.attention.selectors import PageMean
from sparroll.control.controller import Controller, Rules
from sparroll.control.length_bins import LengthBins
from sparroll.engines.vllm.engine import VLLMEngine
from vllm_runs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


def test_each_schedule_of_the_controller_is_what_vllm_samples_under_next() -> None:
    bins = LengthBins(2000, 6000, PageMean())
    controllers = [Controller(Rules(0.86), bins, [budget] * 3) for budget in (64, 128, 256)]
    first = controllers[0]
    engine = VLLMEngine("tiny-reasoner", schedule=first.schedule(), capacity=first.widest(), max_batch=2)
    try:
        engine.check_schedule(first.widest())
        shares = []
        for controller in controllers:
            engine.set_schedule(controller.schedule())
            engine.reset_report()
            prompt = [5 + place % 90 for place in range(400)]
            (rollout,) = engine.generate([prompt], max_new_tokens=4, temperature=0, stop_ids=[])
            assert rollout.schedule_name == "controlled"
            shares.append(engine.report().layers[-1].kv_read_share)
        # Contexts of 401 to 403 tokens end in a page of 1 to 3 tokens: 14 of the budget are slots still empty.
        assert shares == pytest.approx([50 / 402, 114 / 402, 242 / 402], rel=1e-3)
    finally:
        engine.close()
