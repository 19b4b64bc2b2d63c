"""Two worker processes, each with one of the tiny model's two KV heads, are HFEngine token for token."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparroll import Schedule
from sparroll.engines import HFEngine
from sparroll.engines.report import EngineReport
from sparroll.engines.vllm import launch
from sparroll.errors import UserError
from sparroll.schedule import Step
from vllm_runs import needs_vllm, random_prompts

pytestmark = [needs_vllm, pytest.mark.slow]

LENGTHS = [5, 40, 170, 33, 300, 97]
NEW_TOKENS = 40
RISING = Schedule(steps=(Step(0, 64), Step(100, 96), Step(250, 128)), name="rising")
NARROW = Schedule(steps=(Step(0, 64),), name="narrow")
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@pytest.fixture(autouse=True)
def _workers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No worker may outlive its engine, and none outlives a test, whatever became of the engine."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # A step that hangs ends as an error.
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
        process.join()
    assert not left, "workers outlived their engine"


def oracle() -> HFEngine:
    return HFEngine("tiny-reasoner", schedule=RISING, dtype=torch.float32)


def reports(llm: Any) -> list[EngineReport]:
    """What each worker counted."""
    return [EngineReport.from_table(table) for table in llm.collective_rpc("sparroll_report")]


def sockets_of(queues: list[Any]) -> list[Any]:
    """What vLLM's message queues send and receive by."""
    import zmq

    parts = [part for queue in queues for part in (queue, queue._spin_condition)]
    return [held for part in parts for held in vars(part).values() if isinstance(held, zmq.Socket)]


def heads_and_process(worker: Any) -> tuple[int, int, int]:
    """KV heads of a sparse layer and of its index in this worker, and which process it is."""
    attention = worker.get_model().model.layers[2].self_attn.attn
    return attention.num_kv_heads, attention.impl.index.rows_PSHW.shape[2], os.getpid()


def assert_heads_are_split(llm: Any) -> None:
    found = llm.collective_rpc(heads_and_process)
    assert [heads for *heads, _ in found] == [[1, 1], [1, 1]]
    assert {process for *_, process in found} == {process.pid for process in multiprocessing.active_children()}


def test_two_workers_draft_and_check_alike() -> None:
    from sparroll.engines.vllm.engine import VLLMEngine

    prompts, checked = random_prompts(LENGTHS[:4]), RISING.checked(window_tokens=8, floor=0.3)
    settings: dict[str, Any] = dict(max_new_tokens=24, seed=3, stop_ids=[])
    arguments: dict[str, Any] = dict(dtype=torch.float32, max_batch=4, max_context_tokens=1024)
    with VLLMEngine("tiny-reasoner", schedule=checked, **arguments, **TWO) as vllm:
        found = vllm.generate(prompts, **settings)
        one_worker, other_worker = reports(vllm.llm)
    hf = HFEngine("tiny-reasoner", schedule=checked, dtype=torch.float32)
    for got, want in zip(found, hf.generate(prompts, **settings), strict=True):
        assert got.response_ids == want.response_ids and got.checks == want.checks
        torch.testing.assert_close(got.dense_logp, want.dense_logp, atol=2e-4, rtol=0)
    assert one_worker.checks == other_worker.checks == hf.report().checks
    assert one_worker.layers == other_worker.layers == hf.report().layers


