"""recipes/mismatch-study: one row run to its end, the record of it, and what a later study takes from that."""

from __future__ import annotations

import errno
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import study_recipe
from sparroll import files, records
from sparroll.attention.selectors import PageMean
from sparroll.calibrate.curve import Cell
from sparroll.calibrate.fit import fit_schedule, too_little_data
from sparroll.calibrate.target import OutOfReach
from sparroll.errors import UserError, of_machine

registered = study_recipe.registered

import plots  # noqa: E402
import study  # noqa: E402
import study_distill  # noqa: E402
import study_verify  # noqa: E402
import study_worker  # noqa: E402
import table_sums  # noqa: E402
from study_jobs import Outcome  # noqa: E402
from study_record import KIND, make_record, merge  # noqa: E402
from study_rows import Settings, chosen, write_fixed_schedules  # noqa: E402


@pytest.fixture(scope="module")
def dry_study(tmp_path_factory) -> tuple[Settings, Path]:
    """One row run to its end in this process, another one not begun."""
    table_sums.register()
    out = tmp_path_factory.mktemp("study")
    study.write_dry_model(out / "model")
    settings = Settings(**study.DRY, model=str(out / "model"), targets=(0.75,), corrected_target=0.75, distill_lr=2e-3)
    write_fixed_schedules(settings, out)
    study_worker.run_calibration(settings, out)
    study_worker.run_one(settings, out, "calibrated-0.75", 0)
    return settings, out


def test_a_dry_study_calibrates_and_runs_and_leaves_no_checkpoint(dry_study) -> None:
    _, out = dry_study
    found = json.loads((out / "calibration" / "calibration.json").read_text())
    assert found["calibrated-0.75"]["rows"] and (out / "calibration" / "calibrated-0.75.toml").is_file()
    folder = out / "runs" / "calibrated-0.75-0"
    assert (folder / "result.json").is_file() and not (folder / "checkpoints").exists()


def cells(*lows: float) -> list[Cell]:
    """Of one bin, at budgets of 1024, 2048, ... tokens."""
    return [Cell(1024 * place, 0, 2000, low, low, low, 50_000, 100) for place, low in enumerate(lows, 1)]


@pytest.mark.parametrize(
    ("measured", "ceiling", "reachable"),
    [
        ((0.7, 0.8), (), False),
        ((0.7, 0.9), (0.85,), False),
        # Too few tokens, and no cells at all: another calibration may do better.
        ((), (), True),
    ],
)
def test_only_a_target_that_nothing_reaches_is_out_of_reach(measured, ceiling, reachable) -> None:
    with pytest.raises(UserError) as raised:
        fit_schedule(
            cells(*measured), target=0.86, selector=PageMean(), dense_layers=(), ceiling=cells(*ceiling), top_k=20,
            estimator="top_k_lower",
        )  # fmt: skip
    assert isinstance(raised.value, OutOfReach) != reachable


def test_too_little_data_and_a_full_disk_leave_a_target_within_reach() -> None:
    full = of_machine(OSError(errno.ENOSPC, "No space left on device"))
    assert full is not None
    for error in (too_little_data(cells(0.9), 400, 1000), full):
        assert not isinstance(error, OutOfReach)


def test_a_calibration_above_the_dense_ceiling_is_out_of_reach(dry_study, tmp_path) -> None:
    settings, _ = dry_study
    high = replace(settings, targets=(0.9999,), corrected_target=0.9999, distill_target=0.9999)
    study_worker.run_calibration(high, tmp_path)
    assert "the dense ceiling at" in (tmp_path / "calibration" / "calibrated-1.00.failed").read_text()


