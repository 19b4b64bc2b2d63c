"""The kernel that chooses units, in every way that it has, against the reference. It is compiled where there is a GPU,
else interpreted, in layouts so small that each way is taken by few units."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE
from sparroll.attention.decode import paged, paged_reference
from sparroll.attention.decode.workspace import PEAK_UNITS, PEAKED_UNITS, peaks_for, peaks_to_choose_by
from sparroll.attention.selectors import PageMean, QuantizedMean

pytest.importorskip("triton", reason="triton runs on Linux only")

SELECTOR = PageMean(page_tokens=1, first_tokens=0, recent_tokens=1)
LAYOUT = {"warps": 1, "lanes": 128, "rows": 4}
"""Up to 256 units where no request can have more or there are peaks, and up to 128 else, have a lane each. Candidates are
made of up to 512 units with 128 lanes, of up to 1,024 with 256, and of more in parts with 512, for up to 64 units
wanted."""
UNITS = {"all have lanes": 255, "held": 511, "held twice": 1021, "in parts": 2047}


def chosen(
    scores_RHU: Tensor, contexts: list[int], budgets: list[int], impl: str, most: int | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Unit ids and pages over rubbish, of scores that are NaN past each context."""
    from sparroll.attention.decode.choice import triton_top_k

    requests, heads, units = scores_RHU.shape
    place = torch.arange(units)
    scores_RHU = scores_RHU.masked_fill((place >= torch.tensor(contexts)[:, None])[:, None], torch.nan).to(DEVICE)
    shape = (requests, heads, most or max(map(min, contexts, budgets)))
    ids, pages = (torch.full(shape, 1 << 30, dtype=torch.int32, device=DEVICE) for _ in range(2))
    table = torch.randperm(units, generator=torch.Generator().manual_seed(units)).int().expand(requests, -1)
    context_tokens_R, kv_budget_tokens_R = (torch.tensor(each, device=DEVICE).int() for each in (contexts, budgets))
    if impl == "triton":
        triton_top_k.choose_units(
            scores_RHU, context_tokens_R, kv_budget_tokens_R, SELECTOR, ids, pages, table.to(DEVICE), 1, **settings
        )
    else:
        paged.choose_units(
            scores_RHU, context_tokens_R, kv_budget_tokens_R, SELECTOR, ids, impl, pages_RHN=pages,
            block_table_RM=table.to(DEVICE), units_per_block=1, **settings,
        )  # fmt: skip
    return ids, pages


def existing_peaks(scores_RHU: Tensor, contexts: list[int]) -> Tensor:
    """Those of existing units; rubbish that no score exceeds in place of the others."""
    exists = torch.arange(scores_RHU.shape[2]) < torch.tensor(contexts)[:, None]
    peaks_RHK = paged_reference.peaks_of(scores_RHU.masked_fill(~exists[:, None], -torch.inf))
    there = torch.arange(peaks_RHK.shape[2]) * PEAK_UNITS < torch.tensor(contexts)[:, None]
    return peaks_RHK.masked_fill(~there[:, None], (1 << 31) - 1).to(DEVICE)


def assert_same(
    scores_RHU: Tensor,
    contexts: list[int],
    budgets: list[int],
    layout: dict[str, int] | None = None,
    peaks: bool = False,
) -> None:
    from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout

    settings: dict[str, Any] = {} if layout is None else {"layout": ChoiceLayout(**layout)}
    if peaks:
        settings["peaks_RHK"] = existing_peaks(scores_RHU, contexts)
    found = chosen(scores_RHU, contexts, budgets, "triton", **settings)
    expected = chosen(scores_RHU, contexts, budgets, "reference")
    for name, ours, theirs in zip(("units", "pages"), found, expected, strict=True):
        assert torch.equal(ours, theirs), f"{name} of requests {(ours != theirs).any(-1).nonzero()[:, 0].tolist()}"


