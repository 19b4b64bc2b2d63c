"""The kernels for the choice of units that benchmarks/choice_sweep.py times beside the engines' own choose what the
reference does. They are compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paged_caches import DEVICE
from sparroll.attention.decode import paged
from sparroll.attention.selectors import PageMean

pytest.importorskip("triton", reason="triton runs on Linux only")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
VARIANTS: dict[str, dict[str, Any]] = {
    "as the engines' kernel": {"floats": False, "warps_own": False, "pairs": False},
    "ordered bits, warps own units": {"floats": False, "pairs": False},
    "floats": {"warps_own": False, "pairs": False, "warps": 2, "rows": 4},
    "floats, warps own units": {"pairs": False, "lane_rows": 2},
    "pairs": {"warps": 2, "rows": 4},
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import choice_kernels

    yield choice_kernels
    sys.modules.pop("choice_kernels", None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_choose_what_the_reference_does(kernels: Any, variant: str) -> None:
    units, generator = 1000, torch.Generator().manual_seed(0)
    normal, place = torch.randn(units, generator=generator), torch.arange(units)
    always = (place < 4) | (place >= units - 8)
    kinds = torch.stack(
        [
            normal,
            normal.masked_fill(always, torch.inf),
            # The best of all share their lanes with units that are always read.
            torch.where((place % 128 < 12) & (place >= 128), normal + 100, normal).masked_fill(place < 12, torch.inf),
            (normal * 20).round() / 20,
            normal.masked_fill(place % 50 == 0, torch.nan),
            -normal.abs() - 1,
        ]
    )
    # What lies past a context must not be looked at.
    scores = torch.full((len(kinds), 1, units), torch.nan)
    scores[:, 0] = kinds.masked_fill(place >= units - 3, torch.nan)
    contexts, table = torch.full((len(kinds),), units - 3).int(), torch.randperm(units, generator=generator).int()
    scores, contexts, table = (each.to(DEVICE) for each in (scores, contexts, table.expand(len(kinds), -1)))
    selector = PageMean(page_tokens=1, first_tokens=0, recent_tokens=1)
    for wanted in (1, 31, 64):
        budgets = torch.full_like(contexts, wanted)
        poisoned = torch.full((len(kinds), 1, wanted), 1 << 30, dtype=torch.int32, device=DEVICE)
        expected, pages, ids, its_pages = (poisoned.clone() for _ in range(4))
        budgets[0] = wanted - 1
        paged.choose_units(
            scores, contexts, budgets, selector, expected, pages_RHN=pages, block_table_RM=table, units_per_block=1,
            fill_rest=False,
        )  # fmt: skip
        settings = {"warps": 1, "rows": 8, "room": 256} | VARIANTS[variant]
        kernels.choose_units(
            scores, contexts, budgets, selector, ids, its_pages, table, 1, kernels.Variant(**settings)
        )  # fmt: skip
        assert torch.equal(ids, expected) and torch.equal(its_pages, pages), f"{wanted} wanted"


def test_variants_leave_lists_of_more_candidates_than_there_is_room_for(kernels: Any) -> None:
    scores = torch.zeros(1, 1, 1000, device=DEVICE)
    context, budget, table = torch.tensor([1000]).int(), torch.tensor([20]).int(), torch.arange(1000).int()[None]
    ids, pages = (torch.full((1, 1, 20), 7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    kernels.choose_units(
        scores, context.to(DEVICE), budget.to(DEVICE), PageMean(1, 0, 1), ids, pages, table.to(DEVICE), 1,
        kernels.Variant(warps=1, room=128),
    )  # fmt: skip
    assert (ids == 7).all() and (pages == 7).all()
