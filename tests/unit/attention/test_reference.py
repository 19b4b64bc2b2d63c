"""Selection and sparse attention against plain loops, at odd sizes, with poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparroll.attention.decode import api, reference
from sparroll.attention.masked.unit_choice import best
from sparroll.attention.selectors import PageMean, Selector, make_selector, register_selector, selector_kinds
from sparroll.attention.selectors.base import Selector as Base
from sparroll.errors import UserError

HEADS, GROUP, DIM = 2, 3, 8
SCALE = DIM**-0.5
KINDS = ["page_mean", "quest", "head_softmax", "streaming", "oracle_page", "oracle_token"]


def cache(context: int, unit: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """One query and K, V of one request, padded to whole units with NaN."""
    generator = torch.Generator().manual_seed(seed)
    capacity = -(-context // unit) * unit + unit
    query = torch.randn(1, HEADS, GROUP, DIM, generator=generator)
    keys, values = torch.randn(2, 1, HEADS, capacity, DIM, generator=generator)
    keys[:, :, context:], values[:, :, context:] = torch.nan, torch.nan
    return query, keys, values


def index_of(selector: Selector, keys: Tensor, context: int) -> Tensor:
    unit = selector.unit_tokens
    index = selector.build_index(keys.unflatten(2, (-1, unit))).clone()
    index[:, :, context // unit :] = torch.nan
    return index


def chosen(selector: Selector, query: Tensor, keys: Tensor, context: int, budget: int) -> Tensor:
    return api.select(
        query[:, None], index_of(selector, keys, context), torch.tensor([[context]]), torch.tensor([[budget]]),
        selector, SCALE,
    )[:, 0]  # fmt: skip


def dense(query: Tensor, keys: Tensor, values: Tensor, positions: list[int], head: int) -> Tensor:
    weights = torch.softmax(SCALE * query[0, head].double() @ keys[0, head, positions].double().T, dim=-1)
    return weights @ values[0, head, positions].double()


def small(kind: str, page_tokens: int = 4) -> Selector:
    unit = 1 if kind == "oracle_token" else page_tokens
    return make_selector({"kind": kind, "page_tokens": unit, "first_tokens": unit, "recent_tokens": 2 * unit})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [1, 15, 16, 17, 63, 100])
def test_full_budget_equals_dense(kind: str, context: int) -> None:
    selector = small(kind)
    query, keys, values = cache(context, selector.unit_tokens)
    ids = chosen(selector, query, keys, context, budget=128)
    mixed = api.sparse_decode(query, keys, values, ids, torch.tensor([context]), selector.unit_tokens, SCALE)
    for head in range(HEADS):
        expected = dense(query, keys, values, list(range(context)), head)
        torch.testing.assert_close(mixed[0, head].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [17, 63, 100])
def test_sparse_decode_attends_exactly_the_chosen_units(kind: str, context: int) -> None:
    selector = small(kind)
    unit = selector.unit_tokens
    query, keys, values = cache(context, unit, seed=context)
    budget = 5 * unit
    ids = chosen(selector, query, keys, context, budget)
    mixed = api.sparse_decode(query, keys, values, ids, torch.tensor([context]), unit, SCALE)
    last = -(-context // unit) - 1
    for head in range(HEADS):
        units = ids[0, head].tolist()
        assert len(set(units)) == 5 and {0, last, last - 1} <= set(units)
        positions = [p for u in units for p in range(u * unit, min((u + 1) * unit, context))]
        expected = dense(query, keys, values, positions, head)
        torch.testing.assert_close(mixed[0, head].double(), expected, atol=1e-5, rtol=0)


def brute_scores(kind: str, query: Tensor, keys: Tensor, units: list[list[int]]) -> list[float]:
    """Each selector's score written out from its definition, for one KV head: query [G, D], keys [C, D]."""
    logits = SCALE * query.double() @ keys.double().T
    every = [position for unit in units for position in unit]
    if kind == "page_mean":
        return [float(query.mean(0) @ keys[unit].mean(0).bfloat16().float()) for unit in units]
    if kind == "quest":
        best = []
        for unit in units:
            high, low = keys[unit].amax(0).bfloat16().float(), keys[unit].amin(0).bfloat16().float()
            best.append(max(float(torch.maximum(q * high, q * low).sum()) for q in query))
        return best
    if kind == "head_softmax":
        means = torch.stack([keys[unit].mean(0).bfloat16().float() for unit in units])
        return torch.softmax(SCALE * query @ means.T, dim=-1).amax(0).tolist()
    if kind == "streaming":
        return [float(unit[0]) for unit in units]
    total = logits[:, every].exp().sum(1)
    return [float((logits[:, unit].exp().sum(1) / total).sum()) for unit in units]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("context", [41, 63])
