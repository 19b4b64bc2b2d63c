"""Benchmarks of whole steps at tiny sizes: what they record, not what they time."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sparroll import records
from sparroll.schedule import Schedule

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


def ran(case: str, tokens_per_second: float, step_seconds: float, spent: float | None = None, **more: Any) -> dict:
    """A case with a first step that would spoil a mean, and a last one. spent: by re-scoring, of a trainer's step."""
    last = {"tokens_per_second": tokens_per_second, "step_seconds": step_seconds, "rollout_tokens": 36_000}
    last["rollout_seconds"] = 36_000 / tokens_per_second
    if spent is not None:
        last["metrics"] = {"time/sparroll_measure_seconds": spent, "control/share": 1 / 32, "control/dense_steps": 7}
    return {"case": case, "steps": [{"step_seconds": 1e9, "metrics": {}}, last], **more}


def test_trls_speed_up_is_compared_with_the_plugins_own(monkeypatch) -> None:
    trl_steps = load("trl_steps", monkeypatch)
    found = [ran("dense", 1000, 60, 0.0), ran("sparse", 1800, 40, 1.0), {"case": "verified", "steps": [{}]}]
    said = trl_steps.together(found)
    assert said["sparse/rollouts"] == 1.8 and said["sparse/step"] == 1.5 and "verified/rollouts" not in said
    assert said["sparse/added/known"] == 0.025 and "sparse/added/whole" not in said
    said = trl_steps.together([*found, ran("plugin-dense", 1200, 50), ran("plugin-sparse", 2400, 25)])
    assert said["sparse/rollouts_of_plugin"] == 2 and said["sparse/of_plugins"] == 0.9
    # 20 s inside, 15 s of the plugin.
    assert said["sparse/added/sampling"] == 5 / 40 and said["sparse/added/whole"] == 6 / 40


def test_trls_weights_have_to_arrive_where_they_are_sent(monkeypatch) -> None:
    trl_steps = load("trl_steps", monkeypatch)
    row = {"case": "server", "server": True, "steps": [], "arrived": {"from_trained": 1.5, "from_first": 3e-7}}
    assert trl_steps.wrong([row], dry=True) == [] and len(trl_steps.wrong([row], dry=False)) == 1
    assert len(trl_steps.wrong([row | {"server": False}], dry=True)) == 1
    assert trl_steps.wrong([row | {"arrived": {"from_trained": 0.005, "from_first": 1.2}}], dry=False) == []


def of_verl(case: str, tokens_per_second: float, step_seconds: float, spent: float | None = None) -> dict:
    own = {"run": {"sparroll": {"mismatch": {"ceiling_every_steps": 10}}}}
    more = {"mode": "sync", "control": case == "control", "response_tokens": 1000, "in_force": own}
    return ran(case, tokens_per_second, step_seconds, spent, **more)


def test_verls_cases_say_what_sparroll_adds_and_what_a_control_group_costs(monkeypatch) -> None:
    verl_steps = load("verl_steps", monkeypatch)
    found = [of_verl("dense", 1000, 60, 0.0), of_verl("sparse", 1800, 39, 1.0), of_verl("control", 1440, 50, 1.0)]
    found[1]["steps"][0]["metrics"] = {"time/sparroll_ceiling_seconds": 10.0}
    said = verl_steps.together([*found, of_verl("plugin-dense", 1200, 50), of_verl("plugin-sparse", 2400, 25)])
    assert said["sparse/rollouts"] == 1.8 and said["sparse/of_plugins"] == 0.9
    # The ceiling of 10 s every 10 steps; 5 s of sampling; 1 s of re-scoring: 7 s of a step of 40 s.
    assert said["sparse/added/ceiling"] == 1 / 40 and said["sparse/added/whole"] == 7 / 40
    assert said["dense/rollout_seconds_over_plugin"] == 6 and said["sparse/rollout_seconds_over_plugin"] == 5
    assert said["control/rollouts_cost"] == pytest.approx(0.2) and said["control/step_cost"] == pytest.approx(0.22)
    assert said["control/added/ceiling"] == 0 and said["control/dense_steps"] == 7


