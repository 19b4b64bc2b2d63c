"""Each kernel against the paged reference, over poisoned memory. Compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from paged_caches import (
    DEVICE,
    ODD_CONTEXTS,
    SHORT_CONTEXTS,
    PagedCache,
    assert_attends,
    budgets_of,
    paged_cache,
    poison,
    selector_of,
    units_wanted,
)
from sparroll.attention.decode import paged
from sparroll.attention.decode.layers_apart import layers_apart
from sparroll.attention.decode.workspace import LayerPlans, StepWorkspace, Tile
from sparroll.attention.selectors import PageMean, QuantizedMean, Selector
from sparroll.errors import UserError
from sparroll.schedule import Schedule

pytest.importorskip("triton", reason="triton runs on Linux only")

UNITS_AND_BLOCKS = [(16, 16), (16, 32), (16, 64), (4, 16), (8, 32), (1, 16)]
LAYOUTS = ["token_head", "head_token"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter multiplies the bits of bf16 matrices instead of their values.
DOT_DTYPES = DTYPES if DEVICE == "cuda" else [torch.float32, torch.float16]


@dataclass(frozen=True)
class Fp32Index(PageMean):
    index_dtype: ClassVar[torch.dtype] = torch.float32


@dataclass(frozen=True)
class Fp16Index(PageMean):
    index_dtype: ClassVar[torch.dtype] = torch.float16


def both_indices(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    found = []
    for impl in ("reference", "triton"):
        index = torch.full_like(cache.index_PSHW, poison(cache.selector))
        paged.update_index(cache.keys_PBHD, index, slots, cache.selector, impl)
        found.append(index)
    return found[0], found[1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("unit", "block_tokens"), UNITS_AND_BLOCKS)
def test_index_rows_are_written_for_complete_units_only(unit: int, block_tokens: int, layout: str) -> None:
    contexts = [17, 0, 70]
    cache = paged_cache(contexts, unit, block_tokens, dtype=torch.bfloat16, layout=layout)  # type: ignore[arg-type]
    slots = torch.cat([cache.slots(), torch.tensor([-1, -1, -16, -17], device=DEVICE)])
    expected, index = both_indices(cache, slots[torch.randperm(len(slots), device=DEVICE)])
    torch.testing.assert_close(index, expected, equal_nan=True)
    assert int((~index[..., 0].isnan()).sum()) == 2 * sum(context // unit for context in contexts)


@pytest.mark.parametrize("few_programs", [4096, 8])
@pytest.mark.parametrize("kind", [PageMean, QuantizedMean])
def test_one_launch_writes_the_index_rows_of_all_layers(
    kind: type[Selector], few_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparroll.attention.decode import triton_index

    # With few programs, each writes 3 of the 4 layers, the last ones 1.
    monkeypatch.setattr(triton_index, "FEW_PROGRAMS", few_programs)
    monkeypatch.setattr(triton_index, "MOST_LAYERS_EACH", 3)
    caches = [paged_cache([16, 0, 111], selector=selector_of(16, kind)) for _ in range(5)]
    for layer, cache in enumerate(caches):
        cache.keys_PBHD.mul_(layer + 1).add_(layer)
    rows = [torch.full_like(cache.index_PSHW, poison(cache.selector)) for cache in caches]
    # Whichever comes first in memory, addresses lie before and behind that of the launch's first layer.
    order = [1, 0, 2, 4]
    apart_2L = layers_apart([(caches[layer].keys_PBHD, rows[layer]) for layer in order])
    slots = caches[0].slots()
    paged.update_index(caches[1].keys_PBHD, rows[1], slots, caches[1].selector, "triton", apart_2L)
    for layer in order:
        expected, _ = both_indices(caches[layer], slots)
        torch.testing.assert_close(rows[layer], expected, equal_nan=True)
    untouched = rows[3].isnan() if rows[3].is_floating_point() else rows[3] == 255
    assert untouched.all()


def test_layers_laid_out_otherwise_share_no_launch() -> None:
    first = paged_cache([40])
    wide = paged_cache([40], dim=64)
    with pytest.raises(UserError, match="keys of 2 layers are laid out in 2 ways"):
        layers_apart([(first.keys_PBHD, first.index_PSHW), (wide.keys_PBHD, first.index_PSHW)])
    shifted = torch.empty(first.index_PSHW.numel() + 1, dtype=first.index_PSHW.dtype, device=DEVICE)[1:]
    with pytest.raises(UserError, match="multiple of 16 bytes"):
        layers_apart([(first.keys_PBHD, shifted.view(first.index_PSHW.shape)), (first.keys_PBHD, first.index_PSHW)])
    with pytest.raises(UserError, match="no layer"):
        layers_apart([])
    apart_2L = layers_apart([(first.keys_PBHD, first.index_PSHW)])
    with pytest.raises(UserError, match="one layer at a time"):
        paged.update_index(first.keys_PBHD, first.index_PSHW, first.slots(), first.selector, "reference", apart_2L)


@pytest.mark.parametrize("kind", [PageMean, QuantizedMean])
def test_index_rows_of_more_tokens_than_programs(kind: type[Selector], monkeypatch: pytest.MonkeyPatch) -> None:
    from sparroll.attention.decode import triton_index

    monkeypatch.setattr(triton_index, "MOST_PROGRAMS", 7)
    cache = paged_cache([16, 40, 111], selector=selector_of(16, kind))
    slots = cache.slots()
    expected, index = both_indices(cache, slots[torch.randperm(len(slots), device=DEVICE)])
    torch.testing.assert_close(index, expected, equal_nan=True)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", [PageMean, Fp16Index, Fp32Index])
def test_index_rows_at_every_head_size_and_storage(kind: type[PageMean], dim: int) -> None:
    cache = paged_cache([16, 40], dim=dim, dtype=torch.bfloat16, selector=selector_of(16, kind))
    expected, index = both_indices(cache, cache.slots())
    assert index.dtype == kind.index_dtype
    torch.testing.assert_close(index, expected, equal_nan=True)


def assert_same_scores(cache: PagedCache) -> None:
    cache.index_written()
    expected, scores = cache.scores("reference"), cache.scores("triton")
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("unit", "block_tokens"), UNITS_AND_BLOCKS)
def test_scores_at_every_unit_and_block(unit: int, block_tokens: int, layout: str) -> None:
    contexts = ODD_CONTEXTS if unit == 16 else SHORT_CONTEXTS
    assert_same_scores(paged_cache(contexts, unit, block_tokens, layout=layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_scores_at_every_head_size_and_group(group: int, dim: int) -> None:
    dtype, kind = DTYPES[group % 3], (PageMean, Fp16Index, Fp32Index)[dim // 32 % 3]
    assert_same_scores(paged_cache([17, 0, 200], group=group, dim=dim, dtype=dtype, selector=selector_of(16, kind)))


def test_rows_within_their_budget_are_not_scored() -> None:
    cache = paged_cache(SHORT_CONTEXTS).index_written()
    budgets = torch.tensor([64, 64, 64, 64, 112, 64], dtype=torch.int32, device=DEVICE)
    expected = cache.scores("reference", kv_budget_tokens_R=budgets)
    scores = cache.scores("triton", kv_budget_tokens_R=budgets)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-5, equal_nan=True)
    assert scores[:, 0].isnan().all(-1).tolist() == [True, True, False, True, True, False]


def assert_same_choice(cache: PagedCache, scores: Tensor, budgets: Tensor, most: int) -> None:
    expected = cache.chosen(scores, budgets, most, "reference")
    for name, ours, theirs in zip(
        ("ids", "pages"), cache.chosen(scores, budgets, most, "triton"), expected, strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize(("unit", "block_tokens"), UNITS_AND_BLOCKS)
def test_choice_at_every_unit_and_block_with_a_budget_for_each_request(unit: int, block_tokens: int) -> None:
    cache = paged_cache(ODD_CONTEXTS, unit, block_tokens, dim=32).index_written()
    budgets = budgets_of(cache)
    wanted = units_wanted(cache, budgets)
    for most in (wanted, wanted + 5):
        assert_same_choice(cache, cache.scores("reference"), budgets, most)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_an_unfilled_list_equals_a_filled_one_as_far_as_the_budget_goes(impl: str) -> None:
    cache = paged_cache(ODD_CONTEXTS).index_written()
    scores, budgets = cache.scores("reference"), budgets_of(cache)
    filled, pages = cache.chosen(scores, budgets, 40, "reference")
    ids, its_pages = (torch.full_like(filled, 7) for _ in range(2))
    paged.choose_units(
        scores, cache.context_tokens_R, budgets, cache.selector, ids, impl,
        pages_RHN=its_pages, block_table_RM=cache.block_table_RM, units_per_block=cache.index_PSHW.shape[1],
        fill_rest=False,
    )  # fmt: skip
    chosen = filled != -1
    assert torch.equal(ids, torch.where(chosen, filled, 7)) and torch.equal(its_pages, torch.where(chosen, pages, 7))


@pytest.mark.parametrize("lengths", [[1, 0, 511], [512, 513, 0, 99_999, 8191, 8192], [700] * 130])
def test_budgets_are_those_of_the_schedule(lengths: list[int]) -> None:
    from sparroll.attention.decode import triton_budgets

    schedules = [Schedule.load("qwen3-1.7b-0.86"), Schedule.fixed(512), Schedule.load("qwen3-8b-0.86")]
    table = torch.full((3, 4, 64), 1 << 30, dtype=torch.int32)
    table[:, 0, 0] = 0
    for number, schedule in enumerate(schedules):
        for place, step in enumerate(schedule.steps):
            # A layer with these budgets, one with the doubles of them, and one that is dense.
            of_step = [step.from_context_tokens, step.kv_budget_tokens, 2 * step.kv_budget_tokens]
            table[number, :3, place] = torch.tensor(of_step)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full((3, len(lengths) + 3), -9, dtype=torch.int32, device=DEVICE)
    for numbers in ([0], [0, -1, 0], [2, 0, 1, -1]):
        which = [numbers[place % len(numbers)] for place in range(len(lengths))]
        budgets = [
            1 << 30 if number < 0 else schedules[number].kv_budget_tokens(n) if n else 0
            for n, number in zip(lengths, which, strict=True)
        ]
        doubles = [each if number < 0 else 2 * each for each, number in zip(budgets, which, strict=True)]
        dense = [1 << 30 if n or number < 0 else 0 for n, number in zip(lengths, which, strict=True)]
        which_R = torch.tensor(which, dtype=torch.int32, device=DEVICE)
        triton_budgets.budgets(contexts, table.to(DEVICE), which_R, 1 << 30, out[:, : len(lengths)])
        wanted = torch.tensor([budgets, doubles, dense])
        assert torch.equal(out.cpu(), torch.nn.functional.pad(wanted, (0, 3), value=-9).int())


@pytest.mark.parametrize("lengths", [[1], [1, 0, 511, 700], [700] * 70])
def test_layers_are_planned_together_as_each_would_be_alone(lengths: list[int]) -> None:
    cache, requests = paged_cache([64]), len(lengths)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    kept = torch.tensor([[64], [128], [1 << 30]], dtype=torch.int32, device=DEVICE).repeat(1, requests + 2)
    # As in an engine, whose memory is for larger batches.
    budgets = kept[:, :requests]
    shared = StepWorkspace.allocate(requests + 3, 2, 32, torch.float32, cache.selector, DEVICE, kv_heads=2)
    plans = LayerPlans.of(shared, 3)
    for poisoned in (plans.read_before_LR, plans.scored_before_LR):
        poisoned.fill_(-1 << 30)
    paged.plan_layers(contexts, budgets, cache.selector, 44, plans)
    for layer, own in enumerate(plans.workspaces):
        paged.plan_step(contexts, budgets[layer], cache.selector, 44, shared)
        assert own.mixed_XGD is shared.mixed_XGD
        read, scored = (own.read_before_R, shared.read_before_R), (own.scored_before_R, shared.scored_before_R)
        for (found, alone), ends in ((read, requests + 2), (scored, requests + 1)):
            assert torch.equal(found[:ends], alone[:ends])
            assert (found[ends:] == -1 << 30).all()
    with pytest.raises(UserError, match="kv_budget_tokens_LR must have shape"):
        paged.plan_layers(contexts, budgets[:2], cache.selector, 44, plans)


@pytest.mark.parametrize(
    ("requests", "programs", "with_short_lists"),
    [
        *[(1, 264, 264), (8, 264, 264), (9, 396, 396), (12, 396, 396), (16, 264, 264), (24, 396, 396), (29, 264, 264)],
        *[(32, 264, 264), (33, 264, 264), (34, 396, 272), (49, 396, 392), (50, 396, 400), (80, 396, 640)],
    ],
)
def test_programs_that_read(requests: int, programs: int, with_short_lists: int) -> None:
    """132 multiprocessors with two programs each, and 8 heads."""
    for launched, short_lists in ((programs, False), (with_short_lists, True)):
        workspace = StepWorkspace.allocate(
            80, 2, 32, torch.float32, PageMean(), DEVICE, 8, programs=264, short_lists=short_lists
        )
        assert workspace.programs(requests) == launched
        assert workspace.sharing(requests) == min(launched, 396)
        one = "one" if short_lists and requests > 33 else None
        assert workspace.own_programs(requests) == ("several" if launched == 264 else one)
        assert len(workspace.arrivals_X) == 396 and len(workspace.mixed_XGD) == 2 * 396


@pytest.mark.parametrize(("longest", "share"), [(1, 1), (192, 6), (193, 5)])
def test_lists_that_are_shorter_than_beginning_anew_have_a_program_each(longest: int, share: int) -> None:
    """Of 12 (request, head) where four run at a time. A tile is 32 tokens, and beginning anew takes as long as six."""
    contexts = torch.tensor([longest, 0, 32, 1, 20], dtype=torch.int32, device=DEVICE)
    workspace = StepWorkspace.allocate(
        5, 2, 32, torch.float32, selector_of(4, QuantizedMean), DEVICE, 3, Tile(32, 4, 1, 1), 4, short_lists=True
    )
    paged.plan_step(contexts, torch.full_like(contexts, 320), selector_of(4, QuantizedMean), 100, workspace)
    tiles = [-(-longest // 32), 0, 1, 1, 1]
    rows = tiles if longest == 193 else [-(-each // share) * share for each in tiles]
    assert workspace.read_before_R.tolist() == [0, *itertools.accumulate(rows), share]


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("programs", [1, 2, 7, 12, 40, 300])
@pytest.mark.parametrize(
    "lengths", [[0], [700], [0, 40, 0, 1000, 333], [200] * 4, [90, *[1000] * 11], [320, *[32] * 11], [250, 40] * 150]
)
def test_stretches_of_reading(lengths: list[int], programs: int, heads: int) -> None:
    tile, most_units, selector = Tile(32, 4, 1, 1), 100, selector_of(4, QuantizedMean)
    workspace = StepWorkspace.allocate(len(lengths), 2, 32, torch.float32, selector, DEVICE, heads, tile, programs)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    paged.plan_step(contexts, torch.full_like(contexts, 320), selector, most_units, workspace)
    *sums, share = workspace.read_before_R.tolist()
    tiles = [-(-min(length if length <= 320 else 320, 4 * most_units) // 32) for length in lengths]

    def stretches(share: int) -> int:
        return heads * sum(-(-each // share) for each in tiles)

    taken = workspace.programs(len(lengths))
    equal = max(1, -(-heads * sum(tiles) // taken))
    own = next(share for share in itertools.count(equal) if taken != programs or stretches(share) <= programs)
    if taken != programs or own > equal + 6:
        assert share == equal
        assert sums == [0, *itertools.accumulate(tiles)]
    else:
        assert share == own, "each has a program, and none reads more than it must"
        assert sums == [0, *itertools.accumulate(-(-each // share) * share for each in tiles)]


@pytest.mark.parametrize(
    ("contexts", "heads", "programs", "share", "own"),
    [
        # Equal stretches, though there is a program for each (request, head).
        ([900, *[32] * 11], 1, 12, 4, False),
        # Up to five parts of one.
        ([900, 400, 0, 650], 2, 24, 6, True),
        # Six of them and five programs at a time: eight programs.
        ([700, 33], 3, 5, 9, False),
        # Short lists, and eight of them: each has a program of its own, though three run at a time.
        ([192, 0, 180, 33, 1], 2, 3, 6, "one"),
    ],
)
def test_attention_however_its_work_is_cut(
    contexts: list[int], heads: int, programs: int, share: int, own: bool | str
) -> None:
    """In three layers that read everything, half and an eighth, with memory for a larger batch."""
    cache = paged_cache(contexts, 4, heads=heads).index_written()
    requests, _, group, dim = cache.query_RHGD.shape
    budgets_LR = torch.stack([cache.context_tokens_R // part // 4 * 4 + 4 for part in (1, 2, 8)]).int()
    lists = [cache.chosen(cache.scores("reference"), budgets, 226, "reference") for budgets in budgets_LR]
    shared = StepWorkspace.allocate(
        requests + 3,
        group,
        dim,
        cache.query_RHGD.dtype,
        cache.selector,
        DEVICE,
        heads,
        Tile(32, 4, 2, 1),
        programs,
        short_lists=own == "one",
    )
    plans = LayerPlans.of(shared, 3)
    for poisoned in (plans.read_before_LR, plans.scored_before_LR, shared.arrivals_X, shared.listed_RH):
        poisoned.fill_(-1 << 30)
    paged.plan_layers(cache.context_tokens_R, budgets_LR, cache.selector, 226, plans)
    tiles = [-(-context // 32) for context in contexts]
    rows = [-(-each // share) * share for each in tiles] if own else tiles
    assert plans.read_before_LR[0, : requests + 2].tolist() == [0, *itertools.accumulate(rows), share]
    for workspace, budgets, (ids, pages) in zip(plans.workspaces, budgets_LR, lists, strict=True):
        mixed = torch.full_like(cache.query_RHGD, torch.nan)
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, ids, cache.context_tokens_R,
            budgets, cache.selector, cache.scale, mixed, workspace, "triton", pages_RHN=pages, planned=True,
        )  # fmt: skip
        assert_attends(cache, ids, mixed)


MANY = [0, 40, 900, 0, 1, 33, 0, 200, 130, 64, 17, 260, 0]
"""Of very different lengths, some within a budget of 128 tokens, with padding rows first, between and last."""


@pytest.mark.parametrize("with_pages", [True, False])
@pytest.mark.parametrize(
    ("group", "dim", "heads", "programs", "unit", "budget"),
    [
        # Lists of five tiles at most; one of 29 and others, cut into three parts and more.
        *[(1, 64, 3, 3, 4, 160), (2, 64, 2, 3, 16, 1 << 30), (5, 96, 1, 3, 4, 1 << 30), (2, 96, 3, 3, 16, 128)],
        *[(2, 64, 1, 7, 4, 1 << 30), (5, 64, 2, 1, 1, 128), (1, 32, 1, 20, 4, 1 << 30)],
    ],
)
def test_a_few_programs_read_for_many_requests(
    group: int, dim: int, heads: int, programs: int, unit: int, budget: int, with_pages: bool
) -> None:
    """In equal stretches; twice, since the first one must leave no arrivals."""
    dtype = torch.float16 if group == 2 else torch.float32
    cache = paged_cache(MANY, unit, 32 if unit == 16 else 16, heads, group, dim, dtype).index_written()
    budgets = torch.full_like(cache.context_tokens_R, budget)
    # Each has a budget of its own where there are budgets.
    budgets -= torch.arange(len(MANY), device=DEVICE).int() % 3 * 32 if budget < 1 << 30 else 0
    most = units_wanted(cache, budgets) + 1
    ids, pages = cache.chosen(cache.scores("reference"), budgets, most, "reference")
    workspace = cache.workspace(programs)
    assert workspace.own_programs(len(MANY)) is None
    paged.plan_step(cache.context_tokens_R, budgets, cache.selector, most, workspace)
    for _ in range(2):
        mixed = torch.full_like(cache.query_RHGD, torch.nan)
        workspace.mixed_XGD.fill_(torch.nan), workspace.log_sum_XG.fill_(torch.nan)
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, ids, cache.context_tokens_R,
            budgets, cache.selector, cache.scale, mixed, workspace, "triton", pages_RHN=pages if with_pages else None,
            planned=True,
        )  # fmt: skip
        assert_attends(cache, ids, mixed)
        assert not mixed[cache.context_tokens_R == 0].any() and not workspace.arrivals_X.any()


def test_an_engine_compiles_for_few_numbers_of_requests() -> None:
    from sparroll.attention.decode.triton_work_split import request_lanes

    sizes = range(1, 1025)
    assert all(request_lanes(requests) >= requests for requests in sizes)
    assert {request_lanes(requests) for requests in sizes} == {32, 64, 128, 256, 512, 1024}
    assert [request_lanes(requests) for requests in (32, 33, 65, 256, 257)] == [32, 64, 128, 256, 512]


@pytest.mark.parametrize("unit", [4, 16])
def test_more_requests_than_a_warp_has_lanes(unit: int) -> None:
    contexts = [*([1, 40, 0] * 11), 200, 17]
    kind = QuantizedMean if unit == 4 else PageMean
    cache = paged_cache(contexts, unit, heads=1, selector=selector_of(unit, kind))
    assert_same_scores(cache)
    assert_same_attention(cache, programs=7)


def test_choice_over_the_whole_range_of_floats() -> None:
    cache = paged_cache([4097])
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 2, cache.units, generator=generator)
    scores[0, 0] *= torch.logspace(-44, 37, cache.units)
    scores[0, 1, ::3] = torch.inf
    scores[0, 1, 1::3] = -torch.inf
    for budget in (16, 160, 1600, 3200, 4096):
        assert_same_choice(cache, scores.to(DEVICE), torch.tensor([budget], device=DEVICE), 257)


@pytest.mark.parametrize("units", [8191, 8193, 32_768])
def test_choice_among_more_units_than_a_program_holds(units: int) -> None:
    cache = paged_cache([units, units - 1], unit=1, heads=1)
    generator = torch.Generator().manual_seed(units)
    scores = torch.randn(2, 1, units, generator=generator).to(DEVICE)
    # Many candidates at the end alone, where no lane but a few sees them.
    scores[1, 0, -units // 8 :] += 4.0
    for budgets in ([300, 512], [2000, 700], [units - 1, 1]):
        assert_same_choice(cache, scores, torch.tensor(budgets, device=DEVICE), max(budgets))


@pytest.mark.parametrize("lanes", [256, 2048])
def test_units_are_chosen_alike_whether_all_have_lanes_or_candidates_are_made(lanes: int) -> None:
    from sparroll.attention.decode.choice import triton_top_k

    cache = paged_cache([3000, 2049, 2048, 31], unit=1, heads=1)
    generator = torch.Generator().manual_seed(lanes)
    scores = torch.randn(4, 1, cache.units, generator=generator).to(DEVICE)
    budgets = torch.tensor([100, 2000, 1, 30], device=DEVICE)
    expected, pages = cache.chosen(scores, budgets, 2000, "reference")
    ids, its_pages = (torch.full_like(expected, 7) for _ in range(2))
    triton_top_k.choose_units(
        scores, cache.context_tokens_R, budgets, cache.selector, ids, its_pages, cache.block_table_RM,
        cache.index_PSHW.shape[1], layout=triton_top_k.ChoiceLayout(warps=4, lanes=lanes, rows=4),
    )  # fmt: skip
    assert torch.equal(ids, expected) and torch.equal(its_pages, pages)


def test_more_equal_scores_than_there_is_room_for_candidates() -> None:
    cache = paged_cache([9000, 8999, 9000], unit=1, heads=1)
    scores = torch.zeros(3, 1, 9000, device=DEVICE)
    scores[1, 0, 5::3] = torch.nan
    scores[2, 0, ::2], scores[2, 0, 8001] = -0.0, 1.0
    assert_same_choice(cache, scores, torch.tensor([400, 401, 8800], device=DEVICE), 8800)


def test_a_full_budget_reads_no_scores_and_a_larger_list_than_units_is_filled_up() -> None:
    cache = paged_cache(ODD_CONTEXTS)
    scores = torch.full((len(ODD_CONTEXTS), 2, cache.units), torch.nan, device=DEVICE)
    budgets = torch.full((len(ODD_CONTEXTS),), 1 << 30, dtype=torch.int32, device=DEVICE)
    assert_same_choice(cache, scores, budgets, cache.units + 7)


def assert_same_attention(cache: PagedCache, programs: int | None = None, seed: int = 0) -> None:
    cache.index_written()
    budgets = budgets_of(cache, seed)
    most = units_wanted(cache, budgets) + 1
    ids, pages = cache.chosen(cache.scores("reference"), budgets, most, "reference")
    mixed = cache.attended(ids, budgets, "triton", programs, pages)
    assert_attends(cache, ids, mixed)
    assert_attends(cache, ids, cache.attended(ids, budgets, "reference"))
    assert not mixed[cache.context_tokens_R == 0].any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("unit", "block_tokens"), UNITS_AND_BLOCKS)
def test_decode_at_every_unit_and_block(unit: int, block_tokens: int, layout: str) -> None:
    assert_same_attention(paged_cache(SHORT_CONTEXTS, unit, block_tokens, layout=layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_decode_at_every_head_size_and_group(group: int, dim: int) -> None:
    assert_same_attention(
        paged_cache([17, 0, 200], group=group, dim=dim, dtype=DOT_DTYPES[(group + dim // 32) % len(DOT_DTYPES)])
    )


@pytest.mark.parametrize("programs", [1, 2, 7, 16, 100, 1000])
@pytest.mark.parametrize("dtype", DOT_DTYPES)
def test_decode_at_odd_contexts_and_any_number_of_programs(dtype: torch.dtype, programs: int) -> None:
    assert_same_attention(paged_cache(ODD_CONTEXTS, dtype=dtype, block_tokens=32), programs, seed=programs)


@pytest.mark.parametrize("block_tokens", [16, 64])
def test_full_budget_equals_dense(block_tokens: int) -> None:
    cache = paged_cache(ODD_CONTEXTS, block_tokens=block_tokens, group=3, heads=1)
    budgets = torch.full((len(ODD_CONTEXTS),), 1 << 30, dtype=torch.int32, device=DEVICE)
    scores = torch.full((len(ODD_CONTEXTS), 1, cache.units), torch.nan, device=DEVICE)
    ids, pages = cache.chosen(scores, budgets, cache.units, "triton")
    mixed = cache.attended(ids, budgets, "triton", pages_RHN=pages)
    for row, context in enumerate(ODD_CONTEXTS):
        dense = torch.nn.functional.scaled_dot_product_attention(
            cache.query_RHGD[row], cache.keys_RHCD[row, :, :context], cache.values_RHCD[row, :, :context]
        )
        torch.testing.assert_close(mixed[row], dense if context else torch.zeros_like(dense), atol=2e-5, rtol=0)


def test_pages_spare_work_and_change_nothing() -> None:
    cache = paged_cache(SHORT_CONTEXTS, unit=4, block_tokens=32).index_written()
    budgets = budgets_of(cache)
    ids, pages = cache.chosen(cache.scores("reference"), budgets, units_wanted(cache, budgets) + 3, "reference")
    plain = cache.attended(ids, budgets, "triton")
    assert_attends(cache, ids, plain)
    assert torch.equal(cache.attended(ids, budgets, "triton", pages_RHN=pages), plain)


def test_what_lies_past_the_budget_is_not_read() -> None:
    cache = paged_cache(SHORT_CONTEXTS).index_written()
    budgets = budgets_of(cache)
    ids, pages = cache.chosen(cache.scores("reference"), budgets, units_wanted(cache, budgets) + 3, "reference")
    rubbish = (torch.where(held == -1, 1 << 20, held) for held in (ids, pages))
    assert_attends(cache, ids, cache.attended(next(rubbish), budgets, "triton", pages_RHN=next(rubbish)))


def test_blocks_may_hold_any_number_of_units() -> None:
    for unit, block_tokens in ((16, 48), (4, 24), (1, 7)):
        assert_same_attention(paged_cache([100, 17, 0, 200], unit, block_tokens))


def test_layers_follow_each_other_and_what_lay_in_the_workspace_before_the_plan_does_not_count() -> None:
    cache = paged_cache([17, 0, 100, 1, 111, 257], 4).index_written()
    budgets = budgets_of(cache)
    ids, pages = cache.chosen(cache.scores("reference"), budgets, units_wanted(cache, budgets), "reference")
    workspace = cache.workspace(programs=40)
    workspace.arrivals_X.fill_(7)
    paged.plan_step(cache.context_tokens_R, budgets, cache.selector, ids.shape[2], workspace)
    for _ in range(2):
        out = torch.full_like(cache.query_RHGD, torch.nan)
        workspace.mixed_XGD.fill_(torch.nan), workspace.log_sum_XG.fill_(torch.nan)
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, ids, cache.context_tokens_R,
            budgets, cache.selector, cache.scale, out, workspace, "triton", pages_RHN=pages, planned=True,
        )  # fmt: skip
        assert_attends(cache, ids, out)
        assert not workspace.arrivals_X.any()


def test_each_head_reads_the_units_that_it_lists_the_incomplete_one_among_them_or_not() -> None:
    cache = paged_cache([100, 111])
    ids = torch.tensor([[[0, 2, 5, 6], [0, 1, 2, 3]], [[1, 3, 4, 5], [0, 4, 5, 6]]], device=DEVICE).int()
    budgets = torch.tensor([64, 64], dtype=torch.int32, device=DEVICE)
    assert_attends(cache, ids, cache.attended(ids, budgets, "triton"))


@pytest.mark.parametrize("ids", [[6, 2, 0, 1], [0, 2, 2, 6], [0, 2, 6, -1]])
def test_a_list_that_does_not_rise_is_no_list_of_units(ids: list[int]) -> None:
    cache = paged_cache([100])
    budgets = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError, match="does not rise"):
        cache.attended(torch.tensor([[ids, [0, 2, 5, 6]]], device=DEVICE).int(), budgets, "reference")


@pytest.mark.gpu
def test_all_operations_replay_in_one_cuda_graph_at_other_lengths_and_budgets() -> None:
    cache = paged_cache(ODD_CONTEXTS, dim=128, dtype=torch.bfloat16).index_written()
    longest, budgets = cache.context_tokens_R.clone(), budgets_of(cache)
    most = units_wanted(cache, torch.full_like(budgets, 1024))
    scores, out = cache.scores("triton"), torch.full_like(cache.query_RHGD, torch.nan)
    ids, pages = cache.chosen(scores, budgets, most, "triton")
    requests, workspace = len(out), cache.workspace()
    slots = cache.slots()[-requests:].clone()

    def step() -> None:
        paged.update_index(cache.keys_PBHD, cache.index_PSHW, slots, cache.selector, "triton")
        paged.score_units(
            cache.query_RHGD, cache.index_PSHW, cache.block_table_RM, cache.context_tokens_R, cache.selector, scores,
            "triton", kv_budget_tokens_R=budgets, workspace=workspace,
        )  # fmt: skip
        paged.choose_units(
            scores, cache.context_tokens_R, budgets, cache.selector, ids, "triton", pages_RHN=pages,
            block_table_RM=cache.block_table_RM, units_per_block=1,
        )  # fmt: skip
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, ids, cache.context_tokens_R,
            budgets, cache.selector, cache.scale, out, workspace, "triton", pages_RHN=pages,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        shorter = torch.rand(requests, generator=generator).to(DEVICE)
        cache.context_tokens_R.copy_((longest * shorter).int())
        budgets.copy_(budgets_of(cache, seed))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_attends(cache, ids, out)
        expected, _ = cache.chosen(cache.scores("triton"), budgets, most, "reference")
        assert torch.equal(ids, expected)