def test_two_workers_are_the_oracle_count_the_same_switch_and_close() -> None:
    from sparroll.engines.vllm.engine import VLLMEngine

    prompts, hf = random_prompts(LENGTHS), oracle()
    arguments: dict[str, Any] = dict(dtype=torch.float32, max_batch=4, max_context_tokens=1024, **TWO)
    # More requests than rows, and prompts longer than a step: steps that prefill and decode.
    vllm = VLLMEngine("tiny-reasoner", schedule=RISING, max_num_batched_tokens=128, **arguments)
    try:
        assert_heads_are_split(vllm.llm)
        for schedule in (RISING, None, RISING):
            for each in (vllm, hf):
                each.set_schedule(schedule)
                each.reset_report()
            settings: dict[str, Any] = dict(max_new_tokens=NEW_TOKENS, temperature=0, stop_ids=[])
            for got, want in zip(vllm.generate(prompts, **settings), hf.generate(prompts, **settings), strict=True):
                assert got.response_ids == want.response_ids and got.attention == want.attention
                torch.testing.assert_close(got.sparse_logp, want.sparse_logp, atol=1e-4, rtol=0)
            found, expected = vllm.report(), hf.report()
            assert found.generated_tokens == expected.generated_tokens and found.kv_read_share == expected.kv_read_share
            assert [layer.sparse_steps > 0 for layer in found.layers] == [False] * 2 + [schedule is not None] * 4
            one_worker, other_worker = reports(vllm.llm)
            assert one_worker == other_worker and one_worker.layers == expected.layers
            assert one_worker.prefill_tokens == sum(LENGTHS) and one_worker.preemptions == 0
        own = [RISING if place % 2 else NARROW for place in range(len(LENGTHS))]
        dense = [place % 3 == 0 for place in range(len(LENGTHS))]
        for each in (vllm, hf):
            each.reset_report()
        mine = [each.generate(prompts, schedules=own, dense=dense, **settings) for each in (vllm, hf)]
        for got, want in zip(*mine, strict=True):
            assert got.response_ids == want.response_ids
            assert (got.attention, got.schedule_name) == (want.attention, want.schedule_name)
            torch.testing.assert_close(got.sparse_logp, want.sparse_logp, atol=1e-4, rtol=0)
        one_worker, other_worker = reports(vllm.llm)
        assert one_worker == other_worker and one_worker.layers == hf.report().layers
        sampled = [vllm.generate(prompts, n=2, max_new_tokens=10, seed=5) for _ in range(2)]
        assert [r.response_ids for r in sampled[0]] == [r.response_ids for r in sampled[1]]
        with pytest.raises(UserError, match="weights cannot be loaded into 2 processes"):
            vllm.load_weights(hf.model, 1)
        executor = vllm.llm.llm_engine.engine_core.engine_core.model_executor
        sockets = sockets_of([executor.rpc_broadcast_mq, *executor.response_mqs])
        del executor
    finally:
        vllm.close()
    assert not multiprocessing.active_children()
    # One queue to both workers, and one from each.
    assert len(sockets) == 2 + 2 * 4 and all(socket.closed for socket in sockets)


def test_an_engine_whose_workers_died_can_be_closed() -> None:
    def fail(function: Any) -> None:
        raise RuntimeError("Executor failed.")

    shut_down: list[bool] = []
    core = SimpleNamespace(shutdown=lambda: shut_down.append(True))
    parallel = SimpleNamespace(distributed_executor_backend="mp")
    config = SimpleNamespace(parallel_config=parallel)
    launch.stop(SimpleNamespace(apply_model=fail, llm_engine=SimpleNamespace(engine_core=core, vllm_config=config)))
    assert shut_down == [True]


def test_sockets_to_workers_are_closed_with_their_queue_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise zmq's context may wait for them for ever. As in 0.26, vLLM itself closes none here."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    monkeypatch.setattr(MessageQueue, "_close_zmq_on_collect", lambda queue, context: None, raising=False)
    written = MessageQueue(1, 1, max_chunk_bytes=4096)
    queues = [written, MessageQueue.create_from_handle(written.export_handle(), 0)]
    sockets = sockets_of(queues)
    executor = SimpleNamespace(rpc_broadcast_mq=queues[0], response_mqs=[queues[1]])
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor))
    launch._close_sockets_with_their_queues(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    # Two of the end that writes, for messages and to wake those that read; four of the one that reads, two of them to end a
    # wait.
    assert len(sockets) == 2 + 4 and not any(socket.closed for socket in sockets)
    del queues, written, executor, core
    gc.collect()
    assert all(socket.closed for socket in sockets)