def test_a_replica_that_did_not_follow_and_weights_that_did_not_arrive_are_said(monkeypatch) -> None:
    verl_steps = load("verl_steps", monkeypatch)
    steps = [{"step": 1, "schedule": "a", "follows": True}, {"step": 2, "schedule": "b", "follows": False}]
    guarded = {"case": "two-replicas", "guarded": True, "steps": [], "followed": steps}
    (line,) = verl_steps.wrong([guarded])
    assert line == "two-replicas: in step 2, not every replica followed b"
    (line, _) = verl_steps.wrong([guarded | {"followed": [*steps[:1], steps[1] | {"schedule": "a"}]}])
    assert "move the schedule once" in line
    measured = [{"metrics": {"rescoring/measured": count}} for count in (8, 0, 3)]
    separate = {"case": "separate-async", "arrives": True, "steps": measured, "arrived": {"arrived": True}}
    assert verl_steps.wrong([separate]) == []
    assert len(verl_steps.wrong([separate | {"arrived": {}, "steps": measured[:2]}])) == 2
    group = {"case": "control", "control": True, "steps": [{"metrics": {"control/dense_steps": 0.0}}]}
    assert verl_steps.wrong([group]) == ["control: no step of its control group was dense"]
    both = {"case": "ceilings", "both_ceilings": True, "steps": [], "ceilings": {}}
    assert verl_steps.wrong([both]) == ["ceilings: the trainer read none of the dense rollouts"]
    assert verl_steps.wrong([both | {"ceilings": {"trainer_ceiling_q05": 0.8}}]) == []


def options_of(steps: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *given: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["verl_steps.py", "--out", "r.json", "--work", str(tmp_path / "work"), *given])
    return steps.arguments()


def test_cases_beside_others_run_on_the_last_gpu(monkeypatch, tmp_path) -> None:
    verl_steps = load("verl_steps", monkeypatch)
    given = ["--cases", "dense", "sparse", "--beside", "plugin-dense", "--gpus", "0", "1"]
    options = options_of(verl_steps, monkeypatch, tmp_path, *given)
    assert verl_steps.lanes(options) == [([0], ["dense", "sparse"]), ([1], ["plugin-dense"])]
    with pytest.raises(SystemExit):
        options_of(
            verl_steps, monkeypatch, tmp_path, "--cases", "two-replicas", "--beside", "sparse", "--gpus", "0", "1"
        )


def test_verl_is_told_what_a_case_is_about_and_else_sparrolls_defaults_hold(monkeypatch, tmp_path) -> None:
    verl_steps = load("verl_steps", monkeypatch)
    given = ["--steps-of", "control=3", "--short-tokens", "2048"]
    options, case = options_of(verl_steps, monkeypatch, tmp_path, *given), verl_steps.verl_case
    steps = {name: case.steps_of_case(options, name) for name in case.CASES}
    assert steps["sparse"] == 4 and steps["control"] == 3 and steps["separate-async"] == 5 and steps["ceilings"] == 1
    own = "+actor_rollout_ref.rollout.custom.sparroll"
    sparse, guarded = case.overrides(options, "sparse"), case.overrides(options, "two-replicas")
    assert not any("rescoring" in key or "mismatch" in key for key in sparse)
    # 8 of 32 rollouts are re-scored in a step, so two steps have fewer tokens than the guard needs, and three have more.
    least = int(guarded[f"{own}.mismatch.least_tokens"])
    assert 2 * 8 * 2048 < least < 3 * 8 * 2048 and guarded["trainer.total_training_steps"] == "5"
    assert case.overrides(options, "control")[f"{own}.control_group.share"] == "0.03125"
    separate = case.overrides(options, "separate-async")
    assert separate["actor_rollout_ref.actor.optim.lr"] == "0.0001" != sparse["actor_rollout_ref.actor.optim.lr"]
    told = case.environment(options, "sparse", ["0"], "path")
    assert told["SPARROLL_FIRST_TOKENS"] == "1024" and "verl_watch" in told["VERL_USE_EXTERNAL_MODULES"]


