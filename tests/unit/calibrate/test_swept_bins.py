"""What a bin of a sweep loses under budgets of groups of layers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from sparroll.attention.selectors import PageMean
from sparroll.calibrate.allocation import swept_bins


def curve(*losses: tuple[int, float]) -> SimpleNamespace:
    """Of one group, which was varied while the other had its largest budget: (budget, loss), by rising budget."""
    points = [SimpleNamespace(kv_budget_tokens=budget) for budget, _ in losses]
    return SimpleNamespace(points=points, losses=[loss for _, loss in losses])


def test_losses_of_groups_add_up_from_the_worse_of_the_two_largest_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both curves end with the largest budgets everywhere, and noise told them apart."""
    number = len(swept_bins.FIGURES)
    monkeypatch.setattr(swept_bins, "_curve_figures", lambda each: np.repeat(np.array(each.losses)[:, None], number, 1))
    curves = [curve((64, 0.5), (512, 0.1)), curve((128, 0.4), (512, 0.2))]
    found = swept_bins.swept_bin(0, 2000, 1.0, curves, PageMean())
    expected = {(512, 512): 0.2, (64, 512): 0.2 + 0.4, (512, 128): 0.2 + 0.2, (64, 128): 0.2 + 0.4 + 0.2}
    for budgets, loss in expected.items():
        assert found.figures(budgets) == pytest.approx(np.full(number, loss)), budgets
