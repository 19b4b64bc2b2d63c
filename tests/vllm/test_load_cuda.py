"""VLLMEngine under load on a GPU: several rounds of 500 requests of mixed lengths in a cache that holds a fraction of
them, so that vLLM preempts all the time. Nothing crashes, leaks or is miscounted. About three minutes on an H200:

    SPARROLL_GPU_RECORD=load.json python -m pytest -n0 -q -s tests/vllm/test_load_cuda.py
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import vllm_gpu
from sparroll.engines.vllm import outputs
from sparroll.types import Rollout
from vllm_gpu import BLOCK_TOKENS, DRY, SPARSE, Judge, note, prompts

pytestmark = vllm_gpu.needs_gpu_and_vllm

REQUESTS = 24 if DRY else 500
LONGEST_PROMPT, LONGEST_RESPONSE = (150, 150) if DRY else (1500, 1500)
CACHE_TOKENS = 640 if DRY else 32 * 1024
"""Less than a batch needs: 96 requests of the mix come to some 50K tokens when they are half done."""
MAX_BATCH = 8 if DRY else 96
ROUNDS_AT_LEAST, ROUNDS_AT_MOST, SECONDS = 3, 3 if DRY else 12, 100
MIB = 2**20


@dataclass
class Round:
    """What a round of requests was, and what it left behind."""

    asked: list[tuple[list[int], int]]
    """Prompt and number of response tokens of each request."""
    finished: dict[int, Rollout] = field(default_factory=dict)
    preempted: Counter[int] = field(default_factory=Counter)
    """Request -> how often vLLM's scheduler dropped it."""
    recomputed_tokens: int = 0
    """At most: prompts and responses so far of the dropped."""
    steps: int = 0
    seconds: float = 0.0

    @property
    def preemptions(self) -> int:
        return self.preempted.total()


def mix(seed: int) -> list[tuple[list[int], int]]:
    """Prompts of 10 to 1,500 tokens and responses of 2 to 1,500, both mostly short, in no order."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(2, REQUESTS, generator=generator, dtype=torch.float64)
    prompt_tokens = (10 * (LONGEST_PROMPT / 10) ** shares[0]).round().int().tolist()
    response_tokens = (2 + (LONGEST_RESPONSE - 2) * shares[1] ** 2).round().int().tolist()
    return list(zip(prompts(prompt_tokens, seed), response_tokens, strict=True))


def run(engine: Any, seed: int) -> Round:
    """One round, step by step."""
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    round_ = Round(mix(seed))
    llm, scheduler = engine.llm.llm_engine, vllm_gpu.core(engine).scheduler
    preempt = scheduler._preempt_request

    def counted(request: Any, *arguments: Any, **named: Any) -> Any:
        number = int(request.request_id.partition("-")[0])
        round_.preempted[number] += 1
        # A token that is still under way comes on top.
        round_.recomputed_tokens += request.num_tokens + 1
        return preempt(request, *arguments, **named)

    scheduler._preempt_request = counted
    began = time.perf_counter()
    try:
        for number, (prompt, tokens) in enumerate(round_.asked):
            parameters = SamplingParams(
                max_tokens=tokens,
                temperature=1.0,
                seed=1000 * seed + number,
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            llm.add_request(f"{number}-{seed}", {"prompt_token_ids": prompt}, parameters)
        while llm.has_unfinished_requests():
            for output in llm.step():
                if output.finished:
                    number = int(output.request_id.partition("-")[0])
                    round_.finished[number] = rollout(round_.asked[number][0], output.outputs[0])
            round_.steps += 1
    finally:
        scheduler._preempt_request = preempt
    round_.seconds = time.perf_counter() - began
    return round_


def rollout(prompt: list[int], completion: Any) -> Rollout:
    tokens = list(completion.token_ids)
    logp, _ = outputs.log_probs(completion.logprobs, tokens, 0)
    return Rollout(prompt, tokens, logp, completion.finish_reason)


@dataclass
class Held:
    """Memory after a round."""

    allocated_bytes: int
    used_bytes: int
    host_bytes: int
    free_blocks: int

    @staticmethod
    def now(engine: Any) -> Held:
        vllm_gpu.clean()
        allocated = 0 if DRY else torch.cuda.memory_allocated()
        return Held(allocated, vllm_gpu.used_bytes(), psutil.Process().memory_info().rss, vllm_gpu.free_blocks(engine))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with vllm_gpu.engine(
        schedule=SPARSE,
        max_batch=MAX_BATCH,
        max_context_tokens=LONGEST_PROMPT + LONGEST_RESPONSE + 72,
        gpu_memory_share=0.3,
        num_gpu_blocks_override=CACHE_TOKENS // BLOCK_TOKENS,
    ) as engine:
        assert vllm_gpu.capacity_tokens(engine) == CACHE_TOKENS
        yield engine


@pytest.fixture(scope="module")
def blocks_at_start(engine: Any) -> int:
    return vllm_gpu.free_blocks(engine)


@dataclass
class Load:
    """All rounds, what was held after each, and what the engine's report says of each."""

    rounds: list[Round]
    held: list[Held]
    reports: list[Any]


@pytest.fixture(scope="module")
def load(engine: Any, blocks_at_start: int) -> Load:
    load, began = Load([], [], []), time.perf_counter()
    while len(load.rounds) < ROUNDS_AT_LEAST or (
        len(load.rounds) < ROUNDS_AT_MOST and time.perf_counter() - began < SECONDS
    ):
        engine.reset_report()
        load.rounds.append(run(engine, len(load.rounds)))
        load.reports.append(engine.report())
        load.held.append(Held.now(engine))
        last, held = load.rounds[-1], load.held[-1]
        note(
            f"round {len(load.rounds)}",
            seconds=last.seconds,
            steps=last.steps,
            tokens=sum(tokens for _, tokens in last.asked),
            preemptions=last.preemptions,
            preempted_requests=len(last.preempted),
            **dataclasses.asdict(held),
        )
    note(
        "load",
        rounds=len(load.rounds),
        requests=REQUESTS * len(load.rounds),
        steps=sum(each.steps for each in load.rounds),
        preemptions=sum(each.preemptions for each in load.rounds),
        seconds=time.perf_counter() - began,
    )
    return load


