"""The entry point for vLLM's `vllm.general_plugins`. vLLM calls `register` in every process, sometimes several times.
It tells vLLM the names of our classes and imports none of them."""

from __future__ import annotations

import os

from sparroll.engines.vllm import compat
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE

CUDA = "sparroll.engines.vllm.attention.cuda_backend.SparseBackend"
CUDA_OVER_FLASH = "sparroll.engines.vllm.attention.cuda_backend.SparseBackendOverFlash"
CPU = "sparroll.engines.vllm.attention.cpu_backend.SparseCPUBackend"


def register() -> None:
    """Register sparroll's backends. On CUDA, `attention_backend="CUSTOM"` is ours. On CPU, where vLLM has a single
    backend, ours takes its place, and does what vLLM's does unless the engine's settings ask for sparroll. With
    SPARROLL_VLLM_SCHEDULE set, FLASH_ATTN is ours, too. An engine that asks for sparroll gets one of these, or an error
    (compat.hook_config)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, CUDA)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU)
    if os.environ.get(SCHEDULE_VARIABLE):
        register_backend(AttentionBackendEnum.FLASH_ATTN, CUDA_OVER_FLASH)
    compat.hook_config()