def test_each_selector_picks_what_its_definition_ranks_first(kind: str, context: int) -> None:
    selector = small(kind)
    unit = selector.unit_tokens
    query, keys, _ = cache(context, unit, seed=3)
    ids = chosen(selector, query, keys, context, budget=6 * unit)
    last = -(-context // unit) - 1
    candidates = list(range(1, last - 1))
    for head in range(HEADS):
        units = [list(range(number * unit, (number + 1) * unit)) for number in candidates]
        scores = brute_scores(kind, query[0, head], keys[0, head], units)
        ranked = sorted(candidates, key=lambda number: -scores[number - 1])
        assert set(ids[0, head].tolist()) == {0, last - 1, last, *ranked[:3]}


def test_budget_is_each_positions_own() -> None:
    selector = small("page_mean")
    query, keys, _ = cache(100, 4)
    budgets, contexts = torch.tensor([[16, 24, 400]]), torch.tensor([[100, 50, 30]])
    ids = api.select(query[:, None].expand(1, 3, -1, -1, -1), index_of(selector, keys, 100), contexts, budgets,
                     selector, SCALE)  # fmt: skip
    assert (ids >= 0).sum(-1)[0, :, 0].tolist() == [4, 6, 8]
    for position, context in enumerate([100, 50, 30]):
        alone = chosen(selector, query, keys, context, int(budgets[0, position]))
        for head in range(HEADS):
            together = {unit for unit in ids[0, position, head].tolist() if unit >= 0}
            assert together == set(alone[0, head].tolist())


def test_bf16_inputs_accumulate_in_fp32() -> None:
    selector = small("page_mean")
    query, keys, values = (tensor.nan_to_num(0).bfloat16() for tensor in cache(63, 4))
    ids = chosen(selector, query, keys, 63, budget=28)
    mixed = api.sparse_decode(query, keys, values, ids, torch.tensor([63]), 4, SCALE)
    exact = api.sparse_decode(query.float(), keys.float(), values.float(), ids, torch.tensor([63]), 4, SCALE)
    assert mixed.dtype == torch.bfloat16 and torch.equal(mixed, exact.bfloat16())


@pytest.mark.parametrize("page_tokens", [1, 3, 128])
def test_any_page_size_from_1_to_128(page_tokens: int) -> None:
    selector = small("page_mean", page_tokens)
    query, keys, values = cache(300, page_tokens)
    ids = chosen(selector, query, keys, 300, budget=384)
    mixed = api.sparse_decode(query, keys, values, ids, torch.tensor([300]), page_tokens, SCALE)
    expected = dense(query, keys, values, list(range(300)), 0)
    torch.testing.assert_close(mixed[0, 0].double(), expected, atol=1e-5, rtol=0)


def test_unknown_implementations_and_wrong_shapes_are_refused() -> None:
    query, keys, values = cache(16, 4)
    ids, context = torch.zeros(1, HEADS, 1, dtype=torch.int64), torch.tensor([16])
    with pytest.raises(UserError, match="no attention implementation 'triton'"):
        api.sparse_decode(query, keys, values, ids, context, 4, SCALE, impl="triton")
    with pytest.raises(UserError, match="values must have shape"):
        api.sparse_decode(query, keys, values[..., :4], ids, context, 4, SCALE)
    with pytest.raises(UserError, match="multiple of the unit"):
        api.sparse_decode(query, keys, values, ids, context, 3, SCALE)
    with pytest.raises(UserError, match="a context has 32 tokens, and the cache holds 20"):
        api.sparse_decode(query, keys, values, ids, context * 2, 4, SCALE)
    selector = small("page_mean")
    index = index_of(selector, keys, 16)[:, :, :3]
    with pytest.raises(UserError, match="a context has 16 tokens, and the index holds 12"):
        api.select(query[:, None], index, context[:, None], context[:, None], selector, SCALE)


def test_a_context_within_its_budget_is_read_whole_whatever_the_budget_is() -> None:
    """41 tokens are 11 units of 4, and a budget of 42 tokens holds ten whole ones."""
    selector, (query, keys, _) = small("page_mean"), cache(41, 4)
    assert sorted(chosen(selector, query, keys, 41, 42)[0, 0].tolist()) == list(range(11))
    assert selector.read_tokens(41, 42) == 41 and selector.read_tokens(43, 42) == 40 - 1


def test_a_selector_from_outside_can_be_registered_once() -> None:
    class Last(PageMean):
        kind = "last_key"

        def build_index(self, keys: Tensor) -> Tensor:
            return keys[..., -1, :].to(self.index_dtype)

    try:
        register_selector(Last)
        assert "last_key" in selector_kinds()
        assert (
            make_selector({"kind": "last_key", "page_tokens": 8, "first_tokens": 8, "recent_tokens": 8}).unit_tokens
            == 8
        )
        with pytest.raises(UserError, match="already taken"):
            register_selector(type("Other", (PageMean,), {"kind": "last_key"}))
    finally:
        from sparroll.attention import selectors

        selectors._SELECTORS.pop("last_key", None)
    assert issubclass(Last, Base)


@pytest.mark.parametrize("odd", [torch.nan, 1.0])
@pytest.mark.parametrize("wanted", [[1, 1, 1, 1], [5, 5, 5, 5], [1, 3, 9, 12], [0, 0, 0, 0], [0, 2, 0, 5]])
def test_choosing_without_sorting_keeps_the_order_of_ties_and_nans(wanted: list[int], odd: float) -> None:
    score = torch.tensor([[[0.0, -0.0, 1.0, 1.0, odd, torch.inf, -torch.inf, 1.0, 0.0, 2.0, odd, -1.0]]])
    score_RQHU = score.expand(1, 4, 2, -1).contiguous()
    wanted_RQ1 = torch.tensor(wanted)[None, :, None]
    order = reference.best_first(score_RQHU)
    read = best(score_RQHU, wanted_RQ1)
    for position, units in enumerate(wanted):
        for head in range(2):
            assert read[0, position, head].nonzero()[:, 0].tolist() == sorted(order[0, position, head, :units].tolist())


def test_a_nan_of_either_sign_is_the_best() -> None:
    minus_nan = torch.tensor([-4194304], dtype=torch.int32).view(torch.float32)
    assert minus_nan.isnan().all()
    scores = torch.cat([torch.tensor([1.0, float("inf")]), minus_nan])
    assert reference.best_first(scores).tolist() == [2, 1, 0]
