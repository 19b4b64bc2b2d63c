"""What a case of benchmarks/verl_steps.py is: its prompts and schedules, verl's overrides, the environment of its processes,
and what a step of its log says. Starts nothing."""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import verl_watch
from verl_overrides import ROLLOUT, SPARROLL, Sizes, shared, sparse

from sparroll.integrations.settings import AUTO, probe_of
from sparroll.schedule import Schedule, Step

PROMPT_TOKENS = 96
CONTEXT_ROOM = 256
"""Beside the response: the prompt, and a window of drafts."""
MOST_STEPS = 16
"""That there are prompts for. A trainer that samples ahead needs some more than its steps."""
KEPT = (
    *(
        "timing_s/",
        "perf/",
        "mismatch/",
        "correction/",
        "rescoring/",
        "rollout/",
        "check/",
        "time/",
        "policy/",
        "control/",
    ),
    *("rollout_corr/", "staleness/", "validation/", "val-core/", "response_length/", "prompt_length/mean"),
    "critic/rewards/mean",
    *("actor/grad_norm", "actor/pg_loss", "training/rollout_probs_diff"),
)
"""Beginnings of the metrics that a record keeps."""
ON_GPU = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # A host without a network has no other.
    "VLLM_HOST_IP": "127.0.0.1",
}
EVERYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Case:
    schedule: bool = True
    verified: bool = False
    trainer: bool = True
    """False: the plugin's engine alone."""
    mode: str = "sync"
    gpus: int = 1
    tensor_parallel: int = 1
    short: bool = False
    """Whether it takes --short-tokens: it is there for what it does, and not for how fast."""
    first_short: bool = False
    """Whether its first step takes --first-tokens, to save time. Long first steps have a use of their own."""
    least_steps: int = 2
    most_steps: int | None = None
    control: bool = False
    """Whether it has a control group, of --control-share of the rollouts."""
    both_ceilings: bool = False
    """Whether the trainer's ceiling is measured, beside the engine's on the same rollouts: those of a control group, which
    is a quarter."""
    guarded: bool = False
    """Whether a guard moves the schedule once, after the third step."""
    arrives: bool = False
    """Whether the engine's log-probabilities are compared with the trainer's, at --arrival-learning-rate."""


TWO = Case(gpus=2, short=True, guarded=True, least_steps=5)
CASES = {
    "dense": Case(schedule=False, first_short=True),
    "sparse": Case(first_short=True),
    "verified": Case(verified=True, first_short=True),
    "control": Case(control=True, first_short=True),
    "ceilings": Case(control=True, both_ceilings=True, most_steps=1),
    "plugin-dense": Case(schedule=False, trainer=False, first_short=True),
    "plugin-sparse": Case(trainer=False, first_short=True),
    "plugin-verified": Case(trainer=False, verified=True, first_short=True),
    "colocate-async": Case(mode="colocate_async", short=True),
    "two-replicas-dense": Case(schedule=False, gpus=2, short=True),
    "two-replicas": TWO,
    "tensor-parallel-dense": Case(schedule=False, gpus=2, tensor_parallel=2, short=True),
    "tensor-parallel": replace(TWO, tensor_parallel=2),
    "separate-async": Case(mode="separate_async", gpus=2, short=True, least_steps=5, arrives=True),
}
DENSE_BESIDE = {
    "sparse": "dense",
    "verified": "dense",
    "control": "dense",
    "two-replicas": "two-replicas-dense",
    "tensor-parallel": "tensor-parallel-dense",
}
PLUGIN_BESIDE = {
    "dense": "plugin-dense",
    "sparse": "plugin-sparse",
    "verified": "plugin-verified",
    "control": "plugin-sparse",
}


def response_tokens(options: argparse.Namespace, case: Case) -> int:
    return int(options.short_tokens if case.short else options.response_tokens)


def steps_of_case(options: argparse.Namespace, name: str) -> int:
    case, asked = CASES[name], dict(options.steps_of).get(name)
    return int(asked or case.most_steps or max(options.steps, case.least_steps))


def probed(options: argparse.Namespace) -> int:
    """How many rollouts of a step are re-scored."""
    return int(probe_of(options.probe or AUTO, options.prompts * options.samples) or 0)


def schedule_of(options: argparse.Namespace) -> str:
    return str(options.work / "schedule.toml") if options.dry else str(options.schedule)


