"""What an allocation is asked for, and what it answers: a point for each schedule that was looked at, and the chosen one.
Computes nothing."""

# F figures: see FIGURES

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from sparroll.attention.selectors import Selector
from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots, without_lists
from sparroll.calibrate.defaults import CHECKED_KL_AT_MOST, DEFAULT_TARGET
from sparroll.calibrate.fit import MIN_TOKENS, FittedSchedule
from sparroll.calibrate.sweep import Sweep
from sparroll.calibrate.target import Target, check_target, level, plain_target
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.errors import UserError, nearest
from sparroll.layer_groups import LayerGroups, Proportions
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.divergence import NATS
from sparroll.rounding import percent_up, rounded_up

Objective = Literal["time", "kl", "far_mass", "tail"]
OBJECTIVES = ["time", "kl", "far_mass", "tail"]
FIGURES = ("kl", *(f"over_{nats}_nats" for nats in NATS), "tail_loss", "tail_low_loss")
"""Of one bin. The last two are 1 - the tail and 1 - its lower bound, so that less is better everywhere."""
KL, TAIL, LOW = 0, len(FIGURES) - 2, len(FIGURES) - 1


@dataclass(frozen=True)
class Wanted:
    """What a schedule is to hold, and what is to be small under it."""

    objective: Objective = "kl"
    """time: the fewest budgets that hold the target. Of the others, as little as a step's time allows: the mean KL; the
    probability of tokens far off; 1 - the tail, mean over bins."""
    target: Target = DEFAULT_TARGET
    """The lower bound of every bin's tail is at least this; or the upper bound of its share of impossible tokens is within
    this limit, which only the objective "time" of one selector can hold so far; None: with checks of drafts the bounds
    alone have to hold."""
    bounds: BlindSpots = NO_BOUNDS
    min_tokens: int = MIN_TOKENS
    min_rollouts: int = LEAST_ROLLOUTS

    def __post_init__(self) -> None:
        check_target(self.target)
        if self.objective not in OBJECTIVES:
            raise UserError(f"unknown objective {self.objective!r}", nearest(str(self.objective), OBJECTIVES))

    @staticmethod
    def of(objective: Objective, target: Target, bounds: BlindSpots, checked: bool, **least: int) -> Wanted:
        """What is asked for, with the defaults where the user names no target: the published one; with checks of drafts
        no target, but a bound on the KL of what is kept."""
        if target is None and not checked:
            target = DEFAULT_TARGET
        if target is None and bounds.kl_at_most is None:
            bounds = dataclasses.replace(bounds, kl_at_most=CHECKED_KL_AT_MOST)
        return Wanted(objective, target, bounds, **least)

    @property
    def column(self) -> int:
        """The figure that is minimised; in the picture of the objective "time" it is the KL."""
        far_mass = 1 + NATS.index(self.bounds.far_mass_nats)
        return {"time": KL, "kl": KL, "far_mass": far_mass, "tail": TAIL}[self.objective]

    @property
    def called(self) -> str:
        """The loss in words."""
        far_mass = f"probability of tokens more than {self.bounds.far_mass_nats} nats off"
        return {"time": "KL", "kl": "KL", "far_mass": far_mass, "tail": "1 - tail"}[self.objective]

    def limits(self) -> list[tuple[str, int, float]]:
        """(name, figure, the most that a bin may have) of every bound, the target first."""
        found = [("1 - the tail's lower bound", LOW, 1 - level(self.target))] if self.target is not None else []
        if self.bounds.kl_at_most is not None:
            found.append(("the KL", KL, self.bounds.kl_at_most))
        if self.bounds.far_mass_at_most is not None:
            column = 1 + NATS.index(self.bounds.far_mass_nats)
            found.append((f"the probability over {NATS[column - 1]} nats off", column, self.bounds.far_mass_at_most))
        return found


@dataclass(frozen=True)
class Point:
    """One schedule in the picture, with the figures that the sweep predicts."""

    selector: str
    how: Literal["one budget", "allocated", "chosen", "verified"]
    """verified: with the figures of the verification's last round, and the schedule after it."""
    step_seconds: float
    step_time_share: float
    """Of a dense step."""
    figures: tuple[float, ...]
    """Means over the tokens of all bins with data; those of the tail are the worst bin's."""
    budgets: tuple[tuple[int, Any], ...]
    """(from_context_tokens, kv_budget_tokens), a list of budgets where groups of layers have their own."""

    @property
    def kl(self) -> float:
        return self.figures[KL]

    def over(self, nats: int) -> float:
        """Probability of tokens more than that off, one of NATS."""
        return self.figures[1 + NATS.index(nats)]

    @property
    def worst_tail(self) -> float:
        return 1 - self.figures[TAIL]

    @property
    def tail_low(self) -> float:
        """Lower bound of the worst bin's tail."""
        return 1 - self.figures[LOW]

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        over = {f"{name}_share": share for name, share in zip(FIGURES[1:TAIL], self.figures[1:], strict=False)}
        return {
            "selector": self.selector,
            "how": self.how,
            "step_seconds": self.step_seconds,
            "step_time_share": self.step_time_share,
            "kl": self.kl,
            **over,
            "worst_tail": self.worst_tail,
            "worst_tail_low": self.tail_low,
            "budgets": [list(each) for each in self.budgets],
        }


