"""recipes/claims: what was asked for in a folder over all calls, and records that a new folder goes on from."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counting_experiment import Counts
from sparroll import records
from sparroll.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes" / "claims"))

import claim_restored
import run
from claim_asked import Asked, Call, keep_asked
from claim_cells import Cell, Place, hardware_name, run_cell
from claim_restored import restore
from claim_tasks import claim_tasks
from study_jobs import Job

FULL = claim_tasks(Path("out"), "cuda", None, toy=False)[:2]
TOY = claim_tasks(Path("out"), "cpu", None, toy=True)[:2]


class Seeded(Counts):
    """A measurement for each task, and a cell for each task and seed."""

    @staticmethod
    def cells(tasks, seeds):
        about = [{"task": task.name, "to": 3} for task in tasks]
        shared = [Cell(f"{each['task']}-shared", each) for each in about]
        return shared + [Cell(f"{each['task']}-own-{seed}", each, seed) for seed in seeds for each in about]


def asked(out: Path, tasks: list, seeds: list[int], known: list = TOY, begun: bool = True, at_once: int = 1) -> Asked:
    call = Call(tasks, known, seeds, {"at_once": at_once, "threads": 1, "gpus": 0})
    (found,) = keep_asked(out, [(Seeded, cell) for cell in Seeded.cells(tasks, seeds)], call, begun=begun)
    return found


def finish(out: Path, task: Any, seeds: list[int]) -> None:
    for cell in Seeded.cells([task], seeds):
        run_cell(Seeded, cell, Place(out, "counts", cell.name, task))


@pytest.mark.parametrize("tasks", [TOY, FULL])
def test_seeds_and_tasks_of_all_calls_add_up_in_the_order_of_records(tasks: list, tmp_path: Path) -> None:
    assert asked(tmp_path, tasks[1:], [2], tasks).about()["seeds"] == [2]
    found = asked(tmp_path, tasks[:1], [1, 0], tasks)
    assert found.seeds == [0, 1, 2] and [task.name for task in found.tasks] == ["table-sums", "remarks"]
    assert {cell.name for cell in found.cells()} == {cell.name for cell in Seeded.cells(tasks, [0, 1, 2])}
    assert found.about()["tasks"] == {task.name: task.table() for task in tasks}
    anew = asked(tmp_path, tasks[:1], [5], tasks, begun=False)
    assert (anew.seeds, [task.name for task in anew.tasks]) == ([5], ["table-sums"])


def test_toy_experiments_that_take_one_task_keep_the_cells_of_each(tmp_path: Path) -> None:
    wanted = [run.wanted_cells(["threshold"], tasks, [0]) for tasks in (TOY[1:], TOY)]
    call = Call(TOY, TOY, [0], {})
    (found,) = [keep_asked(tmp_path, cells, call, begun=True) for cells in wanted][-1]
    assert [cell.config["task"] for cell in found.cells()] == ["table-sums"] * 3 + ["remarks"] * 3


def test_a_task_of_an_earlier_call_keeps_the_settings_of_its_cells(tmp_path: Path) -> None:
    earlier, known = replace(FULL[1], steps=14, targets=(0.5,)), [FULL[0], FULL[1]]
    run.begin(tmp_path, [earlier])
    asked(tmp_path, [earlier], [0], known)
    assert asked(tmp_path, FULL[:1], [0], known).tasks == [FULL[0], earlier]


def test_toy_cells_and_others_share_no_record(tmp_path: Path) -> None:
    run.begin(tmp_path, TOY[1:])
    asked(tmp_path, TOY[1:], [0])
    with pytest.raises(UserError, match="some cells of counts in .* are of toy size"):
        asked(tmp_path, FULL[:1], [0], FULL)


def test_finished_cells_are_the_evidence_in_a_folder_that_does_not_say_what_was_asked_for(tmp_path: Path) -> None:
    finish(tmp_path, TOY[0], [3])
    found = asked(tmp_path, TOY[1:], [1])
    # The shared measurement has seed 0, which nobody asked for.
    assert found.seeds == [1, 3] and [task.name for task in found.tasks] == ["table-sums", "remarks"]
    assert found.machine == {"at_once": None, "threads": None, "gpus": None}
    assert asked(tmp_path, TOY[1:], [1], at_once=4).machine["at_once"] is None


def test_a_record_says_how_many_cells_ever_shared_the_machine(tmp_path: Path) -> None:
    assert asked(tmp_path, TOY[1:], [0], at_once=2).machine == {"at_once": 2, "threads": 1, "gpus": 0}
    assert asked(tmp_path, TOY[1:], [0], at_once=1).about()["at_once"] == 2
    finish(tmp_path, TOY[1], [0])
    # Nothing is left to run, so this call shares no machine.
    assert asked(tmp_path, TOY[1:], [0], at_once=9).about()["at_once"] == 2


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the runner on the experiment `Seeded`, with jobs in this process. -> the record's configuration and results"""

    def here(jobs: list[Job], *, on_poll: Any, **_: Any) -> None:
        for job in jobs:
            assert run.main(job.command[2:]) == 0
        on_poll()

    def call(*words: str, without_file: bool = False) -> tuple[dict, dict]:
        if without_file:
            (tmp_path / "settings" / "asked.json").unlink()
        assert run.main(["--out", str(tmp_path), "--toy", "--only", "counts", *words]) == 0
        record = records.read(tmp_path / f"claims-counts-{hardware_name()}.json", "claims-counts")
        return record["config"], record["results"]

    monkeypatch.setattr(run, "experiment", lambda name: Seeded)
    monkeypatch.setattr(run, "NAMES", ("counts",))
    monkeypatch.setattr(run, "run_jobs", here)
    monkeypatch.setattr(run, "end_with", lambda parent: None)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    return call


