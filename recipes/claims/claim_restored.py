"""The finished cells of a record, put back into a folder of cells, so that the experiment goes on where the folder it was
made in is gone. Runs nothing."""

from __future__ import annotations

from pathlib import Path

from claim_asked import add_asked
from claim_cells import Table, begun, cell_kind, cell_path
from experiments import NAMES

from sparroll import files, records
from sparroll.errors import UserError
from sparroll.resume import begin_or_resume

OF_A_CELL = ("commit", "hardware", "versions", "date", "wall_seconds", "config", "seed", "results")
"""What a record keeps of each cell, and a cell's own file holds."""


def restore(out: Path, path: Path) -> int:
    """Write the files of those cells of the record at `path` that the folder `out` lacks, and what the record was asked
    for. -> how many were written

    Raises UserError if it is not a whole record of an experiment, or if the folder's tasks have other settings."""
    record = records.read(path)
    name = record["kind"].removeprefix("claims-")
    if name not in NAMES or record["kind"] != f"claims-{name}":
        raise UserError(
            f"{path} is a record of kind {record['kind']!r}, not of an experiment of this recipe",
            "its own records are OUT/claims-NAME-HARDWARE.json",
        )
    try:
        config, tasks, seeds = record["config"], record["config"]["tasks"], record["config"]["seeds"]
        cells = {
            cell_path(out, name, _cell_name(row)): {key: row[key] for key in OF_A_CELL}
            for row in record["results"]["cells"]
        }
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not a whole record of {name}: it lacks {error}", "name another record") from None
    for task, table in tasks.items():
        begin_or_resume(out / "settings" / f"{task}.json", table, begun=begun(out))
    add_asked(out, name, seeds, list(tasks), machine=config)
    lacking = [path for path in cells if not path.is_file()]
    for path in lacking:
        files.write_json(path, {"format": records.FORMAT, "kind": cell_kind(name)} | cells[path])
    return len(lacking)


def _cell_name(row: Table) -> str:
    name = str(row["cell"])
    if Path(name).name != name:
        raise UserError(f"{name!r} is not the name of a cell", "a record names each cell without a folder")
    return name
