"""An engine whose short steps are dense on purpose: what it samples, what it counts, and what its rollouts say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sparroll import Schedule
from sparroll.attention.selectors import PageMean
from sparroll.engines import HFEngine
from sparroll.engines.vllm import outputs
from sparroll.schedule import Step
from sparroll.types import Rollout
from vllm_runs import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow]

SPARSE = Schedule(
    steps=(Step(0, 64), Step(150, 80)),
    selector=PageMean(page_tokens=16, first_tokens=16, recent_tokens=32),
    name="rising",
)
SHORT = 250
LAYERS = 6
GREEDY: dict[str, Any] = dict(temperature=0, stop_ids=[])


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    from sparroll.engines.vllm.engine import VLLMEngine

    made = VLLMEngine("tiny-reasoner", schedule=SPARSE, dtype=torch.float32, max_batch=8, short_step_tokens=SHORT)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle() -> HFEngine:
    return HFEngine("tiny-reasoner", dtype=torch.float32, device="cpu", max_batch=8)


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 130, (length,), generator=generator).tolist() for length in lengths]


def same(found: list[Rollout], expected: list[Rollout]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.response_ids == other.response_ids
        torch.testing.assert_close(one.sparse_logp, other.sparse_logp, atol=1e-4, rtol=0)
        assert (one.attention, one.kv_read_share) == (other.attention, pytest.approx(other.kv_read_share))


def test_one_short_request_is_dense_and_two_that_are_long_together_are_sparse(engine: Any, oracle: HFEngine) -> None:
    for lengths, schedule in (([100], None), ([100, 200], SPARSE)):
        engine.reset_report()
        found = engine.generate(prompts(lengths), max_new_tokens=60, **GREEDY)
        oracle.set_schedule(schedule)
        same(found, oracle.generate(prompts(lengths), max_new_tokens=60, **GREEDY))
        layers, rows = engine.report().layers, 59 * len(lengths)
        assert [layers[n].short_dense_steps for n in (0, 5)] == [0, 59 if schedule is None else 0]
        assert layers[5].sparse_steps == (0 if schedule is None else rows)


def test_a_request_that_grows_beyond_short_steps_goes_on_sparsely_over_an_index_that_they_kept(
    engine: Any, oracle: HFEngine
) -> None:
    prompt, dense, sparse = prompts([200])[0], SHORT - 200, 40
    engine.reset_report()
    (found,) = engine.generate([prompt], max_new_tokens=dense + sparse, **GREEDY)
    # Tokens up to a context of 250 are the dense policy's; what follows is what a sparse engine says behind them.
    oracle.set_schedule(None)
    (start,) = oracle.generate([prompt], max_new_tokens=dense, **GREEDY)
    oracle.set_schedule(SPARSE)
    (rest,) = oracle.generate([prompt + start.response_ids], max_new_tokens=sparse, **GREEDY)
    assert found.response_ids == start.response_ids + rest.response_ids
    torch.testing.assert_close(found.sparse_logp, torch.cat([start.sparse_logp, rest.sparse_logp]), atol=1e-4, rtol=0)
    contexts = outputs.decode_contexts(200, dense + sparse)
    unread = np.where(contexts > SHORT, SPARSE.unread_tokens(contexts, LAYERS), 0).sum()
    assert found.attention == "sparse"
    assert found.kv_read_share == pytest.approx(1 - unread / (LAYERS * contexts.sum()))
    layer, report = engine.report().layers[5], engine.report()
    assert (layer.short_dense_steps, layer.sparse_steps) == ((contexts <= SHORT).sum(), (contexts > SHORT).sum())
    assert report.kv_read_share == pytest.approx(found.kv_read_share)
