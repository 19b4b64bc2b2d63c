"""What every test runs under: one thread a process, no network, no display."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
# Whichever test imports vllm first, VLLMEngine finds it in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
import torch

import fast_interpreter

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Read when triton is imported, and transformers imports it: kernels run in the interpreter on machines without a GPU.
    os.environ["TRITON_INTERPRET"] = "1"
    fast_interpreter.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
