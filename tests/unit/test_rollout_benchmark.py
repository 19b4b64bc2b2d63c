"""The rollout benchmark: what its records say, and what a cut call leaves. What it times needs a GPU, so an engine here
takes the seconds that a formula says. Its moments and bytes are in test_request_sets.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from benchmark_scripts import benchmark
from sparroll import Schedule, records
from sparroll.attention.selectors import QuantizedMean
from sparroll.attention.selectors.remainder import Remainder
from sparroll.schedule import Step

NAMES = ("request_sets", "step_bytes", "measured_windows", "fine_schedule", "rollout", "rollout_record", "render_fine")


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    return {name: benchmark(name) for name in NAMES}


@pytest.fixture
def step_bytes(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["step_bytes"]


# -- whole calls ---------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only where something is measured."""

    now: ClassVar[float] = 0.0

    @staticmethod
    def time() -> float:
        return Clock.now


class FormulaEngine:
    """Ten seconds a measurement; a step takes 2 ms and its context tokens at the engine's rate."""

    started: ClassVar[list[str]] = []
    breaks_after: ClassVar[int | None] = None

    def __init__(self, model: str, folder: Path, asked: dict[str, Any] | None, **_: object) -> None:
        self.name = "dense" if asked is None else "fine" if "scaled" in asked["schedule"] else "sparse"
        self.started.append(self.name)
        self.capacity_tokens, self.left_over_bytes, self.measured = 1_160_000, 2**30, 0

    def __enter__(self) -> FormulaEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def settings(self) -> dict[str, object]:
        return {"start_seconds": 1.0}

    def step_seconds(self, contexts: list[int], steps: int, repeats: int) -> list[float]:
        if self.name == "fine" and self.measured == self.breaks_after:
            raise KeyboardInterrupt
        self.measured += 1
        Clock.now += 10
        rate = {"dense": 4e-8, "sparse": 2e-8, "fine": 1e-8}[self.name]
        return [2e-3 if len(contexts) == 1 else 2e-3 + rate * sum(contexts)] * repeats

    def whole_run(self, prompt_tokens: int, lengths: list[int]) -> dict[str, Any]:
        return {"seconds": {"dense": 4.0, "sparse": 2.0}[self.name], "tokens": sum(lengths)}


