"""recipes/claims: the statistics and figures against known answers, the cells of full size, and what the runner refuses.
test_claims_folder.py has what a folder keeps over several calls."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from counting_experiment import Counts
from sparroll import records
from sparroll.attention.selectors import make_selector
from sparroll.calibrate.target import OutOfReach
from sparroll.errors import UserError
from sparroll.plan.model_shape import ModelShape
from sparroll.types import Rollout, TokenScores, TopK

RECIPE = Path(__file__).parents[2] / "recipes" / "claims"
sys.path.insert(0, str(RECIPE))

import run  # noqa: E402
from claim_cells import Cell, Done, Place, cell_path, hardware_name, read_cell, run_cell, write_record  # noqa: E402
from claim_tasks import (  # noqa: E402
    DENSE,
    budget,
    claim_tasks,
    engine_kind,
    evicting,
    find_task,
    run_config,
    schedule_of,
)
from claim_tokens import Tokens, intervals, paired_difference, statistics  # noqa: E402
from experiments import NAMES, experiment, page_size, sparse_rl, threshold  # noqa: E402
from experiments.quantised_sampler import Rounded, rounded  # noqa: E402
from study_jobs import Job, run_jobs  # noqa: E402

EVERY = claim_tasks(Path("out"), "cuda", None, toy=False)
FULL, TOY = EVERY[:2], claim_tasks(Path("out"), "cpu", None, toy=True)[:2]
"""The tasks of a call that names none."""


def tokens(accepted: list[float], off: list[float] | None = None, prompts: list[int] | None = None) -> Tokens:
    count = len(accepted)
    return Tokens(
        np.array(accepted),
        np.array(off or [0.0] * count),
        np.arange(count),
        np.array(prompts or list(range(count))),
    )


# -- statistics ----------------------------------------------------------------------------------------------------------


def test_statistics_of_a_hundred_tokens_are_what_counting_gives() -> None:
    accepted = [0.0, 0.1, 0.2, 0.3, 0.4, *[1.0] * 95]
    off = [25.0, 12.0, 7.0, 3.0, *[0.0] * 96]
    found = statistics(tokens(accepted, off))
    assert found["mean"] == pytest.approx(0.96)
    assert (found["q01"], found["q05"], found["q10"]) == (0.0, 0.4, 1.0)
    assert found["cvar01"] == pytest.approx(0.0) and found["cvar05"] == pytest.approx(0.2)
    assert [found[f"over_{nats}_nats"] for nats in (2, 5, 10, 20)] == pytest.approx([0.04, 0.03, 0.02, 0.01])
    assert found["kl"] == pytest.approx(0.47)
    assert found["nearly_one_share"] == pytest.approx(0.95)
    assert found["skew"] < -3


def test_statistics_are_read_from_the_log_probabilities_of_rollouts() -> None:
    lists = TopK(torch.tensor([[1, 2], [1, 2]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log())
    read = TopK(torch.tensor([[1, 2], [2, 1]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log())
    rollout = Rollout([7, 7, 7], [1, 1], torch.tensor([0.5, 0.9]).log(), "stop", prompt_index=4, top_k=lists)
    found = Tokens.of([rollout], [TokenScores(torch.tensor([0.5, 0.1]).log(), read)])
    assert found.acceptance_N == pytest.approx([1.0, 0.2])
    assert found.nats_off_N == pytest.approx([0.0, np.log(9)])
    assert found.context_N.tolist() == [3, 4] and found.prompt_N.tolist() == [4, 4]
    assert list(found.bins(4)) == [0, 4]


def test_the_same_tokens_differ_by_nothing_and_few_prompts_have_no_interval() -> None:
    rng = np.random.default_rng(0)
    many = tokens(rng.random(200).tolist(), prompts=(np.arange(200) // 10).tolist())
    assert paired_difference(many, many, "q05") == [0.0, 0.0, 0.0]
    value, low, high = intervals(many)["mean"]
    assert low < value < high
    # 200 uniform draws: the mean's standard error is about .02.
    assert 0.03 < high - low < 0.2
    assert intervals(tokens([0.5, 0.6, 0.7]))["mean"] == [pytest.approx(0.6), None, None]


def test_rounded_weights_lie_on_their_grid() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1, keepdim=True) / 127
    codes = rounded(weight, "int8") / scale
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    errors = [float((rounded(weight, form) - weight).abs().max()) for form in ("int8", "fp8", "int4")]
    assert errors[0] <= float(scale.max()) / 2 + 1e-6 and errors[0] < errors[1] < errors[2]


def test_a_rounded_sampler_leaves_embeddings_and_the_policy_alone() -> None:
    from sparroll.engines import HFEngine

    policy = HFEngine("tiny-reasoner").model
    before = {name: each.clone() for name, each in policy.state_dict().items()}
    merged = Rounded(policy, "int8").merged()
    assert merged.keys() == before.keys()
    changed = {name for name in before if not torch.equal(merged[name], before[name])}
    assert changed and not any("embed" in name or "norm" in name or "lm_head" in name for name in changed)
    assert all(torch.equal(each, before[name]) for name, each in policy.state_dict().items())


# -- cells ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_full_size_can_be_begun(name: str, tmp_path: Path) -> None:
    made = experiment(name)
    cells = made.cells(EVERY, [0, 1, 2])
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) and set(names).isdisjoint({"", "."})
    assert name == made.NAME and made.ABOUT.endswith("?") and made.__doc__
    assert {cell.config["task"] for cell in cells} == {"table-sums", "remarks", "walks"}
    assert {cell.seed for cell in cells if cell.config.get("does", "train") == "train"} >= {0}
    for cell in cells:
        assert set(cell.needs) <= set(names[: names.index(cell.name)])
        assert json.loads(json.dumps(cell.config)) == cell.config
        if "reading" in cell.config:
            task = find_task(EVERY, cell.config["task"])
            config = run_config(task, cell.config["reading"], cell.seed, tmp_path)
            assert config.train.steps == 60 and config.train.seed == cell.seed
            assert config.engine.kind == ("vllm" if task.name == "table-sums" and _in_vllm(cell) else "hf")
            schedule_of(task, cell.config["reading"])


def _in_vllm(cell: Cell) -> bool:
    """Whether vLLM on a GPU can run what the cell's rollouts read."""
    reading = cell.config["reading"]
    selector = schedule_of(FULL[0], reading).selector.kind if reading["kind"] == "budget" else "page_mean"
    return reading["kind"] != "compression" and selector in ("page_mean", "quantized_mean")


