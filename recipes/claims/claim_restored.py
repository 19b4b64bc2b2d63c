"""The finished cells of a record, put back into a folder of cells, so that the experiment goes on where the folder it was
made in is gone. Runs nothing."""

from __future__ import annotations

from pathlib import Path

from claim_asked import HINT, add_asked
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

    Raises UserError if it is not a record of an experiment, or if the folder's tasks have other settings."""
    record = records.read(path)
    name = record["kind"].removeprefix("claims-")
    if name not in NAMES or record["kind"] != f"claims-{name}":
        raise UserError(
            f"{path} is a record of kind {record['kind']!r}, not of an experiment of this recipe",
            "its own records are OUT/claims-NAME-HARDWARE.json",
        )
    for task, table in record["config"]["tasks"].items():
        begin_or_resume(out / "settings" / f"{task}.json", table, begun=begun(out))
    lacking = [row for row in record["results"]["cells"] if not _path(out, name, row).is_file()]
    add_asked(out, name, record["config"])
    for row in lacking:
        cell = {"format": records.FORMAT, "kind": cell_kind(name)} | {key: row[key] for key in OF_A_CELL}
        files.write_json(_path(out, name, row), cell)
    return len(lacking)


def _path(out: Path, name: str, row: Table) -> Path:
    cell = str(row["cell"])
    if Path(cell).name != cell:
        raise UserError(f"{cell!r} is not the name of a cell", HINT)
    return cell_path(out, name, cell)
