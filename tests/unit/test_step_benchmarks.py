"""Benchmarks of whole steps at tiny sizes: what they record, not what they time."""

from __future__ import annotations

import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sparroll import records

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Under a name of its own: the study has an eviction.py, too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_dry_training_step_is_recorded_without_paths(tmp_path, monkeypatch, capsys) -> None:
    training_step, out = load("training_step", monkeypatch), tmp_path / "record.json"
    given = [
        "--dry",
        "--cases",
        "dense",
        "verified",
        "--window-tokens",
        "8",
        "--out",
        str(out),
        "--work",
        str(tmp_path / "work"),
    ]
    monkeypatch.setattr(sys, "argv", ["training_step.py", *given])
    before = signal.getsignal(signal.SIGTERM)
    try:
        training_step.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    record = records.read(out, "training-step")
    case, verified = record["results"]
    assert (
        case["case"] == "dense" and case["state"] == "finished" and [step["step"] for step in case["steps"]] == [1, 2]
    )
    assert case["steps"][-1]["rollout_tokens"] == 2 * 4 * 64 and case["steps"][-1]["trained_rollouts"] == 8
    assert verified["verified"] and verified["steps"][-1]["windows"] > 0 and "windows" not in case["steps"][-1]
    assert verified["steps"][-1]["drafted_per_kept"] > 0.8
    assert record["config"]["response_tokens"] == 64 and str(tmp_path) not in out.read_text()
    assert capsys.readouterr().out.splitlines()[-3].endswith("1.00x")


def test_the_table_holds_warm_steps_of_finished_cases(monkeypatch) -> None:
    warm = [{"step": number, "step_seconds": seconds} for number, seconds in ((1, 90.0), (2, 30.0))]
    found = [
        {"case": "dense", "state": "finished", "steps": warm},
        {"case": "sparse", "state": "failed", "steps": warm},
    ]
    found += [{"case": "distill", "state": "cut off", "steps": []}]
    lines = load("training_step", monkeypatch).table(found).splitlines()[1:]
    assert [line.split()[-1] for line in lines] == ["1.00x", "failed", "off"] and " 30.00 " in lines[0]


@pytest.mark.parametrize(
    ("name", "given"), [("training_step", ["--steps", "1", "--work", "w"]), ("eviction", ["--repeats", "0"])]
)
def test_what_would_time_nothing_is_refused(name, given, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--out", "record.json", *given])
    with pytest.raises(SystemExit):
        load(name, monkeypatch).main()
    assert f"{given[0]} must be at least" in capsys.readouterr().err


def test_eviction_is_recorded_for_every_policy_and_length(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "record.json"
    sizes = ["--hidden", "32", "--layers", "1", "--batch", "2", "--prompt", "8", "--budget", "16", "--new", "4", "160"]
    monkeypatch.setattr(sys, "argv", ["eviction.py", "--out", str(out), *sizes, "--repeats", "1"])
    load("eviction", monkeypatch).main()
    runs = records.read(out, "eviction")["results"]["runs"]
    kinds = [run["policy"]["kind"] if run["policy"] else "dense" for run in runs]
    assert kinds[:4] == kinds[4:] and kinds[0] == "dense" and {"r_kv", "snap_kv"} < set(kinds)
    # The prompt, and all but the last new token; key and value in fp32, 8 heads of 128.
    assert runs[4]["peak_kv_bytes"] == runs[4]["peak_dense_kv_bytes"] >= 2 * 167 * 2 * 8 * 128 * 4
    assert all(len(run["all_seconds_per_step"]) == 1 and run["kv_read_share"] <= 1 for run in runs)
    assert all(run["kv_saved_share"] > 0 for run in runs[5:] if run["policy"]["kind"] == "r_kv")
    assert "MiB" in capsys.readouterr().out


def test_trls_speed_up_is_compared_with_the_plugins_own(monkeypatch) -> None:
    trl_steps = load("trl_steps", monkeypatch)

    def ran(case: str, tokens_per_second: float, step_seconds: float, added_seconds: float | None = None) -> dict:
        last = {"tokens_per_second": tokens_per_second, "step_seconds": step_seconds}
        return {"case": case, "steps": [{}, last if added_seconds is None else last | {"added_seconds": added_seconds}]}

    found = [ran("dense", 1000, 60, 0), ran("sparse", 1800, 40, 1), {"case": "verified", "steps": [{}]}]
    assert trl_steps.together(found) == {"sparse/rollouts": 1.8, "sparse/step": 1.5, "sparse/added_share": 0.025}
    said = trl_steps.together([*found, ran("plugin-dense", 1200, 50), ran("plugin-sparse", 2400, 25)])
    assert said["sparse/rollouts_of_plugin"] == 2 and said["sparse/of_plugins"] == 0.9


@pytest.mark.slow
def test_a_dry_run_of_the_kernels_of_fine_units_checks_them_and_times_nothing(tmp_path, monkeypatch, capsys) -> None:
    pytest.importorskip("triton", reason="triton runs on Linux only")
    if torch.cuda.is_available():
        pytest.skip("interprets kernels on CPU tensors; with CUDA the benchmark itself checks what it compiled")
    fine_kernels, out = load("fine_kernels", monkeypatch), tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["fine_kernels.py", "--dry", "--units", "4x4", "--out", str(out)])
    fine_kernels.main()
    record = records.read(out, "fine-kernels")
    rows = record["results"]["rows"]
    assert [row["kernel"] for row in rows] == ["scores", "choice", "attention", "sparse layer"] * 2
    assert {row["units"] for row in rows} == {"4x4 equal", "4x4 mixed"}
    assert all(row["graph_us"] is None and row["bytes"] > 0 for row in rows)
    # The row of a unit: 32 channels of 4 bits and a scale.
    scored = {row["units"]: row["bytes"] for row in rows if row["kernel"] == "scores"}
    assert scored["4x4 equal"] == 2 * 38 * (4 + 20)
    assert record["results"]["tests"] is None
    assert "4x4 mixed" in capsys.readouterr().out


def test_a_record_of_kernels_says_how_many_of_their_tests_passed_in_the_same_call(tmp_path, monkeypatch) -> None:
    fine_kernels, told = load("fine_kernels", monkeypatch), tmp_path / "tests.xml"
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    told.write_text(suite.format(529, 0, 0, 4))
    found = fine_kernels.tests_told(told)
    assert (found["passed"], found["skipped"], found["compiled"]) == (525, 4, torch.cuda.is_available())
    for failures, errors in ((1, 0), (0, 1)):
        told.write_text(suite.format(529, failures, errors, 4))
        with pytest.raises(AssertionError, match="1 tests failed, 524 passed"):
            fine_kernels.tests_told(told)
    told.write_text(suite.format(4, 0, 0, 4))
    with pytest.raises(AssertionError, match="0 passed"):
        fine_kernels.tests_told(told)
