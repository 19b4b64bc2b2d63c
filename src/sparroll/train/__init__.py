"""GRPO on sparse rollouts, for one machine: `train(config, out)`. loop.py is the loop, setup.py builds what it works
with, and the folders hold the parts of a step. `distill(config, out)` trains an adapter alone.

Not here: sampling itself (engines/), corrections and watchers (corrections/, control/), rewards (tasks/). Training
meets calibration only in the schedule file.
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
    # The corrections alone are cheap; transformers and accelerate load with the loop.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
