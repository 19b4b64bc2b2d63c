"""What OpenRLHF's own code makes of the settings in docs/other-trainers.md, as JSON; and its own Ray actor, sampling
sparsely on a CPU. Run by other_trainers.py, in an environment with vLLM for CPU, Ray and pylatexenc.

    python benchmarks/trainer_openrlhf.py FOLDER_WITH_THE_PACKAGE OUT.json

Its command line is read by its own parser, and its PolicyLoss runs under each of its corrections that we name. Then Ray is
started as the page says, with the variable in its environment; a driver without the variable makes one engine by
OpenRLHF's `create_vllm_engines`, and sends it a request with OpenRLHF's sampling parameters. The actor is OpenRLHF's with
one method more, which asks the worker what ran. DeepSpeed, which neither the parser nor the loss uses, is stood in for.
"""

# B responses, T tokens

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from torch import Tensor
from trainer_world import World, compared, methods_of

import sparroll.models
from sparroll import files
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE
from sparroll.schedule import Schedule

COMMAND = "openrlhf.cli.train_ppo_ray"
PREFIX = "--algo.advantage.is_correction"
CORRECTIONS: dict[str, list[str]] = {
    "tis": [f"{PREFIX}_level", "token", f"{PREFIX}_mode", "clip", f"{PREFIX}_threshold", "0", "2.0"],
    "icepop": [f"{PREFIX}_level", "token", f"{PREFIX}_mode", "mask", f"{PREFIX}_threshold", "0.5", "5.0"],
}
"""Ours -> OpenRLHF's options for the same, as the page gives them."""
BUDGET, PROMPT, RESPONSE = 64, list(range(5, 35)) * 8, 32
"""Tokens. The budget is much less than the prompt has."""
PORT = 6397
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHDYNAMO_DISABLE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


def stand_in(package: Path) -> None:
    """Put stand-ins in the places of what neither the parser nor the loss uses."""
    for name in ("launcher", "ppo_actor", "ppo_critic"):
        sys.modules[f"openrlhf.trainer.ray.{name}"] = MagicMock()
    # The package without its own imports, which are its models.
    sys.modules["openrlhf.models"] = ModuleType("openrlhf.models")
    sys.modules["openrlhf.models"].__path__ = [str(package / "openrlhf" / "models")]


def parsed(words: list[str]) -> argparse.Namespace:
    """What OpenRLHF's parser reads in a command line. Its module only has it where it runs, so the run ends there."""
    found: list[argparse.Namespace] = []
    theirs = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *arguments: Any, **named: Any) -> Any:
        found.append(theirs(parser, *arguments, **named))
        raise SystemExit

    with (
        patch.object(sys, "argv", [COMMAND, "--actor.model_name_or_path", "none", *words]),
        patch.object(argparse.ArgumentParser, "parse_args", parse_and_end),
        contextlib.suppress(SystemExit),
    ):
        runpy.run_module(COMMAND, run_name="__main__")
    return found[0]


def loss_of(words: list[str]) -> Any:
    """OpenRLHF's policy loss under options, summed over the tokens."""
    given, names = vars(parsed(words)), ("level", "mode", "gating", "threshold")
    # Only now, when transformers has looked for it.
    sys.modules.setdefault("deepspeed", MagicMock())
    loss = importlib.import_module("openrlhf.models.loss").PolicyLoss(
        **{f"is_correction_{name}": given[f"algo.advantage.is_correction_{name}"] for name in names}
    )

    def theirs(now_BT: Tensor, world: World) -> Tensor:
        advantage_BT = world.advantage_B[:, None].expand_as(now_BT)
        mean: Tensor = loss(now_BT, world.dense_BT, advantage_BT, world.mask_BT.float(), world.sparse_BT)[0]
        # Its mean is over all tokens of the mask.
        return mean * world.mask_BT.sum()

    return theirs


# -- its actor --------------------------------------------------------------------------------------------------------------


def said_by(worker: Any) -> dict[str, Any]:
    """What ran in a worker of vLLM's."""
    from sparroll.engines.vllm.worker import WorkerExtension

    return WorkerExtension.sparroll_report(worker)


