"""Keys and values that are stored by the kernel that scores."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
import torch

from paged_caches import DEVICE, PagedCache, budgets_of, paged_cache
from sparroll.attention.decode import paged
from sparroll.attention.decode.new_tokens import NewTokens
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.attention.selectors.base import Selector
from sparroll.errors import UserError

pytest.importorskip("triton", reason="triton runs on Linux only")

CONTEXTS = [17, 0, 100, 257, 1]
SMALL = QuantizedMean(4, 16, 32, bits=2)
CASES: list[tuple[Selector, Literal["token_head", "head_token"]]] = [
    (PageMean(16, 16, 32), "token_head"),
    (PageMean(16, 16, 32), "head_token"),
    (QuantizedMean(16, 16, 32, bits=8), "head_token"),
    (SMALL, "head_token"),
]


def newest(cache: PagedCache, requests: int | None = None) -> NewTokens:
    """The last token of each context (in views with strides of their own), padding where there is none, and NaN in its place
    in the cache."""
    block_tokens, slots = cache.keys_PBHD.shape[1], []
    for row, context in enumerate(cache.contexts[:requests]):
        at = context - 1
        slots.append(
            int(cache.block_table_RM[row, at // block_tokens]) * block_tokens + at % block_tokens if context else -1
        )
    slots_T = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    new = NewTokens.held_at(slots_T, cache.keys_PBHD, cache.values_PBHD)
    both, dim = torch.cat((new.keys_THD, new.values_THD), dim=2), cache.keys_PBHD.shape[3]
    cache.keys_PBHD[new.places] = cache.values_PBHD[new.places] = torch.nan
    return dataclasses.replace(new, keys_THD=both[..., :dim], values_THD=both[..., dim:])


def score(
    cache: PagedCache, new_tokens: NewTokens | None, impl: str = "triton", budget: int | None = None
) -> torch.Tensor:
    scores = torch.full((*cache.query_RHGD.shape[:2], cache.units), torch.nan, device=DEVICE)
    budgets = None if budget is None else torch.full_like(cache.context_tokens_R, budget)
    paged.score_units(
        cache.query_RHGD, cache.index_PSHW, cache.block_table_RM, cache.context_tokens_R, cache.selector, scores, impl,
        kv_budget_tokens_R=budgets, workspace=cache.workspace(), new_tokens=new_tokens,
    )  # fmt: skip
    return scores


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(("selector", "layout"), CASES)
def test_new_tokens_are_stored_and_scores_do_not_change(
    selector: Selector, layout: Literal["token_head", "head_token"], impl: str
) -> None:
    dtype = torch.bfloat16 if selector is SMALL else torch.float32
    cache = paged_cache(CONTEXTS, block_tokens=32, heads=3, dim=48, dtype=dtype, layout=layout, selector=selector)
    cache.index_written()
    before = cache.keys_PBHD.clone(), cache.values_PBHD.clone()
    expected = score(cache, None, impl)
    found = score(cache, newest(cache), impl)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    for held, was in zip((cache.keys_PBHD, cache.values_PBHD), before, strict=True):
        assert torch.equal(held.nan_to_num(-1.0), was.nan_to_num(-1.0))


def test_they_are_stored_where_nothing_is_scored_and_where_there_are_more_of_them_than_programs() -> None:
    """Contexts within their budgets; a device of one multiprocessor."""
    cache = paged_cache([33] * 40, layout="head_token", selector=SMALL).index_written()
    before = cache.keys_PBHD.clone(), cache.values_PBHD.clone()
    new_tokens, workspace = newest(cache), cache.workspace()
    scores = torch.full((*cache.query_RHGD.shape[:2], cache.units), torch.nan, device=DEVICE)
    paged.score_units(
        cache.query_RHGD, cache.index_PSHW, cache.block_table_RM, cache.context_tokens_R, cache.selector, scores, "triton",
        kv_budget_tokens_R=torch.full_like(cache.context_tokens_R, 64),
        workspace=dataclasses.replace(workspace, processors=1), new_tokens=new_tokens,
    )  # fmt: skip
    assert scores.isnan().all()
    for held, was in zip((cache.keys_PBHD, cache.values_PBHD), before, strict=True):
        assert torch.equal(held.nan_to_num(-1.0), was.nan_to_num(-1.0))


def test_fewer_tokens_than_rows_are_stored() -> None:
    """vLLM pads a batch and not its slots."""
    cache = paged_cache(CONTEXTS, 16).index_written()
    before = cache.keys_PBHD.clone()
    score(cache, newest(cache, 3))
    assert torch.equal(cache.keys_PBHD.nan_to_num(-1.0), before.nan_to_num(-1.0))


def test_none_are_stored_where_there_are_none() -> None:
    cache = paged_cache(CONTEXTS, 16).index_written()
    before, scores = cache.keys_PBHD.clone(), score(cache, None)
    found = score(cache, NewTokens.none(cache.keys_PBHD, cache.values_PBHD))
    assert torch.equal(found.nan_to_num(), scores.nan_to_num())
    assert torch.equal(cache.keys_PBHD.nan_to_num(-1.0), before.nan_to_num(-1.0))


def test_attention_reads_what_was_stored_in_the_same_layer() -> None:
    cache = paged_cache([100, 40, 257], layout="head_token", selector=SMALL).index_written()
    budgets = budgets_of(cache)
    ids, pages = cache.chosen(cache.scores("triton"), budgets, cache.units, "triton")
    expected = cache.attended(ids, budgets, "triton", pages_RHN=pages)
    score(cache, newest(cache))
    assert torch.equal(cache.attended(ids, budgets, "triton", pages_RHN=pages), expected)


def test_what_cannot_be_stored_is_refused() -> None:
    cache = paged_cache([17, 100], 16).index_written()
    new = newest(cache)
    bad = {
        "keys_THD must have shape": {"keys_THD": new.keys_THD[:1]},
        "values_THD must have shape": {"values_THD": new.values_THD[..., :16]},
        "values_PBHD must have shape": {"values_PBHD": new.values_PBHD[:1]},
        "must have 2 heads of 32": {"keys_PBHD": new.keys_PBHD[:, :, :1], "values_PBHD": new.values_PBHD[:, :, :1]},
        "slots_T must be a row of whole numbers": {"slots_T": new.slots_T.float()},
        "must have the cache's type": {"keys_THD": new.keys_THD.bfloat16()},
        "contiguous in their last axis": {"keys_THD": new.keys_THD.transpose(1, 2).contiguous().transpose(1, 2)},
    }
    with pytest.raises(UserError, match="without requests no kernel is launched"):
        score(
            dataclasses.replace(
                cache,
                **{name: getattr(cache, name)[:0] for name in ("query_RHGD", "block_table_RM", "context_tokens_R")},
            ),
            new,
        )
    for message, change in bad.items():
        with pytest.raises(UserError, match=message):
            score(cache, dataclasses.replace(new, **change))
