"""What a bin must hold where its tail is blind: borders, words and the least budget, each by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots, holding
from sparroll.calibrate.fit import FittedSchedule
from sparroll.calibrate.measure import Measurement
from sparroll.calibrate.sweep import Sweep, sweep
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.mismatch.divergence import Divergence
from sparroll.schedule import Schedule

from .fakes import study

GRID = [64, 96, 128, 192]
BINS = (0, 100, 200, 300)
LEAST = {"min_tokens": 100, "min_rollouts": 4}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(study(), out=tmp_path_factory.mktemp("swept"), budgets=GRID, check=DraftCheck(16, 0.01))


def with_kl(measurement: Measurement, kl: float, over_20_nats: float = 0.0) -> Measurement:
    """The same with this KL and this share in each bin, and with half of the probability 2, 5 and 10 nats off."""
    tokens = 10.0
    over_2 = over_5 = over_10 = tokens / 2
    sums = [tokens, tokens * kl, over_2, over_5, over_10, tokens * over_20_nats]
    return replace(measurement, divergence=Divergence(100, {start: list(sums) for start in BINS}))


def with_kls(swept: Sweep, *kls: float) -> Sweep:
    return replace(
        swept, measurements=tuple(with_kl(each, kl) for each, kl in zip(swept.measurements, kls, strict=True))
    )


@pytest.mark.parametrize(
    "bounds",
    [BlindSpots(over_2_nats_at_most=0.0), BlindSpots(kl_at_most=0.1), BlindSpots(0.1, 0.2, 0.3, 5), NO_BOUNDS],
)
def test_the_target_of_a_schedule_file_gives_the_bounds_back(bounds: BlindSpots) -> None:
    assert BlindSpots.of_target({"at_least": 0.86, **bounds.table()}) == bounds
    assert bounds.any == (bounds != NO_BOUNDS)


def test_bounds_join_the_target_that_a_fitted_schedule_has() -> None:
    for target in (None, {"at_least": 0.86}):
        fitted = FittedSchedule(replace(Schedule.fixed(64), target=target), (), ("a note",))
        found = holding(fitted, BlindSpots(kl_at_most=0.1))
        assert found == replace(fitted, schedule=replace(fitted.schedule, target={**(target or {}), "kl_at_most": 0.1}))


def test_no_target_bounds_nothing() -> None:
    assert BlindSpots.of_target(None) == NO_BOUNDS and NO_BOUNDS.table() == {} and str(NO_BOUNDS) == "nothing"


@pytest.mark.parametrize("name", ["over_2_nats_at_most", "far_mass_at_most"])
def test_a_share_lies_between_0_and_1(name: str) -> None:
    for share in (0.0, 1.0):
        assert BlindSpots(**{name: share}).table()[name] == share
    for share in (-0.01, 1.01):
        with pytest.raises(UserError, match=f"{name} must be a share from 0 to 1"):
            BlindSpots(**{name: share})


@pytest.mark.parametrize("kl", [0.0, -1.0, math.inf, math.nan])
def test_a_bound_on_the_kl_is_above_0_and_finite(kl: float) -> None:
    with pytest.raises(UserError, match="kl_at_most must be above 0 and finite"):
        BlindSpots(kl_at_most=kl)


def test_all_bounds_in_words() -> None:
    assert str(BlindSpots(0.01, 0.1, 0.001, 10)) == (
        "at most 0.01 of the tokens over 2 nats off and a KL of at most 0.1 and at most 0.001 of the probability over 10 "
        "nats off"
    )


def test_what_lies_on_a_limit_holds_and_what_lies_above_it_is_said(swept) -> None:
    found = with_kl(swept.measurements[0], kl=0.5, over_20_nats=0.25)
    far = found.checked.far_share_at(300)
    assert far > 0
    assert BlindSpots(far, 0.5, 0.25).broken(found, 300) == []
    assert BlindSpots(kl_at_most=0.49).broken(found, 300) == ["a KL of 0.5"]
    assert BlindSpots(far_mass_at_most=0.24).broken(found, 300) == [
        "a share of 0.25 of the probability more than 20 nats off"
    ]
    assert BlindSpots(far_mass_at_most=0.49, far_mass_nats=5).broken(found, 300) == [
        "a share of 0.5 of the probability more than 5 nats off"
    ]
    said = BlindSpots(far - 1e-6, 0.49, 0.24).broken(found, 300)
    assert len(said) == 3 and "of its tokens more than 2 nats off" in said[0]


def test_a_bin_without_lists_or_tokens_breaks_no_bound_on_lists(swept) -> None:
    bounds = BlindSpots(kl_at_most=0.1)
    assert bounds.broken(with_kl(swept.measurements[0], 9.0), 400) == []
    assert bounds.broken(replace(swept.measurements[0], divergence=None), 300) == []


@pytest.mark.parametrize(("kls", "least"), [((0, 0, 0, 0), 64), ((0, 9, 0, 0), 128), ((9, 9, 9, 0), 192)])
def test_the_least_budget_is_that_from_which_on_every_larger_one_holds(swept, kls, least) -> None:
    found = BlindSpots(kl_at_most=1.0).least_budgets(with_kls(swept, *kls), **LEAST)
    assert set(found.values()) == {least} and len(found) >= 3


def test_only_budgets_with_enough_data_in_a_bin_say_what_it_needs(swept: Sweep) -> None:
    """By hand: the second bin has data at some budgets alone."""
    start = 100
    whole = {cell.kv_budget_tokens: cell for cell in swept.cells() if cell.from_context_tokens == start}
    assert list(whole) == GRID

    class Partly(Sweep):
        has: tuple[int, ...] = ()

        def cells(self, *_: Any) -> list[Any]:
            return [cell for budget, cell in whole.items() if budget in self.has]

    def least(has: tuple[int, ...], *kls: float) -> dict[int, int]:
        made = Partly(**vars(with_kls(swept, *kls)))
        object.__setattr__(made, "has", has)
        return BlindSpots(kl_at_most=1.0).least_budgets(made, **LEAST)

    assert least((64, 96), 9, 0, 9, 9) == {start: 96}, "what larger budgets show, they show by too little"
    assert least((96, 192), 0, 0, 9, 0) == {start: 96}
    assert least((64,), 9, 0, 0, 0) == {start: 192}, "nothing that holds the bound was measured"
    with pytest.raises(UserError, match="at the largest budget, 192"):
        least((64, 192), 0, 0, 0, 9)
    assert least((64, 128), 0, 9, 0, 9) == {start: 64}


def test_without_bounds_every_bin_with_data_may_have_any_budget(swept) -> None:
    bounded = BlindSpots(kl_at_most=1.0).least_budgets(with_kls(swept, 0, 0, 0, 0), **LEAST)
    assert NO_BOUNDS.least_budgets(swept, **LEAST) == dict.fromkeys(bounded, 0)


def test_the_error_has_the_figures_of_the_largest_budget(swept) -> None:
    with pytest.raises(UserError, match=r"has a KL of 3 at the largest budget, 192; asked for: a KL of at most 1\n"):
        BlindSpots(kl_at_most=1.0).least_budgets(with_kls(swept, 0, 0, 2, 3), **LEAST)


@pytest.mark.parametrize("bounds", [BlindSpots(kl_at_most=1.0), BlindSpots(far_mass_at_most=0.5)])
def test_a_bound_on_lists_needs_lists(swept, bounds) -> None:
    bare = replace(swept, settings=replace(swept.settings, estimator="sampled"))
    with pytest.raises(UserError, match="the estimator sampled has none"):
        bounds.check_measured(bare)
    bounds.check_measured(swept)
    BlindSpots(over_2_nats_at_most=0.5).check_measured(bare)
