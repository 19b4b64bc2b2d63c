"""A replica measures before it is paused, and never while it is: a paused engine takes requests and answers none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from sparroll.integrations.verl.server import SparrollHttpServer


class Engine:
    def __init__(self) -> None:
        self.did: list[str] = []

    async def measure(self) -> None:
        self.did.append("measure")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SparrollHttpServer:
    """A server of which only the engine and verl's gate exist."""

    async def abort(self: Any, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        self._submission_paused = True
        self.engine.did.append(f"abort, reject {reject_request}")
        return {"aborted_count": 0, "request_ids": []}

    monkeypatch.setattr(vLLMHttpServer, "abort_all_requests", abort)
    made = object.__new__(SparrollHttpServer)
    made.engine, made.node_rank, made._submission_paused = Engine(), 0, False
    return made


def test_a_replica_is_measured_before_its_requests_are_aborted(server: SparrollHttpServer) -> None:
    asyncio.run(server.abort_all_requests(reject_request=True))
    assert server.engine.did == ["measure", "abort, reject True"]


def test_a_replica_that_is_lent_to_training_is_not_measured(server: SparrollHttpServer) -> None:
    asyncio.run(server.abort_all_requests())
    asyncio.run(server.sparroll_measure())
    asyncio.run(server.abort_all_requests())
    assert server.engine.did == ["measure", "abort, reject False", "abort, reject False"]


def test_a_node_without_the_engine_only_passes_the_call_on(server: SparrollHttpServer) -> None:
    server.node_rank = 1
    asyncio.run(server.abort_all_requests())
    assert server.engine.did == ["abort, reject False"]
