"""What a step reads: known answers, the tokens that the reference really attends, and the bytes of real index tensors."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch

from sparroll.attention.decode import api, paged
from sparroll.attention.selectors import Selector, make_selector
from sparroll.engines.hf.kv_cache import KVCache
from sparroll.engines.vllm import compat
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step


def selector_of(kind: str = "page_mean", unit: int = 16, **settings: int) -> Selector:
    return make_selector(
        {"kind": kind, "page_tokens": unit, "first_tokens": unit, "recent_tokens": 2 * unit, **settings}
    )


def test_known_answers_with_units_of_16() -> None:
    schedule = Schedule(steps=(Step(0, 64), Step(200, 96)))
    # 65 tokens are five units: the budget holds four, and the last unit has one token of 16.
    expected = {0: 0, 1: 1, 17: 17, 63: 63, 64: 64, 65: 64 - 15, 66: 64 - 14, 80: 64, 81: 64 - 15, 171: 64 - 5}
    expected |= {199: 64 - 9, 200: 96 - 8, 208: 96, 10_000: 96}
    assert {context: schedule.read_tokens(context) for context in expected} == expected


def test_units_of_one_token_are_never_incomplete() -> None:
    schedule = Schedule.fixed(50, selector_of("oracle_token", 1))
    assert [schedule.read_tokens(context) for context in (0, 1, 49, 50, 51, 1000)] == [0, 1, 49, 50, 50, 50]


def test_an_int_an_array_and_a_tensor_give_their_own_kind() -> None:
    schedule = Schedule.load("qwen3-1.7b-0.86")
    contexts = torch.tensor([[0, 511, 512, 513], [2000, 17_001, 31_999, 10**6]])
    expected = [[schedule.read_tokens(context) for context in row] for row in contexts.tolist()]
    assert all(type(number) is int for row in expected for number in row)
    for dtype in (torch.int64, torch.int32):
        found = schedule.read_tokens(contexts.to(dtype))
        assert isinstance(found, torch.Tensor) and found.tolist() == expected
        array = schedule.read_tokens(contexts.to(dtype).numpy())
        assert isinstance(array, np.ndarray) and array.tolist() == expected
    with pytest.raises(UserError, match="must be integers, got float64"):
        schedule.read_tokens(np.array([1.0]))
    with pytest.raises(UserError, match="must not be negative, got -1"):
        schedule.read_tokens(-1)


SELECTORS = [
    selector_of(unit=16),
    selector_of(unit=4),
    selector_of("quest", unit=8, first_tokens=0, recent_tokens=8),
    selector_of("streaming", unit=3, first_tokens=9, recent_tokens=3),
    selector_of("oracle_token", unit=1, first_tokens=5),
]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.kind)
def test_it_is_the_number_of_tokens_that_the_reference_attends(selector: Selector) -> None:
    unit, longest = selector.unit_tokens, 120
    capacity = -(-longest // unit) * unit
    schedule = Schedule(steps=(Step(0, 8 * unit), Step(70, 9 * unit)), selector=selector)
    contexts = torch.arange(1, longest + 1)
    keys = torch.randn(1, 1, capacity, capacity, generator=torch.Generator().manual_seed(0))
    # Values that are unit vectors: the output is the weight of each token.
    values = torch.eye(capacity)[None, None]
    query = torch.ones(1, longest, 1, 1, capacity)
    index = selector.build_index(keys.unflatten(2, (-1, unit)))
    ids = api.select(query, index, contexts[None], schedule.kv_budget_tokens(contexts)[None], selector, 0.01)
    # Each position as a request of its own.
    same = (longest, -1, -1, -1)
    weights = api.sparse_decode(query[0], keys.expand(same), values.expand(same), ids[0], contexts, unit, 0.01)
    assert (weights[:, 0, 0] > 0).sum(-1).tolist() == schedule.read_tokens(contexts).tolist()


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.kind)
def test_it_is_the_number_of_tokens_in_the_chosen_units_at_every_context(selector: Selector) -> None:
    unit = selector.unit_tokens
    longest = 600 if unit == 1 else 4000
    steps = (Step(0, 8 * unit), Step(300, 16 * unit), Step(1000, 31 * unit), Step(2001, 20 * unit))
    schedule = Schedule(steps=steps, selector=selector)
    contexts = torch.arange(longest + 1, dtype=torch.int32)
    budgets = schedule.kv_budget_tokens(contexts)
    scores = torch.zeros(longest + 1, 1, -(-longest // unit))
    # Recent units are read whatever their score: here that of the last one, which may be incomplete.
    last = (-(-contexts // unit) - 1).clamp_min(0).long()
    scores[contexts.long(), 0, last] = 1.0
    ids = torch.empty(longest + 1, 1, scores.shape[2], dtype=torch.int32)
    paged.choose_units(scores, contexts, budgets, selector, ids)
    held = (contexts[:, None] - ids[:, 0] * unit).clamp(0, unit) * (ids[:, 0] >= 0)
    assert torch.equal(held.sum(1), schedule.read_tokens(contexts))


BYTES_PER_TOKEN = {
    "page_mean": (selector_of(), 256 / 16),
    "page_mean, 4 tokens": (selector_of(unit=4), 256 / 4),
    "head_softmax": (selector_of("head_softmax"), 256 / 16),
    "quest": (selector_of("quest"), 2 * 256 / 16),
    "streaming": (selector_of("streaming"), 0),
    "oracle_page": (selector_of("oracle_page"), 4 * 128),
    "oracle_token": (selector_of("oracle_token", 1), 4 * 128),
    "8 bits, 16 tokens": (selector_of("quantized_mean", 16, bits=8), 144 / 16),
    "4 bits, 4 tokens": (selector_of("quantized_mean", 4, bits=4), 68 / 4),
    "2 bits, 2 tokens": (selector_of("quantized_mean", 2, bits=2), 36 / 2),
    "1 bit, 1 token": (selector_of("quantized_mean", 1, bits=1), 20),
}


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_index_bytes_per_token_at_a_head_size_of_128(name: str) -> None:
    selector, expected = BYTES_PER_TOKEN[name]
    assert selector.index_bytes_per_token(128) == expected


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_index_bytes_are_those_of_the_engines_tensors(name: str) -> None:
    selector, _ = BYTES_PER_TOKEN[name]
    rows, heads, dim, unit = 3, 2, 128, selector.unit_tokens
    cache = KVCache(2, rows, heads, dim, 160, selector, frozenset({1}), torch.bfloat16, torch.device("cpu"))
    cache.reserve(160)
    index = cache.index[1]
    assert index.numel() * index.element_size() == rows * heads * 160 * selector.index_bytes_per_token(dim)
    assert cache.index_read_share(1) == selector.index_read_bytes_per_token(dim) / (2 * dim * 2)
    assert cache.index_read_share(0) == 0
    # vLLM's cache of an index layer: [blocks, heads, units, width], where it spreads a row over its unit's tokens.
    shape = compat.rows_shape(5, 32, heads, selector.index_width(dim) // unit, unit)
    assert prod(shape) * selector.index_dtype.itemsize == 5 * 32 * heads * selector.index_bytes_per_token(dim)
