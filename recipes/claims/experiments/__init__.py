"""One module for each experiment: its cells, how one cell runs, and the figures that come of finished cells.

Each has NAME, ABOUT, `cells`, `run` and `results`; `Experiment` in claim_cells.py says what they are.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from sparroll.errors import UserError, nearest

if TYPE_CHECKING:
    from claim_cells import Experiment

NAMES = (
    "threshold",
    "over-iterations",
    "page-size",
    "staleness",
    "distil-loss",
    "sparse-rl",
    "predicts-training",
    "jackpot-union",
    "quantised-sampler",
)


def experiment(name: str) -> Experiment:
    """The experiment of that name. Raises UserError for any other name."""
    if name not in NAMES:
        raise UserError(f"there is no experiment {name!r}", nearest(name, list(NAMES)))
    return cast("Experiment", importlib.import_module(f"experiments.{name.replace('-', '_')}"))
