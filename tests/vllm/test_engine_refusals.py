"""What only VLLMEngine refuses, and that a backend that did not run is noticed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli_runs import save_model
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.calibrate.open_study import open_study
from sparroll.engines.vllm import launch
from sparroll.engines.vllm.launch import installed_version
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
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
        (Schedule((Step(0, (64, 80)),), layer_groups=((2, 5), (4,))), r"layer_groups leaves out the layers \[3\]"),
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


def test_the_schedule_of_another_model_is_refused_before_vllm_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "prepare_process", lambda: None)
    monkeypatch.setattr(launch, "start", lambda *arguments: pytest.fail("vLLM was started"))
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match="was made for Qwen/Qwen3-1.7B, not for tiny-reasoner: the number of layers"):
        VLLMEngine("tiny-reasoner", schedule="qwen3-1.7b-0.86", dtype=torch.float32)


def test_a_checkpoint_without_a_tensor_is_refused_before_vllm_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = save_model(tmp_path / "model"), "model.layers.1.mlp.down_proj.weight"
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(launch, "start", lambda *arguments: pytest.fail("vLLM was started"))
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match=f"does not fit its config: it lacks {name}"):
        VLLMEngine(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"short_step_tokens": -1}, "short_step_tokens must be a number of tokens, 0 or more, got -1"),
        ({"short_step_tokens": True}, "short_step_tokens must be a number of tokens"),
        ({"short_step_tokens": 9, "sparse": False}, "with sparse=False every step is dense"),
        (
            {"short_step_tokens": 9, "additional_config": {"sparroll": "a.toml"}},
            "would be lost beside additional_config",
        ),
        (
            {"short_step_tokens": 9, "schedule": Schedule.fixed(64).checked(), "dtype": torch.float32},
            "not decoded densely where drafts are checked",
        ),
    ],
)
def test_short_steps_are_a_number_of_tokens_of_a_sparse_engine(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match=reason):
        VLLMEngine("tiny-reasoner", **asked)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "one pipeline stage"),
        ({"worker_extension_cls": "other.Extension"}, "its own worker extension"),
        ({"dtype": "bfloat16"}, r"vLLM computes in torch.float32, .*, got dtype='bfloat16'"),
        ({"dtype": torch.float64}, "got dtype=torch.float64"),
        ({"logprobs_mode": "raw_logprobs"}, "'raw_logprobs' gives no log-probabilities of the distribution"),
        (
            {"sparse": False, "additional_config": {"sparroll": "a.toml"}},
            r"sparse=False, but additional_config\[\"sparroll\"\] makes the engine sparse",
        ),
        ({"additional_config": {"sparroll": {"shedule": "a.toml"}}}, "did you mean 'schedule'"),
    ],
)
def test_arguments_of_vllms_own_that_contradict_the_engine_are_refused_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(launch, "start", lambda *arguments: pytest.fail("vLLM was started"))
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match=reason):
        VLLMEngine("tiny-reasoner", **{"dtype": torch.float32, **given})


def test_short_steps_are_known_whichever_way_they_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Started(Exception):
        """Here vLLM would start."""

    def start(folder: Any, arguments: dict[str, Any]) -> None:
        raise Started

    monkeypatch.setattr(launch, "start", start)
    schedule = str(Schedule.fixed(64).save(tmp_path / "read64.toml"))
    own = {"additional_config": {"sparroll": {"schedule": schedule, "short_step_tokens": 9}}}
    for given in ({"short_step_tokens": 9}, own):
        monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
        engine = VLLMEngine.__new__(VLLMEngine)
        with pytest.raises(Started):
            engine.__init__("tiny-reasoner", schedule=schedule, dtype=torch.float32, **given)  # type: ignore[misc]
        assert engine.short_step_tokens == 9


def test_what_vllms_configuration_refuses_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match="a KV cache of type fp8"):
        VLLMEngine("tiny-reasoner", dtype=torch.float32, kv_cache_dtype="fp8")


@pytest.fixture
def own_cache_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM on a CPU prefers this variable, which other tests set, to the size that it is given."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)


@pytest.mark.usefixtures("own_cache_size")
@pytest.mark.parametrize("gib", [1e-5, 5e-4])
def test_a_cache_too_small_for_one_request_is_a_users_error(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    """No block at all; some, but not enough."""
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match=r"(?s)a KV cache of [\d.e-]+ GiB.*hint: .*engine\.kv_cache_gib"):
        VLLMEngine("tiny-reasoner", dtype=torch.float32, kv_cache_gib=gib)


@pytest.mark.usefixtures("own_cache_size")
def test_a_cache_of_a_given_size_holds_what_fits_into_it_with_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    engine = VLLMEngine("tiny-reasoner", dtype=torch.float32, max_batch=4, kv_cache_gib=0.125)
    config, blocks = engine.config, engine.llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    engine.close()
    page = 16 * 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    # A page's landmark is one row beside its 32 of keys and values, in sparse layers.
    assert 2**27 / page / (1 + 1 / 32) - config.num_hidden_layers <= blocks < 2**27 / page


def test_a_start_that_fails_leaves_no_engine_open(monkeypatch: pytest.MonkeyPatch) -> None:
    open_engines: list[VLLMEngine] = []
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", open_engines)
    monkeypatch.setattr(launch, "start", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        VLLMEngine("tiny-reasoner", dtype=torch.float32)
    assert not open_engines


def test_dense_by_name_and_sparse_by_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULE_VARIABLE, "qwen3-1.7b-0.86")
    monkeypatch.setattr("sparroll.engines.vllm.engine._open", [])
    with pytest.raises(UserError, match=f"sparse=False, but {SCHEDULE_VARIABLE}=qwen3-1.7b-0.86"):
        VLLMEngine("tiny-reasoner", sparse=False, dtype=torch.float32)


def test_another_worker_extension_is_refused() -> None:
    with pytest.raises(UserError, match="its own worker extension"):
        VLLMEngine("tiny-reasoner", dtype=torch.float32, worker_extension_cls="somebody.Else")


def test_a_schedule_that_a_later_engine_could_not_run_is_refused_before_anything_is_sampled(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study starts an engine for each selector, the second one after the measurements of the first."""
    closed = []
    monkeypatch.setattr("sparroll.calibrate.open_study.make_engine", lambda *arguments, **named: engine)
    monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    small, settings = QuantizedMean(4, bits=4), MeasureSettings(max_new_tokens=8)
    first, second, third = Schedule.fixed(64), Schedule.fixed(64, small), Schedule.fixed(64, small, dense_layers=())

    def opened(*schedules: Schedule) -> Study:
        return open_study("tiny-reasoner", [], False, settings, schedules, engine="vllm", dtype="fp32")

    for wrong, reason in (
        (third, r"has the dense layers \[0, 1\]"),
        (second.checked(16, 0.1), "without checks of drafts"),
    ):
        with pytest.raises(UserError, match=reason):
            opened(first, second, wrong)
    assert closed == [True, True]
    study = opened(first, second)
    assert study.indexed == first.selector and study.restart is not None and len(closed) == 2


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


