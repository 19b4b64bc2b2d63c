"""recipes/mismatch-study, the grid's part: rows, the scheduler, the record, the figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparroll import files, records
from sparroll.errors import UserError

RECIPE = Path(__file__).parents[2] / "recipes" / "mismatch-study"
sys.path.insert(0, str(RECIPE))

import eviction  # noqa: E402
import plots  # noqa: E402
import study  # noqa: E402
import study_checks  # noqa: E402
import study_distill  # noqa: E402
import study_jobs  # noqa: E402
import study_verify  # noqa: E402
import study_worker  # noqa: E402
import table_sums  # noqa: E402
from study_jobs import Job, Outcome, run_jobs  # noqa: E402
from study_record import KIND, make_record, merge, summary  # noqa: E402
from study_rows import Settings, chosen, rows, run_config, schedule_path, write_fixed_schedules  # noqa: E402


@pytest.fixture(autouse=True)
def _the_task_is_registered():
    table_sums.register()


# -- rows ----------------------------------------------------------------------------------------------------------------


def test_the_grid_holds_every_row_that_was_asked_for() -> None:
    names = list(rows(Settings("folder")))
    assert names[:6] == ["dense", *(f"fixed-{name}" for name in ("none", "tis", "icepop", "sparse_rl", "jackpot"))]
    evicting = ("r_kv-{}-none", "r_kv-{}-sparse_rl", "snap_kv-{}-none", "snap_kv-{}-sparse_rl")
    assert names[6:14] == [name.format(budget) for budget in (1024, 3584) for name in evicting]
    assert names[14:] == [
        *(f"calibrated-{t}" for t in ("0.75", "0.80", "0.86", "0.92")),
        "uniform",
        *(f"calibrated-0.86-{name}" for name in ("none", "icepop", "sparse_rl", "jackpot")),
        "fixed-verified",
        *(f"fixed-verified-{check}" for check in ("32-0.01", "32-0.1", "32-0.5", "64-0.1", "64-0.5")),
        *(f"{name}-verified" for name in ("fixed-256", "fixed-512", "quantized-64", "quantized-128")),
        *(f"{name}-verified" for name in ("calibrated-0.75", "calibrated-0.86")),
        "distill",
        "distill-kl",
        "controller",
        "controller-safe-start",
    ]


@pytest.mark.parametrize("name", list(rows(Settings("folder"))))
def test_every_row_is_a_configuration_that_differs_only_in_its_own_sections(name, tmp_path) -> None:
    settings = Settings("folder")
    row, dense = rows(settings)[name], rows(settings)["dense"]
    table = run_config(settings, tmp_path, row, 3).model_dump(mode="json")
    shared = run_config(settings, tmp_path, dense, 3).model_dump(mode="json")
    differing = {section for section in table if table[section] != shared[section]}
    expected = {section for section in row.tables if section != "correction" or row.tables[section] != {"name": "none"}}
    assert differing == expected | ({"attention"} if schedule_path(tmp_path, row) else set())
    assert table["train"]["seed"] == 3 and table["train"]["dtype"] == "bf16"


def test_vllm_is_for_the_rows_that_do_not_evict(tmp_path) -> None:
    settings = Settings("folder", engine="vllm")
    engines = {name: run_config(settings, tmp_path, row, 0).engine.kind for name, row in rows(settings).items()}
    evicting = {name for name in engines if name.startswith(("r_kv", "snap_kv"))}
    assert {name for name, engine in engines.items() if engine == "hf"} == evicting


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="no row 'fixed-tiss'"):
        chosen(Settings("folder"), ["fixed-tiss"])
    with pytest.raises(UserError, match="no level 77"):
        Settings("folder", level=77)
    for same in ({"targets": (0.75, 0.754, 0.86)}, {"eviction_budgets": (1024, 1024)}):
        with pytest.raises(UserError, match="must differ"):
            Settings("folder", **same)
    with pytest.raises(UserError, match="no setting 'eviction_budget'"):
        Settings.from_table({"model": "folder", "eviction_budget": 1024})
    for name in ("corrected_target", "distill_target"):
        with pytest.raises(UserError, match=f"{name} must be one of"):
            Settings("folder", **{name: 0.5})


def test_settings_come_back_from_their_file() -> None:
    settings = Settings("folder", level=136, targets=(0.75, 0.86), budgets=(64, 128))
    assert Settings.from_table(json.loads(json.dumps(settings.table()))) == settings


# -- the scheduler -------------------------------------------------------------------------------------------------------


def job(folder: Path, name: str, code: str, **more) -> Job:
    return Job(name, [sys.executable, "-c", code], folder / f"{name}.log", **more)


def soon() -> float:
    return time.time() + 60


def test_a_failure_is_reported_with_its_last_words_and_stops_nothing(tmp_path) -> None:
    made = [job(tmp_path, "bad", "raise SystemExit('no luck')"), job(tmp_path, "good", "print('fine')")]
    outcomes = run_jobs(made, gpus=[], at_once=1, deadline=soon())
    assert outcomes["bad"].state == "failed" and "no luck" in outcomes["bad"].reason
    assert outcomes["good"].state == "finished"


def test_a_job_waits_for_what_it_needs_and_fails_when_that_cannot_come(tmp_path) -> None:
    made_later = tmp_path / "made-later"
    first = job(tmp_path, "first", f"open({str(made_later)!r}, 'w')")
    second = job(tmp_path, "second", "pass", blocked=lambda: not made_later.exists())
    third = job(
        tmp_path, "third", "pass", blocked=lambda: True, hopeless=lambda: "never" if made_later.exists() else ""
    )
    fourth = job(tmp_path, "fourth", "pass", blocked=lambda: True)
    outcomes = run_jobs([second, third, fourth, first], gpus=[], at_once=2, deadline=soon())
    assert {name: outcome.state for name, outcome in outcomes.items()} == {
        "first": "finished", "second": "finished", "third": "failed", "fourth": "failed"
    }  # fmt: skip
    assert outcomes["third"].reason == "never" and "did not come" in outcomes["fourth"].reason


def interrupted(folder: Path, on_interrupt: str, began: str = "") -> Outcome:
    """How a job ends that is interrupted as soon as it has begun; another one never begins."""
    code = f"""
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path({str(folder)!r})
try:
    {began or "pass"}
    (folder / "began").touch()
    time.sleep(60)
