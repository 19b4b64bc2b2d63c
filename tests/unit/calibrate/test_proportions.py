"""Groups of layers whose budgets keep a fixed proportion: what is measured, fitted, verified and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import error_of
from sparroll.attention.selectors import QuantizedMean
from sparroll.calibrate.run import calibrate
from sparroll.calibrate.sweep import Sweep, sweep
from sparroll.calibrate.verify import verify
from sparroll.cli import main
from sparroll.cli.calibration.asked import proportions_of
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.layer_groups import Proportions
from sparroll.plan.model_shape import ModelShape
from sparroll.schedule import Schedule, Step

from .fakes import study

GRID = [64, 96, 128, 192, 256]
GROUPS = ((1,), (2, 3))
WIDE = Proportions(GROUPS, (2, 1))
SHAPE = ModelShape("toy", parameters=1_000_000, layers=4, query_heads=4, kv_heads=2, head_dim=64, vocabulary=100)
LEAST = {"min_tokens": 100, "min_rollouts": 4}
ASKED = {"budgets": GRID, "dense_layers": (0,), "target": 0.6, **LEAST}


def in_proportion(schedule: Schedule) -> bool:
    return schedule.layer_groups == GROUPS and all(step.budgets[0] == 2 * step.budgets[1] for step in schedule.steps)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return sweep(study(), out=tmp_path_factory.mktemp("swept"), budgets=GRID, dense_layers=(0,), proportions=WIDE)


def test_a_schedule_in_proportion_has_the_times_of_every_step_and_keeps_the_rest() -> None:
    plain = Schedule((Step(0, 64), Step(4000, 96, {"value": 0.9})), dense_layers=(0,)).checked(16, 0.1)
    made = plain.in_proportion(WIDE)
    assert [step.budgets for step in made.steps] == [(128, 64), (192, 96)]
    assert made.steps[1].measured == {"value": 0.9} and made.check == DraftCheck(16, 0.1)
    assert made.of_layer(1).kv_budget_tokens(5000) == 192 and made.of_layer(3).kv_budget_tokens(5000) == 96
    assert plain.in_proportion(None) is plain
    with pytest.raises(UserError, match="has budgets by groups of layers already"):
        made.in_proportion(WIDE)


@pytest.mark.parametrize(
    ("times", "message"),
    [((4,), "2 groups of layers and 1 numbers"), ((4, 2), "the least of which is 1"), ((0, 1), "whole numbers")],
)
def test_a_proportion_has_a_whole_number_for_each_group_and_counts_by_the_least(times, message) -> None:
    with pytest.raises(UserError, match=message):
        Proportions(GROUPS, times)


def test_each_budget_is_measured_with_its_times_in_every_group(swept) -> None:
    assert swept.budgets == GRID
    assert [each.schedule.steps[0].budgets for each in swept.measurements] == [(2 * budget, budget) for budget in GRID]
    assert swept.table()["proportions"] == {"layer_groups": [[1], [2, 3]], "times": [2, 1]}


def test_equal_groups_are_measured_as_one_budget_in_all_layers_is(tmp_path) -> None:
    alike = {
        name: sweep(study(), out=tmp_path / name, budgets=GRID, dense_layers=(0,), proportions=proportions)
        for name, proportions in (("one", None), ("equal", Proportions(GROUPS, (1, 1))))
    }
    for one, equal in zip(alike["one"].measurements, alike["equal"].measurements, strict=True):
        assert equal.tail().overall.quantile_value == pytest.approx(one.tail().overall.quantile_value, abs=1e-3)
    one, equal = (alike[name].fit(0.6, **LEAST) for name in ("one", "equal"))
    for step in one.schedule.steps:
        budgets = equal.schedule.step_at(step.from_context_tokens).budgets
        # Budgets are whole pages of 16 tokens.
        assert budgets[0] == budgets[1] == pytest.approx(step.budgets[0], abs=16)


def test_a_fit_counts_by_the_group_that_reads_least_and_its_notes_name_all(swept) -> None:
    fitted = swept.fit(0.6, **LEAST)
    assert in_proportion(fitted.schedule)
    assert [found.kv_budget_tokens for found in fitted.bins] == [
        fitted.schedule.step_at(found.from_context_tokens).budgets[1] for found in fitted.bins
    ]
    last = " / ".join(map(str, fitted.schedule.steps[-1].budgets))
    assert fitted.notes and last in fitted.notes[-1]
    assert fitted.notes_under(fitted.schedule) == fitted.notes


def test_a_verification_raises_every_group_to_its_times_of_the_next_notch(swept, tmp_path) -> None:
    low = Schedule.fixed(64, dense_layers=(0,)).in_proportion(WIDE)
    found = verify(study(), low, target=0.9, notches=GRID, out=tmp_path, proportions=WIDE, **LEAST)
    raised = [step.budgets for step in found.schedule.steps]
    assert raised[-1] > (128, 64) and in_proportion(found.schedule)
    assert any("raised to 192 / 96" in note for note in found.notes)


def test_a_calibration_writes_the_groups_and_goes_on_with_the_same_proportion_alone(tmp_path) -> None:
    first = calibrate(study(), out=tmp_path, proportions=WIDE, **ASKED)
    assert in_proportion(Schedule.load(first.path)) and in_proportion(first.schedule)
    again = study()
    assert calibrate(again, out=tmp_path, proportions=WIDE, **ASKED).schedule == first.schedule
    assert again.engine.generated == []
    for other in (None, Proportions(GROUPS, (3, 1))):
        with pytest.raises(UserError, match="proportions"):
            calibrate(study(), out=tmp_path, proportions=other, **ASKED)


def test_checked_candidates_keep_the_proportion_and_read_more_than_without_it(tmp_path) -> None:
    asked = {**ASKED, "target": 0.86, "checks": [DraftCheck(16, 0.01)], "shape": SHAPE, "verify_rounds": 1}
    found = {
        name: calibrate(study(), out=tmp_path / name, proportions=proportions, **asked)
        for name, proportions in (("one", None), ("wide", WIDE))
    }
    assert all(in_proportion(each.fitted.schedule) for each in found["wide"].choice.candidates)
    assert in_proportion(found["wide"].schedule) and found["wide"].schedule.check == DraftCheck(16, 0.01)
    fixed = {name: each.sweep.measurements[0].tail().overall for name, each in found.items()}
    assert fixed["wide"].quantile_value > fixed["one"].quantile_value


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"layer_groups": GROUPS, "objective": "kl", "step_time_share": 0.7},
            "varied alone or keep a fixed proportion",
        ),
        ({"objective": "kl", "step_time_share": 0.7}, "in no fixed proportion"),
        ({"dense_layers": ()}, "leaves out the layers"),
        ({"dense_layers": (1,)}, "is in dense_layers and in a group"),
    ],
)
def test_what_a_proportion_does_not_go_with_is_refused(more, message, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        calibrate(study(), out=tmp_path, proportions=WIDE, **{**ASKED, "shape": SHAPE, **more})


def test_several_selectors_need_checks_to_be_compared_in_proportion(tmp_path) -> None:
    also = [QuantizedMean(page_tokens=4, first_tokens=16, recent_tokens=32, bits=4)]
    with pytest.raises(UserError, match="with one budget in all sparse layers"):
        calibrate(study(), out=tmp_path, proportions=WIDE, also_selectors=also, shape=SHAPE, **ASKED)


@pytest.mark.parametrize(
    ("groups", "times", "message"),
    [((), "4/1", "needs the groups"), (GROUPS, "4/x", "whole numbers"), (GROUPS, "4/1/1", "2 groups of layers and 3")],
)
def test_times_on_the_command_line_are_numbers_for_groups(groups, times, message) -> None:
    with pytest.raises(UserError, match=message):
        proportions_of(groups, times)


def test_the_command_calibrates_checked_drafts_with_wide_first_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "calibrate", "--model", "tiny-reasoner", "--task", "synthetic", "--level", "1", "--count", "8", "--samples", "1",
        "--max-new-tokens", "120", "--bin-tokens", "100", "--page-tokens", "4", "--budget", "52", "--budget", "64",
        "--dense-layers", "none", "--layer-groups", "0-1/2-5", "--check-windows", "16", "--kl-at-most", "5",
        "--verify-rounds", "1", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    message, hint = error_of(command, capsys)
    assert message.startswith("checks of drafts are chosen for one budget") and "--group-times 4/1" in hint
    assert main([*command, "--group-times", "4/1"]) == 0
    made = Schedule.load(tmp_path / "out" / "schedule.toml")
    assert made.layer_groups == ((0, 1), (2, 3, 4, 5)) and made.check == DraftCheck(16, 0.01)
    assert all(step.budgets[0] == 4 * step.budgets[1] for step in made.steps)
    config = json.loads((tmp_path / "out" / "calibration.json").read_text())["config"]
    assert config["proportions"] == {"layer_groups": [[0, 1], [2, 3, 4, 5]], "times": [4, 1]}
    assert " / ".join(map(str, made.steps[0].budgets)) in capsys.readouterr().out
