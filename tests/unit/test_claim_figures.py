"""Figures of recipes/claims over seeds and rows, and which of them the experiment predicts-training compares."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "claims"))

from claim_cells import Cell, Done
from claim_figures import difference, over_seeds, rank_correlation, stronger_correlation
from experiments import experiment


def test_intervals_over_seeds_are_students() -> None:
    found = over_seeds([1.0, 2.0, 3.0, None])
    # t(.975, 2) = 4.3027, standard error 1 / sqrt(3)
    assert found == {"mean": 2.0, "low": pytest.approx(-0.4842, abs=1e-3), "high": pytest.approx(4.4842, abs=1e-3),
                     "seeds": [1.0, 2.0, 3.0]}  # fmt: skip
    assert over_seeds([2.0]) == {"mean": 2.0, "low": None, "high": None, "seeds": [2.0]} and over_seeds([None]) is None
    assert difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx([1.0, -1.267, 3.267], abs=1e-3)
    assert difference([1.0], [3.0]) == [2.0, None, None] and difference([], [1.0]) is None


def test_rank_correlations_keep_the_runs_of_a_row_together() -> None:
    rows = [row for row in "abcdef" for _ in range(3)]
    rising = [float(place) for place in range(18)]
    assert rank_correlation(rising, [value**3 for value in rising], rows) == pytest.approx([1.0, 1.0, 1.0])
    assert rank_correlation(rising, [1.0] * 18, rows) is None
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], ["a", "b", "c"]) == [pytest.approx(-1), None, None]


def test_a_statistic_that_orders_runs_is_stronger_than_one_that_does_not() -> None:
    gained = [float(place) for place in range(16)]
    rows = [f"row {place // 2}" for place in range(16)]
    mixed = [float((5 * place) % 16) for place in range(16)]
    value, low, high = stronger_correlation(gained, mixed, gained, rows) or [None] * 3
    assert value == pytest.approx(1 - rank_correlation(mixed, gained, rows)[0]) and 0 < low < value <= high
    assert stronger_correlation(mixed, gained, gained, rows) == pytest.approx([-value, -high, -low])
    assert stronger_correlation(gained, gained, gained, rows) == pytest.approx([0, 0, 0])
    # Runs that lack one of both do not count, and four rows are too few for an interval.
    known = [None if place > 5 else value for place, value in enumerate(mixed)]
    less = rank_correlation(mixed[:6], gained[:6], rows[:6])[0] - 1
    assert less < 0 and stronger_correlation(known, gained, gained, rows) == [pytest.approx(less), None, None]
    assert stronger_correlation(known[:2], gained[:2], gained[:2], rows[:2]) is None
    assert stronger_correlation([1.0] * 16, gained, gained, rows) is None


def test_each_statistic_is_compared_in_the_direction_that_it_should_have() -> None:
    metrics = {"claims/mean": 1, "claims/kl": -1, "claims/over_10_nats": -1, "claims/skew": -1}
    cells = []
    for place in range(16):
        steps = {metric: [float(sign * place)] for metric, sign in metrics.items()} | {
            "claims/q05": [float(5 * place % 16)]
        }
        kind = "compression" if place % 8 == 0 else "budget"
        about = {"does": "train", "task": "remarks", "row": f"row {place // 2}", "reading": {"kind": kind}}
        cells.append(Done(Cell(f"cell {place}", about), {"accuracy_change": place / 100, "steps": steps}))
    made = experiment("predicts-training").results(cells)["correlations"]
    found = {(line["among"], line["statistic"]): line for line in made}
    for name in ("mean", "kl", "over_10_nats", "skew"):
        line = found["all", name]
        assert abs(line["run_mean"][0]) == pytest.approx(1) and line["runs"] == 16
        assert line["run_mean_beyond_q05"][1] > 0 and line["first_step_beyond_q05"][1] > 0
    assert found["all", "kl"]["run_mean"][0] < 0 < found["all", "mean"]["run_mean"][0]
    assert found["no eviction", "mean"]["runs"] == 14 and found["all", "reward_gap"]["runs"] == 0
