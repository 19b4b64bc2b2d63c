"""GRPO whose rollouts are sampled sparsely: `train(config, out)`. The loop is loop.py; each file beside it is a part.

An adapter alone is trained by `distill(config, out)` of distill/run.py.
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
