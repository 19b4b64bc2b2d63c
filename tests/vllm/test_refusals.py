"""What the plugin refuses at start, and what it asks vLLM for. Needs no vLLM, but for the tests marked so."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from sparroll.attention.selectors import PageMean, QuantizedMean, Quest
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE, VLLMSettings
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from vllm_runs import needs_vllm

PLAIN, CHECKED = Schedule.fixed(64).inline(), Schedule.fixed(64).checked().inline()


def config(**changes: Any) -> SimpleNamespace:
    """A vLLM configuration that is accepted, with changes by dotted name written with two underscores."""
    plain = SimpleNamespace(num_attention_heads=8, num_hidden_layers=4)
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, use_ubatching=False),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        model_config=SimpleNamespace(use_mla=False, hf_text_config=plain, max_model_len=40_960),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=None,
    )
    for name, value in changes.items():
        place, _, field = name.rpartition("__")
        setattr(getattr(made, place) if place else made, field, value)
    return made


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"lora_config": object()}, "LoRA"),
        ({"model_config__use_mla": True}, "latent attention"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size = 2"),
        ({"parallel_config__use_ubatching": True}, "micro-batches"),
        ({"cache_config__cache_dtype": "fp8"}, "type fp8"),
        ({"cache_config__block_size": 24}, "block size of 24"),
        ({"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"model_config__hf_text_config": SimpleNamespace(num_attention_heads=8, layer_types=["x"])}, "type x"),
    ],
)
def test_unsupported_features_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    compat.check_engine(config(), PageMean(), "cuda")
    with pytest.raises(UserError, match=reason):
        compat.check_engine(config(**changes), PageMean(), "cuda")


@pytest.mark.parametrize("tokens", [40_960, 131_072, 200_000])
def test_contexts_of_any_length_are_taken_with_units_of_any_size(tokens: int) -> None:
    for selector in (PageMean(), QuantizedMean(4, 16, 32, bits=4), QuantizedMean(1, 16, 32, bits=1)):
        compat.check_engine(config(model_config__max_model_len=tokens), selector, "cuda")


@needs_vllm
def test_pages_longer_than_their_index_row_are_refused_by_older_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some versions, 0.26 among them, know no rows of several tokens.
    monkeypatch.setattr(compat, "dataclasses", SimpleNamespace(fields=lambda _: ()))
    assert compat.rows_spec(128, 2, 64, 64, torch.bfloat16).head_size == 1
    with pytest.raises(UserError, match="rows of 64 numbers for units of 128 tokens") as refused:
        compat.rows_spec(128, 2, 64, 128, torch.bfloat16)
    assert "units of at most 64 tokens" in str(refused.value.hint)


def test_selectors_without_a_kernel_run_on_cpu_only() -> None:
    compat.check_engine(config(), Quest(), "cpu")
    with pytest.raises(UserError, match="quest"):
        compat.check_engine(config(), Quest(), "cuda")


@pytest.mark.parametrize("arguments", [{"sliding_window": 128}, {"sinks": object()}, {"logits_soft_cap": 30.0}])
def test_layers_that_are_not_plain_attention_are_refused(arguments: dict[str, Any]) -> None:
    compat.check_layer({"sliding_window": None, "attn_type": "decoder", "logits_soft_cap": 0})
    with pytest.raises(UserError, match=next(iter(arguments))):
        compat.check_layer(arguments)


def test_untested_versions_need_a_word_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for tested in ((0, 26), (0, 29), (0, 30), (0, 31), (0, 33)):
        compat.check_version(tested, "cuda")
    compat.check_version(compat.parse_version("0.32.0+cpu"), "cpu")
    for found, device in (((0, 23), "cuda"), ((0, 34), "cuda"), ((0, 0), "cpu"), ((0, 26), "tpu")):
        with pytest.raises(UserError, match="does not work"):
            compat.check_version(found, device)
    with pytest.raises(UserError, match=compat.UNTESTED_VARIABLE) as caught:
        compat.check_version((0, 32), "cuda")
    assert str(caught.value.hint).startswith('pip install -e ".[vllm]"')
    monkeypatch.setenv(compat.UNTESTED_VARIABLE, "1")
    compat.check_version((0, 32), "cuda")


def test_the_extra_allows_the_versions_that_ran_on_cuda_and_no_others() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = project["optional-dependencies"]["vllm"]
    allowed = [minor for minor in range(50) if Requirement(required).specifier.contains(f"0.{minor}.0")]
    assert tuple((0, minor) for minor in allowed) == compat.TESTED["cuda"]


def test_settings_are_a_schedule_or_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(additional: Any) -> VLLMSettings | None:
        return VLLMSettings.find(SimpleNamespace(additional_config=additional))

    assert find({}) is None
    assert find({"sparroll": "a.toml"}) == VLLMSettings(schedule="a.toml")
    assert find({"sparroll": {"schedule": "a.toml", "attention": "fa3_pages"}}) == VLLMSettings("a.toml", "fa3_pages")
    assert find({"sparroll": None}) == VLLMSettings(schedule=None)
    with pytest.raises(UserError, match="did you mean 'attention'"):
        find({"sparroll": {"atention": "triton"}})
    with pytest.raises(UserError, match="unknown attention 'fa2'"):
        find({"sparroll": {"attention": "fa2"}})
    with pytest.raises(UserError, match="short_step_tokens must be a number of tokens, 0 or more, got '9'"):
        find({"sparroll": {"schedule": "a.toml", "short_step_tokens": "9"}})
    with pytest.raises(UserError, match="without a schedule every step is dense"):
        find({"sparroll": {"short_step_tokens": 9}})
    inline = Schedule.fixed(512).inline()
    found = find({"sparroll": {"schedule": inline}})
    assert found is not None and found.load("any") == Schedule.fixed(512)
    with pytest.raises(UserError, match="a schedule's own table"):
        find({"sparroll": inline})
    monkeypatch.setenv(SCHEDULE_VARIABLE, json.dumps(inline))
    found = find({})
    assert found is not None and found.load("any") == Schedule.fixed(512)
    monkeypatch.setenv(SCHEDULE_VARIABLE, "b.toml")
    assert find({}) == VLLMSettings(schedule="b.toml")
    assert find({"sparroll": "a.toml"}) == VLLMSettings(schedule="a.toml")


@pytest.mark.parametrize(
    ("device", "graphs", "v2", "worker", "schedule", "reason"),
    [
        ("cuda", True, True, compat.WORKERS["cuda"], None, None),
        ("cuda", False, False, "mine.Worker", None, None),
        ("cpu", True, False, "mine.Worker", None, None),
        ("cuda", True, False, compat.WORKERS["cuda"], None, "which only vLLM's V2 model runner keeps"),
        ("cuda", True, True, "mine.Worker", None, "which the worker class mine.Worker does not capture"),
        ("cuda", True, True, compat.WORKERS["cuda"], CHECKED, "not decoded densely where drafts are checked"),
        ("cpu", False, False, compat.WORKERS["cpu"], CHECKED, "not decoded densely where drafts are checked"),
    ],
)
def test_short_steps_need_a_runner_and_a_worker_with_graphs_of_their_own(
    device: str, graphs: bool, v2: bool, worker: str, schedule: Any, reason: str | None
) -> None:
    config = SimpleNamespace(
        use_v2_model_runner=v2,
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(model="any"),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: graphs)),
        parallel_config=SimpleNamespace(worker_cls=worker),
        additional_config={"sparroll": {"schedule": schedule or PLAIN, "short_step_tokens": 9}},
    )
    if reason is None:
        compat.check_runs_short_steps(config)
    else:
        with pytest.raises(UserError, match=reason):
            compat.check_runs_short_steps(config)


def test_a_schedule_for_another_model_is_refused_unless_forced() -> None:
    with pytest.raises(UserError, match="made for"):
        VLLMSettings("qwen3-4b-0.86").load("somewhere/Llama-3")
    assert VLLMSettings("qwen3-4b-0.86", force_schedule=True).load("somewhere/Llama-3") is not None


@needs_vllm
def test_registering_twice_names_the_classes_and_loads_none() -> None:
    code = (
        "import os, sys; os.environ['SPARROLL_VLLM_SCHEDULE'] = 'x'\n"
        "from sparroll.engines.vllm.plugin import register; register(); register()\n"
        "from vllm.v1.attention.backends.registry import AttentionBackendEnum as B\n"
        "print([B[n].get_path() for n in ('CUSTOM', 'CPU_ATTN', 'FLASH_ATTN')])\n"
        "assert 'torch.cuda' not in sys.modules or not __import__('torch').cuda.is_initialized()\n"
        "assert not [m for m in sys.modules if m.startswith('sparroll.engines.vllm.') and m.endswith(('cpu', 'backend'))]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("_backend.SparseBackend'", "_backend.SparseCPUBackend'", "_backend.SparseBackendOverFlash'"):
        assert name in done.stdout


def asking(additional: Any = None, **attention: Any) -> SimpleNamespace:
    """The part of a VllmConfig that says which attention is asked for."""
    fields: dict[str, Any] = {"backend": None, "backend_per_kind": {}}
    return SimpleNamespace(additional_config=additional or {}, attention_config=SimpleNamespace(**fields | attention))


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """CUDA, unless the test says otherwise."""
    import vllm.platforms
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES

    from sparroll.engines.vllm.plugin import register

    found = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, device_type="cuda")
    monkeypatch.delenv(SCHEDULE_VARIABLE, raising=False)
    overrides = dict(_ATTN_OVERRIDES)
    # Before the platform: it imports vLLM's configuration, which asks the real one for more.
    register()
    monkeypatch.setattr(vllm.platforms, "current_platform", found)
    yield found
    _ATTN_OVERRIDES.clear()
    _ATTN_OVERRIDES.update(overrides)


@needs_vllm
def test_who_asks_for_sparroll_and_names_no_backend_gets_it(
    platform: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.engines.vllm.plugin import register

    config = asking({"sparroll": "a.toml"})
    compat.name_backend(config)
    compat.name_backend(config)
    assert config.attention_config.backend.name == "CUSTOM"
    monkeypatch.setenv(SCHEDULE_VARIABLE, "a.toml")
    register()
    config = asking()
    compat.name_backend(config)
    assert config.attention_config.backend.name == "FLASH_ATTN"


@needs_vllm
def test_who_asks_for_sparroll_and_names_another_backend_is_told(platform: SimpleNamespace) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum as Backend

    for attention in ({"backend": Backend.FLASH_ATTN}, {"backend_per_kind": {"full_attention": Backend.FLASH_ATTN}}):
        with pytest.raises(UserError, match="the attention backend is FLASH_ATTN\nhint: leave attention_backend out"):
            compat.name_backend(asking({"sparroll": "a.toml"}, **attention))
    compat.name_backend(asking({"sparroll": "a.toml"}, backend_per_kind={"full_attention": Backend.CUSTOM}))
    compat.name_backend(asking({"sparroll": "a.toml"}, backend=Backend.CUSTOM))


@needs_vllm
def test_other_platforms_are_refused_and_a_cpu_needs_no_name(platform: SimpleNamespace) -> None:
    platform.is_cuda, platform.device_type = lambda: False, "xpu"
    with pytest.raises(UserError, match=r"does not work with vLLM on xpu\n.*leave out additional_config"):
        compat.name_backend(asking({"sparroll": "a.toml"}))
    platform.is_cpu = lambda: True
    config = asking({"sparroll": "a.toml"})
    compat.name_backend(config)
    assert config.attention_config.backend is None


# As on a CUDA platform, which vLLM asks for much else while it makes a configuration.
NAMED = """
from vllm.platforms import current_platform
from sparroll.engines.vllm.plugin import register
register(); register()
engine = EngineArgs(model=model, dtype='float32', max_model_len=512, {arguments})
from sparroll.engines.vllm import compat
class Cuda:
    is_cpu, is_cuda = staticmethod(lambda: False), staticmethod(lambda: True)
