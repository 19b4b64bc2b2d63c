"""Two GPUs, each with half of the model's heads, sample what one GPU samples. Under two minutes on two H200:

SPARROLL_GPU_RECORD=two-gpus.json python -m pytest -n0 -q -s tests/vllm/test_tensor_parallel_cuda.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import vllm_gpu
from sparroll.engines.report import EngineReport
from sparroll.types import Rollout
from vllm_gpu import DRY, SPARSE, Difference, Judge, note, prompts

pytestmark = [
    *vllm_gpu.needs_gpu_and_vllm,
    pytest.mark.skipif(not DRY and torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

LENGTHS = [20, 90] if DRY else [9, 60, 100, 170, 255, 256, 257, 333, 600, 640]
SAMPLED_TOKENS = 60 if DRY else 500
GREEDY: dict[str, Any] = dict(max_new_tokens=40 if DRY else 300, temperature=0, stop_ids=[])
ENGINE: dict[str, Any] = dict(schedule=SPARSE, max_batch=32, gpu_memory_share=0.3)
TWO: dict[str, Any] = ENGINE | dict(tensor_parallel_size=2, distributed_executor_backend="mp")


@pytest.fixture(autouse=True)
def _nothing_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")
    if DRY:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(vllm_gpu.load(torch.bfloat16))


@pytest.fixture(scope="module")
def from_one() -> list[Rollout]:
    with vllm_gpu.engine(**ENGINE) as one:
        return one.generate(prompts(LENGTHS), **GREEDY)


@pytest.fixture(scope="module")
def two(from_one: list[Rollout]) -> Iterator[Any]:
    with vllm_gpu.engine(**TWO) as engine:
        yield engine


def counted(engine: Any) -> list[EngineReport]:
    """What each worker counted."""
    return [EngineReport.from_table(table) for table in engine.llm.collective_rpc("sparroll_report")]


def test_log_probs_of_two_gpus_are_transformers_own(two: Any, judge: Judge) -> None:
    two.reset_report()
    rollouts = two.generate(prompts(LENGTHS, 1), max_new_tokens=SAMPLED_TOKENS, seed=5, stop_ids=[])
    errors = judge.errors(rollouts, SPARSE, None)
    note("two GPUs, sparse", tokens=len(vllm_gpu.log_probs(rollouts)), **dataclasses.asdict(errors))
    errors.check()
    one, other = counted(two)
    assert one == other
    assert [layer.sparse_steps > 0 for layer in one.layers] == [False] * 2 + [True] * (two.layers - 2)


def test_two_gpus_say_what_one_says(two: Any, judge: Judge, from_one: list[Rollout]) -> None:
    rollouts = two.generate(prompts(LENGTHS), **GREEDY)
    difference, rounding = Difference.of(from_one, rollouts), judge.errors(rollouts, SPARSE, None)
    note("two GPUs against one, greedy", **dataclasses.asdict(difference))
    assert difference.mean <= 1.5 * rounding.transformers + 0.005


def test_two_gpus_run_dense_and_come_back(two: Any, judge: Judge) -> None:
    before = two.generate(prompts(LENGTHS), **GREEDY)
    two.set_schedule(None)
    dense = two.generate(prompts(LENGTHS, 1), max_new_tokens=SAMPLED_TOKENS, seed=5, stop_ids=[])
    errors = judge.errors(dense, None, SPARSE)
    note("two GPUs, dense", **dataclasses.asdict(errors))
    errors.check()
    two.set_schedule(SPARSE)
    assert vllm_gpu.core(two).scheduler.reset_prefix_cache()
    again = Difference.of(before, two.generate(prompts(LENGTHS), **GREEDY))
    note("two GPUs, schedule back", **dataclasses.asdict(again))
    assert again.mean <= 1.5 * errors.transformers + 0.005