def test_a_calibration_forgets_why_an_earlier_one_failed_and_ends_with_other_errors(tmp_path, monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(study_worker, "open_study", lambda *_, **__: None)
    monkeypatch.setattr(study_worker, "calibrate", refuse)
    settings = Settings("folder", targets=(0.75,), corrected_target=0.75)
    failed = tmp_path / "calibration" / "calibrated-0.75.failed"
    error: UserError = OutOfReach("no budget meets the target of 0.75")
    study_worker.run_calibration(settings, tmp_path)
    assert failed.read_text() == "no budget meets the target of 0.75" and (failed.parent / "calibration.json").is_file()
    (failed.parent / "calibration.json").unlink()
    error = UserError("the disk is full")
    with pytest.raises(UserError, match="the disk is full"):
        study_worker.run_calibration(settings, tmp_path)
    assert not list(failed.parent.iterdir())


def test_an_adapter_alone_is_trained_under_the_studys_settings(dry_study, tmp_path, monkeypatch, capsys) -> None:
    settings, out = dry_study
    files.write_json(out / "settings.json", settings.table())
    command = ["study_distill.py", "--study", str(out), "--out", str(tmp_path / "adapter"), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--held-out", "2", "--schedule", str(out / "calibration/fixed.toml")])
    study_distill.main()
    record = records.read(tmp_path / "adapter" / "result.json", "distill")
    assert record["results"]["steps"] == 2 and record["results"]["before"]["q05"] < 1
    assert record["config"]["distill"]["lr"] == settings.distill_lr
    assert record["config"]["distill"]["objective"] == "kl" and record["config"]["distill"]["kl"] == "top_k"
    assert record["config"]["rollout"]["temperature"] == settings.temperature
    assert (tmp_path / "adapter/adapter/adapter_model.safetensors").is_file()
    assert "before: tail" in capsys.readouterr().out


def test_calibrated_schedules_are_held_against_their_targets(dry_study, tmp_path, monkeypatch, capsys) -> None:
    settings, out = dry_study
    record = make_record(settings, out, chosen(settings, ["dense"]), [0], {})
    asked = ["--model", settings.model, "--schedules-of", str(record), "--out", str(tmp_path), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["study_verify.py", *asked, "--prompts", "8", "--rounds", "1"])
    study_verify.main()
    [found] = records.read(tmp_path / "verified.json", "study-verification")["results"]["schedules"]
    [measured] = found["rounds"]
    lowest = min(cell["value"] for cell in measured["bins"])
    assert found["target"] == 0.75 and found["held_as_made"] == (lowest >= 0.75) == found["met"]
    assert {"kv_budget_tokens", "low", "tokens", "rollouts"} <= measured["bins"][0].keys()
    assert f"calibrated-0.75: worst bin {lowest:.4f} for a target of 0.75, 1 rounds" in capsys.readouterr().out


def test_finished_runs_are_not_run_again_and_the_calibration_comes_first(dry_study) -> None:
    settings, out = dry_study
    made = study.jobs(settings, out, chosen(settings, ["dense", "calibrated-0.75"]), [0, 1])
    assert [each.name for each in made] == ["dense-0", "dense-1", "calibrated-0.75-1"]
    fresh = study.jobs(settings, out / "elsewhere", chosen(settings, ["dense", "calibrated-0.75"]), [0])
    assert [each.name for each in fresh] == ["calibrate", "dense-0", "calibrated-0.75-0"]
    assert fresh[2].blocked() and not fresh[2].hopeless()


def test_the_record_holds_series_and_says_what_is_missing(dry_study, tmp_path) -> None:
    settings, out = dry_study
    taken = chosen(settings, ["dense", "calibrated-0.75"])
    path = make_record(settings, out, taken, [0], {"dense-0": Outcome("failed", "exit code 1: no luck")})
    record = records.read(path, KIND)
    dense, run = record["results"]["runs"]
    assert dense["state"] == "failed" and "no luck" in dense["reason"]
    assert run["state"] == "finished" and [point[0] for point in run["dense_accuracy"]] == [0, 1, 2]
    for name in ("reward/mean", "mismatch/acceptance_q05", "rollout/kv_read_share", "time/rollout_seconds"):
        assert len(run["series"][name]) == 2
    # What it began with, but not where on this machine that was.
    [weights] = Path(settings.model).glob("*.safetensors")
    assert record["config"]["model"] == "model" and record["config"]["model_sha256"] == files.sha256(weights)
    assert str(out) not in path.read_text()
    written = plots.draw(path, tmp_path, png=False)
    assert {each.name for each in written} == {"table.md", *(f"{name}.svg" for name in plots.FIGURES)}
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert len(lines) == 4 and lines[2].startswith("| dense | 0 | - |")


def test_the_record_says_when_the_guard_would_have_acted_on_the_reward_gap(tmp_path) -> None:
    gap = {"reward_gap": 0.2, "reward_gap_low": 0.1, "reward_gap_high": 0.3, "reward_gap_evidence": 1.1, "pairs": 8.0}
    control = {f"control/{name}": value for name, value in gap.items()} | {"control/length_gap": 3.0}
    about_the_tail = "the tail (5th percentile of the acceptance) at all is 0.700, surely under 0.860"
    events = {2: [about_the_tail], 3: [about_the_tail, "sparse rollouts get less reward than dense ones by 0.2"]}
    lines = [{"step": step, "reward/mean": 0.5, "events": events.get(step, [])} | control for step in (1, 2, 3)]
    path = tmp_path / "runs" / "uniform-0" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = Settings("folder", control_share=1 / 32)
    record = records.read(make_record(settings, tmp_path, chosen(settings, ["uniform"]), [0], {}), KIND)
    [run] = record["results"]["runs"]
    assert run["reward_gap_alarms"] == [3] and len(run["events"]) == 3
    assert {name for name in run["series"] if name.startswith("control/")} == {f"control/{name}" for name in gap}
    assert run["series"]["control/reward_gap_low"] == [0.1] * 3


def test_a_later_study_takes_the_schedules_of_an_earlier_record(dry_study, tmp_path) -> None:
    settings, out = dry_study
    record = make_record(settings, out, chosen(settings, ["calibrated-0.75"]), [0], {})
    study.take_schedules(record, settings, tmp_path / "later")
    for name in ("calibrated-0.75.toml", "calibration.json"):
        same = [(folder / "calibration" / name).read_bytes() for folder in (out, tmp_path / "later")]
        assert same[0] == same[1]
    assert study.jobs(settings, tmp_path / "later", chosen(settings, ["calibrated-0.75"]), [0])[0].name != "calibrate"
    with pytest.raises(UserError, match="another temperature"):
        study.take_schedules(record, replace(settings, temperature=0.5), tmp_path / "other")
    nothing = make_record(settings, tmp_path / "empty", chosen(settings, ["dense"]), [0], {})
    with pytest.raises(UserError, match="no calibration"):
        study.take_schedules(nothing, settings, tmp_path / "other")
    table = json.loads(record.read_text())
    for changed, why in (({"model_sha256": "another"}, "other weights"), ({"dtype": "bf16"}, "another dtype")):
        files.write_json(tmp_path / "changed.json", table | {"config": table["config"] | changed})
        with pytest.raises(UserError, match=why):
            study.take_schedules(tmp_path / "changed.json", settings, tmp_path / "other")
    del table["config"]["bin_tokens"], table["config"]["model_sha256"]
    files.write_json(tmp_path / "changed.json", table)
    with pytest.raises(UserError, match="another bin_tokens"):
        study.take_schedules(tmp_path / "changed.json", settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_study_that_has_a_calibration_takes_no_other_one(dry_study, tmp_path) -> None:
    settings, out = dry_study
    record = make_record(settings, out, chosen(settings, ["calibrated-0.75"]), [0], {})
    study.take_schedules(record, settings, tmp_path)
    before = (tmp_path / "calibration" / "calibrated-0.75.toml").read_bytes()
    study.take_schedules(record, settings, tmp_path)
    table = json.loads(record.read_text())
    table["results"]["calibration"]["calibrated-0.75"]["schedule"]["name"] = "another"
    files.write_json(tmp_path / "another.json", table)
    with pytest.raises(UserError, match="differs from that of"):
        study.take_schedules(tmp_path / "another.json", settings, tmp_path)
    assert (tmp_path / "calibration" / "calibrated-0.75.toml").read_bytes() == before


def test_parts_from_two_machines_merge_into_one_record(dry_study, tmp_path) -> None:
    settings, out = dry_study
    taken = chosen(settings, ["dense", "calibrated-0.75"])
    first = tmp_path / "first.json"
    first.write_bytes(make_record(settings, out, taken, [0], {}).read_bytes())
    second = make_record(settings, tmp_path / "empty", taken, [0, 1], {})
    merged = merge([second, first])
    states = {(run["row"], run["seed"]): run["state"] for run in merged["results"]["runs"]}
    assert states[("calibrated-0.75", 0)] == "finished" and states[("dense", 1)] == "waiting" and len(states) == 4
    assert [row["seeds"] for row in merged["results"]["table"]] == [0, 1] and len(merged["results"]["parts"]) == 2
    other = json.loads(first.read_text())
    other["config"]["lr"] = 1.0
    first.write_text(json.dumps(other))
    with pytest.raises(UserError, match="differ in lr"):
        merge([second, first])


def test_merge_compares_weights_and_loses_no_row(dry_study, tmp_path) -> None:
    settings, out = dry_study
    table = json.loads(make_record(settings, out, chosen(settings, ["dense"]), [0], {}).read_text())

    def part(name: str, **config: object) -> Path:
        known = {key: value for key, value in (table["config"] | config).items() if value is not None}
        return files.write_json(tmp_path / f"{name}.json", table | {"config": known})

    first, older = part("first", model="elsewhere"), part("older", model_sha256=None)
    assert len(merge([first, older])["results"]["runs"]) == 1
    with pytest.raises(UserError, match="weights of the model"):
        merge([first, part("other", model_sha256="another")])
    with pytest.raises(UserError, match="no setting 'eviction_budget'"):
        merge([part("foreign", eviction_budget=1024)])
    table["results"]["table"][0]["row"] = "r_kv-none"
    with pytest.raises(UserError, match="no row 'r_kv-none'"):
        merge([part("renamed")])


def test_a_study_that_was_begun_with_other_settings_is_refused(dry_study, monkeypatch, tmp_path) -> None:
    arguments = ["study.py", "--out", str(tmp_path), "--model", "folder", "--lr", "1e-4"]
    monkeypatch.setattr(sys, "argv", arguments)
    begun = study.read_settings(study.arguments())
    assert begun.lr == 1e-4
    files.write_json(tmp_path / "settings.json", begun.table())
    monkeypatch.setattr(sys, "argv", arguments[:3])
    assert study.read_settings(study.arguments()).lr == 1e-4
    monkeypatch.setattr(sys, "argv", [*arguments[:-1], "2e-4"])
    with pytest.raises(UserError, match="was made with lr = 0.0001, and lr = 0.0002"):
        study.read_settings(study.arguments())
