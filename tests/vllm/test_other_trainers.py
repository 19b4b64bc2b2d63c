"""What other trainers' own code gives to vLLM (a record of benchmarks/other_trainers.py), as vLLM and the plugin take it:
the backend and worker that it names, the names of their worker extensions, and their sampling parameters where drafts are
checked. Starts no engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparroll import records
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
from sparroll.engines.vllm.windows import configure
from sparroll.schedule import Schedule
from vllm_runs import needs_vllm

pytestmark = needs_vllm

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "other-trainers-cpu.json"
FOUND: dict[str, Any] = records.read(RECORD, "other-trainers")["results"]

# One process, so that neither vLLM's configuration nor the plugin's hooks meet those of other tests. The platform is CUDA
# only where the plugin names a backend; vLLM asks it for much else.
MAKE = """
import json, os, sys, unittest.mock
from types import SimpleNamespace
import vllm.platforms
from vllm.engine.arg_utils import AsyncEngineArgs
from sparroll.engines.vllm import compat, plugin
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE, VLLMSettings
from sparroll.models import resolve

class Cuda:
    is_cpu, is_cuda = staticmethod(lambda: False), staticmethod(lambda: True)

naming = compat.name_backend
def name_backend(config):
    with unittest.mock.patch.object(vllm.platforms, "current_platform", Cuda):
        naming(config)
compat.name_backend = name_backend

said = {}
for name, case in json.loads(sys.argv[1]).items():
    os.environ.pop(SCHEDULE_VARIABLE, None)
    os.environ.update(case["environment"])
    plugin.register()
    small = {"model": str(resolve("tiny-reasoner")), "dtype": "float32", "max_model_len": 512}
    try:
        config = AsyncEngineArgs(**case["arguments"] | small).create_engine_config()
    except Exception as error:
        said[name] = {"refused": str(error)}
        continue
    backend = config.attention_config.backend
    said[name] = {
        "backend": None if backend is None else [backend.name, backend.get_path()],
        "worker": config.parallel_config.worker_cls,
        "extension": config.parallel_config.worker_extension_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "logprobs_mode": config.model_config.logprobs_mode,
        "asks": VLLMSettings.find(config) is not None,
    }

from vllm.sampling_params import SamplingParams
from sparroll.engines.vllm.attention.cpu_worker import SparseCPUWorker
from sparroll.engines.vllm.windows.admission import Admission
from sparroll.engines.vllm.windows.cpu_worker import WindowCPUWorker
said["taken names"] = sorted({name for worker in (SparseCPUWorker, WindowCPUWorker) for name in dir(worker)})
said["admitted"] = {}
for name, parameters in json.loads(sys.argv[2]).items():
    try:
        Admission.validate_params(SamplingParams(**parameters))
        said["admitted"][name] = ""
    except ValueError as error:
        said["admitted"][name] = str(error)
print("\\nsaid " + json.dumps(said))
"""


def sampling(name: str) -> dict[str, Any]:
    """A trainer's sampling parameters as vLLM's. prime-rl's are those of an OpenAI client."""
    found = dict(FOUND[name]["sampling"])
    if name == "prime-rl":
        found["max_tokens"], found["logprobs"] = found.pop("max_completion_tokens"), int(found["logprobs"])
    return found


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    preset = Schedule.load("qwen3-4b-0.86")
    checked = str(preset.checked(window_tokens=64, floor=0.01).save(tmp_path_factory.mktemp("said") / "checked.toml"))
    # Contexts and models are of other sizes here.
    given = {name: dict(FOUND[name]["arguments"]) for name in ("prime-rl", "skyrl")}
    asked = {"schedule": checked}
    single = given["prime-rl"] | {"additional_config": given["prime-rl"]["additional_config"] | {"sparroll": asked}}
    cases = {
        "prime-rl": {"arguments": given["prime-rl"], "environment": {}},
        "skyrl": {"arguments": given["skyrl"], "environment": {}},
        "openrlhf": {
            "arguments": {"worker_extension_cls": "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"},
            "environment": {SCHEDULE_VARIABLE: "qwen3-4b-0.86"},
        },
        "nobody": {"arguments": {}, "environment": {}},
        "prime-rl, checked": {"arguments": single, "environment": {configure.V2_VARIABLE: "0"}},
        "prime-rl, checked, ranks": {
            "arguments": single | {"data_parallel_size": FOUND["prime-rl"]["data_parallel_size"]},
            "environment": {},
        },
    }
    parameters = {name: sampling(name) for name in FOUND}
    done = subprocess.run(
        [sys.executable, "-c", MAKE, json.dumps(cases), json.dumps(parameters)],
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("said ")]
    found: dict[str, Any] = json.loads(line.removeprefix("said "))
    return found


@pytest.mark.parametrize(("name", "backend"), [("prime-rl", "CUSTOM"), ("skyrl", "CUSTOM"), ("openrlhf", "FLASH_ATTN")])
def test_their_arguments_become_a_configuration_with_our_backend_and_worker(
    name: str, backend: str, said: dict[str, Any]
) -> None:
    found = said[name]
    assert found.get("refused") is None, found
    assert found["asks"] and found["backend"][0] == backend
    assert found["backend"][1].startswith("sparroll.engines.vllm.attention.cuda_backend.")
    assert found["worker"] == compat.WORKERS["cpu"] and found["scheduler"] is None


def test_without_their_settings_nothing_is_asked_for(said: dict[str, Any]) -> None:
    assert (said["nobody"]["asks"], said["nobody"]["backend"]) == (False, None)


def test_the_log_probabilities_are_the_samplers_and_a_trainers_own_extension_stays(said: dict[str, Any]) -> None:
    assert [said[name]["logprobs_mode"] for name in ("prime-rl", "skyrl")] == ["processed_logprobs"] * 2
    assert said["openrlhf"]["extension"] == "openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap"


@pytest.mark.parametrize("name", FOUND)
def test_our_workers_have_none_of_the_names_that_their_extensions_add(name: str, said: dict[str, Any]) -> None:
    # vLLM refuses an extension with such a name.
    added = set(FOUND[name]["worker_methods"])
    assert len(added) >= 3 and not added & set(said["taken names"])


def test_prime_rl_may_check_drafts_with_one_rank_and_not_with_the_ranks_that_it_makes_of_four_gpus(
    said: dict[str, Any],
) -> None:
    found = said["prime-rl, checked"]
    assert found.get("refused") is None, found
    assert (found["worker"], found["scheduler"]) == (configure.WORKERS["cpu"], configure.SCHEDULER)
    assert FOUND["prime-rl"]["data_parallel_size"] == 4
    assert "data_parallel_size = 4" in said["prime-rl, checked, ranks"]["refused"]


def test_a_check_of_drafts_takes_prime_rls_requests_and_refuses_those_of_the_other_two(said: dict[str, Any]) -> None:
    assert said["admitted"]["prime-rl"] == ""
    for name in ("skyrl", "openrlhf"):
        assert "does not know min_tokens=1" in said["admitted"][name]
