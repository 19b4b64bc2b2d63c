"""vLLM's entry point `vllm.general_plugins`. vLLM calls `register` in every process, some of them several times; it names
our classes to vLLM and imports none of them."""

from __future__ import annotations

import os

from sparroll.engines.vllm import compat
from sparroll.engines.vllm.settings import SCHEDULE_VARIABLE

CUDA = "sparroll.engines.vllm.attention.cuda_backend.SparseBackend"
CUDA_OVER_FLASH = "sparroll.engines.vllm.attention.cuda_backend.SparseBackendOverFlash"
CPU = "sparroll.engines.vllm.attention.cpu_backend.SparseCPUBackend"


def register() -> None:
    """`attention_backend="CUSTOM"` is ours on CUDA. On CPU, where vLLM knows a single backend, that one becomes ours; it
    is vLLM's own unless `additional_config` asks for sparroll. With SPARROLL_VLLM_SCHEDULE set, FLASH_ATTN is ours too.
    An engine that asks for sparroll gets one of these, or an error (compat.hook_config)."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, CUDA)
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU)
    if os.environ.get(SCHEDULE_VARIABLE):
        register_backend(AttentionBackendEnum.FLASH_ATTN, CUDA_OVER_FLASH)
    compat.hook_config()