def wider_schedule(options: argparse.Namespace) -> Path:
    """The file of what the guard of a case moves to."""
    return Path(options.work) / "wider.toml"


def write_wider_schedule(options: argparse.Namespace) -> None:
    """Half as many tokens more at every length, so that fewer steps are sparse, and still some."""
    found = Schedule.load(schedule_of(options), force=True)
    page = getattr(found.selector, "page_tokens", 16)
    steps = tuple(
        Step(step.from_context_tokens, -(-3 * int(step.kv_budget_tokens) // (2 * page)) * page) for step in found.steps
    )
    Schedule(steps, selector=found.selector, dense_layers=found.dense_layers, name="wider").save(
        wider_schedule(options)
    )


def write_prompts(options: argparse.Namespace) -> None:
    """Prompts, and a reward that is as good as random, so that the policy really moves."""
    import pandas as pd

    draw = random.Random(options.seed)
    rows = [
        {
            "data_source": "random",
            "prompt": [
                {"role": "user", "content": " ".join(str(draw.randrange(10)) for _ in range(PROMPT_TOKENS // 2))}
            ],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": index},
        }
        for index in range(MOST_STEPS * options.prompts)
    ]
    pd.DataFrame(rows).to_parquet(options.work / "train.parquet")
    (options.work / "reward.py").write_text(
        "import zlib\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):\n"
        "    return float(zlib.crc32(solution_str.encode()) % 5) / 4\n"
    )


def write_tokenizer(options: argparse.Namespace) -> None:
    """A word for every id, since verl masks the logits of ids that the tokenizer does not know; a line break that is one
    token and Qwen's end of a turn, which verl wants; and an end of sequence, which is not obeyed."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_end|>", "<eos>", "<unk>", "\n"]
    words = [*special, *map(str, range(10)), *(f"w{number}" for number in range(14, options.vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|im_end|>", eos_token="<eos>", unk_token="<unk>", bos_token="\n"
    )
    whole.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} {% endif %}"
    )
    whole.save_pretrained(options.work / "model")


def overrides(options: argparse.Namespace, name: str) -> dict[str, str]:
    """verl's, of one case."""
    case, tokens = CASES[name], response_tokens(options, CASES[name])
    separate = case.mode == "separate_async"
    sizes = Sizes(
        steps=steps_of_case(options, name),
        prompts=options.prompts,
        samples=options.samples,
        prompt_tokens=PROMPT_TOKENS,
        response_tokens=tokens,
        context_tokens=tokens + CONTEXT_ROOM,
        rollouts_at_once=options.prompts * options.samples,
        batched_tokens=options.step_tokens,
        micro_batch=options.micro_batch,
        learning_rate=options.arrival_learning_rate if case.arrives else options.learning_rate,
        gpu_memory_share=options.gpu_memory_share,
    )
    settings = shared(sizes, options.work, f"{name}-", options.dry) | {
        "trainer.v1.trainer_mode": f"sparroll_{case.mode}" if case.schedule else case.mode,
        "trainer.n_gpus_per_node": str(1 if separate else case.gpus),
        "trainer.val_before_train": "False",
        "trainer.test_freq": "-1",
        "data.val_files": str(options.work / "train.parquet"),
        "actor_rollout_ref.model.path": str(options.work / "model"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": str(not options.dry),
        f"{ROLLOUT}.ignore_eos": "True",
        f"{ROLLOUT}.calculate_log_probs": "True",
        f"{ROLLOUT}.tensor_model_parallel_size": str(case.tensor_parallel),
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": "64" if options.dry else "1024",
        "+ray_kwargs.ray_init.num_gpus": str(case.gpus),
        "ray_kwargs.ray_init.num_cpus": "14",
        # Two cases at the same time know nothing of each other. Ray's sockets have short paths.
        "+ray_kwargs.ray_init._temp_dir": f"/tmp/ray-{os.getpid()}-{name}",
    }
    if separate:
        settings |= {
            f"{ROLLOUT}.nnodes": "1",
            f"{ROLLOUT}.n_gpus_per_node": "1",
            f"{ROLLOUT}.checkpoint_engine.backend": "by_file" if options.dry else "nccl",
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module": "weights_by_file" if options.dry else "null",
            "actor_rollout_ref.hybrid_engine": "False",
            "trainer.v1.separate_async.parameter_sync_step": "1",
        }
    if case.schedule:
        settings |= sparse(schedule_of(options))
    if case.schedule and options.probe:
        settings |= {f"{SPARROLL}.rescoring.probe_rollouts": str(options.probe)}
    if case.both_ceilings:
        settings |= {f"{SPARROLL}.mismatch.ceiling_prompts": str(options.prompts * options.samples)}
    if case.control:
        share = str(0.25 if case.both_ceilings else options.control_share)
        # The larger share of the first steps would stay for as long as nothing is known of a gap.
        settings |= {f"{SPARROLL}.control_group.share": share, f"{SPARROLL}.control_group.share_first": share}
    if case.guarded:
        settings |= {
            f"{SPARROLL}.guard.at_least": "0.86",
            f"{SPARROLL}.control.by": "guard",
            f"{SPARROLL}.control.stricter": f"[{wider_schedule(options)}]",
            # So many tokens are there after three steps; before that, the guard can test nothing.
            f"{SPARROLL}.mismatch.least_tokens": str(5 * probed(options) * tokens // 2),
        }
    if case.verified:
        settings |= {
            f"{SPARROLL}.verify.window": str(options.window_tokens),
            f"{SPARROLL}.verify.floor": "0.01",
            f"{SPARROLL}.verify.dense_logp": "engine",
        }
    return settings


def environment(options: argparse.Namespace, name: str, devices: list[str], python_path: str) -> dict[str, str]:
    """What a case's processes see, beside what this one does. Ray's inherit it."""
    own = EVERYWHERE | {
        "VERL_FILE_LOGGER_PATH": str(metrics_path(options, name)),
        # Two that begin together would write the same files.
        "VLLM_CACHE_ROOT": str(options.work / f"{name}-vllm"),
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        verl_watch.FOLDER: str(watched_folder(options, name)),
    }
    case, modules, folder = CASES[name], ["verl_watch"], Path(__file__).resolve().parent
    if case.first_short:
        own[verl_watch.FIRST_TOKENS] = str(options.first_tokens)
    own |= {verl_watch.ARRIVAL: "1"} if case.arrives else {}
    own |= {verl_watch.TRAINER_CEILING: "1"} if case.both_ceilings else {}
    paths = [str(folder), python_path]
    if options.dry:
        shim = folder.parent / "tests" / "in_verl" / "shim"
        paths.insert(0, str(shim))
        modules.append("verl_on_cpu")
        own |= {
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM compiles small functions of its sampler even where it runs eagerly.
            "TORCHDYNAMO_DISABLE": "1",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
        }
        own |= {} if case.schedule else {verl_watch.FIRST_WEIGHTS: "1"}
    else:
        own |= ON_GPU | {"CUDA_VISIBLE_DEVICES": ",".join(devices)}
    if case.verified:
        modules.append("forced_verdicts")
        own["SPARROLL_KEPT_SHARE"] = str(options.kept_share)
    return own | {"PYTHONPATH": os.pathsep.join(paths), "VERL_USE_EXTERNAL_MODULES": ",".join(modules)}


def watched_folder(options: argparse.Namespace, name: str) -> Path:
    """Where verl_watch.py writes."""
    return Path(options.work) / f"{name}-watched"


def metrics_path(options: argparse.Namespace, name: str) -> Path:
    return Path(options.work) / f"{name}.jsonl"


def step_of(
    options: argparse.Namespace, number: int, metrics: Mapping[str, float], sampled_seconds: float | None = None
) -> dict[str, Any]:
    """A step of a case, from what verl logged. sampled_seconds: of its rollouts, where it is known; else `rollout_seconds`
    are verl's, which looks every 2 s whether they are done."""
    tokens = options.prompts * options.samples * metrics["response_length/mean"]
    # verl's own time has what sparroll measures before the engine sleeps.
    generated = metrics.get("timing_s/gen", 0.0) - metrics.get("time/sparroll_measure_seconds", 0.0)
    rollout = generated if sampled_seconds is None else sampled_seconds
    return {
        "step": number,
        "step_seconds": metrics["timing_s/step"],
        "rollout_tokens": round(tokens),
        "rollout_seconds": rollout,
        "waited_seconds": generated - rollout,
        "tokens_per_second": tokens / rollout if rollout else 0.0,
        "metrics": {key: value for key, value in metrics.items() if key.startswith(KEPT)},
    }
