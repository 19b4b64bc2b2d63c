"""For each named moment an evaluation that was killed with SIGKILL at that moment.

python killed_evaluations.py MODEL FOLDER MOMENT...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.deaths import Death, run_and_die
from integration.evaluation_runs import evaluate
from sparroll import files
from sparroll.engines import HFEngine
from sparroll.engines.scoring import Scorer
from sparroll.evaluate import log, parquet, settings, summary

MOMENTS: dict[str, Death] = {
    "first-samples": Death(HFEngine, "generate", 1),
    "later-samples": Death(HFEngine, "generate", 5),
    "scores": Death(Scorer, "dense", 3),
    "verdicts": Death(settings.EvalTask, "verdicts", 8),
    "half-a-line": Death(log, "_write", 6, lambda handle, *_: os.write(handle, b'{"kind": "commit", "task": "fir')),
    "between-lines": Death(log, "_write", 8),
    "before-commit": Death(log, "_write", 9),
    "last-commit": Death(log, "_write", 32),
    "summary": Death(summary, "_policy_table", 2),
    "parquet": Death(parquet, "_rename", 1),
    "record": Death(files, "write_json", 2),
}


def main() -> None:
    torch.set_num_threads(1)
    model, folder, moments = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    run_and_die({moment: MOMENTS[moment] for moment in moments}, lambda out: evaluate(model, out), folder)


if __name__ == "__main__":
    main()
