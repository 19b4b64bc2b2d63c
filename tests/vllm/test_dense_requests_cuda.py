"""Dense requests beside sparse ones on a GPU, in the same CUDA graphs: right log-probabilities of both kinds, in both of
vLLM's model runners, under preemption, and with a prefix cache that keeps them apart. A few minutes on an H200:

    SPARROLL_GPU_RECORD=dense-requests.json python -m pytest -n0 -q -s tests/vllm/test_dense_requests_cuda.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import vllm_gpu
from mixed_requests import cached_tokens, of_kind
from sparroll.engines.vllm import outputs
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.windows.configure import V2_VARIABLE
from sparroll.schedule import Step
from sparroll.types import Rollout
from vllm_gpu import BLOCK_TOKENS, DRY, SPARSE, Difference, Judge, Watch, note, only_on_gpu, prompts

pytestmark = vllm_gpu.needs_gpu_and_vllm

TOKENS = 100 if DRY else 600
LENGTHS = [20, 90] if DRY else [9, 12, 60, 100, 170, 255, 256, 257, 333, 600, 640, 900]
FLAGS = [place % 3 == 0 for place in range(2 * len(LENGTHS))]
"""Two of each prompt. The kinds are spread over long and short ones."""
WIDE = dataclasses.replace(SPARSE, steps=(Step(0, 112), Step(600, 256)), name="wide")


def check_both_kinds(name: str, judge: Judge, rollouts: list[Rollout]) -> None:
    """Raise unless each kind has the log-probabilities of its own policy, within rounding, and clearly not the other's."""
    for dense in (True, False):
        mine, other = (None, SPARSE) if dense else (SPARSE, None)
        errors = judge.errors(of_kind(rollouts, FLAGS, dense), mine, other)
        note(f"{name}, {'dense' if dense else 'sparse'} requests", **dataclasses.asdict(errors))
        assert {each.attention for each in of_kind(rollouts, FLAGS, dense)} == {"dense" if dense else "sparse"}
        errors.check()


@pytest.fixture(scope="class", params=["default", "v1"])
def started(request: pytest.FixtureRequest) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "v1":
            patch.setenv(V2_VARIABLE, "0")
        elif DRY:
            pytest.skip("a CPU has one runner")
        with vllm_gpu.engine(schedule=SPARSE, max_batch=32, gpu_memory_share=0.3) as engine:
            note("runner", module=type(vllm_gpu.runner(engine)).__module__)
            yield engine


@pytest.fixture
def engine(started: Any) -> Any:
    vllm_gpu.put_back(started, SPARSE)
    vllm_gpu.forget_prefixes(started)
    started.reset_report()
    return started


@pytest.fixture(scope="class")
def judge() -> Judge:
    return Judge(vllm_gpu.load(torch.bfloat16))


