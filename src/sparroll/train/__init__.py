"""GRPO on sparse rollouts, for one machine: `train(config, out)`. `distill(config, out)`, in distill/run.py, trains
only an adapter.

loop.py is the step, between_steps.py the run around it, and setup.py builds what both work with. The folders hold the
parts of a run: config/ (its settings), sampling/ (from prompts to graded rollouts), update/ (the gradient step),
distill/ (the adapter), runtime/ (checkpoints, seeds, processes, logs). Of the files, schedules.py makes the schedule and
its watchers, step_scores.py scores a step's rollouts, staleness.py keeps older weights, step_correction.py runs the
correction on a step, tail_metrics.py and dense_checks.py measure, and result.py sums up a finished run.

Not here: generation (engines/), the formulas of corrections (corrections/), the decisions of watchers (control/), tasks
and their verdicts (tasks/). Training and calibration meet only in the schedule file.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "TrainConfig": "sparroll.train.config.run",
    "DistillConfig": "sparroll.train.config.distill",
    "load_config": "sparroll.train.config.file",
    "train": "sparroll.train.loop",
    "TrainResult": "sparroll.train.result",
    "correction": "sparroll.corrections",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Importing the corrections alone is cheap. transformers and accelerate load only with the loop.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
