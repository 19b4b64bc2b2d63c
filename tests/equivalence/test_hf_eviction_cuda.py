"""Eviction on a GPU gives what it gives on a CPU, and frees the GPU's memory."""

from __future__ import annotations

import copy

import pytest
import torch

from equivalence.models import prompts, tiny_model
from equivalence.test_hf_eviction import ODD_LENGTHS, POLICIES, check
from sparroll.compression import Compression, compression_kinds, make_compression
from sparroll.engines import HFEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.name}-{policy.every_tokens}")
def test_fp32_rollouts_equal_the_oracle_on_the_cpu(policy: Compression) -> None:
    model = tiny_model()
    engine = HFEngine(copy.deepcopy(model).cuda(), compression=policy, max_batch=4)
    for rollout in engine.generate(prompts(ODD_LENGTHS), max_new_tokens=33, seed=3):
        assert rollout.attention == "evicted"
        check(model, policy, rollout, within=1e-4)


@pytest.mark.parametrize("kind", compression_kinds())
def test_bf16_rollouts_free_the_memory_that_the_report_says(kind: str) -> None:
    """16 rows of 1,500 tokens: far more cache than anything else a step needs."""
    model = tiny_model(max_position_embeddings=2048, head_dim=64).cuda().bfloat16()
    # Libraries take their workspace with the first call.
    HFEngine(model).generate(prompts([40]), n=16, max_new_tokens=2)
    peaks = {}
    for compression in (None, make_compression(kind, budget_tokens=64, every_tokens=64)):
        engine = HFEngine(model, compression=compression, max_batch=16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        rollouts = engine.generate(prompts([40]), n=16, max_new_tokens=1460)
        peaks[compression] = torch.cuda.max_memory_allocated() - before
        assert {rollout.attention for rollout in rollouts} == {"dense" if compression is None else "evicted"}
        assert engine.report().peak_kv_bytes <= peaks[compression]
    dense, evicted = peaks.values()
    assert engine.report().kv_saved_share > 0.8
    assert evicted < 0.6 * dense
