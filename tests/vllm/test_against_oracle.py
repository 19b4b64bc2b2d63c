"""vLLM on CPU with our backend is HFEngine, token for token, however vLLM schedules the work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sparroll import Schedule
from sparroll.attention.selectors import PageMean, Quest, Selector, Streaming
from sparroll.engines import HFEngine
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.attention.state import STATE
from sparroll.schedule import Step
from vllm_runs import Sampled, engine, greedy, needs_vllm, random_prompts

pytestmark = [needs_vllm, pytest.mark.slow]

LENGTHS = [5, 40, 170, 16, 33, 300, 64, 90, 1, 17]
NEW_TOKENS = 80
RISING = Schedule(steps=(Step(0, 64), Step(100, 96), Step(250, 128)), name="rising")


def oracle(schedule: Schedule | None, prompts: list[list[int]]) -> tuple[HFEngine, list]:
    hf = HFEngine("tiny-reasoner", schedule=schedule, dtype=torch.float32)
    return hf, hf.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[])


def assert_same(sampled: list[Sampled], expected: list, tolerance: float = 1e-4) -> None:
    for got, want in zip(sampled, expected, strict=True):
        assert got.ids == want.response_ids, f"prompt of {len(want.prompt_ids)} tokens"
        torch.testing.assert_close(got.logp, want.sparse_logp, atol=tolerance, rtol=0)


@pytest.mark.parametrize("block_size", [16, 64])
def test_mixed_batches_are_the_oracles(tmp_path: Path, block_size: int) -> None:
    prompts = random_prompts(LENGTHS)
    hf, expected = oracle(RISING, prompts)
    with engine(tmp_path, RISING, block_size=block_size, max_num_seqs=4) as llm:
        STATE.reset_report()
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)
        ours, theirs = STATE.report(), hf.report()
    assert ours.layers == theirs.layers
    assert ours.prefill_tokens == theirs.prefill_tokens == sum(LENGTHS)
    assert {layer: STATE.ran[layer] for layer in range(6)} == dict.fromkeys((0, 1), "dense") | dict.fromkeys(
        (2, 3, 4, 5), "reference"
    )


def test_chunked_prompts_are_the_oracles_and_their_one_token_ends_stay_dense(tmp_path: Path) -> None:
    # 97 and 129 leave one token after chunks of 32, at contexts beyond the budget of 64.
    prompts = random_prompts([129, 97, 40, 300])
    _, expected = oracle(RISING, prompts)
    with engine(tmp_path, RISING, max_num_batched_tokens=32, max_num_seqs=1) as llm:
        STATE.reset_report()
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)
        assert STATE.counters.tail_tokens == 2
        assert STATE.counters.prefill_tokens == 129 + 97 + 40 + 300
    with engine(tmp_path, RISING, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)


def test_a_warm_prefix_cache_changes_nothing(tmp_path: Path) -> None:
    prompts = random_prompts([100, 180, 64])
    _, expected = oracle(RISING, prompts)
    with engine(tmp_path, RISING) as llm:
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)
        again = greedy(llm, prompts, NEW_TOKENS)
        assert all(sampled.cached_tokens >= 48 for sampled in again)
        assert_same(again, expected)
        # The same prompt cut inside a block, so that cached index rows serve another request.
        shorter = [prompt[:-9] for prompt in prompts]
        assert_same(greedy(llm, shorter, NEW_TOKENS), oracle(RISING, shorter)[1])


def test_an_llm_without_an_extension_knows_a_dense_request_from_the_first_one_on(tmp_path: Path) -> None:
    prompts = random_prompts([170, 90])
    with engine(tmp_path, RISING) as llm:
        assert_same(greedy(llm, prompts, NEW_TOKENS, dense=True), oracle(None, prompts)[1])
        assert_same(greedy(llm, prompts, NEW_TOKENS), oracle(RISING, prompts)[1])
        report = EngineReport.from_table(llm.collective_rpc("sparroll_report")[0])
    assert report.dense_request_steps == len(prompts) * (NEW_TOKENS - 1)
    assert report.layers[-1].sparse_steps > 0


@pytest.mark.parametrize("chunk_tokens", [None, 33], ids=["whole", "chunked"])
def test_preempted_requests_end_as_the_oracles_up_to_dense_recomputation(
    tmp_path: Path, chunk_tokens: int | None
) -> None:
    prompts = random_prompts([60, 70, 80, 90, 100, 110])
    hf, expected = oracle(RISING, prompts)
    more = {} if chunk_tokens is None else {"max_num_batched_tokens": chunk_tokens}
    small = dict(num_gpu_blocks_override=48, max_model_len=512, enable_prefix_caching=False)
    # Our own worker counts from the end of vLLM's warm-up on, and needs no extension.
    with engine(tmp_path, RISING, **small, **more) as llm:
        preempted = preemptions_of(llm)
        sampled = greedy(llm, prompts, NEW_TOKENS)
        (table,) = llm.collective_rpc("sparroll_report")
    ours, theirs = EngineReport.from_table(table), hf.report()
    assert ours.preemptions == len(preempted) > 0
    # Nothing is cached, so each comes back with all of its prompt and of what it had sampled.
    assert ours.recomputed_tokens == sum(response for _, response in preempted)
    assert ours.prefill_tokens == sum(map(len, prompts)) + sum(prompt + response for prompt, response in preempted)
    assert ours.resumed_tokens == sum(response > 0 for _, response in preempted)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert one.dense_steps + one.sparse_steps == other.dense_steps + other.sparse_steps - ours.resumed_tokens
        if other.sparse_steps:
            assert one.sparse_steps == other.sparse_steps - one.resumed_sparse_tokens
    for got, want in zip(sampled, expected, strict=True):
        agreeing = sum(a == b for a, b in zip(got.ids, want.response_ids, strict=True))
        assert agreeing == NEW_TOKENS or agreeing > NEW_TOKENS // 3
    assert sum(got.ids == want.response_ids for got, want in zip(sampled, expected, strict=True)) >= 3


def preemptions_of(llm: Any) -> list[tuple[int, int]]:
    """(prompt, response tokens) of each request that vLLM's scheduler preempts from here on."""
    scheduler, seen = llm.llm_engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request

    def noted(request: Any, *arguments: Any, **named: Any) -> None:
        seen.append((request.num_prompt_tokens, request.num_output_tokens + request.num_output_placeholders))
        preempt(request, *arguments, **named)

    scheduler._preempt_request = noted
    return seen