def test_dropping_tokens_is_refused_and_keeping_all_is_not(engine: VLLMEngine) -> None:
    with pytest.raises(UserError, match="cannot drop tokens from its cache"):
        engine.set_compression("r_kv")
    engine.set_compression(None)
    assert engine.compression is None


def test_a_temperature_that_vllm_would_change_is_refused(engine: VLLMEngine) -> None:
    with pytest.raises(UserError, match="temperature = 0.001 is below 0.01"):
        engine.generate([[5, 6]], max_new_tokens=2, temperature=0.001)


def test_a_tied_head_of_its_own_is_refused(engine: VLLMEngine) -> None:
    from transformers import AutoModelForCausalLM

    from sparroll.models import resolve

    state = AutoModelForCausalLM.from_pretrained(resolve("tiny-reasoner")).state_dict()
    with pytest.raises(UserError, match="differs from model.embed_tokens.weight"):
        engine.load_weights(state | {"lm_head.weight": state["lm_head.weight"] + 1}, 1)
    engine.load_weights({name: tensor for name, tensor in state.items() if name != "lm_head.weight"}, 1)
    assert engine.weight_version == 1


def test_a_stop_id_outside_the_vocabulary_is_refused_as_by_hf(engine: VLLMEngine) -> None:
    with pytest.raises(UserError, match="stop_ids must be from 0 to 135, the model's last token id, got -1"):
        engine.generate([[5] * 9], max_new_tokens=8, stop_ids=[5, -1])


