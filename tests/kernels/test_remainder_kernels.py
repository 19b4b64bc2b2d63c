"""The kernels of a remainder against the paged reference, over poisoned memory: rows of groups, and attention with what is
not read. Compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE, PagedCache, paged_cache, units_wanted
from sparroll.attention.decode import paged, workspace
from sparroll.attention.decode.workspace import StepWorkspace, log_weights_for
from sparroll.attention.selectors import PageMean, QuantizedMean, Remainder, Selector
from sparroll.errors import UserError

pytest.importorskip("triton", reason="triton runs on Linux only")

from sparroll.attention.decode.remainder.triton_unread import UnreadLayout

CONTEXTS = [1, 17, 0, 63, 64, 130, 333, 700, 0]
BYTES_OF_A_ROW_UNUSED = 255
# The interpreter multiplies the bits of bf16 matrices instead of their values.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32, torch.float16]


def remainder_of(unit: int, bits: int | None, group: int, values: str) -> Selector:
    settings: dict[str, Any] = {
        "page_tokens": unit,
        "first_tokens": 16,
        "recent_tokens": max(32, group),
        "remainder": Remainder(group, values),
    }
    return PageMean(**settings) if bits is None else QuantizedMean(bits=bits, **settings)


SELECTORS = [
    remainder_of(16, None, 16, "bf16"),
    remainder_of(16, None, 64, "fp8"),
    remainder_of(4, None, 32, "bf16"),
    remainder_of(8, 8, 16, "fp8"),
    remainder_of(4, 4, 16, "bf16"),
    remainder_of(4, 4, 64, "fp8"),
    remainder_of(2, 2, 32, "fp8"),
    remainder_of(2, 2, 64, "fp8"),
    remainder_of(1, 1, 16, "fp8"),
    remainder_of(1, 2, 64, "bf16"),
    remainder_of(16, 4, 16, "fp8"),
    remainder_of(1, 4, 32, "bf16"),
    remainder_of(4, 2, 16, "fp8"),
]
WEIGHED = [selector for selector in SELECTORS if selector.weighed_with_scores]


def name_of(selector: Selector) -> str:
    assert selector.remainder is not None
    bits, kept = getattr(selector, "bits", 16), selector.remainder
    return f"{selector.kind}-{selector.page_tokens}-{bits}-{kept.group_tokens}-{kept.values}"


each_selector = pytest.mark.parametrize("selector", SELECTORS, ids=name_of)


@dataclass
class WithGroups:
    cache: PagedCache
    groups_PSHV: Tensor

    @staticmethod
    def of(selector: Selector, contexts: list[int] = CONTEXTS, impl: str = "reference", **settings: Any) -> WithGroups:
        """Every row of a group that is not complete is NaN, whichever way it is read."""
        cache = paged_cache(contexts, block_tokens=64, selector=selector, **settings)
        assert selector.remainder is not None
        blocks, block_tokens, heads, dim = cache.keys_PBHD.shape
        held = (blocks, heads, block_tokens // selector.remainder.group_tokens, selector.group_width(dim))
        groups = torch.full(held, BYTES_OF_A_ROW_UNUSED, dtype=torch.uint8, device=DEVICE).transpose(1, 2)
        paged.update_groups(cache.keys_PBHD, cache.values_PBHD, groups, cache.slots(), selector, impl)
        return WithGroups(_rows_stand_together(cache).index_written(), groups)

    def log_weights(self, impl: str, budgets: Tensor | None = None) -> Tensor | None:
        """What scoring writes, over NaN; None where it weighs no groups."""
        requests, heads, group, _ = self.cache.query_RHGD.shape
        log_weights = log_weights_for(self.cache.selector, requests, heads, group, self.cache.units, DEVICE)
        if log_weights is not None:
            self.cache.scores(
                impl, kv_budget_tokens_R=budgets, groups_PSHV=self.groups_PSHV,
                log_weights_RHGN=log_weights.fill_(torch.nan),
            )  # fmt: skip
        return log_weights

    def attended(self, ids: Tensor, budgets: Tensor, impl: str, **settings: Any) -> Tensor:
        weights = self.log_weights(impl, budgets) if impl == "triton" else None
        return self.cache.attended(
            ids, budgets, impl, groups_PSHV=self.groups_PSHV, log_weights_RHGN=weights, **settings
        )

    def chosen(self, budgets: Tensor, spare: int = 3) -> Tensor:
        """Ascending, with rubbish behind the end of each list."""
        most = units_wanted(self.cache, budgets) + spare
        ids, _ = self.cache.chosen(self.cache.scores("reference"), budgets, most, "reference")
        return ids.masked_fill(ids < 0, 1 << 30)


def _rows_stand_together(cache: PagedCache) -> PagedCache:
    """With the rows of a block's head next to each other, as an engine has them."""
    return dataclasses.replace(cache, index_PSHW=cache.index_PSHW.transpose(1, 2).contiguous().transpose(1, 2))