def test_weights_loaded_again_change_nothing(tmp_path: Path) -> None:
    prompts = random_prompts([100, 40])
    _, expected = oracle(RISING, prompts)
    with engine(tmp_path, RISING) as llm:
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)
        assert STATE.ran[2] == "reference"


@pytest.mark.parametrize(
    "selector",
    [
        PageMean(page_tokens=8, first_tokens=8, recent_tokens=16),
        PageMean(page_tokens=1, first_tokens=4, recent_tokens=8),
        Quest(),
        Streaming(),
    ],
    ids=["page_mean-8", "page_mean-1", "quest", "streaming"],
)
def test_other_units_and_selectors_are_the_oracles(tmp_path: Path, selector: Selector) -> None:
    schedule = Schedule.fixed(96, selector, dense_layers=(0,))
    prompts = random_prompts([150, 40, 201])
    _, expected = oracle(schedule, prompts)
    with engine(tmp_path, schedule, block_size=32) as llm:
        assert_same(greedy(llm, prompts, NEW_TOKENS), expected)
        assert STATE.ran[1] == "reference"


def test_a_budget_above_every_context_is_vllms_dense_attention(tmp_path: Path) -> None:
    prompts = random_prompts(LENGTHS)
    with engine(tmp_path, None) as llm:
        dense = greedy(llm, prompts, NEW_TOKENS)
    with engine(tmp_path, Schedule.fixed(1024)) as llm:
        full = greedy(llm, prompts, NEW_TOKENS)
        assert STATE.decoded.rows > 0
        assert not STATE.decoded.sparse_L.any()
    for got, want in zip(full, dense, strict=True):
        assert got.ids == want.ids
        torch.testing.assert_close(got.logp, want.logp, atol=1e-6, rtol=0)


def test_the_schedule_can_be_switched_to_dense_and_back(tmp_path: Path) -> None:
    prompts = random_prompts([150, 40, 201])
    with engine(tmp_path, RISING) as llm:
        for schedule in (RISING, None, Schedule.fixed(96), RISING):
            STATE.set_schedule(schedule)
            llm.reset_prefix_cache()
            assert_same(greedy(llm, prompts, NEW_TOKENS), oracle(schedule, prompts)[1])


PLAIN = """
import json
from vllm import LLM, SamplingParams
from sparroll.models import resolve
from vllm_runs import random_prompts

settings = dict(dtype="float32", max_model_len=512, max_num_seqs=4, enforce_eager=True, kv_cache_memory_bytes=2**26)
llm = LLM(str(resolve("tiny-reasoner")), **settings)
sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
outputs = llm.generate([{"prompt_token_ids": ids} for ids in random_prompts([5, 100, 37])], sampling, use_tqdm=False)
worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
config, groups = llm.llm_engine.vllm_config, worker.model_runner.attn_groups
found = {
    "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    "logp": [output.outputs[0].cumulative_logprob for output in outputs],
    "blocks": [config.cache_config.block_size, config.cache_config.num_gpu_blocks],
    "cache": [list(cache.shape) for cache in worker.model_runner.kv_caches],
    "impl": sorted({str(type(layer.impl)) for layer in config.compilation_config.static_forward_context.values()}),
    "builder": [str(type(builder)) for each in groups for group in each for builder in group.metadata_builders],
    "sizes": [str(size) for each in groups for group in each for size in group.backend.get_supported_kernel_block_sizes()],
    "attention": repr(config.attention_config),
    "backend": [str(group.backend) for each in groups for group in each],
}
llm.llm_engine.engine_core.shutdown()
"""


def test_vllm_is_its_own_where_nobody_asks_for_sparroll(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process of its own without the plugin, and this one, in which it has run.
    settings = {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(sys.path)}
    code = PLAIN + '\nprint("found", json.dumps(found))'
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    without = json.loads(done.stdout.rpartition("found ")[2])
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    here: dict[str, Any] = {}
    exec(PLAIN, here)
    installed = here["found"]
    assert "sparroll" in str(installed.pop("backend")) and "sparroll" not in str(without.pop("backend"))
    assert installed == without
    assert "vllm.v1.attention.backends.cpu_attn" in installed["impl"][0]
    assert installed["tokens"][0] and installed["builder"]


def test_a_small_block_is_refused_as_without_sparroll(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No common block size for 16"), engine(tmp_path, None, block_size=16):
        pass
