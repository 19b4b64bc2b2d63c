"""The arithmetic of the vLLM speed benchmarks; what they time needs a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

from benchmark_scripts import benchmark
from sparroll import Schedule, records
from sparroll.engines.report import EngineReport

MODULES = (
    "vllm_engines",
    "step_bytes",
    "decode_step",
    "dense_requests",
    "profile_step",
    "sparse_training",
    "whole_run",
    "verified_rollouts",
    "render_speed",
    "rl_grid",
    "calibration_cost",
)


@pytest.fixture(scope="module")
def benchmark_modules() -> dict[str, ModuleType]:
    return {name: benchmark(name) for name in MODULES}


@pytest.fixture
def profile_step(benchmark_modules: dict[str, ModuleType]) -> ModuleType:
    return benchmark_modules["profile_step"]


def test_requests_take_whole_blocks(benchmark_modules: dict[str, ModuleType]) -> None:
    assert benchmark_modules["vllm_engines"].blocks_needed([1, 15, 16, 17], 1, 16) == 1 + 1 + 2 + 2


def test_short_contexts_are_measured_before_among_and_after_the_others(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    options = argparse.Namespace(contexts=[1024, 4096, 8192], batches=[1, 8], cells=None, short=1024)
    order = [context for context, _ in benchmark_modules["decode_step"].rounds(options)]
    assert order == [1024, 1024, 4096, 4096, 1024, 1024, 8192, 8192, 1024, 1024]


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b", "14b"])
def test_contexts_within_the_budget_are_read_whole_to_the_end_of_a_measurement(
    benchmark_modules: dict[str, ModuleType], size: str
) -> None:
    schedule = Schedule.load(f"qwen3-{size}-0.86")
    contexts = benchmark_modules["decode_step"].contexts_within_budget(schedule, measured_tokens=64)
    assert contexts == [256, 448]
    assert all(schedule.read_tokens(context + 64) == context + 64 for context in contexts)
    assert schedule.read_tokens(513) < 513


def test_a_budget_that_a_measurement_would_leave_is_refused(benchmark_modules: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match="reads contexts up to 128 whole, and measuring decodes 64 tokens"):
        benchmark_modules["decode_step"].contexts_within_budget(Schedule.fixed(128), measured_tokens=64)


class StubEngine:
    """Takes half a second a run, and keeps what it was asked for."""

    asked: ClassVar[list[tuple[int, list[int], int]]] = []

    def __init__(self, *_: object, **__: object) -> None:
        self.start_seconds, self.capacity_tokens = 1.0, 1000

    def __enter__(self) -> StubEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def settings(self) -> dict[str, object]:
        return {}

    def whole_run(self, context: int, left: list[int], *, uncounted_steps: int, on_progress, every_steps: int):
        self.asked.append((context, left, uncounted_steps))
        on_progress(every_steps, 0.25)
        return {"seconds": 0.5, "tokens": sum(left), "steps_with_requests_put_off": 0}


def test_a_whole_run_that_was_cut_goes_on_where_it_was(
    benchmark_modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run = benchmark_modules["whole_run"]
    monkeypatch.setattr(whole_run, "Engine", StubEngine)
    monkeypatch.setattr(StubEngine, "asked", [])
    options = argparse.Namespace(
        engine="dense", model="tiny", schedule="s", folder="f", max_seqs=8, every=10, continue_from=None
    )
    lengths, progress = [40, 12, 30], tmp_path / "progress.jsonl"
    first = whole_run.run(options, lengths, progress)
    assert (first["seconds"], first["pieces"], first["tokens"]) == (0.5, 1, 82)
    # The last line was cut in the middle.
    progress.write_text(progress.read_text() + '{"step": 20')
    options.continue_from = progress
    second = whole_run.run(options, lengths, tmp_path / "more.jsonl")
    assert (second["seconds"], second["pieces"]) == (0.75, 2)
    # Of the ten steps that are done, three fill the caches again.
    assert StubEngine.asked == [(150, lengths, 0), (157, [33, 5, 23], 3)]
    assert whole_run.last_line(tmp_path / "more.jsonl", lengths)["step"] == 17
    with pytest.raises(SystemExit, match="holds no progress of these requests"):
        whole_run.last_line(progress, [1, 2])


def cells_of(dense: float, sparse: float) -> list[dict[str, object]]:
    times = {"dense": dense, "triton": sparse}
    return [
        {"engine": name, "batch": 8, "context_tokens": 256, "seconds": [seconds]} for name, seconds in times.items()
    ]


def test_the_overhead_within_the_budget_is_held_against_three_percent(
    benchmark_modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    render_speed = benchmark_modules["render_speed"]
    found = {"1.7b": cells_of(2e-3, 2.06e-3), "4b": cells_of(2e-3, 2.0602e-3)}
    for size in found:
        (tmp_path / f"decode-step-within-budget-qwen3-{size}-h200.json").touch()
    (tmp_path / "decode-step-within-budget-fine-qwen3-1.7b-in-turns-h100.json").touch()
    monkeypatch.setattr(render_speed, "RESULTS", tmp_path)
    monkeypatch.setattr(render_speed, "results", lambda name, kind: found[name.split("qwen3-")[1].split("-")[0]])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in render_speed.within_budget().splitlines()[2:]]
    assert lines == [
        ["H200", "Qwen3-1.7B", "pages", "256", "8", "2.000", "2.060", "+3.0%", "yes"],
        ["H200", "Qwen3-4B", "pages", "256", "8", "2.000", "2.061", "+3.1%", "no"],
        ["H100", "Qwen3-1.7B", "small units", "256", "8", "2.000", "2.060", "+3.0%", "yes"],
    ]
    monkeypatch.setattr(render_speed, "RESULTS", tmp_path / "empty")
    assert render_speed.within_budget() == "Not measured yet."


def test_the_page_says_whether_the_full_lengths_were_run(
    benchmark_modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    render_speed = benchmark_modules["render_speed"]
    found = {"windows": [0] * 14, "sparse_engine": "triton"}
    measured = [("1.7b", "drained", found), ("1.7b", "steady", found | {"windows": [0] * 5})]
    monkeypatch.setattr(render_speed, "rollout_records", lambda: measured)
    short = render_speed.WholeRun("1.7b", "dense", 0.125, 100, 10.0, 9.931)
    monkeypatch.setattr(render_speed, "found_whole", lambda: [short])
    assert "Nobody has run the full lengths whole yet" in " ".join(render_speed.interpolated().split())
    full = [render_speed.WholeRun("1.7b", name, 1.0, 800, *of) for name, of in FULL.items()]
    monkeypatch.setattr(render_speed, "found_whole", lambda: [short, *full])
    said = " ".join(render_speed.interpolated().split())
    assert said.endswith("this is off by: at full lengths 1.2 to 2.0 %, with an eighth of the lengths 0.7 %.")
    assert "Nobody" not in said
    assert render_speed.whole_runs().splitlines()[-1] == "| Qwen3-1.7B | speed-up | full |  | 2.00x | 2.06x |  |"


FULL = {"dense": (100.0, 101.2), "sparse": (50.0, 49.0)}
"""(seconds, what the moments say) of a made-up run."""


def test_a_grid_runs_with_the_learning_rate_that_it_is_given(benchmark_modules: dict[str, ModuleType]) -> None:
    rl_grid = benchmark_modules["rl_grid"]
    assert "train.lr=2e-4" in rl_grid.settings("2e-4")
    assert "train.lr=2e-4" in rl_grid.command(Path("folder"), "dense", "tis", 0, "2e-4")


def test_overlapping_kernels_count_once(profile_step: ModuleType) -> None:
    own = profile_step.own_times([("b", 5.0, 12.0), ("a", 0.0, 10.0), ("a", 20.0, 21.0), ("c", 6.0, 8.0)])
    assert own == [("a", 10.0), ("b", 2.0), ("c", 0.0), ("a", 1.0)]
    assert profile_step.totals(own) == {"a": (11.0, 2), "b": (2.0, 1), "c": (0.0, 1)}


def test_a_profile_of_windows_is_divided_behind_the_last_draft(profile_step: ModuleType) -> None:
    pytest.importorskip("triton")
    window = [
        ("_choose", 0.0, 1000.0),
        ("_draw_tokens", 1000.0, 1500.0),
        ("_choose", 2000.0, 3000.0),
        ("_draw_tokens", 3000.0, 3500.0),
        ("flash_fwd", 3400.0, 5500.0),
        # A window without a draft is drawn from the dense distribution.
        ("_draw_tokens", 5500.0, 6000.0),
    ]
    found = profile_step.summed_windows([window[::-1], window], 2, 0.010)
    assert found["drafts"]["groups_ms"] == {"choice": 2.0, "draws": 1.0}
    assert found["check"]["groups_ms"] == {"attention, FA3": 2.0, "draws": 0.5}
    assert found["check"]["kernels"][0] == {"kernel": "flash_fwd", "group": "attention, FA3", "ms": 2.0, "calls": 1.0}
    assert found["drafts_per_window"] == 2 and found["idle_ms"] == pytest.approx(10.0 - 5.5)
    with pytest.raises(RuntimeError, match="a window of 4 drafts has 3 draws"):
        profile_step.summed_windows([window], 4, 0.010)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<int>>>", "attention, FA3"),
        ("void vllm::reshape_and_cache_flash_kernel<bf16>", "cache write"),
        ("nvjet_tst_192x8_64x7_1x2_h_bz_coopB_TNT", "GEMM"),
        ("_gumbel_sample_kernel", "sampling"),
        ("_gather", "gather"),
        ("_gather_block_tables_kernel", "step inputs"),
        ("_scores_of_rows", "sampling"),
        ("_choose", "choice"),
        ("_mean_query", "scores"),
        ("_score_codes", "scores"),
        ("triton_red_fused__to_copy_add_mean", "norms, rope, activation"),
        ("_measure_tiles", "draws"),
        ("_masses", "the rule"),
        ("something_new", "other"),
    ],
)
def test_kernels_are_grouped_by_name(profile_step: ModuleType, kernel: str, group: str) -> None:
    pytest.importorskip("triton")
    assert profile_step.group_of(kernel) == group


def test_floors_of_a_sparse_layer_add_up_to_what_the_schedule_must_read(
    benchmark_modules: dict[str, ModuleType], profile_step: ModuleType
) -> None:
    step_bytes = benchmark_modules["step_bytes"]
    schedule, contexts = Schedule.fixed(512, dense_layers=(0,)), [100, 1024, 4096]
    floors = profile_step.floors_ms(contexts, schedule, 4, bandwidth=1e3)["sparse"]
    reading = step_bytes.bytes_read(contexts, schedule, 4)
    assert floors["attention, FA3"] == np.sum(contexts) * step_bytes.kv_bytes()
    # Scores and lists of units are written and read besides.
    assert reading < floors["attention, FA3"] + floors["scores"] + floors["gather"] < 1.1 * reading


def test_a_step_within_the_budget_reads_with_vllms_attention_alone(
    benchmark_modules: dict[str, ModuleType], profile_step: ModuleType
) -> None:
    whole = np.sum([100, 200]) * benchmark_modules["step_bytes"].kv_bytes()
    floors = profile_step.floors_ms([100, 200], Schedule.fixed(512, dense_layers=(0,)), 4, bandwidth=1e3)["sparse"]
    assert floors.keys() == {"attention, FA3", "index update"} and floors["attention, FA3"] == 4 * whole


def test_equal_contexts_are_profiled_in_place_of_a_moment(
    profile_step: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = profile_step.arguments(["--equal", "3", "194", "--folder", str(tmp_path)])
    assert profile_step.moment(options, 10_000) == {"step": None, "contexts": [194] * 3}
    with pytest.raises(SystemExit):
        profile_step.arguments(["--equal", "129", "194", "--folder", str(tmp_path)])
    assert "--equal takes 1 to 128 requests (--max-seqs) of 1 token or more" in capsys.readouterr().err


def test_the_sparse_training_benchmark_runs_from_checks_to_record(
    benchmark_modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_modules["sparse_training"], "ODD_TOKENS", (1, 17))
    out = tmp_path / "record.json"
    sizes = "--heads 4 --kv-heads 2 --head-dim 32 --layers 3 --hidden 64 --vocabulary 100 --tokens 560 --repeats 1"
    how = "--device cpu --impl reference --dtype float32 --passes 1"
    benchmark_modules["sparse_training"].main(["--out", str(out), *sizes.split(), *how.split()])
    results = records.read(out, "sparse-training")["results"]
    assert len(results["checks"]) == 6
    assert [(row["tokens"], row["queries"]) for row in results["layer"]] == [(560, "random"), (560, "smooth")]
    assert all(row["read_share"] <= row["loaded_share"] <= 1 for row in results["layer"])
    (whole,) = results["model"]
    assert whole["tokens"] == 560 and {"policy", "adapter_dense", "adapter", "adapter_over_policy"} <= whole.keys()


def test_verified_rollouts_measures_one_batch_or_moments_of_the_sets(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    verified = benchmark_modules["verified_rollouts"]
    options = argparse.Namespace(sets=None, contexts=[30_000, 500], batch=3)
    assert [each["contexts"] for each in verified.moments(options)] == [[30_000] * 3, [500] * 3]
    asked = {
        "moments": 4,
        "capacity_tokens": 200_000,
        "max_seqs": 64,
        "steps": 8,
        "repeats": 3,
        "timed_windows": 2,
        "profile": False,
        "shrink": 1.0,
    }
    found = verified.moments(argparse.Namespace(sets=["drained", "steady"], windows=[16, 64], **asked))
    assert [each["set"] for each in found] == ["drained"] * 4 + ["steady"] * 2
    first, second = (each["contexts"] for each in found[4:])
    assert len(first) == len(second) and first != second
    assert sum(first) + 64 * len(first) < 200_000


def test_a_record_of_verified_rollouts_has_schedules_by_name_and_table_and_no_path(
    benchmark_modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    verified, path = benchmark_modules["verified_rollouts"], Schedule.fixed(512).save(tmp_path / "mine.toml")
    found = [verified.schedule_named(name, "qwen3-1.7b", tmp_path) for name in ("128@4x4", str(path))]
    options = argparse.Namespace(out="record.json", folder=str(tmp_path), schedules=["128@4x4", str(path)], beside=[])
    about = verified.about(options, [], found)
    assert about["schedules"] == list(about["schedule_tables"]) == ["fixed-128-4x4", "mine"]
    assert about["schedule_tables"]["mine"]["steps"] == [{"from_context_tokens": 0, "kv_budget_tokens": 512}]
    assert str(tmp_path) not in json.dumps(about)
    wide = verified.schedule_named("512+128@16x4", "qwen3-1.7b", tmp_path)
    assert wide.name == "wide-128-16x4" and not wide.dense_layers and wide.selector.unit_tokens == 16
    assert [wide.of_layer(layer).kv_budget_tokens(9000) for layer in (0, 1, 2, 27)] == [512, 512, 128, 128]


def test_verified_rollouts_sums_the_moments_of_a_set_up_to_its_whole_run(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    verified = benchmark_modules["verified_rollouts"]

    def cell(engine: str, step: int, rate: float, **more: Any) -> dict[str, Any]:
        return {"set": "steady", "engine": engine, "step": step, "batch": 10, "tokens_per_second": rate, **more}

    checked = {"schedule": "a", "window_tokens": 64, "floor": 0.01, "kept_share_forced": 0.998}
    cells = [cell("dense", 0, 10.0), cell("dense", 5, 10.0)]
    cells += [cell("sparse", step, 40.0, schedule="a") for step in (0, 5)]
    # A step of ten tokens takes half a second at one moment and a quarter at the other.
    cells += [cell("verified", 0, 20.0, **checked), cell("verified", 5, 40.0, **checked)]
    dense, sparse, both = verified.whole_runs(cells)
    assert (dense["tokens_per_second"], sparse["of_dense"]) == (10.0, 4.0)
    assert both["tokens_per_second"] == pytest.approx(10 / 0.375)
    assert both["of_unverified"] == pytest.approx(10 / 0.375 / 40) and both["moments"] == 2
    assert not verified.whole_runs([{"set": "batch", "engine": "dense", "batch": 1, "tokens_per_second": 1.0}])


class _Reports:
    """An engine whose worker decoded so many steps of dense requests."""

    def __init__(self, dense_steps: int):
        self.llm = self
        self.table = EngineReport("vllm", "tiny", None, 0, dense_request_steps=dense_steps).table()

    def collective_rpc(self, method: Any) -> list[Any]:
        return [self.table]


def test_shares_of_dense_requests_are_carried_over_and_a_flag_without_effect_is_an_error(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    of = benchmark_modules["dense_requests"]
    flags = of.dense_flags(90, 1 / 32, 32, seed=3)
    assert sum(map(sum, flags)) == 90 and {sum(each) for each in flags} == {2, 3}
    assert flags == of.dense_flags(90, 1 / 32, 32, seed=3) != of.dense_flags(90, 1 / 32, 32, seed=4)
    of.check_decoded(_Reports(dense_steps=24), 24)
    with pytest.raises(RuntimeError, match="0 steps of dense requests were dense, and 24 were asked for"):
        of.check_decoded(_Reports(dense_steps=0), 24)


def test_what_dense_requests_cost_is_the_share_of_the_tokens_per_second_that_is_lost(
    benchmark_modules: dict[str, ModuleType],
) -> None:
    row = {
        "batch": 64, "context_tokens": 640_000, "dense_requests": [2, 2], "dense_context_tokens": [10_000, 30_000],
        "sparse_seconds": [0.010, 0.010], "mixed_seconds": [0.0105, 0.0107],
    }  # fmt: skip
    options = argparse.Namespace(model="qwen3-1.7b", schedule="qwen3-1.7b-0.86", share=1 / 32)
    found = benchmark_modules["dense_requests"].result(options, [row])
    assert found["cost"] == pytest.approx(1 - 0.010 / 0.0106)
    assert found["sparse_tokens_per_second"] == pytest.approx(6400)
    assert (found["dense_share"], found["dense_share_of_tokens"]) == (1 / 32, 1 / 32)


def test_a_calibration_is_compared_with_a_whole_evaluation(benchmark_modules: dict[str, ModuleType]) -> None:
    measured = {"name": "fixed-512", "kv_read_share": 0.5, "wall_seconds": 9.0, "tail": {}}
    calibration = {
        "command_seconds": 200.0,
        "config": {"cost_ahead": {"sampled_tokens": 5000, "share_of_evaluation": 0.29}},
        "results": {
            "sweep": {"dense_ceiling": measured, "budgets": [measured, measured]},
            "verification": {"rounds": [measured]},
            "generated_tokens": 4000,
            "scored_tokens": 3000,
        },
    }
    sampled = {"tokens_per_second": 960.0, "generate_seconds": 10.0}
    evaluation = {"results": {"tasks": {"synthetic": {"policies": {"dense": sampled}}}}}
    options = argparse.Namespace(response_tokens=1000, problems=60, samples=2)
    found = benchmark_modules["calibration_cost"].figures(options, calibration, evaluation)
    # 60 problems x 16 samples x 1,000 tokens at 960 tokens a second.
    assert found["evaluation"]["whole_seconds"] == 1000.0 and found["share_of_seconds"] == 0.2
    assert found["calibration"]["most_seconds"] == 250.0 and found["most_share_of_seconds"] == 0.25
    assert len(found["calibration"]["sets"]) == 4 and found["calibration"]["verify_rounds"] == 1
