"""What every length bin must hold beside the tail, which does not see the few tokens that are far off. Pure functions of
what was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from sparroll.calibrate.fit import MIN_TOKENS, FittedSchedule
from sparroll.calibrate.measure import Measurement
from sparroll.calibrate.sweep import Sweep
from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.divergence import NATS
from sparroll.mismatch.table import bin_name
from sparroll.rounding import digits_up

FAR_MASS_NATS = 20
"""A distance that orders the project's own runs well by what they gained (docs/claims.md)."""


@dataclass(frozen=True)
class BlindSpots:
    """The largest figures that a bin may have where its tail is blind; None bounds nothing.

    >>> BlindSpots(kl_at_most=0.01, far_mass_at_most=1e-4)
    """

    over_2_nats_at_most: float | None = None
    """Share of the tokens that checks of drafts left more than 2 nats off, as counted."""
    kl_at_most: float | None = None
    """Mean KL of the tokens (see mismatch/divergence.py)."""
    far_mass_at_most: float | None = None
    """Probability of tokens that are more than `far_mass_nats` off, added up over the top-k lists. (The share of **sampled**
    tokens that are so far off is a target of its own, `ImpossibleLimit`.)"""
    far_mass_nats: int = FAR_MASS_NATS

    def __post_init__(self) -> None:
        for name in ("over_2_nats_at_most", "far_mass_at_most"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise UserError(f"{name} must be a share from 0 to 1, got {value}")
        if self.kl_at_most is not None and not 0 < self.kl_at_most < math.inf:
            raise UserError(f"kl_at_most must be above 0 and finite, got {self.kl_at_most}")
        if self.far_mass_nats not in NATS:
            raise UserError(
                f"far_mass_nats must be one of {', '.join(map(str, NATS))}, got {self.far_mass_nats}",
                "these distances are measured",
            )

    @property
    def any(self) -> bool:
        return any(each is not None for each in (self.over_2_nats_at_most, self.kl_at_most, self.far_mass_at_most))

    def table(self) -> dict[str, Any]:
        """The bounds that are set, as the target of a schedule file has them."""
        found = {
            "over_2_nats_at_most": self.over_2_nats_at_most,
            "kl_at_most": self.kl_at_most,
            "far_mass_at_most": self.far_mass_at_most,
            "far_mass_nats": self.far_mass_nats if self.far_mass_at_most is not None else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    @staticmethod
    def of_target(target: dict[str, Any] | None) -> BlindSpots:
        """The bounds that the target of a schedule file names."""
        names = [each.name for each in fields(BlindSpots)]
        return BlindSpots(**{name: target[name] for name in names if name in target}) if target else NO_BOUNDS

    def broken(self, measurement: Measurement, from_context_tokens: int) -> list[str]:
        """What one bin of a measurement has too much of, in words; nothing if every bound holds."""
        found = []
        if self.over_2_nats_at_most is not None:
            assert measurement.checked is not None, "only a schedule with a check has such a bound"
            share = measurement.checked.far_share_at(from_context_tokens)
            if share > self.over_2_nats_at_most:
                found.append(f"a share of {digits_up(share)} of its tokens more than 2 nats off")
        if self.kl_at_most is None and self.far_mass_at_most is None:
            return found
        here = measurement.divergence.bins().get(from_context_tokens) if measurement.divergence else None
        if here is None:
            return found
        if self.kl_at_most is not None and here.kl > self.kl_at_most:
            found.append(f"a KL of {digits_up(here.kl)}")
        if self.far_mass_at_most is not None and here.over(self.far_mass_nats) > self.far_mass_at_most:
            share = here.over(self.far_mass_nats)
            found.append(f"a share of {digits_up(share)} of the probability more than {self.far_mass_nats} nats off")
        return found

    def check_measured(self, sweep: Sweep) -> None:
        """Raise UserError where the sweep does not measure what is bounded."""
        needs_lists = self.kl_at_most is not None or self.far_mass_at_most is not None
        if needs_lists and not sweep.settings.list_tokens:
            raise without_lists(sweep.settings.estimator)

    def least_budgets(
        self, sweep: Sweep, min_tokens: int = MIN_TOKENS, min_rollouts: int = LEAST_ROLLOUTS
    ) -> dict[int, int]:
        """For each bin with enough data at some budget, the least of the budgets with enough data from which on every bound
        holds there. Where the largest of them breaks one, a larger budget may hold it: the largest of the grid is taken.
        Raises UserError where that one has enough data and breaks a bound."""
        self.check_measured(sweep)
        counting = [cell for cell in sweep.cells() if cell.counts(min_tokens, min_rollouts)]
        ends = {cell.from_context_tokens: cell.to_context_tokens for cell in counting}
        if not self.any:
            return dict.fromkeys(ends, 0)
        measured, largest = dict(zip(sweep.budgets, sweep.measurements, strict=True)), sweep.budgets[-1]
        found = {}
        for start, end in ends.items():
            found[start] = largest
            for budget in sorted(
                (c.kv_budget_tokens for c in counting if c.from_context_tokens == start), reverse=True
            ):
                broken = self.broken(measured[budget], start)
                if broken and budget == largest:
                    raise UserError(
                        f"{bin_name(start, end)} has {' and '.join(broken)} at the largest budget, {largest}; "
                        f"asked for: {self}",
                        "measure larger budgets, allow more, or with checks raise the floor",
                    )
                if broken:
                    break
                found[start] = budget
        return found

    def __str__(self) -> str:
        parts = []
        if self.over_2_nats_at_most is not None:
            parts.append(f"at most {self.over_2_nats_at_most:g} of the tokens over 2 nats off")
        if self.kl_at_most is not None:
            parts.append(f"a KL of at most {self.kl_at_most:g}")
        if self.far_mass_at_most is not None:
            parts.append(f"at most {self.far_mass_at_most:g} of the probability over {self.far_mass_nats} nats off")
        return " and ".join(parts) or "nothing"


NO_BOUNDS = BlindSpots()


def holding(fitted: FittedSchedule, bounds: BlindSpots) -> FittedSchedule:
    """The same with the bounds in the schedule's target."""
    target = {**(fitted.schedule.target or {}), **bounds.table()}
    return replace(fitted, schedule=replace(fitted.schedule, target=target))


def without_lists(estimator: str) -> UserError:
    """The error where KL or impossible tokens are asked for and no top-k lists are measured."""
    return UserError(
        f"the KL and impossible tokens come from top-k lists, and the estimator {estimator} has none",
        "use the estimator top_k_lower",
    )