def leased() -> list[list[str]]:
    """The commands of the table in benchmarks/README.md."""
    lines = (BENCHMARKS / "README.md").read_text().splitlines()
    cells = [line.split("|")[2].strip() for line in lines if line.startswith("|") and "GPU" in line.split("|")[1]]
    return [command.split() for cell in cells for command in cell.split("`")[1:2]]


@pytest.mark.parametrize("command", leased(), ids=" ".join)
def test_the_commands_of_a_lease_are_taken_by_their_scripts(command, monkeypatch, tmp_path) -> None:
    if command[0] == "python":
        assert (BENCHMARKS.parent / command[1]).is_file()
        return
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: name if name == "uvicorn" else found(name, *more)
    )
    options = options_of(load(command[0], monkeypatch), monkeypatch, tmp_path, *command[1:])
    assert options.cases and options.steps >= 4


def test_a_steps_rollouts_take_what_they_were_sampled_in_and_not_what_verl_waited_for_them(
    monkeypatch, tmp_path
) -> None:
    verl_steps = load("verl_steps", monkeypatch)
    options, step_of = options_of(verl_steps, monkeypatch, tmp_path), verl_steps.step_of
    metrics = {"response_length/mean": 1000.0, "timing_s/step": 60.0, "timing_s/gen": 36.0, "other": 1.0}
    metrics["time/sparroll_measure_seconds"] = 1.0
    sampled = step_of(options, 2, metrics, 32.0)
    assert (sampled["rollout_seconds"], sampled["waited_seconds"], sampled["tokens_per_second"]) == (32, 3, 1000)
    assert step_of(options, 2, metrics)["rollout_seconds"] == 35 and "other" not in sampled["metrics"]


def test_the_guards_next_schedule_reads_half_as_much_again_and_leaves_sparse_steps(monkeypatch, tmp_path) -> None:
    verl_steps = load("verl_steps", monkeypatch)
    options, case = options_of(verl_steps, monkeypatch, tmp_path), verl_steps.verl_case
    options.work.mkdir()
    case.write_wider_schedule(options)
    narrow, wider = (Schedule.load(str(each)) for each in ("qwen3-1.7b-0.86", case.wider_schedule(options)))
    for context in (500, 2000, 17_000):
        assert wider.kv_budget_tokens(context) == 1.5 * narrow.kv_budget_tokens(context)
    assert wider.dense_layers == narrow.dense_layers and wider.selector == narrow.selector and wider.name == "wider"


def test_a_model_with_random_weights_becomes_sure_of_its_tokens(monkeypatch, tmp_path) -> None:
    random_models = load("random_models", monkeypatch)
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    model = random_models.random_qwen3(
        "cpu", "float32", 0, vocab_size=5000, num_key_value_heads=2, head_dim=32, **sizes
    )
    model.save_pretrained(tmp_path)
    ids = torch.arange(40)[None]

    @torch.no_grad()
    def mass_of_20() -> float:
        logits = type(model).from_pretrained(tmp_path)(ids).logits
        return float(logits.softmax(-1).topk(20).values.sum(-1).mean())

    before = mass_of_20()
    random_models.make_sure_of_tokens(tmp_path)
    assert mass_of_20() > 5 * before


def dry_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> dict[str, Any]:
    """The results of a benchmark of kernels without a GPU, in a record of its own kind."""
    pytest.importorskip("triton", reason="triton runs on Linux only")
    if torch.cuda.is_available():
        pytest.skip("interprets kernels on CPU tensors; with CUDA the benchmark itself checks what it compiled")
    benchmark, out = load(name, monkeypatch), tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--dry", *more, "--out", str(out)])
    benchmark.main()
    return records.read(out, name.replace("_", "-"))["results"]