def _written_anew(cache: WithGroups) -> WithGroups:
    """After its keys changed."""
    held, selector = cache.cache, cache.cache.selector
    paged.update_groups(held.keys_PBHD, held.values_PBHD, cache.groups_PSHV, held.slots(), selector)
    return WithGroups(held.index_written(), cache.groups_PSHV)


def differs(found: Tensor, expected: Tensor) -> Tensor:
    """[R] of each request: the norm of the error / that of the output. Weights are rounded to the cache's type before they
    meet V, and the output is."""
    error, size = ((held.double().flatten(1).norm(dim=1)) for held in (found.double() - expected.double(), expected))
    return error / size.clamp_min(1e-9)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert not found.isnan().any(), "NaN in the output"
    off, allowed = differs(found, expected), max(2e-5, 2 * torch.finfo(found.dtype).eps)
    assert (off <= allowed).all(), f"off by {off.tolist()}, allowed {allowed:.1e}"


@each_selector
@pytest.mark.parametrize("dim", [64, 96])
def test_rows_of_groups_are_those_of_the_reference(selector: Selector, dim: int) -> None:
    expected, found = (WithGroups.of(selector, impl=impl, dim=dim).groups_PSHV for impl in ("reference", "triton"))
    assert selector.remainder is not None
    spreads_at, units = selector.remainder.spreads_at(dim), selector.units_per_group
    written = (expected != BYTES_OF_A_ROW_UNUSED).any(-1)
    assert int(written.sum()) == 2 * sum(context // selector.remainder.group_tokens for context in CONTEXTS)
    if selector.remainder.values == "fp8" or DEVICE == "cuda":
        assert torch.equal(found[..., :spreads_at], expected[..., :spreads_at])
    else:
        # The interpreter cuts bits off where it should round to bf16.
        means = [rows[written][:, : 2 * dim].contiguous().view(torch.bfloat16) for rows in (found, expected)]
        torch.testing.assert_close(*means, rtol=2**-7, atol=0)
    assert (found[~written] == BYTES_OF_A_ROW_UNUSED).all()
    spreads = [selector.remainder.spread(rows[written], dim, units) for rows in (found, expected)]
    # Sums in another order, then rounded to bf16.
    torch.testing.assert_close(*spreads, rtol=2**-7, atol=0)


@pytest.mark.parametrize("selector", WEIGHED, ids=name_of)
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 1)])
def test_scoring_weighs_every_group_as_the_reference_does(selector: Selector, dim: int, group: int) -> None:
    cache = WithGroups.of(selector, [130, 0, 17, 433], dim=dim, group=group)
    expected, found = cache.log_weights("reference"), cache.log_weights("triton")
    assert expected is not None and found is not None
    # Groups past a request's last tile are left as they are.
    weighs = expected > -torch.inf
    assert weighs.any() and torch.equal(found > -torch.inf, weighs) and not (found == torch.inf).any()
    torch.testing.assert_close(found[weighs], expected[weighs], atol=2e-5, rtol=0)


