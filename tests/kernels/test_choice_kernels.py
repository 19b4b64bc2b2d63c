"""The kernel for the choice of units that benchmarks/choice_sweep.py times chooses what the reference does. It is compiled
where there is a GPU, else interpreted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_caches import DEVICE
from sparroll.attention.decode import paged
from sparroll.attention.selectors import PageMean

pytest.importorskip("triton", reason="triton runs on Linux only")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LAYOUTS: dict[str, dict[str, Any]] = {
    "held": {"warps": 1, "rows": 16, "candidates": 256},
    "in parts": {"warps": 1, "rows": 4, "lane_rows": 2, "candidates": 256},
    "one scan of all rows, words apart": {
        "warps": 2, "rows": 4, "candidates": 512, "packed": False, "joined": False,
    },
    "little room": {"warps": 1, "rows": 8, "candidates": 64},
}  # fmt: skip


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import choice_kernels

    yield choice_kernels
    sys.modules.pop("choice_kernels", None)


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
        "threshold below zero": normal - 1.8,
        "neighbouring numbers": 1 + 2.0**-23 * torch.randint(0, 50, (units,), generator=generator),
        "all of them NaN": torch.full((units,), torch.nan),
        "most of them +inf": normal.masked_fill(place % 50 != 0, torch.inf),
    }


@pytest.mark.parametrize("units", [257, 513, 1999])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_choice_equals_the_reference(kernels: Any, layout: str, units: int) -> None:
    kinds = scores_by_kind(units)
    # What lies past a context must not be looked at.
    scores = torch.full((len(kinds), 1, units + 5), torch.nan)
    scores[:, 0, :units] = torch.stack(list(kinds.values()))
    contexts = torch.tensor([units - row % 3 for row in range(len(kinds))], dtype=torch.int32)
    table = torch.randperm(units + 5, generator=torch.Generator().manual_seed(0)).int().expand(len(kinds), -1)
    selector = PageMean(page_tokens=1, first_tokens=0, recent_tokens=1)
    scores, contexts, table = (each.to(DEVICE).contiguous() for each in (scores, contexts, table))
    for wanted in (1, 31, 100, units - 2):
        budgets = torch.full_like(contexts, wanted)
        budgets[0] = 0
        poisoned = torch.full((len(kinds), 1, wanted + 3), 1 << 30, dtype=torch.int32, device=DEVICE)
        expected, pages, ids, its_pages = (poisoned.clone() for _ in range(4))
        paged.choose_units(
            scores, contexts, budgets, selector, expected, pages_RHN=pages, block_table_RM=table, units_per_block=1
        )
        kernels.choose_units(
            scores, contexts, budgets, selector, ids, its_pages, table, 1, kernels.Layout(**LAYOUTS[layout])
        )
        for row, kind in enumerate(kinds):
            assert torch.equal(ids[row], expected[row]), f"{wanted} of {kind}"
            assert torch.equal(its_pages[row], pages[row]), f"{wanted} of {kind}"
