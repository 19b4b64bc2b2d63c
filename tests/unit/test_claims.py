"""recipes/claims: the statistics and figures against known answers, the cells of full size, and what the runner refuses."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from sparroll import records
from sparroll.errors import UserError
from sparroll.types import Rollout, TokenScores, TopK

RECIPE = Path(__file__).parents[2] / "recipes" / "claims"
sys.path.insert(0, str(RECIPE))

import run  # noqa: E402
from claim_cells import Cell, Place, cell_path, hardware_name, read_cell, run_cell, write_record  # noqa: E402
from claim_figures import difference, over_seeds, rank_correlation  # noqa: E402
from claim_tasks import claim_tasks, find_task, run_config, schedule_of  # noqa: E402
from claim_tokens import Tokens, intervals, paired_difference, statistics  # noqa: E402
from experiments import NAMES, experiment  # noqa: E402
from experiments.quantised_sampler import Rounded, rounded  # noqa: E402
from study_jobs import Job, run_jobs  # noqa: E402

FULL = claim_tasks(Path("out"), "cuda", None, toy=False)
TOY = claim_tasks(Path("out"), "cpu", None, toy=True)


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


def test_intervals_over_seeds_are_students() -> None:
    found = over_seeds([1.0, 2.0, 3.0, None])
    # t(.975, 2) = 4.3027, standard error 1 / sqrt(3)
    assert found == {"mean": 2.0, "low": pytest.approx(-0.4842, abs=1e-3), "high": pytest.approx(4.4842, abs=1e-3),
                     "seeds": [1.0, 2.0, 3.0]}  # fmt: skip
    assert over_seeds([2.0]) == {"mean": 2.0, "low": None, "high": None, "seeds": [2.0]} and over_seeds([None]) is None
    assert difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx([1.0, -1.267, 3.267], abs=1e-3)
    assert difference([1.0], [3.0]) == [2.0, None, None] and difference([], [1.0]) is None


def test_rank_correlations_keep_the_runs_of_a_row_together() -> None:
    rows = [row for row in "abcdef" for _ in range(3)]
    rising = [float(place) for place in range(18)]
    assert rank_correlation(rising, [value**3 for value in rising], rows) == pytest.approx([1.0, 1.0, 1.0])
    assert rank_correlation(rising, [1.0] * 18, rows) is None
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0], ["a", "b", "c"]) == [pytest.approx(-1), None, None]


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
    cells = made.cells(FULL, [0, 1, 2])
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names) and set(names).isdisjoint({"", "."})
    assert name == made.NAME and made.ABOUT.endswith("?") and made.__doc__
    assert {cell.config["task"] for cell in cells} == {"table-sums", "remarks"}
    assert {cell.seed for cell in cells if cell.config.get("does", "train") == "train"} >= {0}
    for cell in cells:
        assert set(cell.needs) <= set(names[: names.index(cell.name)])
        assert json.loads(json.dumps(cell.config)) == cell.config
        if "reading" in cell.config:
            task = find_task(FULL, cell.config["task"])
            config = run_config(task, cell.config["reading"], cell.seed, tmp_path)
            assert config.train.steps == 60 and config.train.seed == cell.seed
            assert config.engine.kind == ("vllm" if task.name == "table-sums" and _in_vllm(cell) else "hf")
            schedule_of(task, cell.config["reading"])


def _in_vllm(cell: Cell) -> bool:
    """Whether vLLM on a GPU can run what the cell's rollouts read."""
    reading = cell.config["reading"]
    selector = schedule_of(FULL[0], reading).selector.kind if reading["kind"] == "budget" else "page_mean"
    return reading["kind"] != "compression" and selector in ("page_mean", "quantized_mean")


def test_pages_of_every_size_have_budgets_that_fit_them() -> None:
    from experiments.page_size import selectors

    from sparroll.attention.selectors import make_selector

    for task in FULL:
        for table in selectors(task):
            selector = make_selector(table)
            fitting = [b for b in task.budgets if b >= selector.least_budget_tokens and b % selector.unit_tokens == 0]
            assert len(fitting) >= 3, (task.name, table)


class Counts:
    """An experiment that only counts how often it ran."""

    NAME, ABOUT, runs = "counts", "How often?", 0

    @staticmethod
    def cells(tasks, seeds):
        return [Cell(f"cell-{seed}", {"task": "remarks", "to": 3}, seed) for seed in seeds]

    @classmethod
    def run(cls, cell, place):
        cls.runs += 1
        return {"value": place.part("square", lambda: cell.seed**2), "wall_seconds": 1.0}

    @staticmethod
    def results(done):
        return {"sum": sum(each.result["value"] for each in done), "to": [each["to"] for each in done]}


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


def test_a_part_is_made_once(tmp_path: Path) -> None:
    place, made = Place(tmp_path, "counts", "cell", TOY[1]), []
    assert [place.part("one", lambda: made.append(1) or {"a": (1, 2)}) for _ in range(2)] == [{"a": [1, 2]}] * 2
    assert made == [1]


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
        (["--toy", "--cells", "remarks-0.99"], "no cell's name begins with 'remarks-0.99'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, tmp_path: Path, capsys) -> None:
    assert run.main(["--out", str(tmp_path / "out"), *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and message in told
    assert not (tmp_path / "out" / "cells").exists()


def test_a_folder_of_other_settings_is_refused(tmp_path: Path, capsys) -> None:
    words = ["--out", str(tmp_path), "--toy", "--tasks", "remarks", "--only", "page-size"]
    run.begin(tmp_path, TOY[1:])
    path = cell_path(tmp_path, "page-size", "some")
    path.parent.mkdir(parents=True)
    assert run.main([*words, "--steps", "4"]) == 2
    assert "was made with steps = 2, and steps = 4 is asked for now" in capsys.readouterr().err


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
