"""Batches of dense and sparse requests, and of requests with schedules of their own, of any engine: what they must equal,
and what a prefix cache gave them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from sparroll.schedule import Schedule
from sparroll.types import Rollout


def of_kind(rollouts: Sequence[Rollout], flags: Sequence[bool], dense: bool) -> list[Rollout]:
    """Those that were asked for densely, or the others."""
    return [rollout for rollout, flag in zip(rollouts, flags, strict=True) if flag == dense]


def each_of_its_kind(dense: Sequence[Rollout], sparse: Sequence[Rollout], flags: Sequence[bool]) -> list[Rollout]:
    """What a mixed batch must give: dense requests from a dense generate, the others from a sparse one. Raises where the
    two generates do not differ, since no test could tell the kinds apart then."""
    assert any(left.response_ids != right.response_ids for left, right in zip(dense, sparse, strict=True))
    return [dense[place] if flag else sparse[place] for place, flag in enumerate(flags)]


def each_of_its_schedule(by_name: Mapping[str, Sequence[Rollout]], schedules: Sequence[Schedule]) -> list[Rollout]:
    """What a batch of requests with these schedules must give: each from a generate of its schedule alone. Raises where two
    of the generates do not differ."""
    told = [[rollout.response_ids for rollout in rollouts] for rollouts in by_name.values()]
    assert all(one != other for place, one in enumerate(told) for other in told[:place])
    return [by_name[schedule.name][place] for place, schedule in enumerate(schedules)]


def assert_same(
    found: Sequence[Rollout],
    expected: Sequence[Rollout],
    atol: float,
    *,
    list_atol: float | None = None,
    read_share_rel: float = 0,
) -> None:
    """The same tokens, kinds and ends; log-probabilities within `atol`, those of lists within `list_atol`, and the share
    that was read within `read_share_rel` of it."""
    for one, other in zip(found, expected, strict=True):
        assert (one.response_ids, one.finish_reason) == (other.response_ids, other.finish_reason)
        assert (one.attention, one.schedule_name) == (other.attention, other.schedule_name)
        assert one.kv_read_share == pytest.approx(other.kv_read_share, rel=read_share_rel, abs=0)
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=atol, rtol=0)
        torch.testing.assert_close(one.top_k.logp, other.top_k.logp, atol=list_atol or atol, rtol=0)


@contextmanager
def cached_tokens(engine: Any) -> Iterator[list[int]]:
    """How many tokens vLLM's prefix cache gave each request that finishes meanwhile."""
    cached: list[int] = []
    step = engine.llm.llm_engine.step

    def noted() -> Any:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    engine.llm.llm_engine.step = noted
    try:
        yield cached
    finally:
        engine.llm.llm_engine.step = step