except KeyboardInterrupt:
    {on_interrupt}
"""
    outcomes = run_jobs(
        [job(folder, "long", code), job(folder, "late", "pass")],
        gpus=[],
        at_once=1,
        deadline=1.0,
        least_seconds=0,
        clock=lambda: float((folder / "began").exists()),
    )
    assert "late" not in outcomes
    return outcomes["long"]


def test_at_the_deadline_jobs_are_interrupted_once_and_may_save(tmp_path, monkeypatch) -> None:
    sent, send = [], subprocess.Popen.send_signal
    monkeypatch.setattr(subprocess.Popen, "send_signal", lambda self, number: (sent.append(number), send(self, number)))
    assert interrupted(tmp_path, "(folder / 'saved').touch(); sys.exit(130)").state == "cut"
    assert (tmp_path / "saved").exists() and sent == [signal.SIGINT]


def test_a_job_that_breaks_when_it_is_interrupted_has_failed(tmp_path) -> None:
    outcome = interrupted(tmp_path, "sys.exit('could not save')")
    assert outcome.state == "failed" and "could not save" in outcome.reason


def test_a_job_that_outlasts_its_grace_is_cut_and_its_children_end_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study_jobs, "GRACE_SECONDS", 0)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    child = "import time; time.sleep(20); print('outlived it', flush=True)"
    began = "signal.signal(signal.SIGINT, signal.SIG_IGN); "
    began += f"subprocess.Popen([sys.executable, '-c', {child!r}], stdout=(folder / 'pipe').open('w'))"
    assert interrupted(tmp_path, "pass", began).state == "cut"
    os.set_blocking(reader, True)
    with open(reader) as pipe:
        assert pipe.read() == ""


def test_a_record_that_cannot_be_written_stops_no_job_and_is_told_at_the_end(tmp_path, capsys) -> None:
    def full(outcomes: dict[str, Outcome]) -> None:
        raise OSError("no space left")

    made = [job(tmp_path, name, "print('done')") for name in ("first", "second")]
    with pytest.raises(OSError, match="no space left"):
        run_jobs(made, gpus=[], at_once=1, deadline=soon(), on_change=full)
    assert [each.log.read_text() for each in made] == ["done\n", "done\n"]
    assert "no space left" in capsys.readouterr().err


def test_sigterm_lets_the_runs_save(tmp_path, monkeypatch, capsys) -> None:
    code = f"""
