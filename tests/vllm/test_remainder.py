"""A remainder in vLLM on CPU is HFEngine's, token for token: rows of groups belong to blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparroll import Schedule
from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder
from sparroll.engines import HFEngine
from sparroll.engines.vllm import compat
from sparroll.engines.vllm.attention.state import STATE
from sparroll.errors import UserError
from sparroll.schedule import Step
from vllm_runs import engine, greedy, needs_vllm, random_prompts

LENGTHS, NEW_TOKENS = [5, 140, 33, 90], 40
FINE = QuantizedMean(page_tokens=4, bits=4, first_tokens=16, recent_tokens=32, remainder=Remainder(32, "fp8"))
RISING = Schedule((Step(0, 64), Step(100, 80), Step(150, 112)), FINE, dense_layers=(0,), name="rising")


def expected(schedule: Schedule | None, prompts: list[list[int]]) -> tuple[HFEngine, list]:
    hf = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    return hf, hf.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[])


def assert_same(sampled: list, wanted: list) -> None:
    for got, want in zip(sampled, wanted, strict=True):
        assert got.ids == want.response_ids, f"prompt of {len(want.prompt_ids)} tokens"
        # K and V differ in their last bits, which may put a channel of a 4-bit or fp8 row into the next code.
        torch.testing.assert_close(got.logp, want.sparse_logp, atol=1e-3, rtol=0)


@needs_vllm
@pytest.mark.slow
def test_batches_prefixes_and_switches_are_the_oracles(tmp_path: Path) -> None:
    # With these prompts no choice is so close that a last bit of K, V or the query decides it.
    prompts = random_prompts(LENGTHS, 2)
    hf, wanted = expected(RISING, prompts)
    assert wanted[1].attention == "sparse"
    with engine(tmp_path, RISING, block_size=32, max_num_batched_tokens=48, max_num_seqs=3) as llm:
        STATE.reset_report()
        assert_same(greedy(llm, prompts, NEW_TOKENS), wanted)
        assert STATE.report().layers == hf.report().layers
        again = greedy(llm, prompts, NEW_TOKENS)
        assert again[1].cached_tokens >= 128
        assert_same(again, wanted)
        STATE.set_schedule(None)
        greedy(llm, prompts[:1], 4)
        other = Schedule.fixed(68, FINE, dense_layers=(0,))
        STATE.set_schedule(other)
        llm.reset_prefix_cache()
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected(other, prompts)[1])


@needs_vllm
@pytest.mark.slow
def test_preempted_requests_go_on_with_rows_of_their_new_blocks(tmp_path: Path) -> None:
    prompts = random_prompts([60, 70, 90, 110])
    selector = PageMean(page_tokens=8, recent_tokens=32, remainder=Remainder(16))
    schedule = Schedule.fixed(96, selector, dense_layers=(0,))
    _, wanted = expected(schedule, prompts)
    small = dict(num_gpu_blocks_override=28, max_model_len=256, enable_prefix_caching=False)
    with engine(tmp_path, schedule, **small) as llm:
        scheduler, preempted = llm.llm_engine.engine_core.engine_core.scheduler, []
        preempt = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *rest, **named: (
            preempted.append(request.num_prompt_tokens),
            preempt(request, *rest, **named),
        )
        sampled = greedy(llm, prompts, NEW_TOKENS)
    assert preempted
    # A preempted request prefills densely what it had sampled, so it may go another way afterwards; the others do not.
    for got, want in zip(sampled, wanted, strict=True):
        assert len(want.prompt_ids) in preempted or got.ids == want.response_ids


def test_cuda_refuses_groups_that_kernels_cannot_cut() -> None:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32), model_config=SimpleNamespace(max_model_len=64)
    )
    assert compat._unsupported_selector(config, FINE, "cpu") is None
    assert compat._unsupported_selector(config, FINE, "cuda") is None
    uneven = dataclasses.replace(FINE, recent_tokens=48, remainder=Remainder(48))
    config.cache_config.block_size = 48
    assert "groups of 12 units" in str(compat._unsupported_selector(config, uneven, "cuda"))
    config.cache_config.block_size = 16
    assert "multiple of 16 and of the remainder's group (32)" in str(compat._unsupported_selector(config, FINE, "cpu"))


def test_an_engine_keeps_the_remainder_that_it_started_with() -> None:
    STATE.configure(RISING, 4, "cpu")
    bare = Schedule.fixed(64, QuantizedMean(page_tokens=4, bits=4), dense_layers=(0,))
    with pytest.raises(UserError, match="keeps the index of .*remainder"):
        STATE.set_schedule(bare)
    assert (STATE.unit_tokens, STATE.group_tokens) == (4, 32)
