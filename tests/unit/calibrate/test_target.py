"""Calibration to a share of impossible tokens, on an engine whose share follows a known law."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparroll.attention.selectors import PageMean
from sparroll.calibrate.bounds import BlindSpots
from sparroll.calibrate.curve import Cell
from sparroll.calibrate.fit import fit_schedule
from sparroll.calibrate.measure import MeasureSettings, Study
from sparroll.calibrate.run import Calibration, calibrate
from sparroll.calibrate.verify import verify
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.types import Rollout, TokenScores

from .fakes import CEILING, FakeEngine, FakeScorer

GRID = (64, 96, 128, 192, 256, 384)
LIMIT = ImpossibleLimit(nats=10, at_most=0.02)


class ScorerWithImpossible(FakeScorer):
    """A tenth of what a token loses against the ceiling is its probability of being impossible."""

    def __init__(self, beside: float = 0.0):
        super().__init__()
        self.beside = beside
        """Probability of the same for every token, dense ones included."""

    def dense(self, rollouts: list[Rollout], **more: Any) -> list[TokenScores]:
        scores = super().dense(rollouts, **more)  # type: ignore[no-untyped-call]
        return [replace(score, logp=self._logp(each)) for each, score in zip(rollouts, scores, strict=True)]

    def _logp(self, rollout: Rollout) -> torch.Tensor:
        assert rollout.seed is not None
        generator = torch.Generator().manual_seed(rollout.seed + 1)
        lost_T = 0.1 * (CEILING - 0.02 - rollout.sparse_logp.exp()).clamp_min(0) + self.beside
        return torch.where(torch.rand(len(lost_T), generator=generator) < lost_T, -20.0, 0.0)


def study(beside: float = 0.0, prompts: int = 16, **settings: Any) -> Study:
    about = MeasureSettings(**{"max_new_tokens": 400, "samples": 4, "bin_tokens": 100, "replicates": 40, **settings})
    return Study(FakeEngine(), ScorerWithImpossible(beside), [[1] * 20] * prompts, about)  # type: ignore


def calibrated(out: Any, limit: Any = LIMIT, bench: Study | None = None, **more: Any) -> Calibration:
    about = {"budgets": GRID, "dense_layers": (0,), "target": limit} | more
    return calibrate(bench or study(), out=out, **about)  # type: ignore[arg-type]


def test_every_length_gets_the_least_budget_whose_share_is_within_the_limit(tmp_path: Any) -> None:
    found = calibrated(tmp_path / "a")
    schedule = Schedule.load(found.path)
    assert schedule.target == {"statistic": "impossible_share", "nats": 10, "at_most": 0.02}
    assert found.verification is not None and found.verification.met
    rows = [row for row in found.rows() if row["impossible_share"] is not None]
    assert len(rows) >= 4
    assert all(row["impossible_share"] <= 0.02 for row in rows)
    assert all(row["dense_impossible_share"] == 0 for row in rows)
    budgets = [step.kv_budget_tokens for step in schedule.steps]
    assert budgets == sorted(budgets) and budgets[0] < budgets[-1] <= GRID[-1]
    known = [step.measured for step in schedule.steps if step.measured]
    assert len(known) >= 4 and all(each["low"] <= each["value"] <= each["high"] for each in known)
    looser = calibrated(tmp_path / "b", ImpossibleLimit(10, 0.05)).schedule
    assert [looser.kv_budget_tokens(at) <= schedule.kv_budget_tokens(at) for at in range(50, 400, 50)] == [True] * 7
    assert looser.kv_budget_tokens(350) < schedule.kv_budget_tokens(350)


def test_a_distance_that_nothing_reaches_costs_nothing(tmp_path: Any) -> None:
    schedule = calibrated(tmp_path, ImpossibleLimit(20, 0.02), verify_rounds=0).schedule
    known = [step.kv_budget_tokens for step in schedule.steps if step.measured]
    assert len(known) >= 3 and set(known) == {GRID[0]}


def test_figures_of_a_share_are_kept_to_four_digits_and_turned_round() -> None:
    cells = [
        Cell(64, 0, 100, 1 - 5.4321e-4, 1 - 9e-4, 1 - 3e-4, 100_000, 64, None, 10),
        Cell(96, 0, 100, 1 - 1.23456e-5, 1 - 4e-5, 1 - 3.2e-6, 100_000, 64, None, 10),
    ]
    limit = ImpossibleLimit(10, 1e-4)
    about = {"selector": PageMean(), "dense_layers": (0,), "estimator": "top_k_lower"}
    fitted = fit_schedule(cells[1:], target=limit, **about)  # type: ignore[arg-type]
    assert fitted.bins[0].measured == {
        "value": 1.235e-5, "low": 3.2e-6, "high": 4e-5, "tokens": 100_000, "rollouts": 64,
    }  # fmt: skip
    with pytest.raises(UserError, match=r"(?s)limit of 0.0001 for tokens more than 10 nats off at 0-100: the least upper "
                                        r"bound is 0.0009 \(share 0.00054, 100000 tokens\) at 64"):  # fmt: skip
        fit_schedule(cells[:1], target=limit, **about)  # type: ignore[arg-type]


def test_a_bound_holds_where_there_are_too_few_tokens_for_the_share() -> None:
    def cell(budget: int, start: int, tokens: int) -> Cell:
        return Cell(budget, start, start + 100, 1.0, 1.0, 1.0, tokens, 64, None, 10)

    cells = [cell(budget, start, tokens) for budget in (64, 256) for start, tokens in ((0, 60_000), (100, 3_000))]
    about = {
        "selector": PageMean(),
        "dense_layers": (0,),
        "estimator": "top_k_lower",
        "target": ImpossibleLimit(10, 1e-4),
    }
    assert [each.kv_budget_tokens for each in fit_schedule(cells, **about).bins] == [64, 128]  # type: ignore[arg-type]
    held = fit_schedule(cells, least_budgets={0: 64, 100: 256}, **about)  # type: ignore[arg-type]
    assert [each.kv_budget_tokens for each in held.bins] == [64, 256]


def test_the_verification_looks_at_bounds_where_there_are_too_few_tokens_for_the_share(tmp_path: Any) -> None:
    schedule, rare = Schedule.fixed(64, dense_layers=(0,)), ImpossibleLimit(10, 1e-3)
    about = {"target": rare, "notches": GRID, "most_rounds": 1, "min_tokens": 100, "min_rollouts": 4}
    found = verify(study(), schedule, out=tmp_path, bounds=BlindSpots(kl_at_most=1e-6), **about)  # type: ignore[arg-type]
    assert not any(step.measured for step in found.schedule.steps), "no bin has tokens enough for the share"
    assert found.missed and "which breaks a bound" in found.notes[0]


def test_too_few_tokens_to_show_the_limit_are_refused_before_anything_runs(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"a cell of the fit needs 550000 tokens, and 64 rollouts"):
        calibrated(tmp_path, ImpossibleLimit(10, 1e-5))


def test_a_verified_share_that_is_surely_over_its_limit_misses_it_by_however_few_tokens(tmp_path: Any) -> None:
    """So few that none of them could show that the limit holds."""
    limit, schedule = ImpossibleLimit(10, 1e-5), Schedule.fixed(256, dense_layers=(0,))
    found = verify(study(beside=0.15), schedule, target=limit, notches=GRID, out=tmp_path, most_rounds=1)
    assert not found.met and len(found.missed) >= 3 and "upper bound of the share of 0.1" in found.notes[0]


def test_a_limit_that_dense_rollouts_exceed_is_refused_with_the_reason(tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"(?s)dense rollouts have a share of 0\.1.*engine and trainer differ"):
        calibrated(tmp_path, bench=study(beside=0.15))


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({"mode": "replay"}, {}, "(?s)a replay samples nothing.*faithful"),
        ({"estimator": "exact"}, {}, "(?s)keeps no log-probabilities.*top_k_lower"),
        (
            {},
            {"objective": "kl", "step_time_share": 0.5},
            "(?s)for one selector at the objective time.*--far-mass-at-most",
        ),
        ({}, {"checks": [DraftCheck()]}, "without checks"),
        ({}, {"layer_groups": ((1,), (2, 3))}, "without groups"),
        ({}, {"also_selectors": [PageMean(32, 32, 64)]}, "for one selector"),
    ],
)
def test_what_cannot_hold_a_share_is_refused(
    tmp_path: Any, settings: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        calibrated(tmp_path, bench=study(**settings), **more)


def test_a_folder_of_measurements_that_counted_none_is_refused(tmp_path: Any) -> None:
    bench = study()
    calibrated(tmp_path, 0.5, bench, verify_rounds=0)
    for path in tmp_path.glob("*.safetensors"):
        _forget_impossible(path)
    with pytest.raises(UserError, match=r"(?s)counted no impossible tokens.*measure again in another folder"):
        calibrated(tmp_path, LIMIT, study(), verify_rounds=0)


def _forget_impossible(path: Any) -> None:
    """Make a file of format 1 of one of format 2; others stay as they are."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    if "settings" in tensors:
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("impossible")}
        save_file(kept | {"settings": torch.tensor([1, *tensors["settings"][1:].tolist()])}, path)
