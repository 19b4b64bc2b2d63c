"""`sparroll profile`, `calibrate`, `plan` and `report` on the command line; the figures themselves are tested elsewhere."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import Qwen3Config

from cli_runs import error_of, save_model
from sparroll import files, records
from sparroll.attention.selectors import PageMean, QuantizedMean
from sparroll.calibrate.open_study import selector_from, share_beside_a_scorer
from sparroll.cli import main
from sparroll.errors import UserError
from sparroll.models import fingerprint
from sparroll.plan.model_shape import model_shape
from sparroll.plan.speedup import plan as predict
from sparroll.schedule import Schedule

SMALL = ["--task", "synthetic", "--level", "0", "--count", "6", "--samples", "2", "--max-new-tokens", "60"]
TINY = ["--model", "tiny-reasoner", *SMALL, "--bin-tokens", "50", "--page-tokens", "4"]


def test_plan_reproduces_the_published_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "Qwen3-1.7B", "--schedule", "qwen3-1.7b-0.86", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speedup"] == pytest.approx(3.40, rel=0.05)
    assert main(["plan", "--model", "Qwen3-1.7B", "--schedule", "qwen3-1.7b-0.86"]) == 0
    assert "speed-up   3.4" in capsys.readouterr().out


def test_plan_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["plan", "--model", "Qwen3-1.7B", "--budget", "512", "--gpu", "H20O"], capsys)
    assert message == "unknown hardware 'H20O'"
    assert "H200" in hint
    message, _ = error_of(["plan", "--model", "Qwen3-1.7B"], capsys)
    assert message == "a plan needs --schedule or --budget"
    message, hint = error_of(["plan", "--model", "Qwen3-1.7B", "--budget", "500"], capsys)
    assert "multiple of page_tokens (16), got 500" in message
    assert hint == "use 496 or 512"
    message, _ = error_of(["plan", "--model", "Qwen3-1.7B", "--budget", "512", "--lengths", "many"], capsys)
    assert "many" in message


def test_plan_takes_a_model_folder_and_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "small")
    capsys.readouterr()
    command = ["plan", "--model", str(folder), "--budget", "64", "--lengths", "100", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert capsys.readouterr().err.strip() == f"wrote {tmp_path / 'out' / 'plan.json'}"
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["results"]["model"]["layers"] == 3


def test_plan_looks_at_the_model_in_a_folder_and_not_at_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers as `profile` gives."""
    monkeypatch.chdir(tmp_path)
    folder = save_model(tmp_path / "tiny-reasoner")
    made_for = {"model": "tiny-reasoner", "fingerprint": fingerprint.of_model("tiny-reasoner")}
    tiny = replace(Schedule.fixed(64), **made_for).save(tmp_path / "tiny.toml")
    own = replace(Schedule.fixed(64), model=str(folder), fingerprint=fingerprint.of_model(str(folder)))
    own.save(tmp_path / "own.toml")
    checkpoint = save_model(tmp_path / "run" / "step-000002" / "model", torch_seed=1)
    (checkpoint.parent / "config.json").write_text(json.dumps({"model": {"name": str(folder)}}))
    plan = ["plan", "--lengths", "100", "--model"]
    capsys.readouterr()
    for model in ("./tiny-reasoner", "tiny-reasoner/config.json", str(folder)):
        message, _ = error_of([*plan, model, "--schedule", str(tiny)], capsys)
        assert "was made for tiny-reasoner, not for" in message and "layers" in message
        assert main([*plan, model, "--schedule", "own.toml"]) == 0
        capsys.readouterr()
    assert main([*plan, "tiny-reasoner", "--schedule", str(tiny)]) == 0
    assert main([*plan, str(checkpoint), "--schedule", "own.toml"]) == 0
    assert main([*plan, str(folder), "--schedule", str(tiny), "--force-schedule"]) == 0
    bare = tmp_path / "configs" / "tiny-reasoner"
    bare.mkdir(parents=True)
    (bare / "config.json").write_text((folder / "config.json").read_text())
    assert main([*plan, str(bare / "config.json"), "--schedule", "own.toml"]) == 0
    assert predict(str(folder), own, lengths=100).schedule == "fixed-64"
    with pytest.raises(UserError, match="was made for"):
        predict("./tiny-reasoner", Schedule.load(tiny), lengths=100)


