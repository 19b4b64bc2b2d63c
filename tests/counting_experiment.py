"""An experiment for the runner of recipes/claims that costs nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes" / "claims"))

from claim_cells import Cell


class Counts:
    """An experiment that only counts how often it ran."""

    NAME, ABOUT, runs = "counts", "How often?", 0

    @staticmethod
    def cells(tasks, seeds):
        return [Cell(f"cell-{seed}", {"task": "remarks", "to": 3}, seed) for seed in seeds]

    @classmethod
    def run(cls, cell, place):
        cls.runs += 1
        return {"value": place.part("square", lambda: cell.seed**2), "wall_seconds": 1.0}

    @staticmethod
    def results(done):
        return {"sum": sum(each.result["value"] for each in done), "to": [each["to"] for each in done]}
