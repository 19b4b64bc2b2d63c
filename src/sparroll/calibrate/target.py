"""What every bin of a calibrated schedule is to hold: a 5th percentile of the acceptance of at least so much, or a share of
impossible tokens of at most so much; or neither of them, where drafts are checked and bounds.py alone says what holds.
Arithmetic and words; measures nothing.

The fit looks for the least budget at which a figure is high enough. So where a share of impossible tokens is the target, the
figures of its cells are 1 minus the share, and the lower end of the interval is 1 minus the upper end of the share's.
"""

from __future__ import annotations

import math
from typing import Any

from sparroll.calibrate.curve import Cell, cells_of
from sparroll.calibrate.measure import Measurement, MeasureSettings
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.errors import UserError

Target = float | ImpossibleLimit | None
"""None: nothing has to hold but the bounds beside the target. The tail is then measured and decides nothing."""
NEEDED = 5.5
"""A cell of a share counts once it has so many tokens that this many impossible ones are expected at the limit. With none
among them, the upper end of its interval is then under the limit, if they are of 8 rollouts of equal length or more."""


class OutOfReach(UserError):
    """No budget reaches the target: the largest one misses it, or dense rollouts do. Any other error of a calibration may be
    gone when it is run again."""


def check_target(target: Target) -> None:
    """Raise UserError for a percentile that is none. A limit checks itself."""
    if isinstance(target, (int, float)) and not 0 < target < 1:
        raise UserError(f"the target must be above 0 and below 1, got {target}")


def check_sampled(target: Target, settings: MeasureSettings) -> None:
    """Raise UserError where such measurements count no impossible tokens, and the target is a share of them."""
    if not isinstance(target, ImpossibleLimit):
        return
    if settings.mode == "replay":
        raise UserError(
            "a replay samples nothing under sparse attention, so there is no share of impossible tokens to hold",
            "use the mode faithful; --far-mass-at-most bounds their probability in a replay, too",
        )
    if settings.estimator == "exact":
        raise UserError(
            "the estimator exact compares whole distributions and keeps no log-probabilities of the sampled tokens, so "
            "there is no share of impossible tokens to hold",
            "use the estimator top_k_lower",
        )


def level(target: Target) -> float:
    """What the figures of a cell must reach."""
    if target is None:
        return 0.0
    return 1 - target.at_most if isinstance(target, ImpossibleLimit) else target


def needed_tokens(target: Target, min_tokens: int) -> int:
    """How many tokens a cell needs to count."""
    return max(min_tokens, math.ceil(NEEDED / target.at_most)) if isinstance(target, ImpossibleLimit) else min_tokens


def cells_for(target: Target, measurement: Measurement, kv_budget_tokens: int) -> list[Cell]:
    """The cells of a measurement, with the figures of the target's statistic."""
    if not isinstance(target, ImpossibleLimit):
        return cells_of(measurement.tail(), kv_budget_tokens, measurement.divergence)
    cells = []
    for row in measurement.tail().rows:
        share = row.impossible_share(target.nats)
        if share is None:
            raise UserError(
                f"the measurement of {measurement.name} counted no impossible tokens",
                "an earlier version of sparroll made it; measure again in another folder",
            )
        bin = row.from_context_tokens, row.to_context_tokens
        figures = 1 - share.value, 1 - share.high, 1 - share.low
        cells.append(Cell(kv_budget_tokens, *bin, *figures, share.tokens, row.rollouts, None, target.nats))
    return cells


def target_table(target: Target, estimator: str, quantile: float, top_k: int | None) -> dict[str, Any]:
    """What a schedule file says of its target, without the bounds beside it."""
    if target is None:
        return {}
    if isinstance(target, ImpossibleLimit):
        return target.table()
    table = {"statistic": "acceptance", "estimator": estimator, "top_k": top_k, "quantile": quantile}
    return {key: value for key, value in table.items() if value is not None} | {"at_least": target}


def plain_target(target: Target) -> dict[str, Any] | float | None:
    """The target as a record's configuration has it."""
    return target.table() if isinstance(target, ImpossibleLimit) else target


def in_words(target: Target) -> str:
    """The target in messages: "the target of 0.86"."""
    if isinstance(target, ImpossibleLimit):
        return f"the limit of {target.at_most:g} for tokens more than {target.nats} nats off"
    return "nothing of its tail" if target is None else f"the target of {target:g}"
