"""The command line's side of vLLM, where vLLM is not needed: arguments for `vllm serve`, doctor, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_runs import error_of
from sparroll import doctor
from sparroll.cli import main
from sparroll.engines.vllm import launch
from sparroll.schedule import Schedule

PROMPTS = ["--model", "tiny-reasoner", "--task", "synthetic", "--engine", "vllm"]


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "installed_version", lambda: None)


def test_serve_args_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve-args", "--schedule", "qwen3-4b-0.86", "--model", "Qwen/Qwen3-4B"]) == 0
    assert capsys.readouterr().out == (
        "--attention-backend=CUSTOM --additional-config.sparroll=qwen3-4b-0.86 --block-size=64 "
        "--logprobs-mode=processed_logprobs --worker-extension-cls=sparroll.engines.vllm.worker.WorkerExtension "
        "--middleware=sparroll.engines.vllm.lists_route.ListsRoutes\n"
    )


def test_serve_args_of_a_file_name_it_in_full_and_survive_the_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Schedule.fixed(512).save(tmp_path / "mine.toml")
    monkeypatch.chdir(tmp_path)
    assert main(["serve-args", "--schedule", "./mine.toml"]) == 0
    words = capsys.readouterr().out.split()
    assert f"--additional-config.sparroll={tmp_path / 'mine.toml'}" in words
    spaced = tmp_path / "a folder"
    Schedule.fixed(512).save(spaced / "mine.toml")
    message, hint = error_of(["serve-args", "--schedule", str(spaced / "mine.toml")], capsys)
    assert "a shell would split" in message
    assert "copy the schedule" in hint


def test_serve_args_refuse_another_models_schedule_unless_forced(capsys: pytest.CaptureFixture[str]) -> None:
    other = ["serve-args", "--schedule", "qwen3-4b-0.86", "--model", "Qwen/Qwen3-8B"]
    message, hint = error_of(other, capsys)
    assert "made for Qwen/Qwen3-4B" in message
    assert "--force-schedule" in hint
    assert main([*other, "--force-schedule"]) == 0
    assert "--additional-config.sparroll.force_schedule=true" in capsys.readouterr().out.split()


def test_serve_args_refuse_layers_that_the_model_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = Schedule.fixed(64, dense_layers=(0, 9)).save(tmp_path / "dense.toml")
    message, _ = error_of(["serve-args", "--schedule", str(schedule), "--model", "tiny-reasoner"], capsys)
    assert message.endswith("dense_layers names layer 9, but the model has layers 0..5")


def test_serve_args_make_short_steps_dense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["serve-args", "--schedule", "qwen3-4b-0.86", "--short-step-tokens"]
    assert main([*asked, "24576"]) == 0
    words = capsys.readouterr().out.split()
    assert words[1:3] == [
        "--additional-config.sparroll.schedule=qwen3-4b-0.86",
        "--additional-config.sparroll.short_step_tokens=24576",
    ]
    message, _ = error_of([*asked, "-1"], capsys)
    assert "short_step_tokens must be a number of tokens" in message
    Schedule.fixed(64).checked().save(tmp_path / "checked.toml")
    asked[2] = str(tmp_path / "checked.toml")
    message, hint = error_of([*asked, "9"], capsys)
    assert "not decoded densely where drafts are checked" in message and "--short-step-tokens" in hint


@pytest.mark.usefixtures("no_vllm")
@pytest.mark.parametrize("verb", ["rollout", "profile", "calibrate", "train"])
def test_without_vllm_its_engine_is_refused_and_no_file_written(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    more = {"train": ["--set", "engine=vllm"], "profile": [*PROMPTS, "--budget", "64"]}.get(verb, PROMPTS)
    message, hint = error_of([verb, "--out", str(out), *more], capsys)
    assert message == "the engine vllm needs vLLM, which is not installed"
    assert hint.startswith('pip install -e ".[vllm]"')
    assert not out.exists() or not list(out.iterdir())


def test_an_unknown_engine_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message, hint = error_of(["rollout", *PROMPTS[:-1], "vlm", "--out", str(tmp_path)], capsys)
    assert message == "unknown engine 'vlm'"
    assert hint == "did you mean 'vllm'?"


@pytest.mark.parametrize("setting", ["engine.sleep_level=1", "engine.kv_cache_gib=2"])
def test_sleep_and_the_size_of_the_cache_are_for_vllm(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, _ = error_of(["train", "--out", str(tmp_path), "--set", setting], capsys)
    assert message.endswith('is for engine.kind = "vllm", and engine.kind is "hf"')


def vllm_findings() -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine() if finding.what.startswith("vllm")}


@pytest.mark.usefixtures("no_vllm")
def test_doctor_says_how_to_install_vllm() -> None:
    found = vllm_findings()
    assert list(found) == ["vllm"]
    assert (found["vllm"].status, found["vllm"].value) == ("--", "not installed")
    assert "pip install -e '.[vllm]'" in found["vllm"].note


@pytest.fixture
def some_vllm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(launch, "installed_version", lambda: "0.32.0")
    monkeypatch.setattr(doctor, "_import_problem", lambda package: "")
    monkeypatch.setattr(doctor, "_plugin_seen", lambda: "")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("SPARROLL_VLLM_SCHEDULE", raising=False)
    return monkeypatch


def test_doctor_says_which_attention_runs_when(some_vllm: pytest.MonkeyPatch) -> None:
    found = vllm_findings()
    assert found["vllm"].note == "tested on cpu"
    assert (found["vllm attention"].status, found["vllm attention"].value) == ("ok", "sparroll if asked")
    some_vllm.setenv("SPARROLL_VLLM_SCHEDULE", "qwen3-4b-0.86")
    assert vllm_findings()["vllm attention"].note == "always, since SPARROLL_VLLM_SCHEDULE=qwen3-4b-0.86"
    some_vllm.setattr("torch.cuda.is_available", lambda: True)
    some_vllm.setattr(doctor, "_version_refusal", lambda found, device: "")
    assert vllm_findings()["vllm attention"].note.startswith("always, since")


def test_doctor_says_why_not(some_vllm: pytest.MonkeyPatch) -> None:
    some_vllm.setattr(doctor, "_plugin_seen", lambda: "VLLM_PLUGINS=other leaves sparroll out")
    found = vllm_findings()
    assert found["vllm plugin"].value == "not seen"
    assert (found["vllm attention"].value, found["vllm attention"].note) == (
        "vLLM's own",
        "VLLM_PLUGINS=other leaves sparroll out",
    )
    some_vllm.setattr(launch, "installed_version", lambda: "0.12.0")
    assert "does not work with vLLM 0.12" in vllm_findings()["vllm"].note
    some_vllm.setattr(doctor, "_import_problem", lambda package: "ImportError: libcuda.so.1")
    assert vllm_findings()["vllm"].note == "cannot be imported: ImportError: libcuda.so.1"


def test_the_plugin_allow_list_of_vllm_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "sparroll"

    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [Entry()])
    monkeypatch.setenv("VLLM_PLUGINS", "one,sparroll")
    assert doctor._plugin_seen() == ""
    monkeypatch.setenv("VLLM_PLUGINS", "one")
    assert "leaves sparroll out" in doctor._plugin_seen()
    monkeypatch.setattr(doctor.metadata, "entry_points", lambda group: [])
    assert "no entry point" in doctor._plugin_seen()


def test_a_process_that_already_runs_vllm_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparroll.errors import UserError

    monkeypatch.setattr(launch, "installed_version", lambda: "0.32.0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(UserError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        launch.prepare_process()
