"""The settings that are in force, read from the objects that run and not from what was asked for: of a vLLM engine, of its
workers, and of a trainer's model. Sets nothing."""

from __future__ import annotations

from typing import Any


def of_engine(config: Any) -> dict[str, Any]:
    """config: the VllmConfig of a running engine."""
    import vllm

    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    compilation = config.compilation_config
    return {
        "vllm": vllm.__version__,
        "dtype": _dtype(model.dtype),
        "enforce_eager": bool(model.enforce_eager),
        "cuda_graphs": _name(compilation.cudagraph_mode),
        "largest_graph_requests": max(compilation.cudagraph_capture_sizes or [0]),
        "sleep_mode": bool(model.enable_sleep_mode),
        "max_model_len": int(model.max_model_len),
        "max_num_seqs": int(scheduler.max_num_seqs),
        "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
        "tensor_parallel_size": int(config.parallel_config.tensor_parallel_size),
        "gpu_memory_share": float(cache.gpu_memory_utilization),
        "cache_tokens": int(cache.num_gpu_blocks or 0) * int(cache.block_size),
        "cache_dtype": _dtype(cache.cache_dtype),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "async_scheduling": bool(scheduler.async_scheduling),
    }


def of_server(url: str) -> Any:
    """What a vLLM server in development mode says of its settings; None where it says nothing."""
    import json
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url}/server_info?config_format=json", timeout=10) as said:
            config = json.loads(said.read()).get("vllm_config")
    except OSError:
        return None
    wanted = {
        "model_config": ("dtype", "enforce_eager", "max_model_len", "enable_sleep_mode"),
        "scheduler_config": ("max_num_seqs", "max_num_batched_tokens"),
        "compilation_config": ("cudagraph_mode",),
    }
    if not isinstance(config, dict):
        return None
    return {name: config.get(part, {}).get(name) for part, names in wanted.items() for name in names}


def of_worker(worker: Any) -> dict[str, Any]:
    """worker: one of vLLM's, after its start. It may have settled for other CUDA graphs than the engine's configuration
    names, because of its attention."""
    config, runner = worker.vllm_config, worker.model_runner
    backends = {backend.__name__ for backend in _backends(runner)}
    return {
        "rank": int(worker.rank),
        "cuda_graphs": _name(config.compilation_config.cudagraph_mode),
        "attention": sorted(backends),
        "model_runner": type(runner).__module__,
    }


def of_model(model: Any, autocast: Any) -> dict[str, Any]:
    """The model of a trainer. autocast: the dtype that its passes compute in; None: that of the parameters."""
    parameters = {_dtype(parameter.dtype) for parameter in model.parameters()}
    config = model.config
    return {
        "parameters": "/".join(sorted(parameters)),
        "computes_in": _dtype(autocast) if autocast is not None else "/".join(sorted(parameters)),
        "attention": str(getattr(config, "_attn_implementation", None)),
        "layers": int(config.num_hidden_layers),
        "hidden": int(config.hidden_size),
        "vocabulary": int(config.vocab_size),
        "gradient_checkpointing": bool(getattr(model, "is_gradient_checkpointing", False)),
    }


def _backends(runner: Any) -> list[Any]:
    groups = [group for groups in getattr(runner, "attn_groups", []) for group in groups]
    return [group.backend for group in groups if hasattr(group, "backend")]


def _name(mode: Any) -> str | None:
    return None if mode is None else getattr(mode, "name", str(mode))


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
