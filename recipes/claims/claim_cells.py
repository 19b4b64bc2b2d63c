"""Cells and experiments: what is run once, where its result is kept, and what an experiment is. Trains nothing.

A cell is one training run or one measurement, with a configuration and a seed. Its result is one file, written in one
piece when the cell is finished, so a kill at any moment loses at most the cells that were running. Parts of a long cell
have files of their own.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from claim_tasks import ClaimTask

from sparroll import files, records
from sparroll.errors import UserError
from sparroll.locks import locked

Table = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training run or one measurement.

    >>> Cell("remarks-budget-96-1", {"task": "remarks", "reading": {"kind": "budget", "kv_budget_tokens": 96}}, seed=1)
    """

    name: str
    config: Table
    """Plain data, without paths: what the cell does, beside what its task says."""
    seed: int = 0
    """With this seed at the end of its name, where there is a cell for each seed that is asked for. A measurement that all
    seeds share has 0."""
    needs: tuple[str, ...] = ()
    """Names of the experiment's cells whose results this one reads."""


@dataclass(frozen=True)
class Done:
    """A finished cell with its result."""

    cell: Cell
    result: Table

    def __getitem__(self, key: str) -> Any:
        """A value of the cell's configuration."""
        return self.cell.config[key]


class Experiment(Protocol):
    """What each module of experiments/ offers."""

    NAME: str
    ABOUT: str
    """The question, in one sentence; in the record."""

    @staticmethod
    def cells(tasks: Sequence[ClaimTask], seeds: Sequence[int]) -> list[Cell]:
        """All cells, those first that others need."""

    @staticmethod
    def run(cell: Cell, place: Place) -> Table:
        """The result of one cell, plain data. A value that depends on the machine's speed has `seconds` in its name."""

    @staticmethod
    def results(done: Sequence[Done]) -> Table:
        """The record's figures, from the cells that are finished so far."""


@dataclass(frozen=True)
class Place:
    """Where one cell runs: its task, its folder, and the results of other cells."""

    out: Path
    experiment: str
    cell: str
    task: ClaimTask
    say: Callable[[str], None] = field(default=print)

    @property
    def folder(self) -> Path:
        """For what the cell needs while it runs; it is removed when the cell is finished."""
        return self.out / "work" / self.experiment / self.cell

    def part(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, plain data. It is kept, so a cell that was cut does not make it again."""
        path = self.folder / f"{name}.json"
        if not path.is_file():
            files.write_json(path, records.plain(make()))
        return json.loads(path.read_text(encoding="utf-8"))

    def result(self, cell: str) -> Table:
        """The result of another cell of the same experiment."""
        result: Table = records.read(cell_path(self.out, self.experiment, cell), cell_kind(self.experiment))["results"]
        return result

    def on_progress(self, done: int, total: int, text: str = "", /) -> None:
        self.say(f"{self.cell}: {done}/{total} {text}")


def begun(out: Path) -> bool:
    """Whether the folder holds cells, parts of cells, or accuracies before the first step."""
    return any((out / part).exists() for part in ("cells", "work", "first"))


def cell_path(out: Path, experiment: str, cell: str) -> Path:
    return out / "cells" / experiment / f"{cell}.json"


def run_cell(experiment: Experiment, cell: Cell, place: Place) -> None:
    """Run a cell and write its file. The seconds in it are those of the call that finished it."""
    began = time.time()
    with _held(place.folder):
        result = experiment.run(cell, place)
        path, seconds = cell_path(place.out, experiment.NAME, cell.name), time.time() - began
        records.write(
            path, cell_kind(experiment.NAME), result, config=cell.config, seed=cell.seed, wall_seconds=seconds
        )
    shutil.rmtree(place.folder, ignore_errors=True)


def _held(folder: Path, tries: int = 20) -> ExitStack:
    """Hold the folder until the stack is closed. The worker of a runner that was killed ends a moment later, so it is
    waited for."""
    for left in reversed(range(tries)):
        held = ExitStack()
        try:
            held.enter_context(locked(folder, "recipes/claims/run.py"))
            return held
        except UserError:
            if not left:
                raise
            time.sleep(0.5)
    raise AssertionError("the last try returns or raises")


def read_cell(out: Path, experiment: Experiment, cell: Cell) -> Table | None:
    """The record of a finished cell; None if it is not finished. Raises UserError if it was made from another
    configuration."""
    path = cell_path(out, experiment.NAME, cell.name)
    if not path.is_file():
        return None
    record = records.read(path, cell_kind(experiment.NAME))
    if record["config"] != json.loads(json.dumps(records.plain(cell.config))) or record["seed"] != cell.seed:
        raise UserError(
            f"{path} was made with another configuration", "choose another folder with --out, or delete this file"
        )
    return record


def finished_cells(out: Path, experiment: str) -> dict[str, Table]:
    """The records of all of the experiment's cells that a folder holds, by name, whoever asked for them."""
    paths = sorted((out / "cells" / experiment).glob("*.json"))
    return {path.stem: records.read(path, cell_kind(experiment)) for path in paths}


def write_record(out: Path, experiment: Experiment, cells: Sequence[Cell], about: Table) -> Path:
    """OUT/claims-NAME-HARDWARE.json, of those of these cells that are finished. Each of them says from which commit it
    comes. about: the record's configuration."""
    found = [(cell, record) for cell in cells if (record := read_cell(out, experiment, cell)) is not None]
    done = [Done(cell, record["results"]) for cell, record in found]
    rows = [
        {"cell": cell.name, "seed": cell.seed, "config": cell.config}
        | {name: record[name] for name in ("commit", "hardware", "versions", "date", "wall_seconds", "results")}
        for cell, record in found
    ]
    names = {cell.name for cell, _ in found}
    results = {
        "question": experiment.ABOUT,
        **(experiment.results(done) if done else {}),
        "cells": rows,
        "missing": [cell.name for cell in cells if cell.name not in names],
    }
    return records.write(
        out / f"claims-{experiment.NAME}-{hardware_name()}.json",
        f"claims-{experiment.NAME}",
        results,
        config=about,
        seed=cells[0].seed,
        wall_seconds=sum(record["wall_seconds"] for _, record in found),
    )


def hardware_name() -> str:
    """The machine in one word: h200, h100, cpu.

    >>> hardware_name()
    'h200'
    """
    gpus = records.hardware()["gpus"]
    if not gpus:
        return "cpu"
    words = [word for word in gpus[0]["name"].lower().replace("-", " ").split() if word not in ("nvidia", "amd")]
    return words[0] if words else "gpu"


def cell_kind(experiment: str) -> str:
    """The kind of a cell's file, which is a record of its own."""
    return f"claims-{experiment}-cell"