def test_plan_takes_the_config_of_the_model_that_a_preset_was_made_for(tmp_path: Path) -> None:
    """The folder has no weights, and need not have the model's name."""
    sizes = {"num_hidden_layers": 28, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(**sizes, head_dim=128, vocab_size=151_936, intermediate_size=6144, tie_word_embeddings=True)
    for name in ("Qwen3-1.7B", "mine"):
        config.save_pretrained(tmp_path / name)
        model = str(tmp_path / name / "config.json")
        assert main(["plan", "--model", model, "--schedule", "qwen3-1.7b-0.86"]) == 0


def test_profile_prints_and_plots_each_budget_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["profile", *TINY, "--budget", "52", "--budget", "72", "--out", str(out)]
    assert main(command) == 0
    output = capsys.readouterr()
    assert all(text in output.out for text in ("dense: reads 100%", "fixed-52: reads", "fixed-72: reads", "Beta"))
    assert "too little for a tail" not in output.out
    assert output.err.splitlines()[-1] == f"wrote {out / 'report.html'}"
    record = json.loads((out / "profile.json").read_text())
    assert [entry["name"] for entry in record["results"]["schedules"]] == ["fixed-52", "fixed-72"]
    assert "budget 52" in (out / "report.html").read_text()

    from sparroll.engines.hf.engine import HFEngine

    def again(*_: object, **__: object) -> None:
        raise AssertionError("a finished profile must not generate again")

    monkeypatch.setattr(HFEngine, "generate", again)
    path = out / "profile.json"
    path.write_text(json.dumps(record | {"date": "2020-01-01T00:00:00+00:00", "wall_seconds": 77.0}))
    before = path.read_text()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == record["results"]
    # Nothing was left to do, so the date and the seconds are those of the call that measured.
    assert path.read_text() == before
    assert main(command[:-4] + command[-2:]) == 0
    assert [entry["name"] for entry in json.loads(path.read_text())["results"]["schedules"]] == ["fixed-52"]


def test_calibrate_writes_a_schedule_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["calibrate", *TINY, "--target", "0.3", "--out", str(out), "--name", "mine", "--verify-rounds", "1"]
    command += ["--dense-layers", "0", "--first-tokens", "8", "--recent-tokens", "40"]
    command += [part for budget in (52, 72, 96) for part in ("--budget", str(budget))]
    assert main(command) == 0
    output = capsys.readouterr()
    assert "dense ceiling" in output.out
    assert output.err.splitlines()[-1] == f"wrote {out / 'mine.toml'}"
    kept = f"what {out} holds of that from before is not sampled again"
    assert "this samples at most" in output.err and kept not in output.err.splitlines()
    record, written = out / "calibration.json", out / "mine.toml"
    before = record.read_text(), written.read_text()
    monkeypatch.setattr(records, "datetime", SimpleNamespace(now=lambda zone: datetime(2099, 1, 1, tzinfo=zone)))
    assert main(command) == 0
    said = capsys.readouterr().err.splitlines()
    assert kept in said
    for path in (record, written):
        assert f"{path} stays as it was: nothing was left to do" in said and f"wrote {path}" not in said
    assert (record.read_text(), written.read_text()) == before
    # Somebody's own budgets are not those of the record.
    written.write_text(before[1].replace("kv_budget_tokens = ", "kv_budget_tokens = 1", 1))
    assert main(command) == 0
    assert f"wrote {written}" in capsys.readouterr().err.splitlines()
    again = Schedule.load(written)
    assert again.made_by is not None and again.made_by["date"].startswith("2099")
    assert records.without_provenance(again.table()) == records.without_provenance(tomllib.loads(before[1]))
    monkeypatch.undo()
    schedule = Schedule.load(out / "mine.toml")
    assert schedule.target is not None
    assert schedule.target["at_least"] == 0.3
    assert schedule.model == "tiny-reasoner"
    assert schedule.fingerprint == fingerprint.of_model("tiny-reasoner")
    assert schedule.made_by is not None
    assert schedule.made_by["command"] == shlex.join(["sparroll", *command])
    assert (schedule.dense_layers, schedule.selector.first_tokens, schedule.selector.recent_tokens) == ((0,), 8, 40)
    assert main(["schedule", "show", str(out / "mine.toml")]) == 0
    assert "0.3" in capsys.readouterr().out
    assert main(["report", "--run", str(out)]) == 0
    assert "<svg" in (out / "report.html").read_text()


def test_measuring_refuses_bad_settings_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["--model", "no-such-model", "--task", "synthetic", "--out", str(tmp_path / "out")]
    message, hint = error_of(["profile", *there, "--budget", "64", "--estimator", "sampled"], capsys)
    assert message.startswith("the percentiles of the estimator 'sampled' are not those of the acceptance")
    assert hint == "use top_k_lower or exact"
    message, _ = error_of(["profile", *there], capsys)
    assert message == "there is nothing to profile"
    message, hint = error_of(["profile", *there, "--budget", "100"], capsys)
    assert "multiple of page_tokens (16), got 100" in message
    assert hint == "use 96 or 112"
    message, _ = error_of(["profile", *there, "--budget", "64", "--estimator", "top_k"], capsys)
    assert message == "unknown estimator 'top_k'"
    message, hint = error_of(["calibrate", *there, "--selector", "page_meen"], capsys)
    assert message == "unknown selector kind 'page_meen'"
    message, hint = error_of(["calibrate", *there, "--mode", "cheap"], capsys)
    assert message == "unknown mode 'cheap'"
    assert "faithful" in hint
    message, hint = error_of(["calibrate", *there, "--dense-layers", "0,x"], capsys)
    assert (message, hint) == ("--dense-layers takes numbers of layers, got '0,x'", "for example 0,1, or none")
    for name in ("../x", "a/b", "", ".", "mine.toml"):
        message, _ = error_of(["calibrate", *there, "--name", name], capsys)
        assert message.startswith("--name is the name of a file in --out")
    message, _ = error_of(["calibrate", *there, "--count", "3", "--samples", "2"], capsys)
    assert "needs 8 rollouts, and 3 prompts with 2 samples each give 6" in message


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ("--objective kll", "unknown objective 'kll'", "kl"),
        ("--objective kl", "the objective kl is as small as a step's time allows", "--step-time-share 0.4"),
        ("--objective kl --step-time-share 0", "a dense step's time must be above 0, got 0", "--step-time-share 0.4"),
        ("--step-time-share 0.4", "a limit of a step's time needs something else to be small", "--objective kl"),
        ("--objective kl --step-time-share 0.4 --estimator exact", "the estimator exact has none", "top_k_lower"),
        ("--kl-at-most 0.01 --estimator exact", "the estimator exact has none", "top_k_lower"),
        ("--objective kl --at-time-of no-such-preset", "no-such-preset", ""),
        ("--far-mass-nats 10", "--far-mass-nats has no effect without --far-mass-at-most", "leave it out"),
        ("--far-mass-at-most 0.1 --far-mass-nats 7", "far_mass_nats must be one of 2, 5, 10, 20, got 7", ""),
        ("--selector quantized_mean,bits", "name=number, got 'bits'", "quantized_mean,page_tokens=4,bits=2"),
        (
            "--selector page_mean,page_tokens=4 --page-tokens 8",
            "--page-tokens 8 is given, and page_tokens=4",
            "leave one",
        ),
        (
            "--selector page_mean,page_tokens=4 --page-tokens 16",
            "--page-tokens 16 is given, and page_tokens=4",
            "leave one",
        ),
        ("--selector page_mean,kind=3", "kind is given twice in 'page_mean,kind=3'", "leave one"),
        ("--selector page_mean,page_tokens=4,page_tokens=8", "page_tokens is given twice", "leave one"),
        ("--objective kl --at-time-of CHECKED", "checks drafts, so a token takes more", "without [check]"),
        ("--also-selector page_meen", "unknown selector kind 'page_meen'", "page_mean"),
        ("--also-selector quantized_mean,bits", "name=number, got 'bits'", "quantized_mean,page_tokens=4,bits=2"),
        ("--layer-groups 1-2/3-x", "--layer-groups takes layers, got '1-2/3-x'", "2-14/15-27"),
        ("--layer-groups 1-3", "--layer-groups takes two groups or more", "slash"),
        (
            "--layer-groups 0-99999999999/3",
            "--layer-groups takes layers below 10,000, got '0-99999999999'",
            "2-14/15-27",
        ),
        ("--layer-groups 1-2/3", "groups of layers get budgets of their own where", "--objective kl"),
        (
            "--layer-groups 1-2/3 --objective kl --step-time-share 0.4 --most-budgets 1",
            "groups of layers are told apart by two budgets or more",
            "--most-budgets 2",
        ),
        ("--estimator sampled", "the percentiles of the estimator 'sampled' are not those", "top_k_lower or exact"),
        (
            "--check-windows 64 --layer-groups 2-3/4",
            "checks of drafts are chosen for one budget in all sparse",
            "schedule check",
        ),
        ("--check-windows 64 --estimator exact", "the estimator exact has none", "top_k_lower"),
        ("--gpu H100", "--gpu has no effect where no times are compared", "leave it out"),
        ("--verify-bound lower", "unknown --verify-bound 'lower'", "low"),
        ("--budget 100", "kv_budget_tokens must be a multiple of page_tokens (16), got 100", "112"),
        ("--also-selector page_mean", "a selector is named twice", "name each selector once"),
        (
            "--verify-rounds 0 --verify-bound value",
            "--verify-bound has no effect with --verify-rounds 0",
            "leave it out",
        ),
    ],
)
def test_calibrate_refuses_what_does_not_go_together_before_the_model_is_loaded(
    options: str, message: str, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = ["calibrate", "--model", "no-such-model", "--task", "synthetic", "--out", str(tmp_path / "out")]
    checked = Schedule.fixed(64).checked(16, 0.01).save(tmp_path / "checked.toml")
    said, how = error_of([*there, *options.replace("CHECKED", str(checked)).split()], capsys)
    assert message in said and hint in how


def test_a_selector_is_named_with_its_settings_in_one_word() -> None:
    assert selector_from("quantized_mean,page_tokens=4,bits=2") == QuantizedMean(4, 16, 32, bits=2)
    assert selector_from("quantized_mean, bits=4", 8, recent_tokens=64) == QuantizedMean(8, 16, 64, bits=4)
    assert selector_from("page_mean", 32) == PageMean(32, 32, 64)
    with pytest.raises(UserError, match="--recent-tokens 64 is given, and recent_tokens=32 in"):
        selector_from("page_mean,recent_tokens=32", recent_tokens=64)


@pytest.mark.parametrize(
    "command",
    [
        "rollout --task synthetic --schedule FILE",
        "profile --task synthetic --schedule FILE",
        "evaluate --tasks synthetic_add --schedule FILE",
        "calibrate --task synthetic --objective kl --at-time-of FILE",
    ],
)
def test_a_command_first_says_what_must_be_known_of_its_schedule(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_by = {"caveat": "scaled, to be calibrated on the real model"}
    path = replace(Schedule.fixed(64), made_by=made_by).save(tmp_path / "mine.toml")
    where = ["--model", "no-such-model", "--out", str(tmp_path / "out")]
    assert main([*command.replace("FILE", str(path)).split(), *where]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "the schedule 'mine' is scaled, to be calibrated on the real model"
    assert "no-such-model" in said[1]


@pytest.mark.parametrize("command", ["serve-args --schedule FILE", "schedule check FILE --out FILE.checked.toml"])
def test_a_command_that_only_hands_a_schedule_on_says_its_caveat_beside_its_output(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = replace(Schedule.fixed(64), made_by={"caveat": "scaled"}).save(tmp_path / "mine.toml")
    assert main([*command.replace("FILE", str(path)).split(), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.splitlines()[0] == "the schedule 'mine' is scaled"
    json.loads(output.out)


def test_a_model_of_two_layers_has_none_that_would_be_sparse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_model(tmp_path / "two", num_hidden_layers=2)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c\n" * 8)
    about = ["--model", str(folder), "--prompts", str(prompts), "--max-new-tokens", "100", "--page-tokens", "4"]
    capsys.readouterr()
    message, hint = error_of(["calibrate", *about, "--budget", "52", "--out", str(tmp_path / "out")], capsys)
    assert message == "the schedule keeps all 2 layers of the model dense, so nothing would be sparse"
    assert "--dense-layers" in hint
    message, _ = error_of(["rollout", *about[:-2], "--budget", "64", "--out", str(tmp_path / "rollouts")], capsys)
    assert message.startswith("the schedule keeps all 2 layers")


def test_report_needs_something_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message, _ = error_of(["report", "--run", str(tmp_path / "nowhere")], capsys)
    assert message.startswith("there is no folder")
    message, hint = error_of(["report", "--run", str(tmp_path)], capsys)
    assert message.startswith("there is nothing to report in")
    assert hint


def test_a_page_that_would_replace_a_folder_is_refused_before_the_run_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, hint = error_of(["report", "--run", str(tmp_path), "--out", str(tmp_path)], capsys)
    assert message == f"{tmp_path} is a folder, and a file is to be written there"
    assert hint == f"name a file in it, such as {tmp_path / 'report.html'}"
    (tmp_path / "report.html").mkdir()
    message, _ = error_of(["report", "--run", str(tmp_path)], capsys)
    assert message == f"{tmp_path / 'report.html'} is a folder, and a file is to be written there"
    with pytest.raises(UserError, match="is a folder"):
        files.write_text(tmp_path, "a file")
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


def test_the_engine_leaves_a_scorer_on_the_same_gpu_its_room() -> None:
    small, large = (model_shape(name) for name in ("Qwen3-1.7B", "Qwen3-14B"))
    alone = lambda shape, total: share_beside_a_scorer(shape, total, total)  # noqa: E731
    assert alone(small, 141 * 10**9) == 0.85
    # 4 bytes for each of 14.8 billion parameters and 8 GiB, of which fp32 may need all; never less than half is taken.
    assert alone(large, 141 * 10**9) == pytest.approx(1 - (59.07e9 + 8.59e9) / 141e9, abs=1e-3)
    assert alone(large, 80 * 10**9) == alone(small, 24 * 10**9) == 0.5
    # vLLM refuses to start where less is free than it is to take.
    assert share_beside_a_scorer(small, 99 * 10**9, 141 * 10**9) == pytest.approx(99 / 141 - 0.03)
    assert share_beside_a_scorer(small, 60 * 10**9, 141 * 10**9) == 0.5
