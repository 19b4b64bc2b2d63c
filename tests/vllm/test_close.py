"""A closed engine leaves nothing of its model behind, compiled or not, so that the next one has the memory."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from sparroll import Schedule
from sparroll.errors import UserError
from sparroll.models import resolve
from vllm_runs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]


@pytest.mark.parametrize(("sparse", "reloaded"), [(False, False), (True, True)])
def test_a_closed_engine_leaves_nothing(sparse: bool, reloaded: bool) -> None:
    from sparroll.engines.vllm.engine import VLLMEngine

    schedule = Schedule.fixed(64, dense_layers=(0,)) if sparse else None
    engine = VLLMEngine(
        "tiny-reasoner",
        schedule=schedule,
        sparse=sparse,
        dtype=torch.float32,
        max_context_tokens=256,
        # As on a GPU; what was compiled is held in more places.
        enforce_eager=False,
    )
    engine.generate([[5, 6, 7]], max_new_tokens=3, stop_ids=[])
    if reloaded:
        engine.load_weights(AutoModelForCausalLM.from_pretrained(resolve("tiny-reasoner"), dtype=torch.float32), 1)
        engine.generate([[5, 6, 7]], max_new_tokens=3, stop_ids=[])
    core = engine.llm.llm_engine.engine_core.engine_core
    model = engine.llm.apply_model(lambda model: weakref.ref(model.model.layers[0].self_attn.attn))[0]
    config = weakref.ref(core.vllm_config)
    assert model() is not None
    del core
    engine.close()
    gc.collect()
    assert model() is None and config() is None
    engine.close()
    for use in (lambda: engine.generate([[5, 6, 7]], max_new_tokens=3), engine.report):
        with pytest.raises(UserError, match="the engine is closed"):
            use()
