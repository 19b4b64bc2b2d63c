"""sparroll: reinforcement learning with sparse rollouts that stay close enough to the dense policy.

Public names are listed in `__all__`; everything else may change. Importing sparroll loads torch and nothing heavier.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Schedule": "sparroll.schedule",
    "acceptance": "sparroll.mismatch.acceptance",
    "acceptance_top_k": "sparroll.mismatch.acceptance",
    "acceptance_sampled": "sparroll.mismatch.acceptance",
    "tail": "sparroll.mismatch.tail",
    "correction": "sparroll.corrections",
    "Prompt": "sparroll.types",
    "Rollout": "sparroll.types",
    "UserError": "sparroll.errors",
}
_MODULES = {"cost": "sparroll.plan.cost", "engines": "sparroll.engines"}

__all__ = [*_HOMES, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'sparroll' has no attribute {name!r}")
