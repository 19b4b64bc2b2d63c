"""The arguments that VLLMEngine gives to `vllm.LLM`. Nothing is started here."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparroll.attention.decode.paged import check_scored
from sparroll.attention.selectors.base import Selector
from sparroll.draft_check import DraftCheck
from sparroll.engines.vllm.capacity import block_tokens
from sparroll.engines.vllm.settings import KEY, SCHEDULE_VARIABLE, VLLMSettings, check_token_count
from sparroll.engines.vllm.worker import EXTENSION
from sparroll.errors import UserError
from sparroll.schedule import Schedule

LOGPROBS_MODE = "processed_logprobs"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def llm_arguments(
    config: Any,
    *,
    dtype: torch.dtype | None,
    context_limit: int,
    max_batch: int,
    capacity: Schedule | None,
    gpu_memory_share: float,
    kv_cache_gib: float | None,
    sleep_mode: bool,
    short_step_tokens: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`. capacity: see `widest`; None for vLLM's own attention. Raises UserError for what
    the device cannot do."""
    chosen = dtype or config.dtype or torch.bfloat16
    if chosen not in _DTYPES:
        named = ", ".join(map(str, _DTYPES))
        raise UserError(f"vLLM computes in {named}, got dtype={chosen!r}", "dtype=torch.bfloat16")
    on_cpu = not torch.cuda.is_available()
    if sleep_mode and on_cpu:
        raise UserError("sleep mode frees GPU memory, and there is no GPU", "leave sleep_mode out")
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": _DTYPES[chosen],
        "max_model_len": context_limit,
        "max_num_seqs": max_batch,
        "max_logprobs": -1,
        # Log-probabilities of the distribution that was sampled from, after temperature and top-p.
        "logprobs_mode": LOGPROBS_MODE,
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if not on_cpu and arguments["dtype"] == "float32":
        raise UserError(
            "vLLM's attention on a GPU does not take float32",
            'dtype=torch.bfloat16; --dtype bf16; in a training configuration, rollout.dtype = "bf16"',
        )
    if on_cpu:
        # Compiled code would go on using the weights it was compiled with.
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, context_limit, max_batch)
    else:
        arguments |= {"gpu_memory_utilization": gpu_memory_share, "enable_sleep_mode": sleep_mode}
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if capacity is not None:
        check_selector(capacity.selector)
        arguments |= {
            "block_size": block_tokens(capacity.selector, on_cpu),
            "additional_config": {KEY: _asked(capacity, short_step_tokens)},
        }
        if not on_cpu:
            arguments["attention_backend"] = "CUSTOM"
    return arguments


def check_selector(selector: Selector) -> None:
    """Raise UserError for a selector that has no kernels, where there is a GPU."""
    if torch.cuda.is_available():
        check_scored(selector, "triton")


def whole_prompts(context_limit: int) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` with which no prompt is cut: on a CPU, a prompt that was cut sets the generator of
    its seed back, which torch cannot there. Engines with checks have draws of their own."""
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(4096, context_limit)}


def widest(schedule: Schedule, context_limit: int, layers: int) -> Schedule:
    """The schedule that an engine starts with: this schedule's selector and dense layers, with the whole context as
    budget, so that any schedule with the same selector and dense layers can be set later, whatever its groups. A check
    keeps its window, for which there must be memory; its floor is set later."""
    unit = schedule.selector.unit_tokens
    whole = max(-(-context_limit // unit) * unit, schedule.selector.least_budget_tokens)
    dense_layers = tuple(layer for layer in schedule.dense_layers if layer < layers)
    check = DraftCheck(schedule.check.window_tokens) if schedule.check else None
    return replace(Schedule.fixed(whole, schedule.selector, dense_layers), check=check)


def settings_of(arguments: Mapping[str, Any], sparse: bool) -> VLLMSettings | None:
    """What an engine with these arguments asks of the plugin; None for vLLM's own attention. Raises UserError where the
    caller's own arguments contradict what VLLMEngine rests on."""
    if int(arguments.get("pipeline_parallel_size", 1)) > 1:
        raise UserError("VLLMEngine reads the counters of one pipeline stage", "use pipeline_parallel_size=1")
    if arguments["worker_extension_cls"] != EXTENSION:
        raise UserError("VLLMEngine talks to its own worker extension", "leave worker_extension_cls out")
    if arguments["logprobs_mode"] != LOGPROBS_MODE:
        raise UserError(
            f"logprobs_mode {arguments['logprobs_mode']!r} gives no log-probabilities of the distribution that is sampled "
            "from",
            "leave logprobs_mode out",
        )
    additional = arguments.get("additional_config") or {}
    if sparse:
        return VLLMSettings.parse(additional.get(KEY))
    if KEY in additional:
        raise UserError(
            f'sparse=False, but additional_config["{KEY}"] makes the engine sparse', "leave it out, or use sparse=True"
        )
    if os.environ.get(SCHEDULE_VARIABLE):
        raise UserError(
            f"sparse=False, but {SCHEDULE_VARIABLE}={os.environ[SCHEDULE_VARIABLE]} makes every engine sparse",
            f"unset {SCHEDULE_VARIABLE}",
        )
    return None


def check_short_steps(short_step_tokens: int, sparse: bool, vllm_arguments: Mapping[str, Any]) -> None:
    """Raise UserError where VLLMEngine's `short_step_tokens` is no number of tokens, or would have no effect."""
    check_token_count(short_step_tokens)
    if short_step_tokens and not sparse:
        raise UserError("with sparse=False every step is dense", "leave short_step_tokens out")
    if short_step_tokens and "additional_config" in vllm_arguments:
        raise UserError(
            "short_step_tokens would be lost beside additional_config",
            'give it there, {"sparroll": {"schedule": ..., "short_step_tokens": ...}}',
        )


def _asked(schedule: Schedule, short_step_tokens: int) -> str | dict[str, Any]:
    file = str(_schedule_file(schedule))
    return {"schedule": file, "short_step_tokens": short_step_tokens} if short_step_tokens else file


def _schedule_file(schedule: Schedule) -> Path:
    """A file for `additional_config`. The same schedule always has the same path, because vLLM's compile cache depends
    on it."""
    digest = hashlib.blake2b(json.dumps(schedule.table(), sort_keys=True).encode(), digest_size=8).hexdigest()
    return schedule.save(Path(tempfile.gettempdir()) / f"sparroll-{os.getuid()}" / f"capacity-{digest}.toml")


def _cpu_cache_bytes(config: Any, context_limit: int, max_batch: int) -> int:
    """Enough bytes for the batch at full length, and at most a quarter of the free memory. vLLM itself would take
    nearly all."""
    import psutil

    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * heads * head_dim * 4 * config.num_hidden_layers
    # A sixteenth for the index, and a few blocks that vLLM keeps to itself.
    whole = per_token * (max_batch * context_limit * 17 // 16 + 16 * 1024)
    return min(whole, psutil.virtual_memory().available // 4)
