"""The paged reference chooses and reads what the unpaged specification does, and nothing that was never written."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from paged_caches import (
    DEVICE,
    ODD_CONTEXTS,
    SHORT_CONTEXTS,
    budgets_of,
    paged_cache,
    selector_of,
    units_wanted,
)
from sparroll.attention.decode import paged, reference
from sparroll.attention.decode.workspace import StepWorkspace
from sparroll.attention.selectors import HeadSoftmax, OraclePage, PageMean, QuantizedMean, Quest, Selector, Streaming
from sparroll.errors import UserError


@dataclass(frozen=True)
class FourBits(QuantizedMean):
    bits: int = 4


@pytest.mark.parametrize("layout", ["token_head", "head_token"])
@pytest.mark.parametrize(("unit", "block_tokens"), [(16, 16), (4, 64), (1, 16)])
@pytest.mark.parametrize("kind", [PageMean, FourBits, HeadSoftmax, Quest, Streaming, OraclePage])
def test_paged_equals_unpaged(kind: type[Selector], unit: int, block_tokens: int, layout: str) -> None:
    selector = selector_of(unit, kind)
    cache = paged_cache(SHORT_CONTEXTS, block_tokens=block_tokens, group=3, layout=layout, selector=selector)  # type: ignore[arg-type]
    cache.index_written()
    budgets = budgets_of(cache)
    ids, _ = cache.chosen(cache.scores("reference"), budgets, units_wanted(cache, budgets), "reference")
    mixed = cache.attended(ids, budgets, "reference")
    index = selector.build_index(cache.keys_RHCD.unflatten(2, (-1, unit)))
    expected = reference.select(
        cache.query_RHGD[:, None], index, cache.context_tokens_R[:, None], budgets[:, None], selector, cache.scale
    )[:, 0]
    some = cache.context_tokens_R > 0
    ascending = torch.where(expected < 0, 1 << 40, expected).sort(-1).values
    assert torch.equal(torch.where(ascending == 1 << 40, -1, ascending)[some], ids.long()[some])
    unpaged = reference.sparse_decode(
        cache.query_RHGD, cache.keys_RHCD, cache.values_RHCD, ids.long(), cache.context_tokens_R, unit, cache.scale
    )
    torch.testing.assert_close(mixed[some], unpaged[some], atol=1e-6, rtol=0)
    assert not mixed[~some].any()


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_full_budget_equals_dense(block_tokens: int) -> None:
    cache = paged_cache(ODD_CONTEXTS, block_tokens=block_tokens)
    budgets = torch.full((len(ODD_CONTEXTS),), 1 << 30, dtype=torch.int32, device=DEVICE)
    # Every unit is read: scores that nobody wrote must not matter.
    scores = torch.full((len(ODD_CONTEXTS), 2, cache.units), torch.nan, device=DEVICE)
    ids, _ = cache.chosen(scores, budgets, cache.units, "reference")
    mixed = cache.attended(ids, budgets, "reference")
    for row, context in enumerate(ODD_CONTEXTS):
        if not context:
            assert not mixed[row].any()
            continue
        dense = torch.nn.functional.scaled_dot_product_attention(
            cache.query_RHGD[row], cache.keys_RHCD[row, :, :context], cache.values_RHCD[row, :, :context]
        )
        torch.testing.assert_close(mixed[row], dense, atol=1e-5, rtol=0)


def test_pages_say_where_each_unit_lies() -> None:
    cache = paged_cache(SHORT_CONTEXTS, unit=4, block_tokens=16).index_written()
    budgets = budgets_of(cache)
    ids, pages = cache.chosen(cache.scores("reference"), budgets, 80, "reference")
    for row, head, place in (ids >= 0).nonzero().tolist():
        unit, page = int(ids[row, head, place]), int(pages[row, head, place])
        assert page == int(cache.block_table_RM[row, unit // 4]) * 4 + unit % 4
    assert torch.equal(pages < 0, ids < 0)


def test_equal_scores_choose_the_lowest_units() -> None:
    cache = paged_cache([200])
    scores = torch.zeros(1, 2, cache.units, device=DEVICE)
    budgets = torch.tensor([64], dtype=torch.int32, device=DEVICE)
    ids, _ = cache.chosen(scores, budgets, 6, "reference")
    assert ids.tolist() == [[[0, 1, 2, 3, -1, -1]] * 2]


def test_a_wrong_request_is_refused_and_never_runs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = paged_cache([40])
    with pytest.raises(UserError, match="no paged attention implementation 'trition'.*\n.*triton"):
        cache.index_written("trition")
    with pytest.raises(UserError, match="blocks of 16.*\n.*use blocks of 32"):
        paged.update_index(cache.keys_PBHD, cache.index_PSHW, cache.slots(), PageMean(32, 0, 32), "reference")
    with pytest.raises(UserError, match="no triton kernel scores units for the selector 'quest'"):
        paged_cache([40], selector=selector_of(16, Quest)).scores("triton")
    with pytest.raises(UserError, match="needs a workspace"):
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM,
            torch.zeros(1, 2, 1, dtype=torch.int32, device=DEVICE), cache.context_tokens_R, cache.context_tokens_R,
            cache.selector, 1.0, torch.empty_like(cache.query_RHGD), None, "triton",
        )  # fmt: skip
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        assert "TRITON_INTERPRET" not in os.environ
        with pytest.raises(UserError, match="needs CUDA tensors, got cpu"):
            cache.scores("triton")


def test_contexts_and_budgets_must_be_contiguous_because_kernels_read_them_one_after_the_other() -> None:
    cache = paged_cache([40, 40])
    columns = torch.full((2, 2), 40, dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(2, 2, 1, dtype=torch.int32, device=DEVICE)
    scores = torch.zeros(2, 2, cache.units, device=DEVICE)
    workspace = StepWorkspace.allocate(2, 2, 32, torch.float32, cache.selector, DEVICE, kv_heads=2)
    rows, column, one = columns[0], columns[:, 0], columns[0, :1].expand(2)
    for context, budget, named in ((column, rows, "context_tokens_R"), (rows, one, "kv_budget_tokens_R")):
        with pytest.raises(UserError, match=f"the last axis of {named} must be contiguous.*\n.*contiguous()"):
            paged.plan_step(context, budget, cache.selector, 1, workspace)
        with pytest.raises(UserError, match=f"the last axis of {named} must be contiguous"):
            paged.score_units(
                cache.query_RHGD, cache.index_PSHW, cache.block_table_RM, context, cache.selector, scores,
                kv_budget_tokens_R=budget,
            )  # fmt: skip
        with pytest.raises(UserError, match=f"the last axis of {named} must be contiguous"):
            paged.choose_units(scores, context, budget, cache.selector, ids)
        with pytest.raises(UserError, match=f"the last axis of {named} must be contiguous"):
            paged.paged_decode(
                cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM, ids, context, budget,
                cache.selector, 1.0, torch.empty_like(cache.query_RHGD),
            )  # fmt: skip
    with pytest.raises(UserError, match="the last axis of slots_T must be contiguous"):
        paged.update_index(cache.keys_PBHD, cache.index_PSHW, column, cache.selector)


def test_what_an_operation_would_not_look_at_is_refused() -> None:
    cache = paged_cache([40, 40])
    workspace = StepWorkspace.allocate(2, 2, 32, torch.float32, cache.selector, DEVICE, kv_heads=2)
    with pytest.raises(UserError, match="no paged attention implementation 'trition'.*\n.*triton"):
        paged.plan_step(cache.context_tokens_R, cache.context_tokens_R, cache.selector, 1, workspace, "trition")
    with pytest.raises(UserError, match="no groups are weighed.*\n.*leave out log_weights_RHGN"):
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM,
            torch.zeros(2, 2, 1, dtype=torch.int32, device=DEVICE), cache.context_tokens_R, cache.context_tokens_R,
            cache.selector, 1.0, torch.empty_like(cache.query_RHGD), log_weights_RHGN=torch.zeros(2, 2, 2, 1),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "heads", "group", "dim"), [(1, 2, 2, 32), (2, 4, 2, 32), (2, 2, 3, 32), (2, 2, 2, 64)]
)
def test_a_workspace_for_something_else_is_refused(requests: int, heads: int, group: int, dim: int) -> None:
    cache = paged_cache([40, 40])
    other = StepWorkspace.allocate(requests, group, dim, torch.float32, cache.selector, DEVICE, kv_heads=heads)
    with pytest.raises(UserError, match=r"needed: 2 of \(2, 2, 32\)"):
        paged.paged_decode(
            cache.query_RHGD, cache.keys_PBHD, cache.values_PBHD, cache.block_table_RM,
            torch.zeros(2, 2, 1, dtype=torch.int32, device=DEVICE), cache.context_tokens_R, cache.context_tokens_R,
            cache.selector, 1.0, torch.empty_like(cache.query_RHGD), other, "triton",
        )  # fmt: skip
