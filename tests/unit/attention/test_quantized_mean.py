"""The row format of quantized_mean against plain loops, and what it loses."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from sparroll.attention.decode import api
from sparroll.attention.selectors import QuantizedMean, make_selector
from sparroll.attention.selectors.quantized_mean import rounded_query
from sparroll.errors import UserError
from sparroll.schedule import Schedule

BITS = [8, 4, 2, 1]


def selector_of(unit: int, bits: int) -> QuantizedMean:
    return QuantizedMean(page_tokens=unit, first_tokens=unit, recent_tokens=2 * unit, bits=bits)


def decoded(row: list[int], bits: int, dim: int) -> list[float]:
    """A row's channels, bit by bit."""
    at = 4 * math.ceil(dim * bits / 32)
    (scale,) = struct.unpack("<f", bytes(row[at : at + 4]))
    assert not any(row[at + 4 :])
    number = int.from_bytes(bytes(row[:at]), "little")
    codes = [number >> channel * bits & 2**bits - 1 for channel in range(dim)]
    if bits < 8:
        return [(2 * code + 1 - 2**bits) * scale for code in codes]
    values = []
    for code in codes:
        exponent, mantissa = code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        values.append((-size if code & 128 else size) * scale)
    return values


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("unit", "dim"), [(1, 32), (4, 96), (16, 128), (3, 13)])
def test_a_row_stands_for_what_its_bits_say(bits: int, unit: int, dim: int) -> None:
    selector = selector_of(unit, bits)
    keys = torch.randn(5, unit, dim, generator=torch.Generator().manual_seed(dim))
    index = selector.build_index(keys)
    assert index.dtype == torch.uint8 and index.shape == (5, selector.index_width(dim))
    means = selector.means(index, dim)
    for row in range(5):
        torch.testing.assert_close(means[row], torch.tensor(decoded(index[row].tolist(), bits, dim)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.03), (4, 0.12), (2, 0.36), (1, 0.64)])
def test_error_of_gaussian_means_is_near_the_least_that_the_bits_allow(bits: int, most: float) -> None:
    mean = torch.randn(200, 1, 128, generator=torch.Generator().manual_seed(0))
    selector = selector_of(1, bits)
    error = selector.means(selector.build_index(mean), 128) - mean[:, 0]
    assert float(error.norm() / mean.norm()) < most


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("power", [-60, 0, 60])
def test_rows_keep_their_norm_at_any_size_of_keys(bits: int, power: int) -> None:
    keys = torch.randn(20, 4, 64, generator=torch.Generator().manual_seed(1))
    # One channel of a key is often far above the others.
    keys[..., 3] += 20
    keys *= 2.0**power
    selector = selector_of(4, bits)
    kept = selector.means(selector.build_index(keys), 64).double().norm(dim=-1)
    torch.testing.assert_close(kept, keys.double().mean(-2).norm(dim=-1), rtol=2e-2, atol=0)


@pytest.mark.parametrize("bits", BITS)
def test_keys_of_zeros_score_zero(bits: int) -> None:
    selector = selector_of(4, bits)
    index = selector.build_index(torch.zeros(1, 1, 2, 4, 32))
    candidates = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    scores = selector.score(torch.randn(1, 1, 1, 2, 32), index, 1.0, candidates)
    assert scores.abs().max() < 1e-25


def test_the_query_is_rounded_to_127_steps_and_halves_go_to_the_even_one() -> None:
    query = torch.tensor([[[-127.0, 0.5, 1.5, 2.5, -3.5, 126.4], [-127.0, 0.5, 1.5, 2.5, -3.5, 126.4]]])
    codes, scale = rounded_query(query * 2.0**-30)
    assert codes.tolist() == [[-127, 0, 2, 2, -4, 126]]
    assert scale.item() == pytest.approx(2.0**-30, rel=1e-6)
    codes, scale = rounded_query(torch.zeros(1, 2, 6))
    assert not codes.any() and 0 < scale.item() < 2.0**-100
    codes, scale = rounded_query(torch.tensor([[[1.0, torch.inf]], [[torch.nan, 1.0]]]))
    assert not codes.any() and scale[0].isinf() and scale[1].isnan()