@pytest.fixture
def rollout(modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = modules["rollout"]
    monkeypatch.setattr(module, "Engine", FormulaEngine)
    monkeypatch.setattr(module, "time", Clock)
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr(FormulaEngine, "started", [])
    monkeypatch.setattr(FormulaEngine, "breaks_after", None)
    monkeypatch.setattr(module.vllm_engines, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(module.vllm_engines, "device_name", lambda: "h200")
    looked = ([0.01], {"_score_codes": (2000.0, 4)})
    monkeypatch.setattr(module.profile_step, "look", lambda engine, contexts, options: looked)
    return module


def call(rollout: ModuleType, folder: Path, out: str, *more: str) -> Path:
    asked = ["--budget-ratio", "4", "--sets", "drained", "steady", "long", "--windows", "14"]
    rollout.main([*asked, "--folder", str(folder), "--out-folder", str(folder / out), *more])
    return folder / out


def result_of(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = records.read(folder / f"rollout-qwen3-1.7b-{name}-h200.json", "rollout")["results"]
    return found


def test_three_engines_measure_the_same_moments_and_the_record_is_of_the_third(
    rollout: ModuleType, tmp_path: Path, step_bytes: ModuleType
) -> None:
    out = call(rollout, tmp_path, "all")
    assert FormulaEngine.started == ["dense", "sparse", "fine"]
    assert sorted(each.name for each in out.glob("*.json")) == [
        f"rollout-qwen3-1.7b-{name}-fine-h200.json" for name in ("drained", "long", "steady")
    ]
    found = result_of(out, "long-fine")
    tokens = [window["context_tokens"] for window in found["windows"]]
    dense, fine = (2e-3 + rate * sum(tokens) / len(tokens) for rate in (4e-8, 1e-8))
    assert found["speedup"] == pytest.approx(dense / fine)
    assert found["published"]["speedup"] == pytest.approx(dense / (2e-3 + 2e-8 * sum(tokens) / len(tokens)))
    assert found["dense_tokens_per_second"] == pytest.approx(34 / dense)
    assert (found["budget_ratio"], found["caveat"]) == (4.0, "scaled, to be calibrated on the real model")
    assert "given by hand" in found["budget_ratio_source"]
    schedule = Schedule.from_table({k: v for k, v in found["schedule_table"].items() if k != "name"})
    assert schedule.kv_budget_tokens(17_000) == 3584 // 4 and schedule.dense_layers == (0,)
    assert found["index_share_of_cache"] == pytest.approx(27 / 28 * 68 / 2048)
    assert (found["target_speedup"], found["windows_missing"], len(tokens)) == (4.0, [], 7)
    windows = json.loads((out / "rollout-qwen3-1.7b-fine.jsonl").read_text().splitlines()[2])["value"]["long"]
    read = sum(step_bytes.bytes_read(w["contexts"], schedule, 28) for w in windows) / 7
    assert found["attainable_share"] == pytest.approx((2e-3 + read / 4e12) / fine)


def test_a_host_that_is_disturbed_while_the_dense_engine_starts_leaves_what_is_attainable_as_it_is(
    rollout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm = result_of(call(rollout, tmp_path, "calm"), "long-fine")
    steady = FormulaEngine.step_seconds

    def disturbed(engine: FormulaEngine, contexts: list[int], steps: int, repeats: int) -> list[float]:
        first = engine.measured == 0 and engine.name == "dense"
        return [(1.5 if first else 1.0) * took for took in steady(engine, contexts, steps, repeats)]

    monkeypatch.setattr(FormulaEngine, "step_seconds", disturbed)
    found = result_of(call(rollout, tmp_path, "disturbed"), "long-fine")
    assert found["one_token_seconds"] == [3e-3] * 3 + [2e-3] * 3
    assert found["attainable_share"] == calm["attainable_share"] < 1


def test_a_missed_target_brings_a_profile_of_the_middle_moment_into_the_record(
    rollout: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    out = call(rollout, tmp_path, "missed")
    found = {name: result_of(out, f"{name}-fine") for name in ("drained", "long")}
    assert found["drained"]["speedup"] < 3.1 and found["long"]["speedup"] < 4.0
    profile = found["long"]["profile"]
    assert profile["batch"] == 34 and profile["step"] == 3
    # 2,000 us in 4 steps, of a step of 10 ms.
    assert profile["groups_ms"] == {"scores": 0.5, "idle, host": 9.5} and "scores" in profile["floors_ms"]


def test_on_another_gpu_there_is_no_target_and_a_slower_step_is_profiled(
    rollout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout.vllm_engines, "device_name", lambda: "h100")
    out = call(rollout, tmp_path, "other", "--windows", "2")
    found = records.read(out / "rollout-qwen3-1.7b-drained-fine-h100.json", "rollout")["results"]
    assert found["target_speedup"] is None and found["profile"]["groups_ms"]


def test_a_call_with_a_bound_gives_each_engine_a_share_and_says_what_is_missing(
    rollout: ModuleType, tmp_path: Path
) -> None:
    out = call(rollout, tmp_path, "short", "--minutes", "8")
    # A third of 480 s at 10 s a measurement: the step of one token, and 14 of 28 moments, the sets in turn.
    found = {name: result_of(out, f"{name}-fine") for name in ("drained", "steady", "long")}
    assert {name: len(of["windows"]) for name, of in found.items()} == {"drained": 5, "steady": 5, "long": 4}
    steps = [window["step"] for window in found["drained"]["windows"]]
    assert steps[0] == 0 and steps[-1] == 32_767
    assert len(found["drained"]["windows_missing"]) == 9
    why = {"dense": "not measured", "sparse": "not measured", "fine": "not measured"}
    assert all(each["why"] == why for each in found["drained"]["windows_missing"])
    FormulaEngine.started.clear()
    whole = call(rollout, tmp_path, "rest", "--continue-from", str(out / "rollout-qwen3-1.7b-fine.jsonl"))
    again = result_of(whole, "drained-fine")
    assert (len(again["windows"]), again["windows_missing"], again["pieces"]) == (14, [], 2)


def test_a_call_that_was_too_short_for_a_record_fails_and_can_be_gone_on_with(
    rollout: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="no record of drained and steady and long: go on with --continue-from"):
        call(rollout, tmp_path, "shortest", "--minutes", "0.5")
    progress = tmp_path / "shortest" / "rollout-qwen3-1.7b-fine.jsonl"
    out = call(rollout, tmp_path, "shortest", "--continue-from", str(progress))
    assert result_of(out, "drained-fine")["windows_missing"] == []
    # 55 s for each engine: one token, the first moment of each set, and the last one of the drained run.
    with pytest.raises(SystemExit, match="no record of steady and long: go on"):
        call(rollout, tmp_path, "one", "--minutes", "2.75")
    assert len(result_of(tmp_path / "one", "drained-fine")["windows"]) == 2


def test_a_killed_call_leaves_a_record_and_goes_on_with_the_engine_that_is_missing(
    rollout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FormulaEngine, "breaks_after", 6)
    with pytest.raises(KeyboardInterrupt):
        call(rollout, tmp_path, "killed")
    found = result_of(tmp_path / "killed", "drained-fine")
    assert len(found["windows"]) == 2 and len(found["windows_missing"]) == 12
    assert found["windows_missing"][0]["why"] == {"fine": "not measured"}
    progress = tmp_path / "killed" / "rollout-qwen3-1.7b-fine.jsonl"
    with progress.open("a") as file:
        file.write('{"key": ["seconds", "fi')
    monkeypatch.setattr(FormulaEngine, "breaks_after", None)
    FormulaEngine.started.clear()
    out = call(rollout, tmp_path, "killed", "--continue-from", str(progress))
    assert FormulaEngine.started == ["fine"]
    assert result_of(out, "drained-fine")["windows_missing"] == []
    assert result_of(call(rollout, tmp_path, "uncut"), "steady-fine")["speedup"] == pytest.approx(
        result_of(out, "steady-fine")["speedup"]
    )


def test_a_call_that_was_cut_before_the_last_step_of_one_token_times_only_that(
    rollout: ModuleType, tmp_path: Path
) -> None:
    whole = call(rollout, tmp_path, "whole") / "rollout-qwen3-1.7b-fine.jsonl"
    cut = [line for line in whole.read_text().splitlines(keepends=True) if '["one_token", "after"]' not in line]
    progress = tmp_path / "cut.jsonl"
    progress.write_text("".join(cut))
    FormulaEngine.started.clear()
    found = result_of(call(rollout, tmp_path, "rest", "--continue-from", str(progress)), "long-fine")
    assert FormulaEngine.started == ["dense"] and found["one_token_seconds"] == [2e-3] * 6
    times = (tmp_path / "rest" / "rollout-qwen3-1.7b-fine.jsonl").read_text()
    assert times.count('["one_token", ') == 2


def test_a_call_that_was_cut_before_its_profiles_makes_only_those(rollout: ModuleType, tmp_path: Path) -> None:
    whole = call(rollout, tmp_path, "whole")
    lines = (whole / "rollout-qwen3-1.7b-fine.jsonl").read_text().splitlines(keepends=True)
    missed = [name for name in ("drained", "steady", "long") if result_of(whole, f"{name}-fine")["profile"]]
    assert missed
    progress = tmp_path / "cut.jsonl"
    progress.write_text("".join(line for line in lines if f'["profile", "{missed[0]}"]' not in line))
    FormulaEngine.started.clear()
    again = call(rollout, tmp_path, "rest", "--continue-from", str(progress))
    assert FormulaEngine.started == ["fine"]
    assert result_of(again, f"{missed[0]}-fine")["profile"] == result_of(whole, f"{missed[0]}-fine")["profile"]
    assert (tmp_path / "rest" / "rollout-qwen3-1.7b-fine.jsonl").read_text().count('["profile", ') == len(missed)
    FormulaEngine.started.clear()
    progress = again / "rollout-qwen3-1.7b-fine.jsonl"
    call(rollout, tmp_path, "nothing", "--continue-from", str(progress))
    assert FormulaEngine.started == []


def test_progress_of_another_measurement_is_refused(rollout: ModuleType, tmp_path: Path) -> None:
    progress = str(call(rollout, tmp_path, "one") / "rollout-qwen3-1.7b-fine.jsonl")
    with pytest.raises(SystemExit, match="holds another measurement: it differs in steps"):
        call(rollout, tmp_path, "two", "--steps", "9", "--continue-from", progress)
    with pytest.raises(SystemExit, match="there is no .*none.jsonl to go on from"):
        call(rollout, tmp_path, "two", "--continue-from", str(tmp_path / "none.jsonl"))


def test_two_engines_also_draw_a_line_through_dense_steps_and_run_a_set_whole(
    rollout: ModuleType, tmp_path: Path
) -> None:
    rollout.main(["--folder", str(tmp_path), "--out-folder", str(tmp_path), "--sets", "drained", "--whole-run"])
    found = result_of(tmp_path, "drained")
    assert found["fit"]["seconds_per_context_token"] == pytest.approx(4e-8)
    assert found["fit"]["seconds_per_step"] == pytest.approx(2e-3)
    assert found["attainable_share_fit"] == pytest.approx(found["attainable_share"])
    whole = found["whole_run"]
    assert (found["schedule"], whole["speedup"], whole["sparse"]["seconds"]) == ("qwen3-1.7b-0.86", 2.0, 2.0)
    assert whole["dense"]["relative_error"] == pytest.approx(whole["dense"]["estimated_seconds"] / 4.0 - 1)
    assert "budget_ratio" not in found and found["attainable_definition"].startswith("the fastest step of one request")


# -- the schedule of the third engine ------------------------------------------------------------------------------------


def options(folder: Path, **more: Any) -> argparse.Namespace:
    asked = {"fine": None, "budget_ratio": None, "ratio_records": None, "units": "4x4", "fine_dense_layers": [0]}
    return argparse.Namespace(**(asked | {"model": "qwen3-1.7b", "folder": str(folder)} | more))


def test_a_schedule_file_is_taken_as_it_is_and_checked_before_an_engine_starts(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    fine_schedule = modules["fine_schedule"]
    published = Schedule.load("qwen3-1.7b-0.86")
    made = fine_schedule.make(options(tmp_path, budget_ratio=4.0, units="2x2"), published)
    assert (made.selector.unit_tokens, made.selector.bits) == (2, 2)
    path = made.save(tmp_path / "mine.toml")
    again = fine_schedule.make(options(tmp_path, fine=path), published)
    assert again.name == "mine" and again.steps == made.steps
    assert fine_schedule.described(again)["budget_ratio"] == 4.0
    plain = Schedule.fixed(256, QuantizedMean(page_tokens=4, bits=4), dense_layers=(0,))
    assert fine_schedule.described(plain)["budget_ratio"] is None
    selector = dataclasses.replace(plain.selector, recent_tokens=48, remainder=Remainder(48, "fp8"))
    odd_groups = dataclasses.replace(plain, selector=selector).save(tmp_path / "remainder.toml")
    summing = fine_schedule.make(options(tmp_path, budget_ratio=4.0, units="2x2+64"), published).selector
    assert summing.remainder == Remainder(64, "fp8") and summing.recent_tokens == 64
    for asked, said in (
        ({"fine": path, "model": "qwen3-8b"}, "made for Qwen/Qwen3-1.7B"),
        ({"budget_ratio": 4.0, "fine_dense_layers": [28]}, "names layer 28"),
        ({"budget_ratio": 4.0, "units": "4"}, "takes tokens x bits"),
        ({"budget_ratio": 1.0}, "nothing is gained"),
        ({"budget_ratio": 4.0, "units": "2x2+"}, "takes tokens x bits"),
        ({"fine": odd_groups}, "a selector without CUDA kernels"),
    ):
        with pytest.raises(SystemExit, match=said), fine_schedule.refusals_told():
            fine_schedule.make(options(tmp_path, **asked), published)


def test_calls_at_the_same_time_share_no_schedule(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    """Schedules that are scaled from one preset have one name, and the folder is the same."""
    fine_schedule = modules["fine_schedule"]
    ran = {
        units: Schedule.load(
            fine_schedule.inline(options(tmp_path, budget_ratio=4.0, units=units, schedule="qwen3-1.7b-0.86"))
        )
        for units in ("4x2", "4x4")
    }
    assert {units: schedule.selector.bits for units, schedule in ran.items()} == {"4x2": 2, "4x4": 4}
    assert {schedule.name for schedule in ran.values()} == {"qwen3-1.7b-0.86-scaled"}
    assert not list(tmp_path.rglob("*.toml"))


# -- the page ------------------------------------------------------------------------------------------------------------


def test_the_page_shows_target_ratio_and_missing_moments_or_that_nothing_ran(
    modules: dict[str, ModuleType], rollout: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    render_fine = modules["render_fine"]
    monkeypatch.setattr(render_fine.record_tables, "RESULTS", tmp_path / "short")
    assert render_fine.fine_rollouts() == "Not run yet."
    call(rollout, tmp_path, "short", "--minutes", "8")
    lines = render_fine.fine_rollouts().splitlines()
    # Of the drained set 5 of 14 moments were measured, which is too few for a row.
    assert not any("| drained |" in line for line in lines)
    cells = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert cells[1:5] == ["Qwen3-1.7B", "long", "4 x 4", "0 dense"]
    assert cells[8:10] == ["4.00x", "no, by these moments"]
    assert cells[-3:] == ["1/4", "1/31.2", "4 of 7"]
    assert (
        "The schedules are scaled, to be calibrated on the real model: budgets of the published ones divided by 4, a ratio "
        "that was given by hand and is in no record." in lines
    )
    (record,) = (tmp_path / "short").glob("rollout-qwen3-1.7b-long-fine-*.json")
    # The words of a row come from the schedule that ran, whatever the file is called.
    table = json.loads(record.read_text())
    ran = Schedule.load(table["results"]["schedule_table"])
    halves = dataclasses.replace(ran.selector, bits=2)
    steps = tuple(Step(step.from_context_tokens, (1024, 256)) for step in ran.steps)
    groups = ((0, 1), tuple(range(2, 28)))
    wide = dataclasses.replace(ran, selector=halves, dense_layers=(), layer_groups=groups, steps=steps)
    table["results"] |= {
        "schedule_table": wide.inline(),
        "budget_ratio_source": "the smallest of two, models: 2, and shared among the layers",
    }
    for kind in (render_fine.BY_ALL_MODELS, render_fine.BLOCKS_OF_16):
        Path(str(record).replace("-fine-", f"-{kind}-")).write_text(json.dumps(table))
    lines = render_fine.fine_rollouts().splitlines()
    rows = [line.split("|") for line in lines if "| long |" in line]
    kinds = [(row[4].strip(), row[5].strip(), row[-4].strip()) for row in rows]
    assert kinds == [("4 x 2", "read 4 times as much", "1/4 (2 models)"), ("4 x 4", "0 dense", "1/4")]
    # Only the one by all models is profiled; the one in blocks of 16 is in no table.
    profiled = [line for line in lines if ": 34 requests |" in line]
    assert all("| Qwen3-1.7B, long, 4 x 2: " in line for line in profiled)
    assert any("| scores | 0.50 |" in line for line in profiled) and len(profiled) <= render_fine.SHOWN_GROUPS