def test_a_backend_that_did_not_run_is_an_error(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import sparroll.engines.vllm.attention.state as state

    def nothing(self: Any) -> Any:
        report = state.EngineReport("vllm", "", None, 0)
        report.layers = [state.LayerReport() for _ in range(engine.layers)]
        return report

    monkeypatch.setattr(state.State, "report", nothing)
    with pytest.raises(RuntimeError, match="ran another attention backend"):
        engine.generate([[5] * 90], max_new_tokens=8, stop_ids=[])


@pytest.mark.parametrize("lost", ["dense_steps", "sparse_steps"])
def test_a_single_lost_step_of_one_layer_is_an_error(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    import sparroll.engines.vllm.attention.state as state

    report = state.State.report

    def without_one(self: Any) -> Any:
        found = report(self)
        layer = found.layers[0 if lost == "dense_steps" else 3]
        if layer.dense_steps + layer.sparse_steps > before:
            setattr(layer, lost, getattr(layer, lost) - 1)
            if lost == "sparse_steps":
                # It ran, densely.
                layer.dense_steps += 1
        return found

    layer = engine.report().layers[0]
    before = layer.dense_steps + layer.sparse_steps
    engine.generate([[5] * 90], max_new_tokens=8, stop_ids=[])
    before += 7
    monkeypatch.setattr(state.State, "report", without_one)
    with pytest.raises(RuntimeError, match=f"layer {0 if lost == 'dense_steps' else 3} ran"):
        engine.generate([[5] * 90], max_new_tokens=8, stop_ids=[])


def test_a_layer_that_falls_back_to_dense_attention_shows_in_the_report_and_is_an_error(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.engines.vllm.attention.layer import SparseLayer

    asked: dict[str, Any] = dict(max_new_tokens=8, stop_ids=[])
    engine.reset_report()
    engine.generate([[5] * 90], **asked)
    assert engine.report().layers[3].sparse_steps == 7
    forward = SparseLayer.forward

    def falls_back(self: Any, *arguments: Any, **named: Any) -> Any:
        *first, metadata = arguments
        if self.number == 3 and metadata is not None:
            metadata = copy.copy(metadata)
            metadata.sparroll = None
        return forward(self, *first, metadata, **named)

    with monkeypatch.context() as patch:
        patch.setattr(SparseLayer, "forward", falls_back)
        with pytest.raises(
            RuntimeError, match="layer 3 ran 7 decode steps through sparroll's backend, 0 of them sparse"
        ):
            engine.generate([[5] * 90], **asked)
    found = engine.report().layers
    assert (found[3].dense_steps, found[3].sparse_steps) == (7, 7)
    assert (found[2].dense_steps, found[2].sparse_steps) == (0, 14)
    assert found[3].read_tokens > found[2].read_tokens
    engine.reset_report()
    engine.generate([[5] * 90], **asked)
    assert engine.report().layers[3] == engine.report().layers[2]


def test_workers_that_ran_different_things_are_an_error(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    table = engine.llm.collective_rpc("sparroll_report")[0]
    other = copy.deepcopy(table)
    other["layers"][2]["dense_steps"] += 1
    monkeypatch.setattr(engine.llm, "collective_rpc", lambda name, *arguments: [table, other])
    with pytest.raises(RuntimeError, match="layer 2 ran .* in worker 1"):
        engine.report()


def test_preempted_requests_are_reported_and_accepted(engine: VLLMEngine) -> None:
    engine.close()
    for sparse in (True, False):
        small = VLLMEngine(
            "tiny-reasoner",
            schedule=Schedule.fixed(64) if sparse else None,
            dtype=torch.float32,
            max_batch=8,
            max_context_tokens=512,
            sparse=sparse,
            num_gpu_blocks_override=24,
            block_size=32,
        )
        try:
            small.generate([[5] * 60, [6] * 70, [7] * 80, [8] * 90, [9] * 100], n=2, max_new_tokens=80, stop_ids=[])
            found = small.report()
        finally:
            small.close()
        assert found.preemptions > 0 and found.recomputed_tokens > 0
        steps = {layer.dense_steps + layer.sparse_steps for layer in found.layers}
        assert steps == {10 * 79 - found.resumed_tokens}
        assert (found.resumed_tokens > 0) == sparse