class TestMixed:
    def test_log_probs_of_both_kinds_are_their_policys_own_and_the_counters_say_which_is_which(
        self, engine: Any, judge: Judge
    ) -> None:
        asked = prompts(LENGTHS, 1)
        rollouts = engine.generate(asked, n=2, max_new_tokens=TOKENS, seed=5, stop_ids=[], dense=FLAGS)
        check_both_kinds("bf16", judge, rollouts)
        report = engine.report()
        contexts = {
            dense: np.concatenate(
                [outputs.decode_contexts(len(r.prompt_ids), TOKENS) for r in of_kind(rollouts, FLAGS, dense)]
            )
            for dense in (True, False)
        }
        assert report.dense_request_steps == len(contexts[True])
        assert report.dense_request_context_tokens == contexts[True].sum()
        read = SPARSE.read_tokens(contexts[False])
        last = report.layers[-1]
        note("counters", dense_requests=report.dense_request_steps, sparse_rows=last.sparse_steps)
        assert last.sparse_steps == (read < contexts[False]).sum()
        assert last.dense_steps + last.sparse_steps == len(contexts[True]) + len(contexts[False])
        assert last.read_tokens == contexts[True].sum() + read.sum()

    def test_greedy_rollouts_are_those_of_separate_generates(self, engine: Any, judge: Judge) -> None:
        settings: dict[str, Any] = {"n": 2, "max_new_tokens": TOKENS // 2, "temperature": 0, "stop_ids": []}
        asked = prompts(LENGTHS, 2)
        mixed = engine.generate(asked, dense=FLAGS, **settings)
        vllm_gpu.forget_prefixes(engine)
        sparse = engine.generate(asked, **settings)
        engine.set_schedule(None)
        dense = engine.generate(asked, **settings)
        rounding = judge.errors(of_kind(sparse, FLAGS, False), SPARSE, None).transformers
        for kind, others in ((True, dense), (False, sparse)):
            difference = Difference.of(of_kind(mixed, FLAGS, kind), of_kind(others, FLAGS, kind))
            note(f"greedy, {'dense' if kind else 'sparse'} requests", **dataclasses.asdict(difference))
            assert difference.mean <= 1.5 * rounding + 0.005

    def test_requests_with_schedules_of_their_own_are_read_by_them(self, engine: Any, judge: Judge) -> None:
        """Three schedules and dense requests in the same batch: right log-probabilities, and the rows of each."""
        narrow = dataclasses.replace(SPARSE, steps=SPARSE.steps[:1], name="narrow")
        own = [(SPARSE, WIDE, narrow)[place % 3] for place in range(2 * len(LENGTHS))]
        flags = [place % 8 == 7 for place in range(len(own))]
        rollouts = engine.generate(
            prompts(LENGTHS, 8), n=2, max_new_tokens=TOKENS, seed=9, stop_ids=[], schedules=own, dense=flags
        )
        for schedule, other in ((WIDE, SPARSE), (SPARSE, WIDE)):
            mine = [each for each, flag, its in zip(rollouts, flags, own, strict=True) if its is schedule and not flag]
            errors = judge.errors(mine, schedule, other)
            note(f"requests with the schedule {schedule.name}", **dataclasses.asdict(errors))
            errors.check()
            assert {each.schedule_name for each in mine} == {schedule.name}
        report = engine.report()
        sparse = unread = rows = 0
        for rollout, flag, its in zip(rollouts, flags, own, strict=True):
            contexts = outputs.decode_contexts(len(rollout.prompt_ids), TOKENS)
            read = contexts if flag else its.read_tokens(contexts)
            rows, sparse, unread = (
                rows + len(contexts),
                sparse + (read < contexts).sum(),
                unread + (contexts - read).sum(),
            )
        last = report.layers[-1]
        assert (last.sparse_steps, last.dense_steps) == (sparse, rows - sparse)
        assert last.context_tokens - last.read_tokens == unread
        assert report.dense_request_steps == sum(flags) * (TOKENS - 1)

    @only_on_gpu
    def test_steps_with_both_kinds_replay_full_graphs(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        watch, tokens = Watch(engine, monkeypatch), 120
        asked = prompts([100] * 8, 3)
        engine.generate(asked, max_new_tokens=tokens, temperature=0, stop_ids=[], dense=[True, False] * 4)
        note("graphs", replays=watch.replays, entries_from_python=watch.entries)
        if hasattr(vllm_gpu.runner(engine), "cudagraph_manager"):
            assert watch.replays >= tokens - 4
        assert watch.entries <= 3 * engine.layers
        kinds = dict(enumerate(["dense"] * 2 + ["triton"] * (engine.layers - 2)))
        assert STATE.captured == kinds
        report = engine.report()
        assert report.dense_request_steps == 4 * (tokens - 1)
        assert report.layers[-1].sparse_steps > 0

    def test_neither_kind_finds_what_the_other_left_in_the_prefix_cache(self, engine: Any, judge: Judge) -> None:
        # A prompt of 300 tokens and the response's 200, of which the last was never in the cache: whole blocks are shared.
        shared = 499 // BLOCK_TOKENS * BLOCK_TOKENS
        with cached_tokens(engine) as cached:
            for first in (True, False):
                vllm_gpu.forget_prefixes(engine)
                (before,) = engine.generate(prompts([300], 4), max_new_tokens=200, seed=1, stop_ids=[], dense=[first])
                longer = [before.prompt_ids + before.response_ids]
                for then, expected in ((not first, 0), (first, shared)):
                    cached.clear()
                    engine.generate(longer, max_new_tokens=8, stop_ids=[], dense=[then])
                    note(f"prefix of a {first} request, asked for by a {then} one", cached=cached[0])
                    assert cached == [expected]


@pytest.fixture(scope="class", params=["default", "v1"])
def small(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine whose cache holds a part of a batch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "v1":
            patch.setenv(V2_VARIABLE, "0")
        elif DRY:
            pytest.skip("a CPU has one runner")
        blocks = sum(tokens + TOKENS for tokens in LENGTHS) // BLOCK_TOKENS
        with vllm_gpu.engine(
            schedule=SPARSE,
            max_batch=32,
            max_context_tokens=max(LENGTHS) + TOKENS,
            gpu_memory_share=0.3,
            num_gpu_blocks_override=blocks,
        ) as engine:
            yield engine


class TestPreempted:
    def test_a_dense_request_that_is_computed_again_stays_dense(self, small: Any, judge: Judge) -> None:
        rollouts = small.generate(prompts(LENGTHS, 6), n=2, max_new_tokens=TOKENS, seed=7, stop_ids=[], dense=FLAGS)
        report = small.report()
        dense = judge.errors(of_kind(rollouts, FLAGS, True), None, SPARSE)
        note(
            "under preemption, dense requests",
            preemptions=report.preemptions,
            resumed_tokens=report.resumed_tokens,
            **dataclasses.asdict(dense),
        )
        assert report.preemptions > 0
        dense.check()
        steps = sum(FLAGS) * (TOKENS - 1)
        assert steps - report.resumed_tokens <= report.dense_request_steps <= steps
        assert {each.attention for each in of_kind(rollouts, FLAGS, True)} == {"dense"}