@dataclass(frozen=True)
class Tradeoff:
    """The chosen schedule, the picture that it is a point of, and why some selectors have none."""

    fitted: FittedSchedule
    sweep: Sweep
    """That of the chosen selector."""
    wanted: Wanted
    point: Point
    points: tuple[Point, ...]
    hardware: str
    dense_step_seconds: float
    most_step_seconds: float | None
    """The time that a step may take; None for the objective "time"."""
    refused: tuple[str, ...]
    times: tuple[str, ...] = ()
    """What the times of the selectors rest on, in words."""
    verified: Point | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Selectors without a schedule, what the times rest on, and a step that the verification made too long."""
        most, found = self.most_step_seconds, self.verified
        said = (*self.refused, *self.times)
        if found is None or most is None or found.step_seconds <= most * (1 + 1e-3):
            return said
        longer = (
            f"the verification raised budgets: a step takes {rounded_up(1e3 * found.step_seconds, 3)} ms now, and "
            f"{rounded_up(1e3 * most, 3)} ms was the most"
        )
        return (*said, longer)

    def said(self) -> str:
        """One line for `made_by`."""
        selectors = len({each.selector for each in self.points})
        among = f" of {selectors} selectors" if selectors > 1 else ""
        point, dense = self.point, self.dense_step_seconds
        time = (
            f"{rounded_up(1e3 * point.step_seconds, 3)} ms a step where a dense one takes {1e3 * dense:.3f} "
            f"({percent_up(point.step_time_share)}), predicted on {self.hardware}"
        )
        if self.most_step_seconds is None:
            return f"the least time{among} at the target: {time}; its KL is {rounded_up(point.kl, 5)}"
        loss = rounded_up(point.figures[self.wanted.column], 6)
        most = rounded_up(1e3 * self.most_step_seconds, 3)
        return f"the least {self.wanted.called}{among} in {most} ms a step, {loss} as the sweep has it: {time}"

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "objective": self.wanted.objective,
            "target": plain_target(self.wanted.target),
            **self.wanted.bounds.table(),
            "hardware": self.hardware,
            "times": list(self.times),
            "dense_step_seconds": self.dense_step_seconds,
            "most_step_seconds": self.most_step_seconds,
            "chosen": self.point.table(),
            **({"verified": self.verified.table()} if self.verified else {}),
            "points": [each.table() for each in self.points],
            "refused": list(self.refused),
        }


def limits_given(step_time_share: float | None, at_time_of: object) -> int:
    """How many limits of a step's time there are. Raises UserError for a share of a dense step that no step can keep to."""
    if step_time_share is not None and not step_time_share > 0:
        raise UserError(
            f"the share of a dense step's time must be above 0, got {step_time_share:g}", "give --step-time-share 0.4"
        )
    return (step_time_share is not None) + (at_time_of is not None)


def check_limit(
    wanted: Wanted,
    limits: int,
    checked: bool,
    layer_groups: LayerGroups,
    estimator: str,
    selectors: int = 1,
    proportions: Proportions | None = None,
) -> None:
    """Raise UserError where objective, limits of a step's time (how many are given) and what is swept do not go
    together."""
    objective = wanted.objective
    if isinstance(wanted.target, ImpossibleLimit) and (objective != "time" or checked or layer_groups or selectors > 1):
        raise UserError(
            "a target for the share of impossible tokens is fitted for one selector at the objective time, without checks "
            "and without groups of layers",
            "leave these out; or give a target for the 5th percentile and bound the probability of tokens that are far off, "
            "--far-mass-at-most",
        )
    if objective == "time" and limits:
        raise UserError(
            "a limit of a step's time needs something else to be small",
            "add --objective kl, or leave the limit out: the schedule with the least time is then chosen",
        )
    if objective != "time" and limits != 1:
        raise UserError(
            f"the objective {objective} is as small as a step's time allows, so it needs one limit, and {limits} are given",
            "give --step-time-share 0.4, of a dense step, or --at-time-of SCHEDULE",
        )
    if objective != "time" and checked:
        raise UserError(
            f"with checks of drafts the objective is the time of a kept token, got {objective}",
            "leave --objective out; --kl-at-most and --far-mass-at-most bound what the checks leave",
        )
    if checked and layer_groups:
        raise UserError(
            "checks of drafts are chosen for one budget in all sparse layers, and --layer-groups gives groups of them "
            "budgets of their own",
            "keep the groups in a fixed proportion, for example --group-times 4/1; or calibrate them without checks, and "
            "give the file one: sparroll schedule check",
        )
    if objective == "time" and layer_groups:
        raise UserError(
            "groups of layers get budgets of their own where a step's time is shared out, not with the objective time",
            "add --objective kl --step-time-share 0.4, or keep the groups in a fixed proportion: --group-times 4/1",
        )
    bounded = wanted.bounds.kl_at_most is not None or wanted.bounds.far_mass_at_most is not None
    if (objective != "time" or bounded) and not estimator.startswith("top_k"):
        raise without_lists(estimator)
    if proportions is None:
        return
    if layer_groups:
        raise UserError("groups of layers are varied alone or keep a fixed proportion, not both", "give one of the two")
    if objective != "time":
        raise UserError(
            f"with the objective {objective} groups of layers get budgets of their own, in no fixed proportion",
            "leave --group-times out",
        )
    if selectors > 1 and not checked:
        raise UserError(
            "without checks several selectors are compared with one budget in all sparse layers",
            "leave --also-selector out, and calibrate each selector by itself; or add --check-windows",
        )


def selector_label(selector: Selector) -> str:
    """A short name that tells the selectors of a picture apart: "quantized_mean 4, bits 2"."""
    known = ("page_tokens", "first_tokens", "recent_tokens")
    more = [
        f"{each.name} {getattr(selector, each.name)}"
        for each in dataclasses.fields(selector)
        if each.name not in known and getattr(selector, each.name) != each.default
    ]
    return ", ".join([f"{selector.kind} {selector.page_tokens}", *more])
