"""What only VLLMEngine refuses, and that a backend that did not run is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sparroll.attention.selectors import PageMean
from sparroll.engines.vllm import launch
from sparroll.engines.vllm.launch import installed_version
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step

if installed_version() is None:
    pytest.skip("needs vllm; `make test-vllm` installs it", allow_module_level=True)

from sparroll.engines.vllm.engine import VLLMEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[VLLMEngine]:
    engine = VLLMEngine("tiny-reasoner", schedule=Schedule.fixed(64), dtype=torch.float32, max_batch=4)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        (Schedule.fixed(64, PageMean(page_tokens=8, first_tokens=8)), "keeps the index of"),
        (Schedule(tuple(Step(100 * step, 64) for step in range(65))), "schedules of up to 64 steps, got 65"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, schedule: Schedule, reason: str
) -> None:
    monkeypatch.setattr(launch, "prepare_process", lambda: None)
    monkeypatch.setattr(launch, "start", lambda *arguments: pytest.fail("vLLM was started"))
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match=reason):
        VLLMEngine("tiny-reasoner", schedule=schedule, capacity=Schedule.fixed(64), dtype=torch.float32)


def test_stages_of_a_pipeline_are_refused() -> None:
    with pytest.raises(UserError, match="one pipeline stage"):
        VLLMEngine("tiny-reasoner", pipeline_parallel_size=2)


def test_a_second_engine_in_the_process_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(UserError, match="another VLLMEngine is open"):
        VLLMEngine("tiny-reasoner")


def test_sleep_needs_a_gpu(engine: VLLMEngine) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UserError, match="not started with sleep_mode"):
        engine.sleep()
    with pytest.raises(UserError, match="there is no GPU"):
        VLLMEngine("tiny-reasoner", sleep_mode=True)


def test_another_index_or_other_dense_layers_are_refused(engine: VLLMEngine) -> None:
    with pytest.raises(UserError, match="has the dense layers"):
        engine.set_schedule(Schedule.fixed(64, dense_layers=(0,)))
    with pytest.raises(UserError, match="keeps the index"):
        engine.set_schedule(Schedule.fixed(96, PageMean(page_tokens=16, first_tokens=32, recent_tokens=32)))
    assert engine.schedule is not None and engine.schedule.name == "fixed-64"


def test_a_temperature_that_vllm_would_change_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(UserError, match="got temperature 0.001"):
        engine.generate([[5, 6]], max_new_tokens=2, temperature=0.001)


def test_a_tied_head_of_its_own_is_refused(engine: VLLMEngine) -> None:
    from transformers import AutoModelForCausalLM

    from sparroll.models import resolve

    state = AutoModelForCausalLM.from_pretrained(resolve("tiny-reasoner")).state_dict()
    with pytest.raises(UserError, match="differs from model.embed_tokens.weight"):
        engine.load_weights(state | {"lm_head.weight": state["lm_head.weight"] + 1}, 1)
    engine.load_weights({name: tensor for name, tensor in state.items() if name != "lm_head.weight"}, 1)
    assert engine.weight_version == 1


def test_a_backend_that_did_not_run_is_an_error(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparroll.engines.vllm.state as state

    def nothing(self: Any) -> Any:
        report = state.EngineReport("vllm", "", None, 0)
        report.layers = [state.LayerReport() for _ in range(engine.layers)]
        return report

    monkeypatch.setattr(state.State, "report", nothing)
    with pytest.raises(RuntimeError, match="ran another attention backend"):
        engine.generate([[5] * 90], max_new_tokens=8, stop_ids=[])
