"""The counting of preemptions against vLLM's own schedulers, for both runners, scheduling ahead or not.

A worker is imitated: it decides which rows decode as the runners do, and samples random tokens.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from sparroll import Schedule
from sparroll.engines.vllm import outputs
from sparroll.engines.vllm.attention.preemptions import Follower
from sparroll.engines.vllm.attention.state import State
from sparroll.models import resolve
from vllm_runs import needs_vllm

pytestmark = needs_vllm
BLOCK_TOKENS = 16
STOP = 3
SCHEDULE = Schedule.fixed(64)


@pytest.fixture(params=[False, True], ids=["in step", "ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[1, 2], ids=["runner v1", "runner v2"])
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(request.param - 1))
    return request.param


@dataclass
class Worker:
    """What of a worker decides how rows count."""

    runner: int
    chance: random.Random
    stop_share: float
    state: State = field(default_factory=State)
    follower: Follower = field(default_factory=Follower)
    prefill_tokens: dict[str, int] = field(default_factory=dict)
    known_tokens: dict[str, int] = field(default_factory=dict)

    def run(self, step: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        self.follower.follow(step, self.state)
        cached = step.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in step.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            known = new.prefill_token_ids if self.runner == 2 else new.prompt_token_ids
            self.prefill_tokens[new.req_id] = self.known_tokens[new.req_id] = len(known)
        for name, sampled in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self.known_tokens[name] = self.prefill_tokens[name] + sampled
        tokens, contexts = [], []
        for name, count in step.num_scheduled_tokens.items():
            end = starts[name] + count
            if count == 1 and starts[name] >= self.prefill_tokens[name]:
                contexts.append(end)
            tokens.append([self._token()] if end >= self.known_tokens[name] else [])
        self.state.begin_step(list(contexts), None, may_replay=False)
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, tokens)

    def _token(self) -> int:
        return STOP if self.chance.random() < self.stop_share else self.chance.randrange(5, 100)


def scheduler(ahead: bool, prefix_cache: bool, chunk_tokens: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    # The platform's adaptations would forbid on a CPU what is tested here.
    with monkeypatch.context() as patch:
        patch.setattr(VllmConfig, "__post_init__", lambda config: None)
        config = VllmConfig(
            model_config=ModelConfig(model=str(resolve("tiny-reasoner")), dtype="float32", max_model_len=512),
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_cache),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8,
                max_num_batched_tokens=chunk_tokens,
                max_model_len=512,
                is_encoder_decoder=False,
                async_scheduling=ahead,
            ),
            device_config=DeviceConfig("cpu"),
        )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    made = AsyncScheduler if ahead else Scheduler
    return made(config, cache, StructuredOutputManager(config), BLOCK_TOKENS, BLOCK_TOKENS)


def requests(chance: random.Random) -> list[Any]:
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from vllm import SamplingParams

    init_none_hash(sha256)
    sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, stop_token_ids=[STOP])
    made = []
    for number in range(10):
        prompt = [chance.randrange(5, 100) for _ in range(chance.choice([1, 2, 16, 17, 40, 70, 100, 120]))]
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        made.append(Request(f"r{number}", prompt, sampling, None, block_hasher=hasher))
    return made


@pytest.mark.parametrize("prefix_cache", [False, True], ids=["", "prefix cache"])
@pytest.mark.parametrize("chunk_tokens", [33, 512])
@pytest.mark.parametrize("stop_share", [0.0, 0.02], ids=["", "stops"])
def test_every_token_is_a_decode_row_a_prompts_end_or_a_resumed_requests_end(
    runner: int,
    ahead: bool,
    prefix_cache: bool,
    chunk_tokens: int,
    stop_share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen_preemptions = 0
    for seed in range(6):
        chance = random.Random(seed)
        worker = Worker(runner, chance, stop_share)
        worker.state.configure(SCHEDULE, 4, "cpu")
        sched = scheduler(ahead, prefix_cache, chunk_tokens, 24 + seed, monkeypatch)
        assert sched.use_v2_model_runner == (runner == 2)
        asked = requests(chance)
        for request in asked:
            sched.add_request(request)
        run(sched, worker, ahead)
        counted = worker.state.counters
        contexts = np.concatenate(
            [outputs.decode_contexts(r.num_prompt_tokens, len(r.output_token_ids)) for r in asked]
        )
        needed_sparse = int((SCHEDULE.read_tokens(contexts) < contexts).sum())
        assert counted.preemptions == sum(request.num_preemptions for request in asked)
        assert counted.resumed_tokens <= counted.preemptions
        # Scheduled ahead, a request that stops may have run one row more.
        wasted = sum(request.output_token_ids[-1] == STOP for request in asked) if ahead else 0
        assert 0 <= worker.state.decoded.rows + counted.resumed_tokens - len(contexts) <= wasted
        assert 0 <= worker.state.decoded.sparse_L.max() + counted.resumed_sparse_L.max() - needed_sparse <= wasted
        assert not worker.follower.resumed
        seen_preemptions += counted.preemptions
    assert seen_preemptions > 6


def run(sched: Any, worker: Worker, ahead: bool) -> None:
    """As vLLM's engine: ahead, a step is scheduled before the tokens of the one before are known."""
    under_way: deque[Any] = deque()
    for _ in range(5000):
        if sched.has_requests():
            step = sched.schedule()
            under_way.append((step, worker.run(step)))
        while len(under_way) > int(ahead) or (under_way and not sched.has_requests()):
            sched.update_from_output(*under_way.popleft())
        if not sched.has_requests() and not under_way:
            return
    pytest.fail("the requests did not end")
