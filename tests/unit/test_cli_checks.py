"""Checks of drafts on the command line: who takes them, what is written and printed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli_runs import error_of, save_model
from sparroll.attention.selectors import PageMean
from sparroll.cli import main
from sparroll.draft_check import DraftCheck
from sparroll.engines import HFEngine
from sparroll.engines.adapter import load_adapter
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.types import Checks

LONG = ["--max-new-tokens", "100"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Weights this large make attention sharp, so that the budget matters.
    return str(save_model(tmp_path_factory.mktemp("model") / "small", initializer_range=0.4))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("a b c d e\nx y z 1 2 3\n")
    return str(path)


def rollout(model: str, prompts: str, out: Path, *more: str) -> list[str]:
    about = ["--model", model, "--prompts", prompts, "--out", str(out)]
    return ["rollout", *about, "--n", "2", *LONG, *more]


def test_rollouts_with_a_check_say_what_it_did_and_hold_dense_log_probabilities(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tight = tmp_path / "out", Schedule.fixed(16, PageMean(4, 4, 8), dense_layers=()).save(tmp_path / "tight.toml")
    check = ["--check-window", "16", "--check-floor", "1"]
    assert main(rollout(model, prompts, out, "--schedule", str(tight), *check)) == 0
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
    summary = json.loads((out / "record.json").read_text())["results"]
    total = Checks()
    for row in rows:
        assert len(row["dense_logp"]) == len(row["sparse_logp"]) == len(row["response_ids"])
        # At floor 1 the tokens are the dense policy's.
        assert row["dense_logp"] == pytest.approx(row["sparse_logp"], abs=2e-5)
        total.add(Checks(**row["checks"]))
    assert summary["check_windows"] == total.windows > 0
    assert summary["check_cut_share"] == total.cut_share > 0
    assert summary["check_drafted_per_kept"] == total.drafted_per_kept > 1
    assert summary["check_largest_nats"] < 1e-4 and summary["check_over_2_nats_share"] == 0
    assert summary["engine"]["checks"]["windows"] == total.windows
    assert all(f"check_{name}" in printed for name in ("windows", "cut_share", "drafted_per_kept", "largest_nats"))


def test_a_schedule_file_brings_its_own_check_and_options_change_a_part_of_it(
    model: str, prompts: str, tmp_path: Path
) -> None:
    path = str(Schedule.fixed(64).checked(8, 0.5).save(tmp_path / "mine.toml"))
    asked = {
        "own": ([], {"window_tokens": 8, "floor": 0.5}),
        "window": (["--check-window", "4"], {"window_tokens": 4, "floor": 0.5}),
        "floor": (["--check-floor", "0.1"], {"window_tokens": 8, "floor": 0.1}),
    }
    for name, (more, expected) in asked.items():
        assert main(rollout(model, prompts, tmp_path / name, "--schedule", path, *more)) == 0
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["schedule"]["check"] == expected
    rows = (tmp_path / "own" / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(row)["schedule_name"] for row in rows} == {"mine"}


def test_rollouts_without_a_check_have_neither_its_columns_nor_its_summary(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(rollout(model, prompts, tmp_path / "out", "--budget", "64")) == 0
    assert "check" not in (tmp_path / "out" / "rollouts.jsonl").read_text()
    assert "check_" not in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["rollout", "evaluate"])
@pytest.mark.parametrize("sampler", [[], ["--compression", "streaming"]])
def test_without_drafts_there_is_nothing_to_check(
    verb: str, sampler: list[str], model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    first = {
        "rollout": rollout(model, prompts, tmp_path / "out"),
        "evaluate": ["evaluate", "--model", model, "--tasks", "synthetic", "--out", out],
    }[verb]
    message, hint = error_of([*first, *sampler, "--check-floor", "0.1"], capsys)
    assert message.startswith("--check-floor checks what is drafted under a schedule")
    assert hint == "add --schedule or --budget, or leave it out"


def test_a_check_that_cannot_be_is_refused(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = rollout(model, prompts, tmp_path / "out", "--budget", "64")
    message, _ = error_of([*command, "--check-floor", "0"], capsys)
    assert message == "floor must be above 0 and at most 1, got 0.0"
    message, _ = error_of([*command, "--check-window", "5000"], capsys)
    assert "--check-window" in message and "4096" in message


def test_profile_measures_a_checked_budget_and_refuses_to_replay_it(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = ["--model", model, "--prompts", prompts, *LONG, "--samples", "2", "--bin-tokens", "50"]
    command = ["profile", *about, "--budget", "64", "--check-window", "16", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "fixed-64-checked-16-0.01: reads" in (printed := capsys.readouterr().out)
    assert "checks: " in printed and "drafted per kept" in printed
    (entry,) = json.loads((tmp_path / "out" / "profile.json").read_text())["results"]["schedules"]
    assert entry["checked"]["windows"] > 0 and entry["schedule"]["check"]["window_tokens"] == 16
    message, hint = error_of([*command[:-1], str(tmp_path / "replay"), "--mode", "replay"], capsys)
    assert message.startswith("a replay drafts nothing") and "faithful" in hint


def test_evaluate_counts_what_checks_read_and_took_back(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = ["--model", model, "--tasks", "synthetic:0", "--count", "2", "--samples", "2", "--max-new-tokens", "40"]
    shares = []
    for name, more in (("plain", []), ("checked", ["--check-window", "2", "--check-floor", "0.001"])):
        out = tmp_path / name
        assert main(["evaluate", *about, "--budget", "64", "--no-tail", *more, "--out", str(out)]) == 0
        table = json.loads((out / "evaluation.json").read_text())
        (policy,) = next(iter(table["results"]["tasks"].values()))["policies"].values()
        shares.append(policy["kv_read_share"])
        assert ("checks: " in capsys.readouterr().out) == ("checks" in policy) == bool(more)
        assert ("check" in table["config"]["policies"]["sparse"]["schedule"]) == bool(more)
        assert ("checks of drafts" in (out / "report.html").read_text()) == bool(more)
    # A window of two reads the whole context for one token, or for two where the draft stands.
    assert shares[0] < shares[1] and shares[1] > 0.5
    checks = policy["checks"]
    assert 0.5 < checks["drafted_per_kept"] <= 1 <= checks["windows"], "a window of two wastes no draft"


def test_an_adapter_s_weights_are_no_dense_policy_to_check_against(
    model: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapted = ["--budget", "64", "--check-window", "16", "--adapter", "."]
    evaluation = ["evaluate", "--model", model, "--tasks", "synthetic:0", "--out", str(tmp_path / "evaluation")]
    for command in (rollout(model, prompts, tmp_path / "out", *adapted), [*evaluation, *adapted]):
        message, hint = error_of(command, capsys)
        assert "checks its drafts against the dense policy, which has no adapter" in message
        assert hint == "leave the adapter or the check out"
    engine = HFEngine(model, schedule=Schedule.fixed(64).checked(16), device="cpu")
    with pytest.raises(UserError, match="which has no adapter"):
        load_adapter(engine, model, tmp_path)


def test_evaluate_finds_no_tail_behind_greedy_checked_tokens(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = ["--model", model, "--tasks", "synthetic:0", "--samples", "1", "--temperature", "0", "--budget", "64"]
    message, hint = error_of(["evaluate", *about, "--check-floor", "1", "--out", str(tmp_path / "out")], capsys)
    assert "has no distribution to compare" in message and "--no-tail" in hint


def test_plan_prices_a_check_and_names_what_it_assumes(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", "Qwen3-1.7B", "--schedule", "qwen3-1.7b-0.86", "--check-window", "64"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "verified   2." in printed and "replace the trainer's scoring pass" in printed
    assert "of the study's model at 128 tokens and floor 0.01, not of this one" in printed
    assert main([*command, "--drafted-per-kept", "2", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["verified"]["drafted_per_kept"] == 2 and table["verified_speedup"] < 2
    message, hint = error_of([*command[:5], "--cut-share", "0.1"], capsys)
    assert "checks no drafts" in message and "--check-window" in hint


def test_schedule_check_writes_a_checked_copy_that_show_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.toml"
    assert main(["schedule", "check", "qwen3-1.7b-0.86", "--window", "32", "--floor", "0.1", "--out", str(path)]) == 0
    assert capsys.readouterr().err.strip() == f"wrote {path}"
    loaded, preset = Schedule.load(path), Schedule.load("qwen3-1.7b-0.86")
    assert loaded.check == DraftCheck(32, 0.1)
    assert (loaded.steps, loaded.model, loaded.target) == (preset.steps, preset.model, preset.target)
    assert main(["schedule", "show", str(path)]) == 0
    assert "windows of 32 tokens, floor 0.1: no token more than 2.31 nats off" in capsys.readouterr().out
    message, hint = error_of(["schedule", "check", "qwen3-1.7b-0.86", "--out", str(tmp_path / "x")], capsys)
    assert "ends with .toml" in message and hint.endswith("x.toml")
    (tmp_path / "folder.toml").mkdir()
    message, hint = error_of(["schedule", "check", "no-preset", "--out", str(tmp_path / "folder.toml")], capsys)
    assert message == f"{tmp_path / 'folder.toml'} is a folder, and a file is to be written there"
    assert hint == f"name a file in it, such as {tmp_path / 'folder.toml' / 'schedule.toml'}"


def test_calibrate_chooses_a_check_and_refuses_what_cannot_have_one(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "eight.txt"
    prompts.write_text("".join(f"{letter} b c d e\n" for letter in "fghijklm"))
    about = ["calibrate", "--model", model, "--prompts", str(prompts), *LONG, "--samples", "4", "--bin-tokens", "50"]
    about += ["--page-tokens", "4", "--budget", "52", "--budget", "80", "--target", "0.3", "--verify-rounds", "1"]
    out = tmp_path / "out"
    command = [*about, "--out", str(out), "--check-windows", "8,16", "--check-floors", "1"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "drafted/kept" in printed and "checks in the last round: " in printed
    page = (out / "report.html").read_text()
    assert "Window, floor and budgets were chosen together" in page and "have the least predicted time of" in page
    loaded = Schedule.load(out / "schedule.toml")
    assert loaded.check is not None and loaded.check.window_tokens in (8, 16) and loaded.check.floor == 1
    record = json.loads((out / "calibration.json").read_text())
    assert record["config"]["checks"] == [{"window_tokens": size, "floor": 1.0} for size in (8, 16)]
    for more, expected in (
        (["--check-windows", "8", "--mode", "replay"], "a replay drafts nothing"),
        (["--check-floors", "0.1", "--estimator", "exact"], "the estimator exact"),
        (["--check-floors", "2"], "floor must be above 0"),
        (["--check-windows", "8,x"], "--check-windows takes numbers, got '8,x'"),
        (["--check-windows", ""], "--check-windows takes numbers, got ''"),
        (["--check-over-2-nats", "0.001"], "--check-over-2-nats bounds what a check leaves"),
        (["--check-windows", "8", "--gpu", "H20O"], "unknown hardware 'H20O'"),
    ):
        message, _ = error_of([*about, "--out", str(tmp_path / "other"), *more], capsys)
        assert message.startswith(expected)
