"""Verification: a schedule that holds is left alone, one that misses is raised, and the last round is what is reported."""

import json
from dataclasses import replace

import pytest

from sparroll.calibrate.run import calibrate
from sparroll.calibrate.verify import _at_least, verify
from sparroll.schedule import Schedule, Step

from .fakes import study

NOTCHES = [64, 96, 128, 192, 256]


def run(bench, schedule, out, target=0.86, **settings):
    # These studies have 24 rollouts and fewer than 8 in the longest bin, whose interval begins at 0. So the value has to
    # meet the target here, which the fake's law gives.
    defaults = {"notches": NOTCHES, "min_tokens": 100, "min_rollouts": 4, "bound": "value"}
    return verify(bench, schedule, target=target, out=out, **{**defaults, **settings})


def test_a_schedule_that_holds_takes_one_round_with_a_fresh_seed(tmp_path):
    bench = study()
    schedule = Schedule((Step(0, 256),), dense_layers=(0,), name="mine")
    got = run(bench, schedule, tmp_path)
    assert got.met
    assert bench.engine.generated == [("mine", 1)]
    assert got.notes == got.missed == ()
    assert got.schedule.kv_budget_tokens(350) == 256
    assert all(step.measured["verified"] for step in got.schedule.steps)


def test_bins_that_miss_are_raised_notch_by_notch(tmp_path):
    bench = study()
    got = run(bench, Schedule((Step(0, 96),), dense_layers=(0,), name="mine"), tmp_path)
    assert got.met
    assert [seed for _, seed in bench.engine.generated] == [1, 2, 3]
    # By the law, .86 at 200 tokens needs 95 of them, at 300 142 and at 400 190: two notches from 200 on, not four.
    assert [got.schedule.kv_budget_tokens(context) for context in (0, 150, 250, 350)] == [96, 96, 192, 192]
    assert "round 1: 200-300 has value" in got.notes[0]
    assert "at 96 tokens, the target is 0.86; raised to 128" in got.notes[0]


def test_the_figures_are_those_of_the_last_round(tmp_path):
    got = run(study(), Schedule((Step(0, 128),), dense_layers=(0,)), tmp_path)
    rows = {row.from_context_tokens: row for row in got.measurement.tail().rows}
    assert got.measurement is got.rounds[-1]
    assert len(got.rounds) > 1
    for step in got.schedule.steps:
        assert step.measured["value"] == pytest.approx(rows[step.from_context_tokens].quantile_value, abs=1e-6)


def test_rounds_are_bounded_and_a_miss_is_reported(tmp_path):
    got = run(study(), Schedule((Step(0, 64),), dense_layers=(0,)), tmp_path, most_rounds=2)
    assert not got.met
    assert len(got.rounds) == 2
    assert "300-400" in got.missed
    assert "not raised further" in got.notes[-1]
    # What is reported was measured with the schedule that is returned.
    assert got.measurement.schedule.kv_budget_tokens(350) == got.schedule.kv_budget_tokens(350)


def test_the_largest_notch_is_the_end(tmp_path):
    bench = study()
    got = run(bench, Schedule((Step(0, 256),), dense_layers=(0,)), tmp_path, target=0.955)
    assert not got.met
    assert len(bench.engine.generated) == 1


def test_the_lower_bound_asks_for_more_than_the_value(tmp_path):
    schedule = Schedule((Step(0, 128), Step(200, 176)), dense_layers=(0,))
    by_value = run(study(), schedule, tmp_path / "value", bound="value", target=0.855)
    by_low = run(study(), schedule, tmp_path / "low", bound="low", target=0.855)
    assert len(by_low.rounds) >= len(by_value.rounds)
    assert all(step.measured["low"] >= 0.855 for step in by_low.schedule.steps if step.measured)


def test_the_lower_bound_is_what_has_to_meet_the_target_unless_asked_otherwise(tmp_path):
    """192 tokens have a tail of .867 at 300 to 400, with an interval that begins at .862."""
    schedule = Schedule((Step(0, 192),), dense_layers=(0,))
    about = {"target": 0.865, "notches": NOTCHES, "min_tokens": 100, "most_rounds": 1}
    by_value = verify(study(prompts=12), schedule, out=tmp_path, bound="value", **about)
    assert by_value.met
    found = verify(study(prompts=12), schedule, out=tmp_path, **about)
    assert found.missed == ("300-400",) and found.bound == "low" == found.table()["bound"]
    assert "300-400 has low 0.8616 at 192 tokens, the target is 0.865; not raised further" in found.notes[0]