@pytest.mark.parametrize("selector", [SELECTORS[5], SELECTORS[8]], ids=name_of)
def test_weighing_groups_changes_no_score_and_leaves_requests_within_their_budget_alone(selector: Selector) -> None:
    cache = WithGroups.of(selector, [300, 0, 1001, 64, 700], dim=64)
    units, held = cache.cache.units, cache.cache
    budgets = torch.tensor([304, 64, 256, 64, 128], dtype=torch.int32, device=DEVICE)
    weights = log_weights_for(selector, 5, 2, 2, units, DEVICE)
    assert weights is not None
    peaks, expected_peaks = torch.zeros(2, 5, 2, -(-units // 8), dtype=torch.int32, device=DEVICE)
    scores = held.scores(
        "triton", kv_budget_tokens_R=budgets, groups_PSHV=cache.groups_PSHV, log_weights_RHGN=weights.fill_(torch.nan),
        peaks_RHK=peaks,
    )  # fmt: skip
    bare = dataclasses.replace(held, selector=dataclasses.replace(selector, remainder=None))
    expected = bare.scores("triton", kv_budget_tokens_R=budgets, peaks_RHK=expected_peaks)
    for row, context in enumerate(held.contexts):
        its_units = -(-context // selector.unit_tokens)
        assert torch.equal(scores[row, :, :its_units].isnan(), expected[row, :, :its_units].isnan())
        assert torch.equal(scores[row, :, :its_units].nan_to_num(), expected[row, :, :its_units].nan_to_num())
        assert torch.equal(peaks[row, :, : its_units // 8], expected_peaks[row, :, : its_units // 8])
    written = ~weights.isnan().all(-1).all(-1).all(-1)
    assert written.tolist() == [False, False, True, False, True]


@each_selector
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_a_remainder_is_that_of_the_reference(selector: Selector, dtype: torch.dtype) -> None:
    cache = WithGroups.of(selector, dtype=dtype, dim=64)
    unit, a_third = selector.unit_tokens, cache.cache.context_tokens_R // 3
    budgets = (a_third // unit * unit).clamp_min(selector.least_budget_tokens)
    ids = cache.chosen(budgets)
    expected = cache.attended(ids, budgets, "reference")
    assert_same(cache.attended(ids, budgets, "triton"), expected)
    # Attention to what is read alone would not pass.
    bare = dataclasses.replace(cache.cache, selector=dataclasses.replace(selector, remainder=None))
    much_is_left_out = cache.cache.context_tokens_R > 1.5 * budgets
    off = differs(bare.attended(ids, budgets, "triton"), expected)[much_is_left_out]
    assert len(off) and off.min() > 0.05


@pytest.mark.parametrize("dim", [32, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_every_head_size_and_group_of_query_heads(group: int, dim: int) -> None:
    selector = SELECTORS[(group + dim // 32) % len(SELECTORS)]
    dtype = DTYPES[(group + dim // 32) % len(DTYPES)]
    cache = WithGroups.of(selector, [17, 0, 200, 400], group=group, dim=dim, dtype=dtype)
    budgets = torch.full((4,), 128, dtype=torch.int32, device=DEVICE)
    ids = cache.chosen(budgets)
    assert_same(cache.attended(ids, budgets, "triton"), cache.attended(ids, budgets, "reference"))


@pytest.mark.parametrize("selector", [SELECTORS[0], SELECTORS[5], SELECTORS[7]])
def test_within_the_budget_it_is_attention_to_everything(selector: Selector) -> None:
    cache = WithGroups.of(selector, [1, 100, 0, 333])
    budgets = torch.full((4,), 336, dtype=torch.int32, device=DEVICE)
    ids = cache.chosen(budgets)
    bare = dataclasses.replace(cache.cache, selector=dataclasses.replace(selector, remainder=None))
    assert_same(cache.attended(ids, budgets, "triton"), bare.attended(ids, budgets, "reference"))


@pytest.mark.parametrize("programs", [1, 7, 64])
def test_however_the_reading_is_cut(programs: int) -> None:
    """Pairs that one program reads whole, and pairs that several share: what is not read counts once."""
    cache = WithGroups.of(SELECTORS[5], [700, 40, 0, 1500], dim=64)
    budgets = torch.tensor([300, 64, 64, 800], dtype=torch.int32, device=DEVICE)
    ids = cache.chosen(budgets)
    expected = cache.attended(ids, budgets, "reference")
    assert_same(cache.attended(ids, budgets, "triton", programs=programs), expected)


def test_units_that_stand_close_in_the_list_are_all_found() -> None:
    """More chosen units in one tile than are compared at a time, and tiles without any."""
    selector = SELECTORS[8]
    cache = WithGroups.of(selector, [900], dim=64)
    budgets = torch.tensor([200], dtype=torch.int32, device=DEVICE)
    ids = torch.cat([torch.arange(16), torch.arange(300, 452), torch.arange(868, 900)]).int().to(DEVICE)
    ids = ids.expand(1, 2, -1).contiguous()
    assert_same(cache.attended(ids, budgets, "triton"), cache.attended(ids, budgets, "reference"))


@pytest.mark.parametrize("selector", [*WEIGHED[:3], WEIGHED[4]], ids=name_of)
def test_all_that_is_chosen_is_read_anyway(selector: Selector) -> None:
    """Every unit that competes is unread."""
    cache = WithGroups.of(selector, [700, 100, 0, 333], dim=64)
    anyway = selector.first_tokens + selector.recent_tokens
    budgets = torch.full((4,), anyway, dtype=torch.int32, device=DEVICE)
    unit, first = selector.unit_tokens, selector.first_tokens // selector.unit_tokens
    units = -(-cache.cache.context_tokens_R[:, None] // unit)
    column = torch.arange(anyway // unit, device=DEVICE)
    ids = torch.where(column < first, column, units - anyway // unit + column).int()
    ids = ids[:, None].expand(-1, 2, -1).contiguous()
    assert_same(cache.attended(ids, budgets, "triton"), cache.attended(ids, budgets, "reference"))


@pytest.mark.parametrize("selector", WEIGHED[:4], ids=name_of)
@pytest.mark.parametrize("left_out", [1, 3])
def test_groups_that_are_read_whole_weigh_nothing_however_heavy_they_are(selector: Selector, left_out: int) -> None:
    """All units but some of one light group are read. What rounding leaves of the other groups would outweigh these."""
    cache = WithGroups.of(selector, [400], dim=64)
    light = cache.cache.slots()[192:256]
    cache.cache.keys_PBHD.mul_(6.0)
    cache.cache.keys_PBHD[light // 64, light % 64] /= 12.0
    cache = _written_anew(cache)
    unit, units = selector.unit_tokens, 400 // selector.unit_tokens
    unread = torch.arange(left_out) + 192 // unit
    every = torch.arange(units)
    ids = every[~torch.isin(every, unread)].int().to(DEVICE).expand(1, 2, -1).contiguous()
    budgets = torch.tensor([unit * (units - left_out)], dtype=torch.int32, device=DEVICE)
    found, expected = (cache.attended(ids, budgets, impl) for impl in ("triton", "reference"))
    assert_same(found, expected)


@pytest.mark.parametrize("layout", [UnreadLayout(2, 32, 32), UnreadLayout(4, 16, 64)], ids=str)
@pytest.mark.parametrize("tile", [64, 256])
def test_however_scoring_and_summing_up_are_cut(layout: UnreadLayout, tile: int, monkeypatch) -> None:
    cache = WithGroups.of(SELECTORS[7], [1500, 0, 333], dim=64)
    budgets = torch.tensor([300, 96, 128], dtype=torch.int32, device=DEVICE)
    ids = cache.chosen(budgets)
    expected = cache.attended(ids, budgets, "reference")
    monkeypatch.setattr(UnreadLayout, "default", lambda unit_tokens: layout)
    monkeypatch.setattr(workspace, "default_scored_tile", lambda *_: tile)
    assert_same(cache.attended(ids, budgets, "triton"), expected)


@pytest.mark.parametrize("selector", [SELECTORS[5], SELECTORS[8]], ids=name_of)
def test_a_query_head_that_is_not_a_number_spoils_no_other(selector: Selector) -> None:
    cache = WithGroups.of(selector, [300, 70, 0], dim=64, group=3)
    budgets = torch.tensor([128, 72, 128], dtype=torch.int32, device=DEVICE)
    ids = cache.chosen(budgets)
    expected = cache.attended(ids, budgets, "reference")
    cache.cache.query_RHGD[0, 0, 1, 5], cache.cache.query_RHGD[0, 1, 2, 9] = torch.inf, torch.nan
    found = cache.attended(ids, budgets, "triton")
    spoiled = torch.zeros(3, 2, 3, dtype=torch.bool, device=DEVICE)
    spoiled[0, 0, 1] = spoiled[0, 1, 2] = True
    assert torch.equal(found.isnan().any(-1), spoiled)
    assert_same(*(output.masked_fill(spoiled[..., None], 0.0) for output in (found, expected)))


def test_a_nan_in_v_does_not_disappear() -> None:
    selector = SELECTORS[5]
    cache = paged_cache([64], block_tokens=64, selector=selector, dim=64)
    cache.values_PBHD[cache.block_table_RM[0, 0].long(), 5, 1, 7] = torch.nan
    assert selector.remainder is not None
    rows = []
    for impl in ("reference", "triton"):
        groups = torch.zeros(
            *cache.keys_PBHD.shape[:1], 1, 2, selector.group_width(64), dtype=torch.uint8, device=DEVICE
        )
        paged.update_groups(cache.keys_PBHD, cache.values_PBHD, groups, cache.slots(), selector, impl)
        rows.append(selector.remainder.means(groups[cache.block_table_RM[0, 0].long(), 0], 64))
    assert rows[0][1].isnan().all() and rows[1][1].isnan().all() and torch.equal(rows[1][0], rows[0][0])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_what_lies_behind_a_requests_blocks_is_not_read(impl: str) -> None:
    cache = WithGroups.of(SELECTORS[5], [70, 700, 0], dim=64)
    budgets = torch.tensor([84, 128, 84], dtype=torch.int32, device=DEVICE)
    ids = cache.chosen(budgets)
    expected = cache.attended(ids, budgets, impl)
    table = cache.cache.block_table_RM
    needed = -(-cache.cache.context_tokens_R // 64)
    table[torch.arange(table.shape[1], device=DEVICE) >= needed[:, None]] = 1_000_000
    torch.testing.assert_close(cache.attended(ids, budgets, impl), expected)


def test_a_head_of_its_own_and_no_complete_group() -> None:
    """Most decode steps complete no group."""
    cache = paged_cache([70], block_tokens=64, selector=SELECTORS[5], heads=1, dim=64)
    groups = torch.full((len(cache.keys_PBHD), 1, 1, SELECTORS[5].group_width(64)), 7, dtype=torch.uint8, device=DEVICE)
    for impl in ("reference", "triton"):
        paged.update_groups(cache.keys_PBHD, cache.values_PBHD, groups, cache.slots()[64:66], SELECTORS[5], impl)
    assert (groups == 7).all()


def test_a_workspace_for_something_else_is_refused() -> None:
    cache = WithGroups.of(SELECTORS[5], [700] * 40, dim=64)
    budgets = torch.full((40,), 128, dtype=torch.int32, device=DEVICE)
    ids, shape = cache.chosen(budgets), (40, 2, 64, torch.float32)
    held = cache.cache
    bare = dataclasses.replace(SELECTORS[5], remainder=None)
    fitting = StepWorkspace.allocate(*shape, SELECTORS[5], DEVICE, kv_heads=2)
    weights = log_weights_for(SELECTORS[5], 40, 2, 2, held.units, DEVICE)
    for its in (
        StepWorkspace.allocate(*shape, bare, DEVICE, kv_heads=2),
        dataclasses.replace(fitting, unread_log_sum_XG=fitting.unread_log_sum_XG[:79]),
        dataclasses.replace(fitting, unread_tile_units=8),
    ):
        with pytest.raises(UserError, match="not for this remainder"):
            paged.paged_decode(
                held.query_RHGD, held.keys_PBHD, held.values_PBHD, held.block_table_RM, ids, held.context_tokens_R, budgets,
                SELECTORS[5], held.scale, torch.empty_like(held.query_RHGD), its, "triton",
                index_PSHW=held.index_PSHW, groups_PSHV=cache.groups_PSHV, log_weights_RHGN=weights,
            )  # fmt: skip


def test_kernels_need_the_weights_of_groups_and_say_so() -> None:
    cache, other = WithGroups.of(SELECTORS[5], [300], dim=64), WithGroups.of(SELECTORS[0], [300], dim=64)
    budgets = torch.tensor([128], dtype=torch.int32, device=DEVICE)
    with pytest.raises(UserError, match="needs log_weights_RHGN"):
        cache.cache.scores("triton")
    with pytest.raises(UserError, match="needs log_weights_RHGN"):
        cache.cache.attended(cache.chosen(budgets), budgets, "triton", groups_PSHV=cache.groups_PSHV)
    weights = log_weights_for(SELECTORS[5], 1, 2, 2, cache.cache.units, DEVICE)
    assert weights is not None and log_weights_for(SELECTORS[0], 1, 2, 2, 400, DEVICE) is None
    with pytest.raises(UserError, match="needs groups_PSHV"):
        cache.cache.scores("triton", log_weights_RHGN=weights)
    with pytest.raises(UserError, match="log_weights_RHGN must have shape"):
        cache.cache.scores("triton", log_weights_RHGN=weights[..., 1:], groups_PSHV=cache.groups_PSHV)
    with pytest.raises(UserError, match="no groups are weighed"):
        other.cache.scores("reference", log_weights_RHGN=weights, groups_PSHV=other.groups_PSHV)


def test_groups_and_blocks_that_do_not_fit_are_refused() -> None:
    cache = WithGroups.of(SELECTORS[4], [70])
    strange = dataclasses.replace(SELECTORS[4], recent_tokens=48, remainder=Remainder(48))
    with pytest.raises(UserError, match="groups of 1, 2, 4, ... units, got 12"):
        StepWorkspace.allocate(1, 2, 32, torch.float32, strange, DEVICE, kv_heads=2)
    held, slots = (cache.cache.keys_PBHD, cache.cache.values_PBHD), cache.cache.slots()
    width = SELECTORS[4].group_width(32)
    shifted = torch.zeros(*cache.groups_PSHV.shape[:3], width + 1, dtype=torch.uint8, device=DEVICE)[..., 1:]
    with pytest.raises(UserError, match="multiples of 4 bytes"):
        paged.update_groups(*held, shifted, slots, SELECTORS[4])
    with pytest.raises(UserError, match="groups_PSHV must have shape"):
        paged.update_groups(*held, cache.groups_PSHV[:, :1], slots, SELECTORS[4])
    ids, budgets = torch.zeros(1, 2, 4, dtype=torch.int32), torch.tensor([64])
    with pytest.raises(UserError, match="needs index_PSHW and groups_PSHV"):
        cache.cache.attended(ids, budgets, "reference")