def drive(address: str, asked: dict[str, Any]) -> dict[str, Any]:
    """In a process that connects to Ray: an engine of OpenRLHF's, and what ran in it. asked: sampling parameters."""
    import ray

    from vllm import SamplingParams

    assert SCHEDULE_VARIABLE not in os.environ, "the driver has the variable itself"
    theirs = importlib.import_module("openrlhf.trainer.ray.vllm_engine")

    class Asked(theirs.RolloutRayActor.__ray_metadata__.modified_class):  # type: ignore[misc, name-defined]
        async def report(self) -> Any:
            return await self.llm.collective_rpc(said_by)

        def schedule(self) -> str | None:
            return os.environ.get(SCHEDULE_VARIABLE)

    theirs.RolloutRayActor = ray.remote(Asked)
    # Of OpenRLHF's own start of Ray.
    ray.init(address=address, runtime_env={"env_vars": {"NCCL_DEBUG": "WARN"}})
    model = str(Path(sparroll.models.__file__).parent / "tiny_reasoner")
    (engine,) = theirs.create_vllm_engines(
        1, 1, model, 0, False, False, True, 512, None, 0.3, False, "processed_logprobs"
    )
    # The response goes on behind an end, so that its length is known.
    whole = SamplingParams(**asked, max_tokens=RESPONSE, ignore_eos=True)
    output = ray.get(engine.generate.remote(PROMPT, whole)).outputs[0]
    (report,) = ray.get(engine.report.remote())
    given = ray.get(engine.schedule.remote())
    return {
        "schedule_in_actor": None if given is None else Schedule.load(given).name,
        "schedule_name": report["schedule_name"],
        "response_tokens": len(output.token_ids),
        "layers": [{name: layer[name] for name in ("dense_steps", "sparse_steps")} for layer in report["layers"]],
    }


def sampling(words: list[str]) -> dict[str, Any]:
    """The sampling parameters that OpenRLHF makes of a command line, without the lengths."""
    given = vars(parsed(words))
    advantage = SimpleNamespace(is_correction_level=given["algo.advantage.is_correction_level"])
    own = SimpleNamespace(algo=SimpleNamespace(advantage=advantage), rollout=SimpleNamespace(n_samples_per_prompt=1))
    theirs = importlib.import_module("openrlhf.trainer.ppo_utils.samples_generator")
    with patch.object(theirs, "SamplingParams") as made, patch.object(theirs, "ray"):
        # Without engines and prompts nothing is sent.
        theirs.SamplesGenerator._dispatch_prompts_to_vllm(
            SimpleNamespace(args=own, vllm_engines=[]),
            [],
            [],
            temperature=given["rollout.temperature"],
            top_p=given["rollout.top_p"],
        )
    return {name: value for name, value in made.call_args.kwargs.items() if name != "max_tokens"}


def sampled(package: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Start Ray with the variable, and let another process drive it."""
    # Paths to Ray's sockets must be short.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join([str(package), *_own_path()])}
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={PORT}"]
        ray += ["--num-gpus=1", "--num-cpus=4", "--include-dashboard=false", "--object-store-memory=200000000"]
        ray += [f"--temp-dir={folder}"]
        variable = {SCHEDULE_VARIABLE: json.dumps(Schedule.fixed(BUDGET).inline())}
        started = Path(folder) / "start.log"
        with started.open("w") as log:
            cluster = subprocess.Popen(ray, env=environment | variable, stdout=log, stderr=log)
            try:
                until = time.monotonic() + 180
                while "Ray runtime started" not in started.read_text() and time.monotonic() < until:
                    time.sleep(0.5)
                out = Path(folder) / "seen.json"
                command = [sys.executable, __file__, str(package), str(out), "--address", f"127.0.0.1:{PORT}"]
                command += ["--sampling", json.dumps(asked)]
                subprocess.run(command, env=environment, check=True, timeout=900)
                found: dict[str, Any] = json.loads(out.read_text())
                return found
            finally:
                # With --block, Ray ends what it started when it is told to end.
                cluster.terminate()
                cluster.wait(60)


def _own_path() -> list[str]:
    return [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--address", help="drive the Ray at that address, and nothing else")
    parser.add_argument("--sampling", type=json.loads, help="and with these parameters")
    options = parser.parse_args()
    package = options.package.resolve()
    sys.path.insert(0, str(package))
    if options.address:
        files.write_json(options.out, drive(options.address, options.sampling))
        return
    stand_in(package)
    rows = [compared(name, {"options": words}, loss_of(words)) for name, words in CORRECTIONS.items()]
    asked = sampling(CORRECTIONS["tis"])
    worker = package / "openrlhf" / "trainer" / "ray" / "vllm_worker_wrap.py"
    files.write_json(
        options.out,
        {
            "asked": CORRECTIONS["tis"],
            "sampling": asked,
            "corrections": rows,
            "worker_methods": methods_of(worker, ["WorkerWrap"]),
            "actor": sampled(package, asked),
        },
    )


if __name__ == "__main__":
    main()