def test_finished_rounds_are_not_repeated(tmp_path):
    schedule = Schedule((Step(0, 128), Step(300, 128)), dense_layers=(0,))
    first = run(study(), schedule, tmp_path)
    bench = study()
    again = run(bench, schedule, tmp_path)
    assert bench.engine.generated == []
    assert again.schedule == first.schedule
    run(bench, Schedule((Step(0, 192),), dense_layers=(0,)), tmp_path)
    assert bench.engine.generated


@pytest.mark.parametrize("mode", ["faithful", "replay"])
def test_from_a_study_to_a_schedule_file(tmp_path, mode):
    got = calibrate(
        study(prompts=12, mode=mode),
        out=tmp_path,
        budgets=NOTCHES,
        dense_layers=(0,),
        min_tokens=100,
        model="me/fake",
        made_by={"command": "a test"},
        name="fake-0.86",
    )
    assert got.path == tmp_path / "fake-0.86.toml"
    loaded = Schedule.load(got.path, model="me/fake")
    assert loaded == got.schedule
    assert loaded.made_by == {"command": "a test"}
    assert got.verification.met
    rows = [row for row in got.rows() if row["q05"] is not None]
    assert len(rows) >= 4
    assert all(row["q05_low"] >= 0.86 and row["dense_ceiling_q05"] > 0.95 for row in rows)
    assert json.loads(json.dumps(got.table()))["verification"]["met"] is True


def test_the_notes_of_a_calibration_are_of_its_verified_schedule(tmp_path):
    about = {"budgets": NOTCHES, "dense_layers": (0,), "min_tokens": 100, "verify_rounds": 0}
    got = calibrate(study(prompts=12), out=tmp_path, **about)
    last = got.schedule.kv_budget_tokens(10_000)
    assert f"they take the {last} tokens of " in got.notes[-1]
    raised = replace(got, schedule=replace(got.schedule, steps=(*got.schedule.steps, Step(9000, 1024))))
    assert raised.notes == got.notes
    raised = replace(got, schedule=replace(got.schedule, steps=(Step(0, 1024),)))
    assert "they take the 1024 tokens of " in raised.notes[-1] and raised.table()["notes"] == list(raised.notes)


def test_a_calibration_goes_on_where_it_was_interrupted(tmp_path):
    def settings(bench):
        return {"study": bench, "out": tmp_path, "budgets": NOTCHES, "dense_layers": (0,), "min_tokens": 100}

    first = calibrate(**settings(study(prompts=12)))
    first.path.unlink()
    bench = study(prompts=12)
    assert calibrate(**settings(bench)).schedule == first.schedule
    assert bench.engine.generated == []


def test_without_verification_the_fit_is_the_schedule(tmp_path):
    got = calibrate(
        study(prompts=12), out=tmp_path, budgets=NOTCHES, dense_layers=(0,), min_tokens=100, verify_rounds=0
    )
    assert got.verification is None
    assert got.schedule.steps == got.fitted.schedule.steps


def test_a_raised_budget_raises_what_comes_after_it_and_no_budget_falls():
    steps = Schedule((Step(0, 128), Step(100, 192), Step(200, 96)), dense_layers=(0,))
    assert _at_least(steps, 100, [192], [256]).plain_budgets() == [[0, 128], [100, 256], [200, 96]]


def test_a_raised_step_has_no_figures_of_its_old_budget():
    measured = Schedule((Step(0, 128, {"value": 0.8}),), dense_layers=(0,))
    assert _at_least(measured, 0, [128], [192]).steps[0].measured is None


def test_a_verification_that_could_judge_nothing_does_not_meet_the_target(tmp_path):
    got = run(study(), Schedule((Step(0, 256),), dense_layers=(0,)), tmp_path, min_rollouts=25)
    assert not got.met and got.missed == ()
    assert "no length could be judged: each has fewer than 100 tokens or 25 rollouts" in got.notes[-1]