@pytest.mark.parametrize("without_file", [False, True])
def test_a_call_with_other_seeds_and_tasks_drops_no_finished_cell(runner: Any, without_file: bool) -> None:
    _, first = runner("--tasks", "remarks", "--seeds", "1")
    assert [cell["cell"] for cell in first["cells"]] == ["remarks-shared", "remarks-own-1"] and not first["missing"]
    config, second = runner("--tasks", "table-sums", "--seeds", "2", without_file=without_file)
    names = {"table-sums-shared", "table-sums-own-2", "remarks-shared", "remarks-own-1"}
    assert {cell["cell"] for cell in second["cells"]} == names
    assert second["missing"] == ["table-sums-own-1", "remarks-own-2"]
    assert (config["seeds"], list(config["tasks"]), config["toy"]) == ([1, 2], ["table-sums", "remarks"], True)
    _, third = runner("--seeds", "2")
    assert third["missing"] == ["table-sums-own-1"] and len(third["cells"]) == 5


def test_a_new_folder_goes_on_from_a_record(runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run, claim_restored):
        monkeypatch.setattr(module, "NAMES", ("counts",))
    _, whole = runner("--tasks", "remarks", "--seeds", "1", "2", "--at-once", "3")
    (tmp_path / "cells" / "counts" / "remarks-own-2.json").unlink()
    _, cut = runner("--tasks", "remarks", "--seeds", "1", "2", "--cells", "remarks-own-1")
    assert cut["missing"] == ["remarks-own-2"]
    record = tmp_path / "cut.json"
    (tmp_path / f"claims-counts-{hardware_name()}.json").rename(record)
    for part in ("cells", "settings"):
        shutil.rmtree(tmp_path / part)
    runs = Seeded.runs
    config, again = runner("--tasks", "remarks", "--seeds", "1", "2", "--continue", str(record))
    assert Seeded.runs == runs + 1, "only the missing cell runs"
    assert again["cells"][:2] == cut["cells"] and not again["missing"] and again["sum"] == whole["sum"]
    assert (config["seeds"], config["at_once"]) == ([1, 2], 3)
    assert restore(tmp_path, record) == 0, "a cell that the folder has stays"


def test_a_record_that_is_not_of_this_recipe_or_folder_is_refused(tmp_path: Path) -> None:
    other = records.write(tmp_path / "profile.json", "profile", {"rows": []})
    with pytest.raises(UserError, match="is a record of kind 'profile', not of an experiment of this recipe"):
        restore(tmp_path, other)
    config = {"tasks": {"remarks": TOY[1].table()}, "seeds": [0]}
    outside = records.write(tmp_path / "a.json", "claims-threshold", {"cells": [{"cell": "../a"}]}, config=config)
    with pytest.raises(UserError, match="'../a' is not the name of a cell"):
        restore(tmp_path / "out", outside)
    cut = records.write(tmp_path / "b.json", "claims-threshold", {"cells": [{"cell": "remarks-0.8-0"}]}, config=config)
    with pytest.raises(UserError, match="is not a whole record of threshold: it lacks 'commit'"):
        restore(tmp_path / "out", cut)
    assert not (tmp_path / "out").exists(), "nothing is written from a record that is refused"
    run.begin(tmp_path / "out", [replace(TOY[1], steps=4)])
    (tmp_path / "out" / "cells").mkdir()
    empty = records.write(tmp_path / "c.json", "claims-threshold", {"cells": []}, config=config)
    with pytest.raises(UserError, match="was made with steps = 4, and steps = 2 is asked for now"):
        restore(tmp_path / "out", empty)
