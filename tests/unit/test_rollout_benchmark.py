"""The rollout benchmark: which moments are measured, what they say of whole runs, what a cut call leaves. What it times
needs a GPU, so an engine here takes the seconds that a formula says."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from sparroll import Schedule, records
from sparroll.attention.selectors import QuantizedMean
from sparroll.attention.selectors.remainder import Remainder
from sparroll.plan.model_shape import BUILT_IN
from sparroll.schedule import Step

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
NAMES = ("request_sets", "step_bytes", "measured_windows", "fine_schedule", "rollout", "rollout_record", "render_fine")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, BENCHMARKS)
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.fixture
def request_sets(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["request_sets"]


@pytest.fixture
def step_bytes(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["step_bytes"]


# -- the sets ------------------------------------------------------------------------------------------------------------


def test_drained_run_starts_with_all_requests_and_ends_with_those_that_are_capped(request_sets: ModuleType) -> None:
    windows = request_sets.drained_windows(5)
    assert windows[0]["contexts"] == [150] * 60
    assert set(windows[-1]["contexts"]) == {150 + 32_767}
    assert len(windows[-1]["contexts"]) == int((request_sets.response_tokens(60) == 32_768).sum())


@pytest.mark.parametrize(("capacity_tokens", "at_once"), [(650_000, 60), (394_224, 27), (33_000, 1)])
def test_drained_run_has_as_many_requests_at_a_time_as_its_cache_always_holds(
    request_sets: ModuleType, capacity_tokens: int, at_once: int
) -> None:
    windows = request_sets.drained_windows(3000, capacity_tokens, slack_tokens=72)
    assert max(len(w["contexts"]) for w in windows) == len(windows[0]["contexts"]) == at_once
    assert max(sum(w["contexts"]) + 72 * len(w["contexts"]) for w in windows) <= capacity_tokens
    # Places that are free are taken until every request of the set has begun.
    lengths, steps = request_sets.response_tokens(60), windows[-1]["step"] + 1
    assert lengths.sum() / at_once <= steps <= lengths.sum() / at_once + lengths.max()
    each = [len(w["contexts"]) for w in windows]
    assert sum(each) / len(each) * steps == pytest.approx(lengths.sum(), rel=0.01)
    if at_once == 60:
        assert windows == request_sets.drained_windows(3000)
    requests_T, tokens_T = request_sets.drained_steps(at_once)
    assert len(requests_T) == len(tokens_T) == steps and requests_T.sum() == lengths.sum()
    for window in windows[::50]:
        assert requests_T[window["step"]] == len(window["contexts"])
        assert tokens_T[window["step"]] == sum(window["contexts"])
    assert max(len(w["contexts"]) for w in request_sets.drained_windows(99, capacity_tokens, most_requests=7)) <= 7


@pytest.mark.parametrize("capacity_tokens", [None, 394_224])
def test_few_moments_stand_for_the_whole_run(request_sets: ModuleType, capacity_tokens: int | None) -> None:
    """Steps that grow with requests and tokens, exactly; those of a budget, which grow by less and less, to 1 %."""
    windows = request_sets.drained_windows(12, capacity_tokens)
    requests_T, tokens_T = request_sets.drained_steps(len(windows[0]["contexts"]))

    def both(seconds: Callable[[Any, Any], Any]) -> tuple[float, float]:
        at_moments = [float(seconds(len(w["contexts"]), sum(w["contexts"]))) for w in windows]
        found, tokens = request_sets.run_seconds(windows, at_moments, "drained")
        assert tokens == requests_T.sum()
        return found, float(seconds(requests_T, tokens_T).sum())

    found, exact = both(lambda requests, tokens: 4e-3 + 2e-5 * requests + 3e-8 * tokens)
    assert found == pytest.approx(exact)
    found, exact = both(lambda requests, tokens: 4e-3 + 1e-5 * (tokens + 1e3 * requests) ** 0.5)
    assert found == pytest.approx(exact, rel=0.01)


def test_drained_set_needs_a_cache_for_its_longest_request(request_sets: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match="a cache of 32000 tokens does not hold the longest request of the drained set"
    ):
        request_sets.drained_windows(3, capacity_tokens=32_000)


def test_steady_requests_fit_the_cache_with_what_they_decode(request_sets: ModuleType) -> None:
    windows = request_sets.steady_windows(6, capacity_tokens=100_000, most_requests=64, slack_tokens=72)
    assert len(windows) == 6
    assert all(sum(w["contexts"]) + 72 * len(w["contexts"]) <= 100_000 for w in windows)
    assert windows == request_sets.steady_windows(6, capacity_tokens=100_000, most_requests=64, slack_tokens=72)


def test_steady_set_says_when_no_moment_fits(request_sets: ModuleType) -> None:
    with pytest.raises(SystemExit, match="a cache of 10000 tokens holds 0 of 3 steady moments"):
        request_sets.steady_windows(3, capacity_tokens=10_000, most_requests=64)


def test_long_requests_lie_between_28k_and_32k_and_fill_the_cache(request_sets: ModuleType) -> None:
    windows = request_sets.long_windows(5, capacity_tokens=1_130_000, most_requests=64, slack_tokens=72)
    assert {len(w["contexts"]) for w in windows} == {int(0.95 * 1_130_000 / (150 + 30_720 + 72))} == {34}
    assert windows[0]["contexts"][0] == 150 + 28_672
    assert all(150 + 28_672 <= context < 150 + 32_768 for w in windows for context in w["contexts"])
    assert all(sum(w["contexts"]) + 34 * 72 <= 1_130_000 for w in windows)
    assert len({tuple(w["contexts"]) for w in windows}) == 5
    with pytest.raises(SystemExit, match="holds no request of the long set"):
        request_sets.long_windows(5, capacity_tokens=30_000, most_requests=64)


def test_moments_are_measured_coarsely_first_and_the_sets_in_turn(request_sets: ModuleType) -> None:
    assert request_sets.coarse_first(9) == [0, 8, 4, 2, 6, 1, 3, 5, 7]
    for count in range(1, 30):
        assert sorted(request_sets.coarse_first(count)) == list(range(count))
    windows = {"drained": [{}] * 3, "long": [{}] * 2}
    order = [("drained", 0), ("long", 0), ("drained", 2), ("long", 1), ("drained", 1)]
    assert request_sets.measuring_order(windows) == order


def test_constant_steps_make_a_run_of_as_many(request_sets: ModuleType) -> None:
    windows = request_sets.drained_windows(4)
    seconds, tokens = request_sets.run_seconds(windows, [0.01] * 4, "drained")
    assert seconds == pytest.approx(0.01 * 32_768)
    assert tokens == request_sets.response_tokens(60).sum()
    two = [{"step": 0, "contexts": [1, 2]}, {"step": 7, "contexts": [3, 4, 5, 6]}]
    assert request_sets.run_seconds(two, [0.01, 0.03], "long") == (0.02, 3)


# -- bytes ---------------------------------------------------------------------------------------------------------------


def test_the_cache_that_all_engines_have_is_smaller_by_the_largest_index_and_a_percent(step_bytes: ModuleType) -> None:
    published = Schedule.load("qwen3-1.7b-0.86")
    assert step_bytes.smaller_capacity(1_000_000, [published], 28) == int(0.99 * 1_000_000 / (1 + 26 / 28 / 32))
    # 4 tokens with 4 bits: 64 bytes of channels and 4 of the scale, beside 4 x 512 of K and V.
    fine = Schedule.fixed(512, QuantizedMean(page_tokens=4, bits=4), dense_layers=(0,))
    assert step_bytes.index_share(fine, 28) == pytest.approx(27 / 28 * 68 / 2048)
    assert step_bytes.index_share(fine, 28) <= 1 / 28
    held = step_bytes.smaller_capacity(1_000_000, [published, fine], 28)
    assert held == int(0.99 * 1_000_000 / (1 + 27 / 28 * 68 / 2048))


def test_step_within_budget_reads_what_a_dense_one_does(step_bytes: ModuleType) -> None:
    schedule = Schedule.fixed(512, dense_layers=(0,))
    assert step_bytes.bytes_read([100, 512], schedule, 4) == 4 * 612 * step_bytes.kv_bytes()
    longer = 1024 * step_bytes.kv_bytes() + 3 * (512 * step_bytes.kv_bytes() + 1024 * 8 * 128 * 2 / 16)
    assert step_bytes.bytes_read([1024], schedule, 4) == longer


@pytest.mark.parametrize("model", ["Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B"])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(step_bytes: ModuleType, model: str) -> None:
    unread = {"Qwen3-8B": 151_936 * 4096, "Qwen3-14B": 151_936 * 5120}.get(model, 0)
    assert step_bytes.weight_bytes(model.lower()) == 2 * (BUILT_IN[model].parameters - unread)


def test_the_attainable_step_is_that_of_one_token_or_the_weights_and_the_bytes_of_the_cache(
    step_bytes: ModuleType,
) -> None:
    weights = 2 * BUILT_IN["Qwen3-1.7B"].parameters / 4e12
    assert step_bytes.attainable_seconds(2e-3, "qwen3-1.7b", 8e9, 4e12) == pytest.approx(2e-3 + 2e-3)
    assert step_bytes.attainable_seconds(1e-4, "qwen3-1.7b", 8e9, 4e12) == pytest.approx(weights + 2e-3)


def test_fit_finds_what_steps_were_made_of(step_bytes: ModuleType) -> None:
    batches, contexts = [60, 41, 10, 60, 10], [9_000, 603_233, 329_170, 3_840, 640]
    seconds = [4e-3 + 2e-5 * b + 3e-8 * c for b, c in zip(batches, contexts, strict=True)]
    found = step_bytes.fit_steps(batches, contexts, seconds)
    assert found["seconds_per_step"] == pytest.approx(4e-3)
    assert found["seconds_per_request"] == pytest.approx(2e-5)
    assert found["seconds_per_context_token"] == pytest.approx(3e-8)
    assert found["largest_relative_error"] < 1e-9


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
    # Of the drained set 3 of 12 moments were measured, which is too few for a row.
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
    # Only the one in blocks of 16 is profiled, and misses its target.
    profiled = [line for line in lines if ": 34 requests |" in line]
    assert all("| Qwen3-1.7B, long, 4 x 2: " in line for line in profiled)
    assert any("| scores | 0.50 |" in line for line in profiled) and len(profiled) <= render_fine.SHOWN_GROUPS
