"""The reward function that verl calls for each response: whether its boxed answer is the gold one."""

from __future__ import annotations

from functools import cache
from typing import Any

from sparroll.errors import UserError
from sparroll.tasks.math.pool import Pool
from sparroll.tasks.math.reward import MathReward

WORKERS = 2
"""Grading processes of each of verl's reward workers."""


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **more: Any
) -> float:
    """1.0 for a right answer, else 0.0. A gold answer that cannot be read is an error: prepare.py has left such rows
    out."""
    verdict = _math().grade(ground_truth, solution_str)
    if verdict.status == "unparsable_gold":
        raise UserError(
            f"the gold answer {ground_truth!r} of a row of {data_source} cannot be read",
            "write the data with recipes/verl-polaris/prepare.py, which leaves such rows out",
        )
    return verdict.reward


@cache
def _math() -> MathReward:
    return MathReward(Pool(WORKERS))
