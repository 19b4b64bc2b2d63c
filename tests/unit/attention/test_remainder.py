"""What the tokens that a step does not read add to it: known answers, plain loops over tiny tensors, refusals."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from sparroll.attention.decode import api, paged, paged_reference
from sparroll.attention.masked import remainder as masked_remainder
from sparroll.attention.masked.unit_choice import chosen_words
from sparroll.attention.selectors import HeadSoftmax, PageMean, QuantizedMean, Remainder, Selector, make_selector
from sparroll.errors import UserError
from sparroll.schedule import Schedule

HEADS, GROUP, DIM = 2, 3, 8
SCALE = 0.4
RECENT = {"first_tokens": 16, "recent_tokens": 32}
SELECTORS = [
    PageMean(**RECENT, remainder=Remainder(32)),
    HeadSoftmax(page_tokens=8, **RECENT, remainder=Remainder(16, "fp8")),
    QuantizedMean(page_tokens=4, bits=4, **RECENT, remainder=Remainder(16)),
    QuantizedMean(page_tokens=1, bits=2, **RECENT, remainder=Remainder(32, "fp8")),
]


def name_of(selector: Selector) -> str:
    assert selector.remainder is not None
    return f"{selector.kind}-{selector.page_tokens}-{selector.remainder.values}"


each_selector = pytest.mark.parametrize("selector", SELECTORS, ids=name_of)


def poisoned(context: int, selector: Selector, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """One query and K, V of one request, with NaN from the context's end to the end of its groups and one more."""
    assert selector.remainder is not None
    group = selector.remainder.group_tokens
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, GROUP, DIM, generator=generator)
    keys, values = torch.randn(2, 1, HEADS, (-(-context // group) + 1) * group, DIM, generator=generator)
    keys[:, :, context:], values[:, :, context:] = torch.nan, torch.nan
    return query, keys, values


def step(selector: Selector, query: Tensor, keys: Tensor, values: Tensor, context: int, budget: int) -> tuple:
    """(attention with the remainder, the chosen units [H, N]) with NaN, or bytes of 255, in rows of what is not complete."""
    assert selector.remainder is not None
    unit, group = selector.unit_tokens, selector.remainder.group_tokens
    index = selector.build_index(keys.nan_to_num().unflatten(2, (-1, unit))).clone()
    index[:, :, context // unit :] = 255 if index.dtype == torch.uint8 else torch.nan
    groups = selector.build_groups(*(held.nan_to_num().unflatten(2, (-1, group)) for held in (keys, values)))
    groups[:, :, context // group :] = 255
    lengths = torch.tensor([context])
    ids = api.select(query[:, None], index, lengths[:, None], torch.tensor([[budget]]), selector, SCALE)[:, 0]
    return api.sparse_decode_with_remainder(
        query, keys, values, index, groups, ids, lengths, selector, SCALE
    ), ids[0]  # fmt: skip


def dense(query: Tensor, keys: Tensor, values: Tensor, context: int) -> Tensor:
    logits = SCALE * torch.einsum("hgd,hcd->hgc", query[0].double(), keys[0, :, :context].double())
    return torch.einsum("hgc,hcd->hgd", logits.softmax(-1), values[0, :, :context].double())


@each_selector
@pytest.mark.parametrize("context", [1, 15, 33, 100])
def test_full_budget_equals_dense(selector: Selector, context: int) -> None:
    query, keys, values = poisoned(context, selector)
    mixed, _ = step(selector, query, keys, values, context, budget=128)
    torch.testing.assert_close(mixed[0].double(), dense(query, keys, values, context), atol=1e-5, rtol=0)


@each_selector
@pytest.mark.parametrize("context", [129, 190])
def test_groups_of_equal_keys_and_values_are_dense_attention(selector: Selector, context: int) -> None:
    # Values that bf16 holds exactly, and keys of one size in all channels, which any number of bits holds exactly.
    query, keys, values = poisoned(context, selector)
    group = selector.remainder.group_tokens
    generator = torch.Generator().manual_seed(1)
    groups = keys.shape[2] // group
    signs = torch.randint(0, 2, (1, HEADS, groups, DIM), generator=generator) * 2.0 - 1
    keys = signs.repeat_interleave(group, dim=2)
    values = torch.randint(0, 2, (1, HEADS, groups, DIM), generator=generator).float().repeat_interleave(group, dim=2)
    mixed, ids = step(selector, query, keys, values, context, budget=80)
    assert (ids >= 0).sum() < HEADS * (context // selector.unit_tokens)
    loose = 0.03 if selector.remainder.values == "fp8" or getattr(selector, "bits", 16) < 8 else 0.005
    torch.testing.assert_close(mixed[0].double(), dense(query, keys, values, context), atol=loose, rtol=0)


@each_selector
def test_every_group_weighs_what_loops_over_its_unread_units_say(selector: Selector) -> None:
    context, budget, unit = 150, 80, selector.unit_tokens
    query, keys, values = poisoned(context, selector, seed=3)
    mixed, ids = step(selector, query, keys, values, context, budget)
    assert selector.remainder is not None
    group = selector.remainder.group_tokens
    for head in range(HEADS):
        units = {unit_id for unit_id in ids[head].tolist() if unit_id >= 0}
        for member in range(GROUP):
            q, total, result = query[0, head, member].double(), 0.0, torch.zeros(DIM, dtype=torch.float64)
            estimating = q
            if isinstance(selector, QuantizedMean):
                estimating = (q * (127 / q.abs().max())).round() * q.abs().max() / 127
            for token in range(context):
                if token // unit in units:
                    weight = math.exp(SCALE * float(q @ keys[0, head, token].double()))
                    total, result = total + weight, result + weight * values[0, head, token].double()
            for first in range(0, context, group):
                mean_value = values[0, head, first : first + group].mean(0)
                stored = mean_value.bfloat16().double()
                if selector.remainder.values == "fp8":
                    size = mean_value.abs().max() / 448
                    stored = ((mean_value / size).to(torch.float8_e4m3fn).float() * size).double()
                for number in range(first // unit, (first + group) // unit):
                    if number in units or number * unit >= context:
                        continue
                    inside = keys[0, head, number * unit : (number + 1) * unit]
                    mean = selector.mean_keys(selector.build_index(inside), DIM)
                    spread = inside.var(0, unbiased=False).mean()
                    logit = SCALE * estimating @ mean.double() + SCALE**2 * q @ q * float(spread.bfloat16()) / 2
                    weight = unit * math.exp(logit)
                    total, result = total + weight, result + weight * stored
            torch.testing.assert_close(mixed[0, head, member].double(), result / total, atol=2e-5, rtol=0)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_below_8_bits_each_head_estimates_with_its_rounded_query(bits: int) -> None:
    selector = QuantizedMean(page_tokens=4, bits=bits, **RECENT, remainder=Remainder(16))
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 2, HEADS, GROUP, DIM, generator=generator).requires_grad_()
    index = selector.build_index(torch.randn(1, HEADS, 5, 4, DIM, generator=generator))
    products = selector.estimated_products(query, index)
    # A group of one head has the score of that head.
    alone = [selector.score(query[:, :, :, [member]], index, 1.0, torch.empty(0)) for member in range(GROUP)]
    assert torch.equal(products, torch.stack(alone, 3))
    smooth = torch.einsum("rqhgd,rhud->rqhgu", query, selector.mean_keys(index, DIM))
    assert not torch.equal(products, smooth)
    torch.testing.assert_close(products, smooth, atol=0.1, rtol=0)
    wanted = torch.randn(products.shape, generator=generator)
    gradients = [torch.autograd.grad((held * wanted).sum(), query)[0] for held in (products, smooth)]
    torch.testing.assert_close(*gradients)


def test_a_head_that_is_not_a_number_spoils_no_other() -> None:
    selector = QuantizedMean(page_tokens=4, bits=4, **RECENT, remainder=Remainder(16))
    query, keys = torch.randn(1, 1, HEADS, GROUP, DIM), torch.randn(1, HEADS, 5, 4, DIM)
    query[0, 0, 0, 1, 3], query[0, 0, 1, 2, 0] = torch.inf, torch.nan
    products = selector.estimated_products(query, selector.build_index(keys))
    spoiled = torch.zeros(HEADS, GROUP, dtype=torch.bool)
    spoiled[0, 1] = spoiled[1, 2] = True
    assert torch.equal(products.isnan().all(-1)[0, 0], spoiled) and torch.equal(products.isnan().any(-1)[0, 0], spoiled)


def test_the_correction_makes_weights_of_gaussian_keys_right_on_average() -> None:
    # 16,000 units of 4 keys about means of their own. Without the term the sum of the weights is 30 % off.
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(4000, 1, 4, DIM, generator=generator) + torch.randn(4000, 4, 1, DIM, generator=generator)
    query = torch.randn(DIM, generator=generator)
    selector = PageMean(page_tokens=4, **RECENT, remainder=Remainder(16))
    exact = (SCALE * keys @ query).exp().sum()
    logits = SCALE * selector.mean_keys(selector.build_index(keys), DIM) @ query
    corrected = logits + SCALE**2 * query.square().sum() * selector.unit_spread(keys) / 2
    assert float(4 * logits.exp().sum() / exact) < 0.9
    assert float(4 * corrected.exp().sum() / exact) == pytest.approx(1, abs=0.03)


@each_selector
def test_all_positions_at_once_are_the_decode_steps(selector: Selector, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of 32 positions: the first two are dense, the third one in part.
    monkeypatch.setitem(masked_remainder._LOGITS_AT_ONCE, "cpu", 1)
    tokens, prompt, budget = 133, 70, 80
    assert selector.remainder is not None
    query, keys, values = torch.randn(3, 1, HEADS, GROUP, tokens, DIM, generator=torch.Generator().manual_seed(5))
    query, keys, values = query.flatten(1, 2), keys[:, :, 0], values[:, :, 0]
    positions = torch.arange(tokens)
    whole = (positions < prompt)[None]
    budgets = torch.full((tokens,), budget)
    words = chosen_words(query, keys, whole, budgets, selector, SCALE)
    mixed = masked_remainder.masked_attention(query, keys, values, words, selector, SCALE).unflatten(1, (HEADS, GROUP))
    padding = -tokens % selector.remainder.group_tokens
    padded = [torch.nn.functional.pad(held, (0, 0, 0, padding)) for held in (keys, values)]
    for position in (0, 40, prompt - 1, 80, 96, 111, 132):
        allowed = position + 1 if position < prompt else budget
        allowed = -(-allowed // selector.unit_tokens) * selector.unit_tokens
        one = query.unflatten(1, (HEADS, GROUP))[:, :, :, position]
        expected, _ = step(selector, one, *padded, position + 1, allowed)
        torch.testing.assert_close(mixed[:, :, :, position], expected, atol=1e-5, rtol=0)


@each_selector
def test_blocks_in_any_order_give_the_decode_step(selector: Selector) -> None:
    """In a block the rows of an index may be cut, channels in front and scales behind."""
    assert selector.remainder is not None
    context, budget, block, blocks = 250, 64, 32, 12
    query, keys, values = poisoned(context, selector)
    expected, ids_HN = step(selector, query, keys, values, context, budget)
    table_RM = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))[None, : -(-context // block)]
    keys_PBHD, values_PBHD = torch.full((2, blocks, block, HEADS, DIM), torch.nan)
    positions = torch.arange(context)
    slots = table_RM[0, positions // block] * block + positions % block
    for held, given in ((keys_PBHD, keys), (values_PBHD, values)):
        held.view(-1, HEADS, DIM)[slots] = given[0, :, :context].transpose(0, 1)
    width = selector.index_width(DIM)
    index_PSHW = torch.zeros(blocks, block // selector.unit_tokens, HEADS, width, dtype=selector.index_dtype)
    groups_PSHV = torch.zeros(
        blocks, block // selector.remainder.group_tokens, HEADS, selector.group_width(DIM), dtype=torch.uint8
    )
    paged_reference.update_index(keys_PBHD, index_PSHW, slots, selector)
    paged.update_groups(keys_PBHD, values_PBHD, groups_PSHV, slots, selector)
    found, lengths = torch.empty_like(query), torch.tensor([context])
    paged.paged_decode(
        query, keys_PBHD, values_PBHD, table_RM, ids_HN[None].sort(-1).values.int(), lengths, torch.tensor([budget]),
        selector, SCALE, found, index_PSHW=index_PSHW, groups_PSHV=groups_PSHV,
    )  # fmt: skip
    torch.testing.assert_close(found, expected)


def test_a_pass_with_a_gradient_is_refused() -> None:
    selector = SELECTORS[0]
    query, keys, values = torch.randn(3, 1, HEADS, 64, DIM)
    words = chosen_words(query, keys, torch.zeros(1, 64, dtype=torch.bool), torch.full((64,), 64), selector, SCALE)
    with pytest.raises(UserError, match="has no gradient"):
        masked_remainder.masked_attention(query.requires_grad_(), keys, values, words, selector, SCALE)


def test_a_schedule_keeps_its_remainder_and_does_not_name_none() -> None:
    table = {"kind": "quantized_mean", "page_tokens": 4, "bits": 4, "first_tokens": 16, "recent_tokens": 32}
    with_one = table | {"remainder": {"group_tokens": 32, "values": "fp8"}}
    assert make_selector(with_one).table() == with_one
    assert make_selector(with_one).remainder == Remainder(32, "fp8")
    assert "remainder" not in make_selector(table).table()
    schedule = Schedule.fixed(128, make_selector(with_one))
    assert Schedule.load(schedule.inline()).selector == schedule.selector


def test_index_bytes_count_the_rows_of_groups() -> None:
    bare, with_one = (QuantizedMean(page_tokens=4, bits=4, **RECENT, remainder=r) for r in (None, Remainder(16, "fp8")))
    # 128 bytes of e4m3, a scale, 4 numbers of 2 bytes; padded to whole 16 bytes.
    assert with_one.group_width(128) == 144
    assert with_one.index_bytes_per_token(128) == bare.index_bytes_per_token(128) + 144 / 16
    # Below 8 bits units are weighed while they are scored; others are read again.
    assert with_one.index_read_bytes_per_token(128) == with_one.index_bytes_per_token(128)
    again = dataclasses.replace(with_one, bits=8)
    assert again.index_read_bytes_per_token(128) == again.index_bytes_per_token(128) + 144 / 4


@pytest.mark.parametrize("kind", ["quest", "streaming", "oracle_page", "oracle_token"])
def test_selectors_without_mean_keys_take_no_remainder(kind: str) -> None:
    unit = 1 if kind == "oracle_token" else 16
    with pytest.raises(UserError, match=f"{kind}.* takes no remainder: it"):
        make_selector({"kind": kind, "page_tokens": unit, **RECENT, "remainder": {"group_tokens": 16}})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"remainder": {"group_tokens": 8}}, r"must lie in 16\.\.64, got 8"),
        ({"remainder": {"group_tokens": 32.0}}, r"must lie in 16\.\.64, got 32.0"),
        ({"remainder": {"values": "fp4"}}, "bf16 or fp8, got 'fp4'"),
        ({"remainder": {"group": 16}}, "no setting 'group'"),
        ({"remainder": 16}, "must be a table, got 16"),
        ({"page_tokens": 12, "first_tokens": 12, "recent_tokens": 36, "remainder": {}}, "multiple of the unit"),
        ({"remainder": {"group_tokens": 64}}, "recent_tokens must be at least group_tokens"),
    ],
)
def test_wrong_remainders_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_selector({"kind": "page_mean", "page_tokens": 4, **RECENT, **settings})