import vllm.platforms, unittest.mock
naming = compat.name_backend
def name_backend(config):
    with unittest.mock.patch.object(vllm.platforms, 'current_platform', Cuda): naming(config)
compat.name_backend = name_backend
config = engine.create_engine_config()
import pickle; config = pickle.loads(pickle.dumps(config))
print('backend', getattr(config.attention_config.backend, 'name', None))
"""
FP8 = """
asked = {'sparroll': 'qwen3-4b-0.86'}
EngineArgs(model=model, dtype='float32', kv_cache_dtype='fp8', additional_config=asked).create_engine_config()
"""
ONE_FORK_EACH = """
import json, os, sys, traceback
from vllm.engine.arg_utils import EngineArgs
from sparroll.models import resolve
model = str(resolve('tiny-reasoner'))
for number, code in enumerate(json.loads(sys.argv[1])):
    child = os.fork()
    if not child:
        os.dup2(os.open(f"{sys.argv[2]}/{number}", os.O_WRONLY | os.O_CREAT), 1)
        os.dup2(1, 2)
        try:
            exec(code)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush(), os._exit(0)
    os.waitpid(child, 0)
"""
BACKENDS = {
    "": "backend None",
    "additional_config={'sparroll': 'qwen3-4b-0.86'}": "backend CUSTOM",
    "additional_config={'sparroll': 'qwen3-4b-0.86'}, attention_backend='TRITON_ATTN'": "backend is TRITON_ATTN",
    "additional_config={'sparrol': 'qwen3-4b-0.86'}": "backend None",
    "additional_config={'sparroll': {'shedule': 'x'}}": "did you mean 'schedule'",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What vLLM prints as it makes each configuration, each in a fork of one process that has imported vLLM and nothing
    else."""
    codes = {arguments: NAMED.format(arguments=arguments) for arguments in BACKENDS} | {"fp8": FP8}
    folder = tmp_path_factory.mktemp("said")
    done = subprocess.run(
        [sys.executable, "-c", ONE_FORK_EACH, json.dumps(list(codes.values())), str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: (folder / str(number)).read_text() for number, name in enumerate(codes)}


@needs_vllm
@pytest.mark.parametrize("arguments", BACKENDS)
def test_a_configuration_made_by_vllm_itself_names_the_backend(arguments: str, said: dict[str, str]) -> None:
    assert BACKENDS[arguments] in said[arguments]


@needs_vllm
def test_what_cannot_be_sparse_is_refused_with_the_configuration(said: dict[str, str]) -> None:
    assert "does not work here: a KV cache of type fp8" in said["fp8"]
