"""Which budgets are measured where not all are: on laws whose answer is known, and on the published schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sparroll.attention.selectors import PageMean
from sparroll.calibrate.allocation.wanted import Wanted
from sparroll.calibrate.curve import Cell
from sparroll.calibrate.effort.coarse_to_fine import first_budgets, narrowed, next_budget, next_budgets, spread_over
from sparroll.calibrate.fit import fit_schedule
from sparroll.calibrate.run import calibrate
from sparroll.calibrate.sweep import PUBLISHED_PAGES
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.presets import presets
from sparroll.schedule import Schedule

from .fakes import study
from .test_cost_ahead import SHAPE

PUBLISHED = [pages * 16 for pages in PUBLISHED_PAGES]
WANTED = Wanted("time", 0.86)
WIDTH = 2000


class Law:
    """A sweep whose tail meets .86 in each bin at a known budget, and falls with context over budget as published."""

    def __init__(self, budgets: Sequence[int], needs: dict[int, float], tokens: int = 5000):
        self.budgets, self.needs, self.tokens = sorted(budgets), needs, tokens
        self.measurements = self.budgets

    def cells_of(self, budget: Any, target: Any) -> list[Cell]:
        found = []
        for start, need in self.needs.items():
            low = 0.97 if budget >= start + WIDTH - 1 else min(0.97, 1 - 0.14 * (need / budget) ** 0.75)
            found.append(Cell(budget, start, start + WIDTH, low + 0.005, low, low + 0.01, self.tokens, 24))
        return found

    def fit(self) -> list[int]:
        cells = [cell for budget in self.budgets for cell in self.cells_of(budget, None)]
        fitted = fit_schedule(cells, target=0.86, selector=PageMean(), dense_layers=(0, 1), estimator="top_k_lower")
        return [min(each.kv_budget_tokens, each.to_context_tokens) for each in fitted.bins]  # type: ignore[type-var]


def measured(needs: dict[int, float], grid: list[int], most: int, at_once: int = 1) -> Law:
    asked: list[list[int]] = []

    def measure(budgets: Sequence[int]) -> Law:
        asked.append(sorted(budgets))
        return Law(budgets, needs)

    found = narrowed(measure, grid, [], WANTED, most, at_once)  # type: ignore[arg-type]
    # Every call has what was measured before, and one budget more, or at most as many as are chosen at once.
    assert all(set(before) < set(after) for before, after in zip(asked, asked[1:], strict=False))
    assert all(len(after) - len(before) <= at_once for before, after in zip(asked, asked[1:], strict=False))
    assert at_once == 1 or len(asked) <= 2
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("name", [name for name in presets() if Schedule.load(name).steps[-1].budgets[0] < 14_000])
def test_five_of_the_published_budgets_give_nearly_the_published_schedule(name: str, at_once: int) -> None:
    """At most 8 % more is read than with all 18, one after the other or three and then two."""
    schedule = Schedule.load(name)
    needs = {start: 0.97 * schedule.kv_budget_tokens(start + 1000) for start in range(0, 32_000, WIDTH)}
    found = measured(needs, PUBLISHED, 5, at_once)
    assert len(found.budgets) <= 5
    assert 0.99 < sum(found.fit()) / sum(Law(PUBLISHED, needs).fit()) < 1.08


def test_a_budget_that_surely_misses_or_surely_holds_spares_others() -> None:
    needs = dict.fromkeys(range(0, 32_000, WIDTH), 1500.0)
    found = measured(needs, PUBLISHED, 18)
    # 1,280 misses and 1,536 holds; what lies further away on both sides says nothing more.
    assert {1280, 1536} < set(found.budgets) and len(found.budgets) <= 6
    assert found.fit() == Law(PUBLISHED, needs).fit()


def test_a_bin_that_no_budget_holds_is_looked_after_first_and_the_last_budget_is_the_largest() -> None:
    needs = {0: 300.0, 2000: 300.0, 30_000: 13_000.0}
    found = measured(needs, PUBLISHED, 3)
    assert found.budgets[-1] == PUBLISHED[-1]
    assert found.fit()[-1] <= PUBLISHED[-1]
    assert measured(needs, PUBLISHED, 2).budgets[-1] == PUBLISHED[-1]
    assert measured(needs, PUBLISHED, 1).budgets == [PUBLISHED[-1]]
    # Where even that one misses there is nothing left to find for this bin, and the fit says so.
    hopeless = measured({30_000: 40_000.0}, PUBLISHED, 5)
    assert PUBLISHED[-1] in hopeless.budgets
    with pytest.raises(UserError, match="no budget meets the target of 0.86 at 30k-32k"):
        hopeless.fit()


def test_bins_with_too_little_data_say_nothing() -> None:
    few = Law(first_budgets(PUBLISHED, 5), {0: 5000.0}, tokens=399)
    assert next_budgets(few, PUBLISHED, WANTED, 3, 2) == []  # type: ignore[arg-type]
    assert next_budget(few, PUBLISHED, WANTED, 3) is None  # type: ignore[arg-type]


def test_budgets_that_are_chosen_together_part_the_gap_and_stop_where_it_is_narrow() -> None:
    grid = [256, 320, 400, 512, 640, 800, 1024]
    between = Law([256, 1024], {0: 500.0, 30_000: 10.0})
    choose = lambda count, left=9: next_budgets(between, grid, WANTED, left, count)  # noqa: E731  # type: ignore[arg-type]
    assert choose(1) == [512] and choose(2) == [320, 512] and choose(3) == [320, 512, 640]
    assert choose(9) == [320, 400, 512, 640, 800] and choose(9, left=2) == [320, 512]
    # Of a bin that nothing holds, the middle of what is larger, and with the last ones the largest. Others get the rest.
    unheld = Law([256], {0: 5000.0})
    assert next_budgets(unheld, grid, WANTED, 2, 2) == [512, 1024]  # type: ignore[arg-type]


def test_a_bin_that_nothing_holds_takes_one_of_the_budgets_that_are_chosen_together() -> None:
    needs = {0: 900.0, 30_000: 15_000.0}
    alone, together = (measured(needs, PUBLISHED, 5, at_once).fit() for at_once in (1, 3))
    assert together[1] == alone[1] and together[0] <= 1.5 * alone[0]


def test_budgets_at_even_places() -> None:
    assert spread_over([1, 2, 3, 4, 5], 3) == [1, 3, 5]
    assert spread_over([1, 2, 3, 4, 5], 1) == [5] and spread_over([1, 2], 5) == [1, 2]
    assert first_budgets(list(range(10)), 5) == [3, 6] and first_budgets([7], 5) == [7]
    assert first_budgets(list(range(10)), 5, 3) == [2, 4, 7] and first_budgets(list(range(10)), 2, 3) == [4]
    assert first_budgets([1, 2, 3], 2) == [2], "the second one is left for where the first leads"
    assert first_budgets([1, 2, 3], 1) == [3]


GRID = [64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 640]
ABOUT = {"budgets": GRID, "dense_layers": (0,), "min_tokens": 100, "min_rollouts": 4, "shape": SHAPE, "bound": "value"}


def test_a_calibration_of_few_budgets_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    whole = calibrate(study(prompts=12), out=tmp_path / "whole", **ABOUT, verify_rounds=0)
    bench = study(prompts=12)
    few = calibrate(bench, out=tmp_path / "few", **ABOUT, most_budgets=4, verify_rounds=1)
    # Four budgets, the one that holds every context and is not run, the dense rollouts and a round.
    assert len(few.sweep.budgets) == 5 and 640 in few.sweep.budgets and len(bench.engine.generated) == 1 + 4 + 1
    note = next(note for note in few.notes if "of the grid were measured" in note)
    assert note.startswith("5 of the 11 budgets of the grid were measured: ")
    for context in range(50, 400, 50):
        before, now = (found.fitted.schedule.kv_budget_tokens(context) for found in (whole, few))
        assert abs(now - before) <= 32
    broken = study(prompts=12)
    generate = broken.engine.generate

    def until(*prompts: Any, **settings: Any) -> Any:
        if len(broken.engine.generated) == 4:
            raise RuntimeError("killed")
        return generate(*prompts, **settings)

    broken.engine.generate = until
    with pytest.raises(RuntimeError, match="killed"):
        calibrate(broken, out=tmp_path / "broken", **ABOUT, most_budgets=4, verify_rounds=1)
    rest = study(prompts=12)
    again = calibrate(rest, out=tmp_path / "broken", **ABOUT, most_budgets=4, verify_rounds=1)
    assert again.schedule == few.schedule
    assert broken.engine.generated[:4] + rest.engine.generated == bench.engine.generated


def test_where_times_are_weighed_the_budgets_are_spread_over_the_grid(tmp_path: Path) -> None:
    seen = {}
    for name, more in {
        "checked": {"checks": [DraftCheck(16, 0.01)], "target": 0.5},
        "least KL": {"objective": "kl", "step_time_share": 0.9, "target": 0.5},
        "groups": {"objective": "kl", "step_time_share": 0.9, "target": 0.5, "layer_groups": ((1,), (2, 3))},
    }.items():
        found = calibrate(study(), out=tmp_path / name, **{**ABOUT, **more}, most_budgets=3, verify_rounds=0)
        seen[name] = found.sweep.grid
    assert len(seen) == 3 and all(grid == [64, 128, 320, 640] for grid in seen.values())
    with pytest.raises(UserError, match="most_budgets must be 1 or more, got 0"):
        calibrate(study(), out=tmp_path / "none", **ABOUT, most_budgets=0)