def test_walks_are_run_where_a_call_names_them() -> None:
    words = ["--out", "out", "--device", "cpu"]
    assert [task.name for task in run.the_tasks(run.arguments(words))] == ["table-sums", "remarks"]
    (walks,) = run.the_tasks(run.arguments([*words, "--tasks", "walks"]))
    assert walks.task == "synthetic_walk"


def test_pages_of_every_size_have_budgets_that_fit_them() -> None:
    from experiments.page_size import selectors

    from sparroll.attention.selectors import make_selector

    for task in EVERY:
        for table in selectors(task):
            selector = make_selector(table)
            fitting = [b for b in task.budgets if b >= selector.least_budget_tokens and b % selector.unit_tokens == 0]
            assert len(fitting) >= 3, (task.name, table)


def test_a_record_holds_the_finished_cells_and_names_the_missing_ones(tmp_path: Path) -> None:
    cells = Counts.cells(TOY, [2, 3])
    run_cell(Counts, cells[0], Place(tmp_path, "counts", "cell-2", TOY[1]))
    path = write_record(tmp_path, Counts, cells, {"toy": True})
    assert path.name == f"claims-counts-{hardware_name()}.json"
    record = records.read(path, "claims-counts")
    assert record["seed"] == 2 and record["config"] == {"toy": True}
    found = record["results"]
    assert (found["sum"], found["to"], found["missing"], found["question"]) == (4, [3], ["cell-3"], "How often?")
    assert found["cells"][0]["commit"] == record["commit"] and found["cells"][0]["seed"] == 2
    assert not (tmp_path / "work" / "counts" / "cell-2").exists()


def test_a_cell_of_another_configuration_is_refused(tmp_path: Path) -> None:
    (cell,) = Counts.cells(TOY, [2])
    run_cell(Counts, cell, Place(tmp_path, "counts", cell.name, TOY[1]))
    with pytest.raises(UserError, match="made with another configuration"):
        read_cell(tmp_path, Counts, Cell(cell.name, {"task": "remarks", "to": 4}, 2))
    assert read_cell(tmp_path, Counts, Cell("cell-9", {}, 9)) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_is_the_same_whatever_other_seeds_are_asked_for(name: str) -> None:
    alone, among = ({cell.name: cell for cell in experiment(name).cells(FULL, seeds)} for seeds in ([2], [0, 1, 2]))
    assert all(among[each] == cell for each, cell in alone.items())
    # What has no seed in its name has 0, as it has where nothing else is asked for.
    assert all(cell.seed == (2 if each.endswith("-2") else 0) for each, cell in alone.items())


def test_a_part_is_made_once(tmp_path: Path) -> None:
    place, made = Place(tmp_path, "counts", "cell", TOY[1]), []
    assert [place.part("one", lambda: made.append(1) or {"a": (1, 2)}) for _ in range(2)] == [{"a": [1, 2]}] * 2
    assert made == [1]


