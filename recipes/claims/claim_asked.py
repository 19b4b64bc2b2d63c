"""What was asked for in a folder over all calls, so that a record holds the cells of all of them. Runs nothing.

OUT/settings/asked.json has it for each experiment: the union of the seeds and of the tasks, and how many cells shared a
machine. Finished cells count as asked for, too, so a folder that was begun before there was such a file loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claim_cells import Cell, Experiment, Table, cell_path, finished_cells
from claim_tasks import ClaimTask, with_settings

from sparroll import files
from sparroll.errors import UserError

HINT = "choose another folder with --out"
MACHINE = ("at_once", "threads", "gpus")
"""What says how many cells shared a machine."""


@dataclass(frozen=True)
class Call:
    """One call of the runner.

    >>> Call(tasks=[remarks], known=[table_sums, remarks], seeds=[0, 1], machine={"at_once": 5, "threads": 1, "gpus": 2})
    """

    tasks: Sequence[ClaimTask]
    """Those that are asked for."""
    known: Sequence[ClaimTask]
    """All that there are, in the order of records."""
    seeds: Sequence[int]
    machine: dict[str, int]
    """at_once: cells that share a GPU, or the CPU. threads: of each. gpus: 0 on a CPU."""


@dataclass(frozen=True)
class Asked:
    """What was ever asked for of one experiment in one folder."""

    experiment: Experiment
    tasks: Sequence[ClaimTask]
    seeds: Sequence[int]
    machine: dict[str, int | None]
    """The largest numbers of all calls that ran cells; None in a folder whose older calls did not say."""

    def cells(self) -> list[Cell]:
        """All cells of the record."""
        # At toy size an experiment takes one of the tasks that it is given, so each is given alone.
        groups = [[task] for task in self.tasks] if self.tasks[0].toy else [self.tasks]
        return [cell for group in groups for cell in self.experiment.cells(group, self.seeds)]

    def about(self) -> Table:
        """The record's configuration."""
        tables = {task.name: task.table() for task in self.tasks}
        return {"toy": self.tasks[0].toy, "seeds": list(self.seeds), "tasks": tables, **self.machine}


def keep_asked(out: Path, wanted: Sequence[tuple[Experiment, Cell]], call: Call, *, begun: bool) -> list[Asked]:
    """Add what this call wants to what the folder's file says. -> the union, for each experiment of this call

    begun: whether the folder holds cells or parts of them; if not, this call replaces what the file says. Raises UserError
    if the union would mix cells of toy size with others."""
    table = _read(out) if begun else {}
    found = []
    for name, each in {each.NAME: each for each, _ in wanted}.items():
        cells = [cell for owner, cell in wanted if name == owner.NAME]
        table[name] = _union(out, name, cells, call, table.get(name))
        tasks = [_task(out, task, call) for task in call.known if task.name in table[name]["tasks"]]
        if len({task.toy for task in tasks}) > 1:
            raise UserError(f"some cells of {name} in {out} are of toy size, and others are not", HINT)
        machine = {key: table[name][key] for key in call.machine}
        found.append(Asked(each, tasks, table[name]["seeds"], machine))
    files.write_json(_file(out), table)
    return found


def add_asked(out: Path, name: str, seeds: Sequence[int], tasks: Sequence[str], machine: Table) -> None:
    """Add what the cells of another folder were asked for. name: of their experiment. machine: as in Call; other keys count
    for nothing, and missing ones as not known."""
    table = _read(out)
    older = table.get(name, {"seeds": [], "tasks": []})
    table[name] = {
        "seeds": sorted({*older["seeds"], *seeds}),
        "tasks": list(dict.fromkeys([*older["tasks"], *tasks])),
        **{key: _largest(older.get(key, 0), machine.get(key)) for key in MACHINE},
    }
    files.write_json(_file(out), table)


def _file(out: Path) -> Path:
    return out / "settings" / "asked.json"


def _read(out: Path) -> Table:
    return files.read_table(_file(out), HINT) if _file(out).is_file() else {}


def _union(out: Path, name: str, cells: Sequence[Cell], call: Call, before: Table | None) -> Table:
    """What the file is to say of one experiment. cells: those of this call."""
    records = finished_cells(out, name)
    # A cell without its seed in its name is there whatever seeds are asked for.
    own = {record["seed"] for cell, record in records.items() if cell.endswith(f"-{record['seed']}")}
    here = {cell.config["task"] for cell in cells} | {record["config"]["task"] for record in records.values()}
    older = before or {"seeds": [], "tasks": []}
    runs = any(not cell_path(out, name, cell.name).is_file() for cell in cells)
    # Cells of a call that left no word of itself.
    unknown = before is None and any((out / part / name).exists() for part in ("cells", "work"))
    return {
        "seeds": sorted({*older["seeds"], *call.seeds, *own}),
        "tasks": [task.name for task in call.known if task.name in {*older["tasks"], *here}],
        **{
            key: _largest(None if unknown else older.get(key, 0), now if runs else 0)
            for key, now in call.machine.items()
        },
    }


def _largest(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else max(before, now)


def _task(out: Path, task: ClaimTask, call: Call) -> ClaimTask:
    """With the settings of this call where it asks for the task, else with those that its cells were made with."""
    for asked in call.tasks:
        if asked.name == task.name:
            return asked
    path = out / "settings" / f"{task.name}.json"
    table: dict[str, Any] = files.read_table(path, HINT) if path.is_file() else {}
    return with_settings(task, table)
