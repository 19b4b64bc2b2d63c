"""For each named moment a cell of recipes/claims that was killed with SIGKILL at that moment.

python killed_claims.py FOLDER MOMENT...
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "claims"
sys.path[:0] = [str(Path(__file__).parents[1]), str(RECIPE)]

import claim_cells  # noqa: E402
import claim_runs  # noqa: E402
import claim_tasks  # noqa: E402
import table_sums  # noqa: E402
from experiments import experiment  # noqa: E402

from integration.deaths import Death, run_until  # noqa: E402
from sparroll import files, records  # noqa: E402
from sparroll.train.runtime import checkpoint  # noqa: E402


def nothing(*_: object) -> None:
    """Each death has a run of its own: a run's paths are part of its configuration."""


MOMENTS: dict[str, Death] = {
    "checkpoint": Death(checkpoint, "_point", 2, nothing),
    "between-parts": Death(claim_runs, "sampled", 5, nothing),
    "result": Death(records, "write", 2, nothing),
}


def one_cell(out: Path) -> Path:
    """A toy cell that trains and then measures several checkpoints. -> its file"""
    table_sums.register()
    made, (task, _) = experiment("over-iterations"), claim_tasks.claim_tasks(out, "cpu", None, toy=True)
    claim_tasks.make_model(task)
    (cell,) = made.cells([task], [0])
    claim_cells.run_cell(made, cell, claim_cells.Place(out, made.NAME, cell.name, task, say=nothing))
    return claim_cells.cell_path(out, made.NAME, cell.name)


def main() -> None:
    torch.set_num_threads(1)
    for moment in sys.argv[2:]:
        out = files.output_folder(Path(sys.argv[1]) / moment)
        run_until(MOMENTS[moment], lambda out=out: one_cell(out))


if __name__ == "__main__":
    main()