def test_what_vllm_cannot_run_is_run_by_hf_engine() -> None:
    task, wide = FULL[0], page_size.selectors(FULL[0])
    engines = {each["page_tokens"]: engine_kind(task, [budget(512, make_selector(each))]) for each in wide[:6]}
    assert engines == {4: "vllm", 8: "vllm", 16: "vllm", 32: "vllm", 64: "vllm", 128: "hf"}
    assert engine_kind(task, [DENSE, budget(512)]) == "vllm"
    assert engine_kind(task, [DENSE, evicting(task, "r_kv", 1024)]) == "hf"


# -- what cells keep -----------------------------------------------------------------------------------------------------


@contextmanager
def no_engine(*_: Any) -> Iterator[Any]:
    yield SimpleNamespace(tokenizer=None)


def calibrating(monkeypatch: pytest.MonkeyPatch, error: UserError) -> Place:
    """A place for `threshold` whose calibrations end with this error."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    encoder = SimpleNamespace(ids=lambda asked: asked)
    monkeypatch.setattr(threshold, "opened", no_engine)
    for name, made in (("scorer_of", None), ("PromptEncoder", encoder), ("Study", None)):
        monkeypatch.setattr(threshold, name, lambda *_, made=made: made)
    monkeypatch.setattr(threshold, "calibrate", refuse)
    return Place(Path("out"), "threshold", "remarks-calibration", TOY[1])


def test_a_target_out_of_reach_is_a_result_and_any_other_error_fails_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "no budget meets the target of 0.8"
    assert threshold.schedules(calibrating(monkeypatch, OutOfReach(why))) == {"0.80": {"table": None, "why": why}}
    with pytest.raises(UserError, match="the disk is full"):
        threshold.schedules(calibrating(monkeypatch, UserError("the disk is full")))


def test_seconds_of_another_engine_are_on_no_frontier() -> None:
    def measured(page: int, tail: float, seconds: float, engine: str) -> Done:
        row = {"budget": 512, "engine": engine, "eflops": 512 / page, "decode_seconds": seconds}
        row |= {"statistics": {"q05": [tail, tail, tail]}}
        config = {"task": "table-sums", "selector": {"kind": "page_mean", "page_tokens": page}}
        return Done(Cell(f"page-{page}", config), {"rows": [row]})

    done = [measured(16, 0.8, 4.0, "vllm"), measured(32, 0.7, 3.0, "vllm"), measured(128, 0.6, 1.0, "hf")]
    frontier = page_size.results(done)["frontier"]
    by = {price: [row["page_tokens"] for row in rows] for price, rows in frontier.items()}
    assert by == {"table-sums by eflops": [128, 32, 16], "table-sums by decode_seconds": [32, 16]}


def test_the_price_of_small_units_is_that_of_their_index() -> None:
    """The rows of 4 tokens in 4 bits take 68 bytes for heads of 128, of which page means of 15 tokens take 64."""
    shape = ModelShape("made up", 1e6, layers=2, query_heads=4, kv_heads=2, head_dim=128, vocabulary=100)
    rollout = Rollout([0] * 64, [0] * 2000, torch.zeros(2000), "length")

    def price(**selector: Any) -> float:
        reading = budget(128) | {"selector": selector | {"first_tokens": 16, "recent_tokens": 32}}
        return page_size.eflops(shape, [rollout], TOY[1], reading)

    pages = {tokens: price(kind="page_mean", page_tokens=tokens) for tokens in (4, 16)}
    assert pages[16] < price(kind="quantized_mean", page_tokens=4, bits=4) < pages[4]


def test_sparse_rl_measures_the_trained_policy_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = []

    @contextmanager
    def engine(task: Any, model: Path, readings: list) -> Iterator[None]:
        models.append(model)
        yield

    monkeypatch.setattr(sparse_rl, "trained", lambda *_, **__: (None, {"accuracy_change": 0.25, "steps": {}}))
    monkeypatch.setattr(sparse_rl, "opened", engine)
    monkeypatch.setattr(sparse_rl, "accuracy", lambda engine, task, reading, seed: {"value": 0.5})
    (cell,) = sparse_rl.cells(TOY, [0])
    place = Place(tmp_path, sparse_rl.NAME, cell.name, TOY[1])
    found = sparse_rl.run(cell, place)
    assert models == [sparse_rl.last_checkpoint(place) / "model"]
    assert found["accuracy"] == {"after-dense": {"value": 0.5}, "after-r_kv-96": {"value": 0.5}}
    # Cells that were made when it was measured before training, too, give the same figures.
    older = found | {"accuracy": {"before-dense": {"value": 0.1}, **found["accuracy"]}}
    assert sparse_rl.results([Done(cell, older)]) == sparse_rl.results([Done(cell, found)])


# -- the runner ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--toy", "--only", "treshold"], "there is no experiment 'treshold'"),
        (["--toy", "--tasks", "remark"], "there is no task 'remark'"),
        (["--toy", "--device", "cuda"], "--toy runs on a CPU"),
        (["--toy", "--engine", "vllm"], "--toy runs on a CPU"),
        (["--toy", "--steps", "3"], "even number from 2 on, got 3"),
        (["--toy", "--seeds", "-1"], "a seed must be a whole number from 0"),
        (["--toy", "--at-once", "0"], "--at-once must be 1 or more"),
        (["--toy", "--minutes", "0"], "--minutes must be above 0"),
        (["--toy", "--minutes", "0.5"], "--minutes must be at least 1.6, got 0.5"),
        (["--toy", "--gpus", "0", "1"], "--gpus 0 1 is given, and jobs of this call run on the CPU"),
        (["--device", "cpu", "--gpus", "0"], "--gpus 0 is given, and jobs of this call run on the CPU"),
        (["--toy", "--cells", "remarks-0.99"], "no cell's name begins with 'remarks-0.99'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(run, "BEGAN", now - 3)
    assert run.main(["--out", str(tmp_path / "out"), *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told
    assert not (tmp_path / "out" / "cells").exists()


@pytest.mark.parametrize("made", ["cells", "work", "first"])
def test_a_folder_of_other_settings_is_refused_once_a_part_of_a_cell_is_there(
    made: str, tmp_path: Path, capsys
) -> None:
    words = ["--out", str(tmp_path), "--toy", "--tasks", "remarks", "--only", "page-size"]
    run.begin(tmp_path, TOY[1:])
    (tmp_path / made / "page-size").mkdir(parents=True)
    assert run.main([*words, "--steps", "4"]) == 2
    assert "was made with steps = 2, and steps = 4 is asked for now" in capsys.readouterr().err


def test_shared_seconds_of_page_size_are_warned_of(tmp_path: Path, capsys) -> None:
    wanted = run.wanted_cells(["page-size", "jackpot-union"], TOY, [0])
    for at_once, cells in ((1, wanted), (2, wanted[-1:]), (2, wanted)):
        args = run.arguments(["--out", str(tmp_path), "--toy", "--at-once", str(at_once)])
        run.warn_of_shared_seconds(args, cells)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: cells of page-size share the machine (--at-once 2)")


def test_toy_cells_share_processes_by_experiment_and_others_have_their_own(tmp_path: Path) -> None:
    toy = run.arguments(["--out", str(tmp_path), "--toy", "--at-once", "2"])
    made = run.jobs(toy, run.wanted_cells(NAMES, TOY, [0]))
    assert [job.name for job in made] == ["toy-0", "toy-1"]
    full = run.arguments(["--out", str(tmp_path), "--only", "threshold"])
    wanted = run.wanted_cells(["threshold"], FULL, [0])
    jobs = {job.name: job for job in run.jobs(full, wanted)}
    assert len(jobs) == len(wanted) == 20
    assert not jobs["threshold/remarks-dense-0"].blocked() and jobs["threshold/remarks-0.86-0"].blocked()
    calibrated = cell_path(tmp_path, "threshold", "remarks-calibration")
    calibrated.parent.mkdir(parents=True)
    calibrated.write_text("{}")
    assert not jobs["threshold/remarks-0.86-0"].blocked()


def test_cells_may_be_named_by_their_beginnings_and_bring_what_they_need() -> None:
    wanted = run.wanted_cells(["threshold", "staleness"], FULL, [0])
    names = [cell.name for _, cell in run.asked_cells(["remarks-0.86", "remarks-sparse-4"], wanted)]
    assert names == ["remarks-calibration", "remarks-0.86-0", "remarks-sparse-4-now-0", "remarks-sparse-4-sampler-0"]
    assert run.asked_cells(None, wanted) == wanted


def test_the_runner_looks_for_finished_cells_while_jobs_run(tmp_path: Path) -> None:
    polls, marker = [], tmp_path / "seen"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(marker)!r}).exists(): time.sleep(0.05)"
    job = Job("one", [sys.executable, "-c", waits], tmp_path / "log")

    def on_poll() -> None:
        polls.append(None)
        if len(polls) == 3:
            marker.touch()

    outcomes = run_jobs([job], gpus=[], at_once=1, deadline=time.time() + 60, on_poll=on_poll)
    assert outcomes["one"].state == "finished" and len(polls) >= 3