@pytest.mark.parametrize("bits", [4, 2, 1])
def test_a_score_is_an_exact_sum_times_two_scales(bits: int) -> None:
    selector, made = selector_of(4, bits), torch.Generator().manual_seed(bits)
    query = torch.randn(1, 1, 1, 3, 128, generator=made)
    index = selector.build_index(torch.randn(1, 1, 7, 4, 128, generator=made))
    scores = selector.score(query, index, 1.0, torch.ones(1, 1, 1, 7, dtype=torch.bool))[0, 0, 0]
    codes, scale = rounded_query(query[0, 0, 0])
    for unit in range(7):
        row = index[0, 0, unit].tolist()
        (its_scale,) = struct.unpack("<f", bytes(row[16 * bits : 16 * bits + 4]))
        number = int.from_bytes(bytes(row[: 16 * bits]), "little")
        levels = [2 * (number >> channel * bits & 2**bits - 1) + 1 - 2**bits for channel in range(128)]
        whole = sum(int(code) * level for code, level in zip(codes.tolist(), levels, strict=True))
        assert scores[unit] == torch.tensor(float(whole)) * torch.tensor(its_scale) * scale[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("context", [41, 63])
def test_it_picks_what_its_definition_ranks_first_over_poisoned_rows(bits: int, context: int) -> None:
    heads, group, dim, unit = 2, 3, 32, 4
    generator = torch.Generator().manual_seed(context)
    selector = selector_of(unit, bits)
    query = torch.randn(1, 1, heads, group, dim, generator=generator)
    keys = torch.randn(1, heads, 68, dim, generator=generator)
    index = selector.build_index(keys.unflatten(2, (-1, unit)))
    index[:, :, context // unit :] = 255
    chosen = api.select(query, index, torch.tensor([[context]]), torch.tensor([[6 * unit]]), selector, dim**-0.5)
    last = -(-context // unit) - 1
    candidates = range(1, last - 1)
    for head in range(heads):
        mean_query = [sum(query[0, 0, head, :, d].tolist()) / group for d in range(dim)]
        means = {number: decoded(index[0, head, number].tolist(), bits, dim) for number in candidates}
        if bits < 8:
            largest = max(abs(channel) for channel in mean_query)
            mean_query = [round(channel * 127 / largest) for channel in mean_query]
        scores = {number: sum(q * k for q, k in zip(mean_query, means[number], strict=True)) for number in candidates}
        ranked = sorted(candidates, key=scores.__getitem__, reverse=True)
        assert set(chosen[0, 0, head].tolist()) == {0, last - 1, last, *ranked[:3]}


@pytest.mark.parametrize(
    ("unit", "bits", "dim", "width"),
    [(16, 8, 128, 144), (4, 4, 128, 68), (2, 2, 128, 36), (1, 1, 128, 20), (16, 1, 64, 16), (4, 4, 96, 52)],
)
def test_rows_are_padded_to_whole_words_and_can_be_spread_over_their_tokens(
    unit: int, bits: int, dim: int, width: int
) -> None:
    selector = selector_of(unit, bits)
    assert selector.index_width(dim) == width
    assert width % unit == 0 and width % selector.row_align == 0


def test_gradients_do_not_pass_and_do_not_hinder() -> None:
    keys = torch.randn(2, 4, 32, requires_grad=True)
    for bits in BITS:
        assert not selector_of(4, bits).build_index(keys).requires_grad


def test_settings_stand_in_schedule_files_and_wrong_ones_are_refused() -> None:
    table = {"kind": "quantized_mean", "page_tokens": 4, "first_tokens": 16, "recent_tokens": 32, "bits": 4}
    selector = make_selector(table)
    assert selector.table() == table
    assert Schedule.fixed(64, selector).selector == selector
    with pytest.raises(UserError, match=r"bits must be 8, 4, 2 or 1, got 4\.0"):
        QuantizedMean(bits=4.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="kind of a selector must be text"):
        make_selector({"kind": ["page_mean"]})
    with pytest.raises(UserError, match="bits must be 8, 4, 2 or 1, got 3"):
        make_selector({**table, "bits": 3})
    with pytest.raises(UserError, match="pages of up to 16 tokens, got 32"):
        make_selector({**table, "page_tokens": 32, "first_tokens": 32})