@pytest.mark.slow
def test_a_dry_run_of_the_kernels_of_fine_units_checks_them_and_times_nothing(tmp_path, monkeypatch, capsys) -> None:
    results = dry_run("fine_kernels", tmp_path, monkeypatch, "--units", "4x4")
    rows = results["rows"]
    assert [row["kernel"] for row in rows] == [
        "scores",
        "choice",
        "attention",
        "attention in a layer",
        "sparse layer",
    ] * 2
    assert {row["units"] for row in rows} == {"4x4 equal", "4x4 mixed"}
    assert all(row["graph_us"] is None and row["bytes"] > 0 for row in rows)
    # The row of a unit: 32 channels of 4 bits and a scale.
    scored = {row["units"]: row["bytes"] for row in rows if row["kernel"] == "scores"}
    assert scored["4x4 equal"] == 2 * 38 * (4 + 20)
    assert results["tests"] is None
    assert "4x4 mixed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_dry_run_of_the_plans_of_reading_checks_each_and_times_nothing(tmp_path, monkeypatch) -> None:
    rows = dry_run("reading_plans", tmp_path, monkeypatch)["rows"]
    assert [(row["requests"], row["contexts"], row["budgets"]) for row in rows] == [
        (1, "mixed", "schedule"), (3, "mixed", "schedule"), (2, "equal", "96"),
    ]  # fmt: skip
    for row in rows:
        # Six programs at a time: heads of 3 requests have one each, heads of 2 would leave two of them idle.
        taken, shares = "programs" if row["requests"] == 2 else "own", row["tiles_in_a_stretch"]
        assert shares["planned"] == shares[taken]
        assert set(row["attention_us"]) == {"planned", "running", "programs", "own"}
        assert set(row["attention_us"].values()) == {None}


def test_a_dry_run_of_the_scores_of_rows_checks_them_and_times_nothing(tmp_path, monkeypatch, capsys) -> None:
    rows = dry_run("row_scores", tmp_path, monkeypatch)["rows"]
    assert [(row["dtype"], row["top_k"]) for row in rows] == [
        (dtype, top_k) for dtype in ("bfloat16", "float32") for top_k in (0, 20)
    ]
    assert all(row["ours_us"] is None and row["speedup"] is None for row in rows)


def test_a_record_of_kernels_says_how_many_of_their_tests_passed_in_the_same_call(tmp_path, monkeypatch) -> None:
    fine_kernels, told = load("fine_kernels", monkeypatch), tmp_path / "tests.xml"
    suite = '<testsuites><testsuite tests="{}" failures="{}" errors="{}" skipped="{}"/></testsuites>'
    told.write_text(suite.format(529, 0, 0, 4))
    found = fine_kernels.tests_told(told, fine_kernels.TESTS)
    assert (found["passed"], found["skipped"], found["compiled"]) == (525, 4, torch.cuda.is_available())
    for failures, errors in ((1, 0), (0, 1)):
        told.write_text(suite.format(529, failures, errors, 4))
        with pytest.raises(AssertionError, match="1 tests failed, 524 passed"):
            fine_kernels.tests_told(told, fine_kernels.TESTS)
    told.write_text(suite.format(4, 0, 0, 4))
    with pytest.raises(AssertionError, match="0 passed"):
        fine_kernels.tests_told(told, fine_kernels.TESTS)


def test_a_kernel_that_fails_hangs_or_is_never_begun_is_told(monkeypatch) -> None:
    kernel_tasks = load("kernel_tasks", monkeypatch)
    monkeypatch.setattr(kernel_tasks.os, "cpu_count", lambda: 2)
    quick = [
        sys.executable,
        "-c",
        "import sys; number = int(sys.argv[1]); print('bad', file=sys.stderr); sys.exit(number)",
    ]
    assert kernel_tasks.failures(quick, 3, 60) == {1: "bad", 2: "bad"}
    hangs = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert kernel_tasks.failures(hangs, 3, 0.2) == {
        0: "not ready after 0.2 s",
        1: "not ready after 0.2 s",
        2: "not begun in time",
    }
