"""What these benchmarks tell verl whatever they measure: GRPO on one machine with vLLM and FSDP2 but without flash-attn,
nothing saved or resumed, and a Ray that knows of no other one. Names are Hydra's, with its `+` in front of new ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SPARROLL = f"+{ROLLOUT}.custom.sparroll"
ALWAYS = {
    "trainer.nnodes": "1",
    "trainer.total_epochs": "1",
    "trainer.save_freq": "-1",
    "trainer.logger": '["console","file"]',
    "trainer.resume_mode": "disable",
    "data.dataloader_num_workers": "0",
    "data.filter_overlong_prompts": "False",
    "data.shuffle": "False",
    "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
    "actor_rollout_ref.model.use_remove_padding": "False",
    # Without flash-attn, verl takes the log-probabilities of logits token by token, which takes longer than the rest.
    "actor_rollout_ref.model.use_fused_kernels": "True",
    "actor_rollout_ref.model.fused_kernel_options.impl_backend": "torch",
    f"{ACTOR}.strategy": "fsdp2",
    f"{ACTOR}.fsdp_config.use_torch_compile": "False",
    f"{ACTOR}.use_torch_compile": "False",
    f"{ACTOR}.use_kl_loss": "False",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.agent.num_workers": "1",
    "algorithm.adv_estimator": "grpo",
    "reward.num_workers": "1",
    "+ray_kwargs.ray_init.include_dashboard": "False",
    "transfer_queue.enable": "True",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": "1",
}
ON_CPU = {
    f"{ACTOR}.fsdp_config.model_dtype": "fp32",
    f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
    f"{ROLLOUT}.enforce_eager": "True",
    f"{ROLLOUT}.free_cache_engine": "False",
    f"+{ROLLOUT}.enable_sleep_mode": "False",
    f"{ROLLOUT}.dtype": "float32",
    f"{ROLLOUT}.load_format": "auto",
}


@dataclass(frozen=True)
class Sizes:
    """How much a run of verl does, and at once."""

    steps: int
    prompts: int
    """Of a step."""
    samples: int
    """Of each prompt."""
    prompt_tokens: int
    response_tokens: int
    context_tokens: int
    """That vLLM makes room for."""
    rollouts_at_once: int
    batched_tokens: int
    """Of one step of vLLM."""
    micro_batch: int
    """Rollouts of one pass of the trainer, or of re-scoring."""
    learning_rate: float
    gpu_memory_share: float
    """vLLM's part of the device."""


def shared(sizes: Sizes, work: Path, name: str, dry: bool) -> dict[str, str]:
    """What every run is told, with its files in `work`.

    name: in front of the names of its own folders; may be empty.  dry: on a CPU.
    """
    return {
        **ALWAYS,
        **(ON_CPU if dry else {}),
        "trainer.device": "cpu" if dry else "cuda",
        "trainer.total_training_steps": str(sizes.steps),
        "trainer.default_local_dir": str(work / f"{name}checkpoints"),
        "hydra.run.dir": str(work / f"{name}hydra"),
        "data.train_files": str(work / "train.parquet"),
        "reward.custom_reward_function.path": str(work / "reward.py"),
        "data.train_batch_size": str(sizes.prompts),
        "data.max_prompt_length": str(sizes.prompt_tokens),
        "data.max_response_length": str(sizes.response_tokens),
        f"{ACTOR}.ppo_mini_batch_size": str(sizes.prompts),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": str(sizes.micro_batch),
        f"{ACTOR}.optim.lr": str(sizes.learning_rate),
        f"{ROLLOUT}.n": str(sizes.samples),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": str(sizes.micro_batch),
        f"{ROLLOUT}.max_num_seqs": str(sizes.rollouts_at_once),
        f"{ROLLOUT}.max_model_len": str(sizes.context_tokens),
        f"{ROLLOUT}.max_num_batched_tokens": str(sizes.batched_tokens),
        f"{ROLLOUT}.gpu_memory_utilization": str(sizes.gpu_memory_share),
        "+ray_kwargs.ray_init.object_store_memory": "500000000" if dry else "4000000000",
    }


def sparse(schedule: Path | str) -> dict[str, str]:
    """What a run with sparse rollouts is told besides: any model may have the schedule, since the folders of the
    benchmarks' models have other names than the model that it was made for."""
    return {
        f"{SPARROLL}.schedule": str(schedule),
        f"{SPARROLL}.force_schedule": "true",
        f"{SPARROLL}.correction.name": "tis",
    }