import os, pathlib, signal, sys, time
try:
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
except KeyboardInterrupt:
    pathlib.Path({str(tmp_path)!r}, "saved").touch()
    sys.exit(130)
"""

    def unhandled(*_: object) -> None:
        raise RuntimeError("nobody heeds SIGTERM")

    monkeypatch.setattr(study, "jobs", lambda *_: [job(tmp_path, "dense-0", code)])
    monkeypatch.setattr(sys, "argv", ["study.py", "--dry", "--out", str(tmp_path), "--rows", "dense"])
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        with pytest.raises(KeyboardInterrupt):
            study.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "saved").exists() and "dense-0: cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seen", "given"), [(None, ("0", "1")), ("4,5", ("4", "5")), ("GPU-b, GPU-a", ("GPU-b", "GPU-a"))]
)
def test_jobs_are_spread_over_the_gpus_that_are_visible(tmp_path, monkeypatch, seen, given) -> None:
    if seen is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']); input()"
    made = [job(tmp_path, f"job-{number}", code) for number in range(4)]
    run_jobs(made, gpus=[0, 1], at_once=2, deadline=soon(), threads=3)
    told = sorted(each.log.read_text().splitlines()[0] for each in made)
    assert told == sorted(f"{name} 3" for name in given for _ in range(2))


def test_a_gpu_that_is_not_visible_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(UserError, match="no GPU 4: CUDA_VISIBLE_DEVICES is '4,5'"):
        study_jobs.visible_device(4)


# -- runs, record, figures -----------------------------------------------------------------------------------------------


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


def test_figures_hold_the_rows_of_which_a_run_went_to_its_end() -> None:
    def run(row: str, state: str, steps: int, stopped: str = "") -> dict:
        names = ("reward/mean", "mismatch/acceptance_q05", "mismatch/kl_sparse_to_dense", "rollout/kv_read_share")
        names += ("rollout/response_tokens_mean", "time/step_seconds", "time/rollout_seconds")
        ends = [0, steps] if state == "finished" else [0]
        return {
            "row": row,
            "state": state,
            "steps": steps,
            "stopped": stopped,
            "dense_accuracy": [[step, 0.5, 0.4, 0.6] for step in ends],
            "series": {name: [0.1] * steps for name in names},
        }

    runs = [
        run("dense", "finished", 5),
        run("cut", "cut", 5),
        run("stopped", "finished", 3, "no token kept"),
        run("waiting", "waiting", 0),
    ]
    table = [summary(each["row"], "", "", [each]) for each in runs]
    assert [(row["seeds"], row["steps"]) for row in table] == [(1, 5), (1, 5), (1, 3), (0, 0)]
    # A run that was cut has figures, and no accuracy after.
    assert table[1]["reward_last"]["mean"] == 0.1 and table[1]["accuracy_change"] is None
    assert [row["row"] for row in plots._whole_rows({"table": table, "runs": runs})] == ["dense"]
    # A seed that stopped itself is in no figure.
    runs = [run("dense", "finished", 5), run("dense", "finished", 3, "no token kept")]
    results = {"table": [summary("dense", "", "dense", runs)], "runs": runs}
    assert list(plots.progress(results).axes[0].lines[0].get_xdata()) == [0, 5]
    assert list(plots.accuracy(results).axes[0].lines[0].get_xdata()) == [0]


def test_the_rows_of_a_family_are_told_apart_or_refused(tmp_path) -> None:
    families = [row.family for row in rows(Settings("folder")).values()]
    assert max(map(families.count, families)) <= len(set(plots.LINES)) == len(set(plots.MARKS))
    whole = {"state": "finished", "stopped": ""}
    table = [{"row": str(n), "family": "eviction", "accuracy_change": {"mean": 0.0}} for n in range(9)]
    results = {"runs": [whole | {"row": row["row"]} for row in table], "table": table}
    with pytest.raises(UserError, match="9 rows"):
        plots.draw(records.write(tmp_path / "study.json", KIND, results), tmp_path / "figures")


def test_eviction_without_need_is_dense_and_says_what_it_saves_otherwise(tmp_path, monkeypatch) -> None:
    model, out = tmp_path / "model", tmp_path / "eviction.json"
    study.write_dry_model(model)
    given = ["--model", str(model), "--out", str(out), "--device", "cpu", "--level", "0", "--problems", "2"]
    monkeypatch.setattr(sys, "argv", ["eviction.py", *given, "--kinds", "snap_kv", "--budgets", "40", "4096"])
    eviction.main()
    dense, tight, ample = records.read(out, "study-eviction")["results"]["runs"]
    assert tight["policy"]["budget_tokens"] == 40 and tight["kv_saved_share"] > 0
    # The room for a compression that never comes is all that differs.
    same = ("solved_share", "kv_read_share", "response_tokens_mean")
    assert dense["policy"] is None and [ample[name] for name in same] == [dense[name] for name in same]


def test_corrections_of_a_remainder_are_printed_line_by_line(monkeypatch, capsys) -> None:
    import remainder

    asked = ["--model", "tiny-reasoner", "--response-tokens", "40", "--budgets", "64", "--units", "4x4"]
    monkeypatch.setattr(sys, "argv", ["remainder.py", *asked, "--variants", "none", "plain", "both"])
    remainder.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[3] for line in lines] == ["none", "plain", "both"]
    # Each variant reads another thing, and none of them is dense.
    assert len({line[4] for line in lines}) == 3
    assert all(0 < float(line[6]) < 1 for line in lines)


def test_checks_are_sampled_row_by_row_and_go_on_where_they_were_cut(tmp_path, monkeypatch, capsys) -> None:
    def run(*more: str) -> dict:
        command = ["study_checks.py", "--quick", "--out", str(tmp_path), *more]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(study_checks, "QUICK", study_checks.QUICK | {"problems": 2, "windows": [8]})
        study_checks.main()
        return records.read(tmp_path / "checks.json", "study-checks")["results"]

    whole = run()
    rows = {row["sampler"]: row for row in whole["rows"]}
    names = ["dense", "sparse-24", "sparse-48", "verified-48-8-0.01", "verified-24-8-0.01", "verified-24-8-1"]
    assert list(rows) == names and whole["missing"] == []
    assert abs(rows["dense"]["largest_nats"]) < 1e-4 and rows["dense"]["kv_read_share"] == 1
    assert rows["verified-24-8-1"]["largest_nats"] < 1e-4, "a floor of 1 samples from the dense policy"
    assert rows["verified-24-8-0.01"]["draft_acceptance_q05"] < 1 and rows["verified-24-8-0.01"]["windows"] > 0
    # A cut run has the rows that it finished, and its next call adds only the missing ones, with the same figures.
    for name in names[-2:]:
        (tmp_path / "rows" / f"{name}.json").unlink()
    assert run("--minutes", "0")["missing"] == names[-2:]
    again = run()
    timed = ("seconds", "sampling_seconds", "check_seconds")
    for one, other in zip(whole["rows"], again["rows"], strict=True):
        assert {k: v for k, v in one.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    assert "waits for another call" in capsys.readouterr().out


def test_nats_off_are_averaged_over_tokens_with_an_error_over_rollouts() -> None:
    found = study_checks.far([torch.tensor([0.0, 3.0]), torch.tensor([0.0, 21.0])])
    assert found["kl"] == 6.0 and found["largest_nats"] == 21.0
    assert [found[f"over_{nats}_nats_share"] for nats in (2, 10, 20)] == [0.5, 0.25, 0.25]
    # Means of 1.5 and 10.5 a token: a standard deviation of 9 / sqrt(2), over sqrt(2).
    assert found["kl_standard_error"] == pytest.approx(4.5)


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


def test_a_row_is_summed_up_as_mean_and_range_over_its_finished_seeds() -> None:
    def run(last: float, state: str = "finished", stopped: str = "") -> dict:
        series = {
            "reward/mean": [0.1, last],
            "mismatch/acceptance_q05": [0.8, 0.9],
            "correction/masked_token_share": [0.0, 0.2],
        }
        series |= {"mismatch/kl_sparse_to_dense": [0.1, 0.3], "rollout/kv_read_share": [0.5, 0.5]}
        series |= {
            "rollout/response_tokens_mean": [10, 12],
            "time/step_seconds": [1, 3],
            "time/rollout_seconds": [1, 1],
        }
        ends = [[0, 0.5, 0.4, 0.6], [2, last, 0, 1]]
        return {"state": state, "steps": 2, "stopped": stopped, "dense_accuracy": ends, "series": series}

    stopped = [run(0.1, stopped="no token kept"), run(0.3, stopped="no token kept")]
    found = summary("row", "about", "fixed", [run(0.6), run(0.8), run(0.0, "cut"), stopped[0]])
    assert found["seeds"] == 2 and found["runs"] == 4 and found["stopped"] == 1
    assert found["accuracy_change"] == {"mean": 0.2, "low": 0.1, "high": 0.3}
    assert found["tail"]["mean"] == 0.85 and found["masked_share"]["mean"] == 0.1 and found["kv_saved_share"] is None
    found = summary("row", "about", "fixed", [*stopped, run(0.0, "cut")])
    assert found["seeds"] == found["stopped"] == 2 and found["accuracy_change"]["mean"] == -0.3


@pytest.mark.parametrize("name", ["mismatch-study-h200", "mismatch-study-60-steps-h200"])
def test_the_committed_tables_are_those_of_their_runs(name) -> None:
    found = records.read(RECIPE.parents[1] / "benchmarks" / "results" / f"{name}.json", KIND)["results"]
    for row in found["table"]:
        made = summary(
            row["row"], row["about"], row["family"], [run for run in found["runs"] if run["row"] == row["row"]]
        )
        assert made | row == made


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


@pytest.mark.parametrize(("asked", "named"), [([], "no GPU\n"), (["--gpus", "4", "5"], "no GPU 4, 5\n")])
def test_without_its_gpus_a_study_is_not_begun(monkeypatch, tmp_path, asked, named) -> None:
    monkeypatch.setattr(study.torch.cuda, "device_count", lambda: 2 if asked else 0)
    monkeypatch.setattr(sys, "argv", ["study.py", "--out", str(tmp_path / "study"), "--model", "folder", *asked])
    with pytest.raises(SystemExit, match=f"error: there is {named}hint: "):
        study.main()
    assert not (tmp_path / "study").exists()


def test_settings_that_agree_need_not_be_named_all_again(monkeypatch, tmp_path) -> None:
    arguments = ["study.py", "--out", str(tmp_path), "--targets", "0.5"]
    others = ["--model", "folder", "--corrected-target", "0.5", "--distill-target", "0.5"]
    monkeypatch.setattr(sys, "argv", arguments + others)
    files.write_json(tmp_path / "settings.json", study.read_settings(study.arguments()).table())
    monkeypatch.setattr(sys, "argv", arguments)
    assert study.read_settings(study.arguments()).corrected_target == 0.5