def test_every_request_gets_its_tokens_with_finite_log_probs(load: Load) -> None:
    for round_ in load.rounds:
        assert sorted(round_.finished) == list(range(REQUESTS))
        for number, (_, tokens) in enumerate(round_.asked):
            rollout = round_.finished[number]
            assert len(rollout.response_ids) == len(rollout.sparse_logp) == tokens
            assert rollout.finish_reason == "length"
            assert torch.isfinite(rollout.sparse_logp).all() and (rollout.sparse_logp <= 0).all()


def test_vllm_preempted_many_times(load: Load) -> None:
    for round_ in load.rounds:
        assert round_.preemptions >= (1 if DRY else 50)


def test_counters_add_up(load: Load) -> None:
    """A request's first token, and the first after a preemption, come from a prefill; each other from a decode row. So
    nothing may be off by more than once per preemption, which vLLM's scheduler is asked for here."""
    for number, (round_, report) in enumerate(zip(load.rounds, load.reports, strict=True)):
        contexts = np.concatenate(
            [outputs.decode_contexts(len(prompt), tokens) for prompt, tokens in round_.asked if tokens > 1]
        )
        reads = SPARSE.read_tokens(contexts)
        sparse, longest = int((reads < contexts).sum()), int(contexts.max())
        layer, dense_layer, off = report.layers[-1], report.layers[0], round_.preemptions
        rows = layer.sparse_steps + layer.dense_steps
        note(
            f"counters of round {number + 1}",
            decode_rows=rows,
            of=len(contexts),
            sparse_rows=layer.sparse_steps,
            sparse_of=sparse,
            preemptions=off,
            preemptions_reported=report.preemptions,
            resumed_tokens=report.resumed_tokens,
            resumed_sparse_tokens=layer.resumed_sparse_tokens,
            recomputed_tokens=report.recomputed_tokens,
            prefilled=report.prefill_tokens,
            kv_read_share=layer.kv_read_share,
        )
        assert abs(len(contexts) - rows) <= off
        assert abs(sparse - layer.sparse_steps) <= off
        assert abs(int(contexts.sum()) - layer.context_tokens) <= off * longest
        assert abs(int(reads.sum()) - layer.read_tokens) <= off * int(reads.max())
        assert dense_layer.sparse_steps == 0 and dense_layer.read_tokens == dense_layer.context_tokens
        assert dense_layer.context_tokens == layer.context_tokens
        prompt_tokens = sum(len(prompt) for prompt, _ in round_.asked)
        assert prompt_tokens <= report.prefill_tokens <= prompt_tokens + round_.recomputed_tokens
        # And exactly, by the engine's own count of what preemptions did.
        assert report.preemptions == off
        assert rows + report.resumed_tokens == len(contexts)
        assert layer.sparse_steps + layer.resumed_sparse_tokens == sparse
        assert report.recomputed_tokens <= min(round_.recomputed_tokens, report.prefill_tokens - prompt_tokens)


def test_all_blocks_are_free_at_the_end(load: Load, blocks_at_start: int) -> None:
    assert {held.free_blocks for held in load.held} == {blocks_at_start}


def test_memory_does_not_grow(load: Load) -> None:
    second, last = load.held[1], load.held[-1]
    grown = {name: getattr(last, name) - getattr(second, name) for name in ("allocated_bytes", "used_bytes")}
    # The rollouts that this test keeps are on the host, too.
    kept = sum(20 * len(r.response_ids) + 4000 for each in load.rounds[2:] for r in each.finished.values())
    host = last.host_bytes - second.host_bytes - kept
    note("growth since the second round", **grown, host_bytes=host, rounds=len(load.rounds) - 2)
    assert grown["allocated_bytes"] <= 4 * MIB
    assert grown["used_bytes"] <= 64 * MIB
    assert host <= 128 * MIB


def test_log_probs_stay_right_under_preemption(load: Load) -> None:
    judge, last = Judge(vllm_gpu.load(torch.bfloat16)), load.rounds[-1]
    long_enough = [number for number, (_, tokens) in enumerate(last.asked) if tokens >= LONGEST_RESPONSE // 4]
    whole = [last.finished[number] for number in long_enough if number not in last.preempted][:32]
    dropped = [last.finished[number] for number in long_enough if number in last.preempted][:32]
    assert dropped
    errors = judge.errors(dropped, SPARSE, None)
    note("preempted requests", requests=len(dropped), **dataclasses.asdict(errors))
    # K and V of what was sampled before a preemption come from dense attention: between the two policies, never garbage.
    assert math.isfinite(errors.engine) and errors.engine <= errors.policies
    if whole:
        errors = judge.errors(whole, SPARSE, None)
        note("requests left alone", requests=len(whole), **dataclasses.asdict(errors))
        errors.check()


def test_generate_accepts_a_preempted_batch(engine: Any, load: Load) -> None:
    asked = prompts([20 + 7 * i % 90 for i in range(MAX_BATCH)], 9)
    tokens = 140 if DRY else 900
    rollouts = engine.generate(asked, max_new_tokens=tokens, seed=1, stop_ids=[])
    assert all(len(each.response_ids) == tokens for each in rollouts)
    assert {each.attention for each in rollouts} == {"sparse"}
