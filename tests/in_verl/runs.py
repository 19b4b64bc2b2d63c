"""What a short run of verl on a CPU needs: the tiny model with a tokenizer that verl takes for Qwen's, prompts, a reward,
and the command. No test here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

import sparroll.models
from sparroll import tasks

SHIM = Path(__file__).parent / "shim"
PROMPT_TOKENS, RESPONSE_TOKENS, PROMPTS, SAMPLES = 128, 160, 4, 4
ROLLOUTS = PROMPTS * SAMPLES
MARK = "SPARROLL_TEST_RUN"
SOURCE = Path(__file__).parents[2] / "src"
SLOW_START, STARTS = "The current node timed out during startup", 3
"""Ray gives its node 30 s, whatever it is told. Where other tests keep the machine busy, that has been too short."""


def write_world(folder: Path) -> None:
    """Model, prompts and reward of a run, in a folder."""
    import pandas as pd

    model = folder / "model"
    shutil.copytree(Path(sparroll.models.__file__).parent / "tiny_reasoner", model)
    # verl wants a line break that is one token, and Qwen's end of a turn.
    text = (model / "tokenizer.json").read_text()
    text = text.replace('"<pad>"', '"<|im_end|>"').replace('"<bos>"', '"\\n"')
    (model / "tokenizer.json").write_text(text)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"pad_token": "<|im_end|>", "bos_token": "\n"}
    settings["chat_template"] = (
        "{% for m in messages %}{{ m['content'] }}{% if not loop.last %} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %} {% endif %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    task = tasks.get("synthetic")
    rows = [
        {
            "data_source": "synthetic",
            "prompt": [{"role": "user", "content": prompt.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for index, prompt in enumerate(task.prompts("train", 1, 0, 64))
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
    (folder / "reward.py").write_text(
        "import zlib\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):\n"
        "    return float(zlib.crc32(solution_str.encode()) % 5) / 4\n"
    )


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": f"{SHIM}:{SOURCE}",
        # Python hands this on as an argument of its own, which shim/imported_ahead.py does not expect.
        "PYTHONDONTWRITEBYTECODE": "",
        "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # vLLM compiles small functions of its sampler even where it runs eagerly. On a CPU, that takes longer than a step.
        "TORCHDYNAMO_DISABLE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # It kills workers where the machine, and not the run, is short of memory.
        "RAY_memory_monitor_refresh_ms": "0",
        # Ray would start a process for each CPU that it is told of.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def overrides(folder: Path, mode: str = "sparroll_sync") -> dict[str, str]:
    """Those of a run in that folder; `+` and `++` in front of a name as Hydra has them."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "trainer.v1.trainer_mode": mode,
        "trainer.device": "cpu",
        "trainer.nnodes": "1",
        "trainer.n_gpus_per_node": "1",
        "trainer.total_epochs": "1",
        "trainer.val_before_train": "False",
        "trainer.test_freq": "-1",
        "trainer.save_freq": "-1",
        "trainer.logger": '["console","file"]',
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.resume_mode": "auto",
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "val.parquet"),
        "data.train_batch_size": str(PROMPTS),
        "data.max_prompt_length": str(PROMPT_TOKENS),
        "data.max_response_length": str(RESPONSE_TOKENS),
        "data.dataloader_num_workers": "0",
        "data.filter_overlong_prompts": "False",
        "data.shuffle": "False",
        "actor_rollout_ref.model.path": str(folder / "model"),
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": "False",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "False",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": str(PROMPTS),
        f"{actor}.ppo_micro_batch_size_per_gpu": "8",
        f"{actor}.fsdp_config.use_torch_compile": "False",
        f"{actor}.use_torch_compile": "False",
        f"{actor}.use_kl_loss": "False",
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        # So large that an update is seen in every token.
        f"{actor}.optim.lr": "1e-4",
        f"{rollout}.name": "vllm",
        f"{rollout}.n": str(SAMPLES),
        f"{rollout}.tensor_model_parallel_size": "1",
        f"{rollout}.enforce_eager": "True",
        f"{rollout}.free_cache_engine": "False",
        f"+{rollout}.enable_sleep_mode": "False",
        f"{rollout}.log_prob_micro_batch_size_per_gpu": "8",
        f"{rollout}.max_num_seqs": "16",
        f"{rollout}.max_model_len": str(PROMPT_TOKENS + RESPONSE_TOKENS),
        f"{rollout}.max_num_batched_tokens": "512",
        f"{rollout}.dtype": "float32",
        f"{rollout}.load_format": "auto",
        f"{rollout}.agent.num_workers": "1",
        f"{rollout}.gpu_memory_utilization": "0.2",
        # Enough for 16 requests; vLLM writes zeros over all of it.
        f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": str(2**26),
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": "64",
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": str(folder / "reward.py"),
        "reward.num_workers": "1",
        "+ray_kwargs.ray_init.num_gpus": "1",
        "ray_kwargs.ray_init.num_cpus": "12",
        "+ray_kwargs.ray_init.include_dashboard": "False",
        "+ray_kwargs.ray_init.object_store_memory": "500000000",
        "transfer_queue.enable": "True",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
        "hydra.run.dir": str(folder / "hydra"),
    }


