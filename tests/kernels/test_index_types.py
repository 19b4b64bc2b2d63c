"""Index rows of few bits: the kernels write the reference's bytes, and read its scores from them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE, ODD_CONTEXTS, SHORT_CONTEXTS, PagedCache, budgets_of, paged_cache, units_wanted
from sparroll.attention.decode import paged
from sparroll.attention.decode.workspace import PEAK_UNITS, StepWorkspace
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError

pytest.importorskip("triton", reason="triton runs on Linux only")

BITS = [8, 4, 2, 1]
Layout = Literal["token_head", "head_token"]
CACHES: list[tuple[int, int, Layout]] = [
    (16, 16, "token_head"),
    (16, 64, "head_token"),
    (8, 32, "head_token"),
    (4, 16, "head_token"),
    (2, 32, "head_token"),
    (1, 16, "head_token"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def selector_of(unit: int, bits: int) -> QuantizedMean:
    return QuantizedMean(page_tokens=unit, first_tokens=16, recent_tokens=32, bits=bits)


def both_indices(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for impl in ("reference", "triton"):
        index = torch.full_like(cache.index_PSHW, 255)
        paged.update_index(cache.keys_PBHD, index, slots, cache.selector, impl)
        found.append(index)
    return found[0], found[1]


def in_context(cache: PagedCache, scores: Tensor) -> Tensor:
    """Which scores there are with budgets: what lies past the context need not be written."""
    units = torch.arange(cache.units, device=DEVICE)
    of_context = -(-cache.context_tokens_R // cache.selector.unit_tokens)
    return (units < of_context[:, None])[:, None].expand_as(scores)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("unit", "block_tokens", "layout"), CACHES)
def test_bytes_are_those_of_the_reference_and_of_complete_units_only(
    unit: int, block_tokens: int, layout: Layout, bits: int
) -> None:
    contexts = [17, 0, 70]
    cache = paged_cache(
        contexts, unit, block_tokens, dtype=torch.bfloat16, layout=layout, selector=selector_of(unit, bits)
    )
    slots = torch.cat([cache.slots(), torch.tensor([-1, -1, -16, -17], device=DEVICE)])
    expected, index = both_indices(cache, slots[torch.randperm(len(slots), device=DEVICE)])
    assert torch.equal(index, expected)
    over_zeros = torch.zeros_like(index)
    paged.update_index(cache.keys_PBHD, over_zeros, slots, cache.selector, "triton")
    rows = 2 * sum(context // unit for context in contexts)
    assert int(((index != 255) | (over_zeros != 0)).sum()) == rows * index.shape[3]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("bits", BITS)
def test_bytes_at_every_head_size_and_for_keys_of_any_type_and_size(bits: int, dim: int) -> None:
    dtype = DTYPES[dim // 32 % 3]
    cache = paged_cache([16, 21, 70], 4, dim=dim, dtype=dtype, layout="head_token", selector=selector_of(4, bits))
    # Tokens apart by up to 24 powers of two, a few channels far above the others, units of equal keys and of zeros.
    powers = torch.arange(cache.keys_PBHD.shape[0], device=DEVICE) % 25 - 12
    cache.keys_PBHD.mul_((2.0**powers).to(dtype)[:, None, None, None])
    cache.keys_PBHD[1::3, :, :, 5:7] *= 50
    cache.keys_PBHD[::5, :, 0] = 0.0
    cache.keys_PBHD[::5, :4, 0] = 1.5
    expected, index = both_indices(cache, cache.slots())
    assert torch.equal(index, expected)


def test_fp8_rounds_as_torch_does_over_its_whole_range() -> None:
    selector = selector_of(1, 8)
    # A largest magnitude of 448 makes the scale 1: every e4m3, every middle between two, and their neighbours in fp32.
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9))])
    values = torch.cat([values, -values, torch.tensor([-0.0])])
    padded = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    keys = torch.cat([padded, torch.full((len(padded), 1), 448.0)], dim=1)
    keys = torch.nn.functional.pad(keys, (0, 0, 0, -len(keys) % 16)).view(-1, 16, 1, 32).to(DEVICE)
    index = torch.full((len(keys), 16, 1, selector.index_width(32)), 255, dtype=torch.uint8, device=DEVICE)
    paged.update_index(keys, index, torch.arange(16 * len(keys), device=DEVICE), selector, "triton")
    assert torch.equal(index, selector.build_index(keys[:, :, :, None]))
    stored = index.view(-1, index.shape[-1])[: len(padded), :31]
    assert torch.equal(stored, padded.to(torch.float8_e4m3fn).view(torch.uint8).to(DEVICE))


@pytest.mark.parametrize(("unit", "bits"), [(4, 4), (2, 2), (1, 1)])
def test_a_block_holds_the_channels_of_a_heads_units_and_behind_them_the_scales(unit: int, bits: int) -> None:
    cache = paged_cache([32], unit, 32, layout="head_token", selector=selector_of(unit, bits)).index_written("triton")
    rows = cache.selector.build_index(cache.keys_RHCD[0, :, :32].unflatten(1, (-1, unit)))
    block, cut = cache.index_PSHW[int(cache.block_table_RM[0, 0])], 4 * bits
    for head in range(2):
        held = block[:, head].flatten()
        assert torch.equal(held[: len(held) * cut // rows.shape[2]], rows[head, :, :cut].flatten())
        assert torch.equal(held[len(held) * cut // rows.shape[2] :], rows[head, :, cut:].flatten())


def assert_same_scores(cache: PagedCache) -> None:
    cache.index_written()
    assert_equal_scores(cache, cache.scores("triton"), cache.scores("reference"))


def assert_equal_scores(cache: PagedCache, scores: Tensor, expected: Tensor) -> None:
    """Below 8 bits to the last bit."""
    exact = isinstance(cache.selector, QuantizedMean) and cache.selector.bits < 8
    close = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-4, "rtol": 1e-5}
    torch.testing.assert_close(scores, expected, equal_nan=True, **close)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("unit", "block_tokens", "layout"), CACHES)
def test_scores_at_every_unit_and_block(unit: int, block_tokens: int, layout: Layout, bits: int) -> None:
    contexts = ODD_CONTEXTS if unit == 16 else SHORT_CONTEXTS
    assert_same_scores(paged_cache(contexts, unit, block_tokens, layout=layout, selector=selector_of(unit, bits)))


@pytest.mark.parametrize("bits", [4, 2, 1])
@pytest.mark.parametrize(("unit", "block_tokens", "layout"), CACHES)
def test_peaks_are_the_best_of_every_eight_scores(unit: int, block_tokens: int, layout: Layout, bits: int) -> None:
    contexts = [*(ODD_CONTEXTS if unit == 16 else SHORT_CONTEXTS), 0]
    cache = paged_cache(contexts, unit, block_tokens, layout=layout, selector=selector_of(unit, bits)).index_written()
    shape = (*cache.query_RHGD.shape[:2], -(-cache.units // PEAK_UNITS))
    found, expected = (torch.full(shape, -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    scores = cache.scores("triton", peaks_RHK=found)
    assert_equal_scores(cache, scores, cache.scores("reference", peaks_RHK=expected))
    # An incomplete stretch at the end is as long as the scores go.
    eights = torch.nn.functional.pad(scores, (0, -cache.units % PEAK_UNITS), value=-torch.inf).unflatten(
        2, (-1, PEAK_UNITS)
    )
    assert torch.equal(expected.view(torch.float32).clamp_min(0), eights.amax(3).clamp_min(0))
    assert torch.equal(found, expected)
    # Within its budget a request is not scored, and past a context there are no peaks.
    found.fill_(-7)
    cache.scores("triton", kv_budget_tokens_R=budgets_of(cache), peaks_RHK=found)
    scored = budgets_of(cache) < cache.context_tokens_R
    assert (found[~scored] == -7).all() and scored.any()
    first = torch.arange(shape[2], device=DEVICE) * PEAK_UNITS * unit
    there = (scored[:, None] & (first < cache.context_tokens_R[:, None]))[:, None].expand(shape)
    assert torch.equal(found[there], expected[there])


@pytest.mark.parametrize("selector", [PageMean(4, 16, 32), selector_of(4, 8)])
def test_peaks_of_other_selectors_are_refused(selector: Selector) -> None:
    cache = paged_cache([40], 4, layout="head_token", selector=selector).index_written()
    peaks = torch.zeros(*cache.query_RHGD.shape[:2], 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(UserError, match="no peaks are kept"):
        cache.scores("triton", peaks_RHK=peaks)
    with pytest.raises(UserError, match="peaks_RHK must have shape"):
        cache.scores("triton", peaks_RHK=peaks[..., :1])


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_scores_at_every_head_size_and_group(group: int, dim: int) -> None:
    bits, unit = BITS[(group + dim // 32) % 4], (1, 4, 8)[group % 3]
    dtype = DTYPES[group % 3]
    assert_same_scores(
        paged_cache(
            [17, 0, 100], unit, group=group, dim=dim, dtype=dtype, layout="head_token", selector=selector_of(unit, bits)
        )
    )


@pytest.mark.parametrize("bits", BITS)
def test_scores_of_large_and_of_tiny_keys_and_queries(bits: int) -> None:
    for power in (-30, 20):
        cache = paged_cache([100], 4, layout="head_token", selector=selector_of(4, bits))
        cache.keys_PBHD.mul_(2.0**power), cache.query_RHGD.mul_(2.0**-power * 100)
        cache.index_written()
        if bits == 8:
            torch.testing.assert_close(cache.scores("triton"), cache.scores("reference"), atol=1e-2, rtol=1e-5)
        else:
            assert_equal_scores(cache, cache.scores("triton"), cache.scores("reference"))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bits", [4, 2, 1])
def test_queries_that_have_no_whole_numbers_and_ties_between_two(bits: int) -> None:
    contexts = [60] * 5
    cache = paged_cache(contexts, 4, group=1, layout="head_token", selector=selector_of(4, bits)).index_written()
    cache.query_RHGD[0] = 0.0
    cache.query_RHGD[1, 0, 0, 3] = torch.nan
    cache.query_RHGD[2, 1, 0, 5] = -torch.inf
    # Halves between two whole numbers: the largest is 127, so the scale is 1.
    cache.query_RHGD[3, 0, 0] = torch.arange(32, device=DEVICE) - 15.5
    cache.query_RHGD[3, 0, 0, 7] = 127.0
    cache.query_RHGD[4] *= 2.0**-120
    scores, expected = cache.scores("triton"), cache.scores("reference")
    assert_equal_scores(cache, scores, expected)
    competing = slice(4, 60 // 4 - 8)
    assert not scores[0, :, competing].any()
    assert scores[1, 0, competing].isnan().all() and scores[2, 1, competing].isnan().all()
    assert not scores[1, 1, competing].isnan().any()


@pytest.mark.parametrize("bits", BITS)
def test_rows_within_their_budget_are_not_scored_and_the_choice_is_the_references(bits: int) -> None:
    cache = paged_cache(SHORT_CONTEXTS, 4, layout="head_token", selector=selector_of(4, bits)).index_written("triton")
    budgets = budgets_of(cache)
    scores = cache.scores("triton", kv_budget_tokens_R=budgets)
    expected = cache.scores("reference", kv_budget_tokens_R=budgets)
    held = in_context(cache, scores)
    assert_equal_scores(cache, scores[held], expected[held])
    most = units_wanted(cache, budgets)
    assert torch.equal(
        cache.chosen(scores, budgets, most, "triton")[0], cache.chosen(expected, budgets, most, "reference")[0]
    )


@pytest.mark.parametrize("programs", [1, 2, 7, 40, 1000])
@pytest.mark.parametrize("bits", [None, *BITS])
def test_scores_by_any_number_of_programs(bits: int | None, programs: int) -> None:
    from sparroll.attention.decode.scores import triton_score

    selector = PageMean(4, 16, 32) if bits is None else selector_of(4, bits)
    contexts = [0, *SHORT_CONTEXTS, 0]
    cache = paged_cache(contexts, 4, heads=3, group=3, layout="head_token", selector=selector).index_written()
    budgets = budgets_of(cache)
    requests, heads, group, dim = cache.query_RHGD.shape
    workspace = StepWorkspace.allocate(
        requests, group, dim, cache.query_RHGD.dtype, selector, DEVICE, kv_heads=heads, scored_tile_units=16
    )
    expected = cache.scores("reference", kv_budget_tokens_R=budgets)
    scores = torch.full_like(expected, torch.nan)
    triton_score.score_units(
        cache.query_RHGD, cache.index_PSHW, cache.block_table_RM, cache.context_tokens_R, selector, scores, budgets,
        cache.scale, workspace, False, programs=programs,
    )  # fmt: skip
    held = in_context(cache, scores)
    assert_equal_scores(cache, scores[held], expected[held])


def test_rows_that_are_not_aligned_are_refused() -> None:
    cache = paged_cache([40], 16, selector=selector_of(16, 8))
    wider = torch.zeros(*cache.index_PSHW.shape[:3], cache.index_PSHW.shape[3] + 4, dtype=torch.uint8, device=DEVICE)
    cache.index_PSHW = wider[..., :-4]
    with pytest.raises(UserError, match="multiples of 16 bytes"):
        cache.scores("triton")
    apart = paged_cache([40], 4, layout="token_head", selector=selector_of(4, 4))
    with pytest.raises(UserError, match="must follow each other in a block"):
        apart.scores("triton")
