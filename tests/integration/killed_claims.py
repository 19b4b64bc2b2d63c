"""For each moment a cell of recipes/claims that was killed with SIGKILL at that moment, and in FOLDER/run one that was not.

python killed_claims.py FOLDER
"""

from __future__ import annotations

import os
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

from integration.deaths import Death, run_and_die  # noqa: E402
from sparroll import files, records  # noqa: E402
from sparroll.train.runtime import checkpoint  # noqa: E402

MOMENTS: dict[str, Death] = {
    "checkpoint": Death(checkpoint, "_point", 2),
    "between-parts": Death(claim_runs, "sampled", 5),
    "result": Death(records, "write", 2),
}


def one_cell() -> Path:
    """A toy cell that trains and then measures several checkpoints, in the working directory. -> its file

    Its paths are relative, so what a killed one left goes on in another place.
    """
    out = Path("claims")
    table_sums.register()
    made, (task, *_) = experiment("over-iterations"), claim_tasks.claim_tasks(out, "cpu", None, toy=True)
    claim_tasks.make_model(task)
    (cell,) = made.cells([task], [0])
    claim_cells.run_cell(made, cell, claim_cells.Place(out, made.NAME, cell.name, task, say=lambda _: None))
    return claim_cells.cell_path(out, made.NAME, cell.name)


def main() -> None:
    torch.set_num_threads(1)

    def run(out: Path) -> None:
        os.chdir(files.output_folder(out))
        one_cell()

    run_and_die(MOMENTS, run, Path(sys.argv[1]).resolve())


if __name__ == "__main__":
    main()