def command(settings: dict[str, str]) -> list[str]:
    return [sys.executable, "-m", "sparroll.verl", *(f"{name}={value}" for name, value in settings.items())]


def run(
    folder: Path,
    settings: dict[str, str],
    name: str,
    *,
    kill_after_step: int | None = None,
    standing: bool = False,
    seconds: float = 1200,
) -> str:
    """Run to the end, or kill -9 everything as soon as a step was logged. -> what it printed. Metrics are in NAME.jsonl.

    standing: in a Ray cluster that was there before, and not in one of the run's own. A run whose Ray did not start in
    time began nothing, and is started again."""
    for _ in range(STARTS):
        log = _run_once(folder, settings, name, kill_after_step, standing, seconds)
        if SLOW_START not in log:
            break
    return log


def _run_once(
    folder: Path, settings: dict[str, str], name: str, kill_after_step: int | None, standing: bool, seconds: float
) -> str:
    metrics, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    marked = {"VERL_FILE_LOGGER_PATH": str(metrics), MARK: f"{folder}/{name}"}
    try:
        if standing:
            settings = _in_cluster(settings, folder, marked)
        with log.open("w") as sink:
            process = subprocess.Popen(
                command(settings), cwd=folder, env=environment() | marked, stdout=sink, stderr=subprocess.STDOUT
            )
        until = time.monotonic() + seconds
        while process.poll() is None and time.monotonic() < until:
            if (
                kill_after_step is not None
                and metrics.is_file()
                and f'"step":{kill_after_step},' in metrics.read_text()
            ):
                break
            time.sleep(0.1)
        process.kill()
        process.wait()
    except ClusterError as error:
        return str(error)
    finally:
        kill_marked(marked[MARK])
    return log.read_text()


class ClusterError(Exception):
    """A cluster did not start; with what it printed."""


def _in_cluster(settings: dict[str, str], folder: Path, marked: dict[str, str]) -> dict[str, str]:
    """Start a cluster of the size that the run would start. -> the settings of the run in it

    verl names its sockets in /tmp by the number of Ray's job, which is 1 in each cluster that a run starts for itself. Here
    the process that starts the cluster is job 1, so the run can go on beside one that has its own."""
    prefix = "ray_kwargs.ray_init."
    own = {name.rpartition(".")[2]: value for name, value in settings.items() if prefix in name}
    sizes = [own[name] for name in ("num_cpus", "num_gpus", "object_store_memory")]
    errors = folder / "cluster.log"
    with errors.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, str(SHIM / "ray_cluster.py"), *sizes],
            cwd=folder,
            env=environment() | marked,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
        )
    assert process.stdout is not None
    address = next((line.split()[1] for line in process.stdout if line.startswith("address ")), None)
    if address is None:
        raise ClusterError(errors.read_text())
    rest = {name: value for name, value in settings.items() if prefix not in name}
    return rest | {f"+{prefix}address": address}


def kill_marked(folder: str) -> None:
    """Kill what a run has left, or all runs in a folder: Ray's processes have sessions of their own, but they inherit its
    environment."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK, "").startswith(folder):
                process.kill()
        except psutil.Error:
            continue


def steps(folder: Path, name: str) -> list[dict[str, float]]:
    """The metrics of each step that verl logged."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["data"] for line in lines]