def scores_by_kind(units: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(units)
    normal, place = torch.randn(units, generator=generator), torch.arange(units)
    return {
        "normal": normal,
        "some always read": normal.masked_fill(place % 97 == 0, torch.inf),
        "all equal": torch.zeros(units),
        "few values": normal.round(),
        "zeros of both signs at the threshold": torch.where(normal > 1.9, normal, torch.where(normal > 0, 0.0, -0.0)),
        "NaN among them": normal.masked_fill(place % 5 == 0, torch.nan),
        "most of them -inf": normal.masked_fill(normal < 1.0, -torch.inf),
        "all negative": -normal.abs() - 1,
        "rising": normal.sort().values,
        "neighbouring numbers": 1 + 2.0**-23 * torch.randint(0, 50, (units,), generator=generator),
        "all of them NaN": torch.full((units,), torch.nan),
        "most of them +inf": normal.masked_fill(place % 50 != 0, torch.inf),
    }


def requests_of_every_kind(units: int, wanted: int | None, lengths: int) -> tuple[Tensor, list[int], list[int]]:
    """Scores, contexts of so many lengths and budgets: of so many units, or of all but one, one of everything and one of
    nothing."""
    scores = torch.stack(list(scores_by_kind(units).values()))[:, None]
    contexts = [units - row % lengths for row in range(len(scores))]
    budgets = [wanted or context - 1 for context in contexts]
    budgets[2], budgets[3] = units, 0
    return scores, contexts, budgets


PEAKED = {"peaks have lanes": 1000, "peaks have lanes or twice as many": 2047}


@pytest.mark.parametrize("wanted", [1, 7, 33, 64, None])
@pytest.mark.parametrize("way", PEAKED)
def test_with_the_peaks_of_scores_the_choice_is_the_same(way: str, wanted: int | None) -> None:
    assert_same(*requests_of_every_kind(PEAKED[way], wanted, lengths=11), LAYOUT, peaks=True)


def test_with_peaks_requests_of_one_batch_take_different_ways() -> None:
    lengths = [2047, 1025, 1024, 513, 512, 257, 129, 128, 127, 8, 1, 0]
    scores = torch.randn(len(lengths), 2, 2047, generator=torch.Generator().manual_seed(0))
    # What lies side by side is alike.
    alike = scores.cumsum(-1)
    for wanted in ([64] * 12, [65] * 12, [64, 50, 51, 30, 33, 60, 64, 3, 9, 2, 1, 1]):
        for each in (scores, alike):
            assert_same(each, lengths, wanted, LAYOUT, peaks=True)


WAYS = {"peaks": "candidates_under_peaks", "a sample": "candidates_by_sample", "bounds": "choose_between_bounds"}


@pytest.mark.skipif(DEVICE == "cuda", reason="ways are taken out of the interpreted kernel")
@pytest.mark.parametrize(
    ("units", "wanted", "alike", "taken"),
    [
        (4000, 250, False, ["peaks"]),
        (4000, 251, False, ["a sample"]),
        (4000, 400, False, ["a sample"]),
        (4000, 900, False, ["a sample", "bounds"]),
        (4000, 250, True, ["peaks", "a sample"]),
        (4200, 256, False, ["peaks"]),
        (4200, 257, False, ["a sample"]),
        (1024, 64, False, []),
        (1025, 64, False, ["peaks"]),
    ],
)
def test_the_ways_that_peaks_leave_open(
    monkeypatch: pytest.MonkeyPatch, units: int, wanted: int, alike: bool, taken: list[str]
) -> None:
    """Each is needed where it is taken, and no other one. With 512 lanes there is room for 1,024 candidates."""
    from sparroll.attention.decode.choice import triton_top_k

    layout = {**LAYOUT, "lanes": 512}
    scores = torch.rand(1, 1, 4200, generator=torch.Generator().manual_seed(0))
    if alike:
        # Every second group of eight is better than all the others.
        scores += torch.arange(4200) // 8 % 2
    for way, name in WAYS.items():
        with monkeypatch.context() as patched:

            def refuse(*_: Any) -> None:
                raise RuntimeError("taken out")

            patched.setattr(triton_top_k, name, refuse)
            if way in taken:
                with pytest.raises(Exception, match="taken out"):
                    assert_same(scores, [units], [wanted], layout, peaks=True)
            else:
                assert_same(scores, [units], [wanted], layout, peaks=True)


SAMPLED = {"warps": 1, "lanes": 512, "sampled": True}
"""Up to 512 units have a lane each; of more, 128 scores are a sample, and there is room for 1,024 candidates."""


@pytest.mark.parametrize("wanted", [1, 33, 100, 300, 700, None])
@pytest.mark.parametrize("units", [1021, 4093])
def test_the_choice_by_a_sample_is_the_same(units: int, wanted: int | None) -> None:
    assert_same(*requests_of_every_kind(units, wanted, lengths=11), SAMPLED)


def test_by_a_sample_requests_of_one_batch_take_different_ways() -> None:
    lengths = [2047, 1025, 1024, 513, 512, 257, 129, 128, 127, 8, 1, 0]
    scores = torch.randn(len(lengths), 2, 2047, generator=torch.Generator().manual_seed(0))
    for wanted in ([64] * 12, [900, 300, 100, 33, 1, 256, 128, 64, 9, 2, 1, 1]):
        for each in (scores, scores.cumsum(-1)):
            assert_same(each, lengths, wanted, SAMPLED)


@pytest.mark.parametrize("wanted", [1, 256, 615, 1900, 4096, 8500])
def test_large_batches_choose_the_same_in_the_layout_that_they_take(wanted: int) -> None:
    """Rows are padded to whole 16 bytes, as in engines."""
    from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout

    contexts = [10_240, 10_239, 8193, 4098, 2049, 2047]
    generator = torch.Generator().manual_seed(wanted)
    scores = torch.randn(len(contexts), 1, 10_240, generator=generator)
    # Neighbours that are alike, and units that are always read.
    scores[1] = scores[1, :, ::4].repeat_interleave(4, -1)
    scores[2, :, :4] = scores[2, :, 8180:8193] = torch.inf
    layout = ChoiceLayout.default(10_240, 397)
    assert layout.sampled
    assert_same(scores, contexts, [min(wanted, context) for context in contexts], dataclasses.asdict(layout))


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreted kernel is counted")
@pytest.mark.parametrize(("wanted", "lanes"), [(4, 128), (40, 256), (100, 512), (350, 1024)])
def test_candidates_by_a_sample_have_as_many_lanes_as_they_need(
    monkeypatch: pytest.MonkeyPatch, wanted: int, lanes: int
) -> None:
    from sparroll.attention.decode.choice import triton_top_k

    chosen_among: list[int] = []
    choose = triton_top_k._choose_listed
    monkeypatch.setattr(
        triton_top_k, "_choose_listed", lambda *given: (chosen_among.append(int(given[11])), choose(*given))[1]
    )
    scores = torch.randn(1, 1, 2047, generator=torch.Generator().manual_seed(0))
    assert_same(scores, [2047], [wanted], SAMPLED)
    assert chosen_among == [lanes]


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreted kernel is counted")
@pytest.mark.parametrize(
    ("better", "wanted", "lists", "bounds"),
    [
        (0.0, 100, 1, False),
        # The sample says that there is no room.
        (0.0, 1000, 0, True),
        (1.3, 300, 2, False),
        (9.0, 400, 3, True),
        (-9.0, 400, 1, True),
        (math.nan, 100, 1, True),
    ],
    ids=["like all", "more than there is room for", "a little better", "better", "worse", "all equal"],
)
def test_a_sample_that_deceives_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, better: float, wanted: int, lists: int, bounds: bool
) -> None:
    """better: by how much the scores of the sample are better than others; NaN where all are equal."""
    from sparroll.attention.decode.choice import triton_candidates, triton_top_k

    scores, called = torch.randn(4096, generator=torch.Generator().manual_seed(0)), []
    scores = (scores + better * (torch.arange(4096) // 4 % 32 == 0)).nan_to_num(0.0)
    if math.isnan(better):
        scores.zero_()

    def count(module: Any, name: str) -> None:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: (called.append(name), kernel(*given))[1])

    count(triton_candidates, "_list_reaching"), count(triton_top_k, "choose_between_bounds")
    assert_same(scores[None, None], [4096], [wanted], SAMPLED)
    assert called == ["_list_reaching"] * lists + ["choose_between_bounds"] * bounds


@pytest.mark.parametrize("wanted", [251, 400, 900])
def test_with_peaks_many_wanted_units_are_chosen_by_a_sample(wanted: int) -> None:
    """Of some kinds of scores a sample lists enough, and others it leaves to the bounds."""
    assert_same(*requests_of_every_kind(4093, wanted, lengths=11), {**LAYOUT, "lanes": 512}, peaks=True)


@pytest.mark.parametrize("wanted", [281, 282, 500])
def test_with_peaks_rising_scores_are_chosen_right(wanted: int) -> None:
    """The best lie side by side, under few peaks."""
    rising = torch.randn(1, 1, 4500, generator=torch.Generator().manual_seed(0)).sort().values
    assert_same(rising, [4500], [wanted], {"warps": 1, "lanes": 1024, "rows": 4}, peaks=True)


def test_peaks_are_kept_where_they_spare_time() -> None:
    from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout

    layout = ChoiceLayout.default(8193)
    assert {units for units in range(1, 40_000) if layout.peak_lanes(units)} == set(PEAKED_UNITS)
    pairs, large = (QuantizedMean(2, 16, 32, bits) for bits in (2, 8))
    assert [peaks_for(pairs, 2, 3, units, "cpu") is None for units in (8192, 8193, 32_768, 32_769)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert peaks_for(pairs, 2, 3, 8193, "cpu").shape == (2, 3, 1025)
    assert peaks_for(large, 2, 3, 9000, "cpu") is peaks_for(SELECTOR, 2, 3, 9000, "cpu") is None


def test_a_batch_that_chooses_by_a_sample_reads_no_peaks() -> None:
    from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout

    pairs = QuantizedMean(2, 16, 32, 2)
    for units in (8193, 10_240, 10_241):
        peaks = peaks_for(pairs, 60, 8, units, "cpu")
        for requests in (1, 49, 50, 60):
            read = peaks_to_choose_by(peaks, requests, units)
            assert (read is not None) == bool(ChoiceLayout.default(units, requests * 8).peak_lanes(units))
            assert read is None or len(read) == requests
    assert peaks_to_choose_by(None, 1, 9000) is None


@pytest.mark.parametrize("wanted", [1, 33, 100, None])
@pytest.mark.parametrize("way", UNITS)
def test_every_way_chooses_what_the_reference_does(way: str, wanted: int | None) -> None:
    assert_same(*requests_of_every_kind(UNITS[way], wanted, lengths=3), LAYOUT)


def test_requests_of_one_batch_take_different_ways() -> None:
    lengths = [2047, 1025, 1024, 513, 512, 129, 128, 127, 31, 1, 0]
    scores = torch.randn(len(lengths), 2, 2047, generator=torch.Generator().manual_seed(0))
    for wanted in ([64] * 11, [65] * 11, [600, 3, 64, 400, 65, 128, 127, 5, 7, 9, 2]):
        assert_same(scores, lengths, wanted, LAYOUT)


@pytest.mark.parametrize("wanted", [64, 65, 128, 129])
def test_candidates_are_made_with_more_lanes_where_more_units_are_wanted(wanted: int) -> None:
    """With room for 256 candidates: of up to 512 units they are made with 128 lanes for up to 64 wanted units, and with 256
    lanes for up to 128."""
    scores = torch.stack(list(scores_by_kind(1021).values()))[:, None]
    contexts = [500 + row for row in range(len(scores))]
    assert_same(scores, contexts, [wanted] * len(contexts), {**LAYOUT, "lanes": 256})


@pytest.mark.skipif(DEVICE == "cuda", reason="the sample is taken out of the interpreted kernel")
def test_up_to_half_the_lanes_may_be_wanted_before_a_sample_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparroll.attention.decode.choice import triton_top_k

    def refuse(*_: Any) -> None:
        raise RuntimeError("taken out")

    monkeypatch.setattr(triton_top_k, "candidates_by_sample", refuse)
    scores = torch.randn(1, 1, 1021, generator=torch.Generator().manual_seed(0))
    for wanted in (64, 65, 128):
        assert_same(scores, [500], [wanted], {**LAYOUT, "lanes": 256})
    with pytest.raises(Exception, match="taken out"):
        assert_same(scores, [500], [129], {**LAYOUT, "lanes": 256})


@pytest.mark.parametrize("units", [700, 1999])
def test_the_best_may_share_lanes_with_units_that_are_always_read(units: int) -> None:
    # Lanes keep the largest of units that lie 128, 256 or 512 apart, and +inf hides the others.
    scores = torch.rand(1, 1, units, generator=torch.Generator().manual_seed(0))
    place = torch.arange(units)
    scores[0, 0, (place % 128 < 12) & (place >= 128)] += 100.0
    scores[0, 0, :12] = torch.inf
    for wanted in (13, 27, 50):
        assert_same(scores, [units], [wanted], LAYOUT)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_of_a_period_may_deceive_the_bounds(sign: float) -> None:
    # Held are those of every eighth unit, all of which lie above the others, or all below.
    units = 4096
    scores = torch.rand(1, 1, units, generator=torch.Generator().manual_seed(1))
    scores[..., ::8] += sign * 1000.0
    for wanted in (200, 600, 3000, 4000):
        assert_same(scores, [units], [wanted], LAYOUT)


def test_bounds_between_which_there_is_no_room_come_closer() -> None:
    # Neighbouring numbers, of which there are more than 128 between any bounds, among a few that are far away.
    units = 3000
    generator = torch.Generator().manual_seed(2)
    scores = 1 + 2.0**-23 * torch.randint(0, 400, (1, 1, units), generator=generator)
    scores[..., :100], scores[..., 100:200] = 1e30, -1e30
    for wanted in (101, 1500, 2901):
        assert_same(scores, [units], [wanted], LAYOUT)


@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("fill_rest", [True, False])
@pytest.mark.parametrize("way", UNITS)
def test_lists_without_pages_and_lists_that_are_not_filled_up(way: str, fill_rest: bool, pages: bool) -> None:
    from sparroll.attention.decode.choice import triton_top_k

    units = UNITS[way]
    scores = torch.randn(3, 1, units, generator=torch.Generator().manual_seed(0))
    contexts, budgets = [units, units, 20], [40, 100, 30]
    expected = chosen(scores, contexts, budgets, "reference", 103)
    ids, its_pages = (torch.full_like(expected[0], 1 << 30) for _ in range(2))
    table = torch.randperm(units, generator=torch.Generator().manual_seed(units)).int().expand(3, -1).to(DEVICE)
    triton_top_k.choose_units(
        scores.to(DEVICE), *(torch.tensor(each, device=DEVICE).int() for each in (contexts, budgets)), SELECTOR, ids,
        its_pages if pages else None, table if pages else None, 1, fill_rest, layout=triton_top_k.ChoiceLayout(**LAYOUT),
    )  # fmt: skip
    for found, each in zip((ids, its_pages), expected, strict=True):
        if found is its_pages and not pages:
            assert (found == 1 << 30).all()
        else:
            assert torch.equal(found, each if fill_rest else torch.where(each < 0, 1 << 30, each))


@pytest.mark.parametrize("stride", [1021, 1022, 1024])
def test_rows_of_scores_may_begin_anywhere(stride: int) -> None:
    held = torch.full((2 * stride + 3,), torch.nan)
    held[3 : 2 * stride + 3] = torch.randn(2 * stride, generator=torch.Generator().manual_seed(0))
    for begins in (0, 3):
        scores = held[begins : begins + 2 * stride].view(2, 1, stride)[..., :1021].nan_to_num(0.5)
        assert_same(scores, [1021, 1000], [60, 300], LAYOUT)


@pytest.mark.parametrize(
    ("units", "wanted"), [(2049, 900), (8193, 300), (16_387, 1024), (30_000, 4096), (30_000, 29_999), (40_963, 9000)]
)
def test_budgets_up_to_all_of_many_units(units: int, wanted: int) -> None:
    generator = torch.Generator().manual_seed(units)
    scores = torch.randn(2, 1, units, generator=generator)
    # Many candidates at the end alone, where no lane but a few sees them; and units that are always read.
    scores[1, 0, -units // 8 :] += 4.0
    scores[:, :, :16], scores[:, :, -32:] = torch.inf, torch.inf
    assert_same(scores, [units, units - 1], [wanted, wanted - 1])


def test_the_kernel_is_compiled_for_what_the_shape_of_the_scores_leaves_open() -> None:
    from sparroll.attention.decode.choice.triton_top_k import ChoiceLayout

    def lanes(units: int, pairs: int = 1) -> tuple[int, int, int, bool]:
        layout = ChoiceLayout.default(units, pairs)
        constants = layout.constants(units)
        return layout.warps, constants["LANES"], constants["MORE_LANES"], bool(constants["MANY"])

    assert [lanes(units) for units in (3, 257, 1025, 2049, 4096, 4097, 40_960)] == [
        (4, 256, 0, False), (4, 512, 0, False), (8, 2048, 0, False), (8, 2048, 4096, False), (8, 2048, 4096, False),
        (8, 2048, 0, True), (8, 2048, 0, True),
    ]  # fmt: skip
    # Half the warps where more programs are launched than run at a time, and a sample where units are many.
    assert [lanes(units, 397) for units in (1024, 2048, 2049, 4096, 4097, 8193, 10_240, 10_241)] == [
        (4, 1024, 0, False), (8, 2048, 0, False), (4, 2048, 4096, False), (4, 2048, 4096, False), (8, 2048, 0, True),
        (4, 2048, 0, True), (4, 2048, 0, True), (8, 2048, 0, True),
    ]  # fmt: skip
    sampled = [(8192, 397), (8193, 397), (10_240, 397), (10_241, 397), (10_240, 396)]
    assert [ChoiceLayout.default(*each).sampled for each in sampled] == [False, True, True, False, False]
    # Registers with peaks, by how many programs of 8 warps have to fit on a multiprocessor.
    registers = [ChoiceLayout.default(10_240, pairs).options(10_240, peaked=True) for pairs in (264, 265, 396)]
    assert registers == [{"num_warps": 8, "maxnreg": most} for most in (128, 80, 80)]
    # Where fewer have more units than lanes, the kernel holds no more than these.
    assert [ChoiceLayout(4, sampled=True).constants(units)["MORE_LANES"] for units in (2048, 4096)] == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("units", [2048, 4096, 30_000])
def test_one_cuda_graph_chooses_at_other_lengths_and_budgets(units: int) -> None:
    generator = torch.Generator().manual_seed(units)
    scores = torch.randn(8, 2, units, generator=generator).to(DEVICE)
    table = torch.stack([torch.randperm(units, generator=generator) for _ in range(8)]).int().to(DEVICE)
    contexts, budgets = (torch.full((8,), value, dtype=torch.int32, device=DEVICE) for value in (units, 100))
    # As in an engine, with a place for every unit.
    ids, pages, expected, its_pages = (torch.full(scores.shape, -2, dtype=torch.int32, device=DEVICE) for _ in range(4))

    def choose(impl: str, ids: Tensor, pages: Tensor) -> None:
        paged.choose_units(
            scores, contexts, budgets, SELECTOR, ids, impl, pages_RHN=pages, block_table_RM=table, units_per_block=1,
            fill_rest=False,
        )  # fmt: skip

    choose("triton", ids, pages)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose("triton", ids, pages)
    for _ in range(4):
        contexts.copy_((units * torch.rand(8, generator=generator)).int())
        share = torch.tensor([0.01, 0.03, 0.1, 0.3, 0.5, 0.9, 1.0, 0.0])
        budgets.copy_((contexts.cpu() * share).int())
        for each in (ids, pages, expected, its_pages):
            each.fill_(-2)
        graph.replay()
        choose("reference", expected, its_pages)
        assert torch.equal(ids, expected) and torch.equal(pages, its_pages)
