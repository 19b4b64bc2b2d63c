"""What a report takes from a folder of records, and what it keeps apart."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from report_data import schedule
from report_folders import write_profile, write_run
from sparroll import records
from sparroll.errors import UserError
from sparroll.report import collect, write_report
from sparroll.report.data import GapPoint
from sparroll.schedule import Step


def test_a_run_has_the_means_of_its_steps_its_worst_bin_and_its_target(tmp_path: Path) -> None:
    write_run(tmp_path / "run", guard={"at_least": 0.86})
    (run,) = collect(tmp_path).runs
    assert (run.reward_first, run.reward_last) == (pytest.approx(0.4), pytest.approx(1.4 / 3))
    assert run.reward_window_steps == 3 and not run.gone_on
    assert run.worst_bin_q05 == (0.8, 0.8, 0.8, None, 0.8, 0.8)
    assert run.tail_q05 == (0.9,) * 6
    assert (run.target, run.model, run.dense, run.read_share) == (0.86, "tiny-reasoner", True, 0.5)
    assert run.events == ("step 6: something happened",)
    (point,) = run.accuracy
    assert (point.value, point.high, point.prompts) == (0.0, 0.265, 12)


@pytest.mark.parametrize(
    ("sections", "target"),
    [
        ({"guard": {"at_least": None}}, 0.86),
        ({"guard": {"at_least": None}, "control": {"by": "controller", "target": 0.9}}, 0.9),
        ({"guard": {"at_least": 0.8}, "control": {"by": "controller", "target": 0.9}}, 0.8),
        ({"guard": {"action": "off", "at_least": None}}, None),
        ({"guard": {"action": "off"}, "control": {"by": "controller", "target": 0.9}}, 0.9),
        ({"guard": {"at_least": None, "impossible_at_most": 1e-4}}, None),
    ],
)
def test_the_target_of_a_run_is_the_guards(sections: dict[str, Any], target: float | None, tmp_path: Path) -> None:
    write_run(tmp_path / "run", **sections)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000006"
    checkpoint.mkdir(parents=True)
    schedule(64).save(checkpoint / "schedule.toml")
    (run,) = collect(tmp_path).runs
    assert run.target == target
    assert run.rollouts == "budget 64"


def test_a_run_that_a_watcher_made_dense_ran_under_no_schedule_at_the_end(tmp_path: Path) -> None:
    write_run(tmp_path / "run", attention={"kind": "budget", "kv_budget_tokens": 64})
    for step in (3, 6):
        (tmp_path / "run" / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    schedule(64).save(tmp_path / "run" / "checkpoints" / "step-000003" / "schedule.toml")
    (run,) = collect(tmp_path).runs
    assert run.schedule is None and run.rollouts == "budget 64, dense at the end"


def test_a_run_with_a_control_group_has_its_gaps_where_they_have_an_interval(tmp_path: Path) -> None:
    sections = {"rollout": {"control_share": 0.125}, "guard": {"at_least": None, "reward_gap": 0.1}}
    write_run(tmp_path / "run", **sections)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1] |= {"control/reward_gap": 0.5}
    for line in lines[2:]:
        line |= {"control/reward_gap": 0.1, "control/reward_gap_low": -0.1, "control/reward_gap_high": 0.3}
    alarm = "sparse rollouts get less reward than dense ones of the same prompts: by 0.2, surely and by more than"
    lines[-1]["events"] = [alarm]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = collect(tmp_path).runs
    assert run.reward_gap == tuple(GapPoint(step, 0.1, -0.1, 0.3) for step in range(2, 7))
    assert run.tolerated_gap == 0.1
    assert run.alarms == (f"step 6: {alarm}",)
    write_run(tmp_path / "without", guard={"at_least": None, "reward_gap": 0.05})
    without = next(each for each in collect(tmp_path).runs if not each.reward_gap)
    assert without.tolerated_gap is None


def test_a_guard_that_is_off_tolerates_any_gap(tmp_path: Path) -> None:
    guard = {"at_least": None, "reward_gap": 0.1, "action": "off"}
    write_run(tmp_path / "run", rollout={"control_share": 0.125}, guard=guard)
    (run,) = collect(tmp_path).runs
    assert run.tolerated_gap is None


CHECK = {"window_tokens": 32, "floor": 0.1, "dense_logp": "engine"}


def test_a_run_whose_drafts_were_checked_says_so_with_the_check_that_held(tmp_path: Path) -> None:
    write_run(tmp_path / "run", check=CHECK)
    (run,) = collect(tmp_path).runs
    assert run.rollouts.endswith(", check 32 / 0.1")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000006"
    checkpoint.mkdir(parents=True)
    # A check that came with the schedule's file, or that [check] put in its place.
    schedule(64).checked(16, 0.01).save(checkpoint / "schedule.toml")
    (run,) = collect(tmp_path).runs
    assert run.rollouts == "budget 64, check 16 / 0.01"
    grouped = dataclasses.replace(schedule(64), steps=(Step(0, (64, 1024)), Step(9, 96)), layer_groups=((2,), (3,)))
    grouped.save(checkpoint / "schedule.toml")
    (run,) = collect(tmp_path).runs
    assert run.rollouts == "budgets 64 to 1024" and run.schedule.layer_groups == ((2,), (3,))


def test_a_run_with_a_control_group_is_shown_with_what_its_sparse_rollouts_read(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [line | ({"control/sparse_kv_read_share": 0.3} if line["step"] in (1, 2) else {}) for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    (run,) = collect(tmp_path).runs
    assert run.kv_read_share == (0.3, 0.3, 0.5, 0.5, 0.5, 0.5)


def test_a_quickstart_further_down_gives_its_title_and_figures_to_no_other_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "other")
    (tmp_path / "first").mkdir()
    summary = {"kv_read_share": 0.75, "wall_seconds": 80.0}
    records.write(tmp_path / "first" / "summary.json", "quickstart", summary, config={})
    data = collect(tmp_path)
    assert data.title == f"sparroll {tmp_path.name}" and "for all of it" not in data.facts
    write_run(tmp_path / "first" / "run")
    data = collect(tmp_path / "first")
    assert data.title == "sparroll quickstart" and data.facts["for all of it"] == "1 min 20 s"


def test_a_folder_of_two_models_is_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "run", "first")
    write_run(tmp_path / "b" / "run", "second")
    write_profile(tmp_path / "a" / "profile.json", "first")
    write_profile(tmp_path / "b" / "profile.json", "second")
    data = collect(tmp_path)
    assert data.models == ("first", "second")
    assert [run.name for run in data.runs] == ["a/run", "b/run"]
    assert [(each.folder, each.model) for each in data.measured] == [("a", "first"), ("b", "second")]
    assert data.facts == {} and data.answers == ()


def test_a_budget_whose_drafts_were_checked_says_so_and_what_the_checks_did(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", "first")
    record = json.loads((tmp_path / "profile.json").read_text())
    entry = record["results"]["schedules"][0]
    entry["schedule"]["check"] = {"window_tokens": 16, "floor": 0.01}
    entry["checked"] = {"windows": 4380, "cut_share": 0.875, "drafted_per_kept": 2.45, "over_2_nats_share": 0.0279}
    (tmp_path / "profile.json").write_text(json.dumps(record))
    (measured,) = collect(tmp_path).measured
    assert measured.curves[0].name == "budget 64, check 16 / 0.01"
    page = write_report(tmp_path).read_text()
    for said in ("checks of drafts", "budget 64, check 16 / 0.01", "4,380", "88%", "2.45", "0.0279"):
        assert said in page
    assert "looks at windows of 16 tokens" in page and "more than log(1 / 0.01) nats off" in page
    write_profile(tmp_path / "profile.json", "first")
    assert "checks of drafts" not in write_report(tmp_path).read_text()


def test_a_schedule_with_groups_of_layers_is_named_by_itself(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", "first")
    record = json.loads((tmp_path / "profile.json").read_text())
    entry = record["results"]["schedules"][0]
    entry["schedule"] |= {"format": 2, "layer_groups": [[2], [3]]}
    entry["schedule"]["steps"][0]["kv_budget_tokens"] = [64, 128]
    entry["name"] = "grouped"
    (tmp_path / "profile.json").write_text(json.dumps(record))
    (measured,) = collect(tmp_path).measured
    assert measured.curves[0].name == "grouped" and measured.curves[0].kv_budget_tokens is None
    assert "grouped" in write_report(tmp_path).read_text()


def test_a_calibration_supersedes_the_profile_that_it_began_with_and_no_other(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", "first")
    write_profile(tmp_path / "calibration" / "calibration.json", "first", "calibration")
    write_profile(tmp_path / "other" / "profile.json", "first")
    found = collect(tmp_path).measured
    assert [each.folder for each in found] == ["calibration", "other"]
    (about, _) = found
    assert (about.target, about.bound, about.notes) == (0.86, "low", ("a note",))
    assert [curve.name for curve in about.curves] == ["budget 64", "calibrated schedule", "dense ceiling"]


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "record.json").write_text('{"kind": "rollout", "results": {}, "versions": {}}')
    with pytest.raises(UserError, match="there is nothing to report"):
        collect(tmp_path)
