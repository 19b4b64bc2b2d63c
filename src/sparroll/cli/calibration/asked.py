"""What the options of `sparroll calibrate` ask for: what every length is to hold, what is tried, and what the record says of
it. Measures nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from sparroll.attention.selectors import Selector
from sparroll.calibrate.allocation.wanted import Wanted, check_limit, limits_given
from sparroll.calibrate.effort.cost_ahead import CostAhead, Evaluation, cost_ahead
from sparroll.calibrate.measure import MeasureSettings, check_measurable, check_percentiles
from sparroll.calibrate.run import begun_last, check_selectors
from sparroll.calibrate.target import Target, check_sampled, plain_target
from sparroll.calibrate.verify import Bound
from sparroll.cli.shared import common
from sparroll.control.impossible_limit import STATISTIC, ImpossibleLimit
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError, nearest
from sparroll.layer_groups import LayerGroups, Proportions
from sparroll.schedule import Schedule

_MOST_LAYERS = 10_000
"""More than any model has."""


@dataclass(frozen=True)
class Candidates:
    """What is tried: every budget, with each selector and under each check."""

    budgets: list[int]
    selector: Selector
    also_selectors: list[Selector]
    dense_layers: tuple[int, ...]
    layer_groups: LayerGroups
    checks: list[DraftCheck]
    proportions: Proportions | None = None
    """Groups of layers that read so many times each budget, in place of `layer_groups`, which are varied alone."""
    most_budgets: int | None = None
    """How many of the budgets are run in each sweep at most; None: all."""

    def cost(
        self, settings: MeasureSettings, prompts: int, runnable: int, verify_rounds: int, evaluation: Evaluation
    ) -> CostAhead:
        """What all of this takes at most. runnable: how many of the budgets do not hold every context."""
        return cost_ahead(
            settings,
            prompts,
            evaluation,
            budgets=runnable if self.most_budgets is None else min(runnable, self.most_budgets),
            verify_rounds=verify_rounds,
            selectors=1 + len(self.also_selectors),
            checks=self.checks,
            layer_groups=len(self.layer_groups),
            largest_is_run=runnable == len(set(self.budgets)),
        )

    def schedules(self, settings: MeasureSettings, out: Path) -> list[Schedule]:
        """The roomiest schedule of each selector, for the engine to have room for; first that with which a calibration into
        this folder goes on. Raises UserError for a budget that a selector cannot read, for a selector that is there twice,
        and where these settings cannot measure the check."""
        selectors = (self.selector, *self.also_selectors)
        check_selectors(selectors, self.budgets)
        tried = [
            Schedule.fixed(max(*self.budgets, each.least_budget_tokens), each, self.dense_layers).in_proportion(
                self.proportions
            )
            for each in selectors
        ]
        if self.checks:
            longest = max(check.window_tokens for check in self.checks)
            tried = [each.checked(longest, self.checks[0].floor) for each in tried]
            check_measurable(tried[0], settings)
        elif self.layer_groups:
            tried = [dataclasses.replace(each, layer_groups=self.layer_groups) for each in tried]
        goes_on = begun_last(out, selectors)
        return sorted(tried, key=lambda each: each.selector != goes_on)


@dataclass(frozen=True)
class Goal:
    """What is to hold, what is to be small, and how long a decode step may take."""

    wanted: Wanted
    step_time_share: float | None
    at_time_of: str | None
    gpu: str

    def check(self, candidates: Candidates, settings: MeasureSettings) -> None:
        """Raise UserError for what these candidates, or these measurements, cannot answer."""
        limits = limits_given(self.step_time_share, self.at_time_of)
        selectors = 1 + len(candidates.also_selectors)
        groups = candidates.layer_groups
        checked, estimator = bool(candidates.checks), settings.estimator
        check_limit(self.wanted, limits, checked, groups, estimator, selectors, candidates.proportions)
        check_sampled(self.wanted.target, settings)
        check_percentiles(settings)
        if groups and candidates.most_budgets == 1:
            raise UserError("groups of layers are told apart by two budgets or more", "--most-budgets 2")

    def table(self, candidates: Candidates) -> dict[str, Any]:
        """Goal and candidates, as the record holds them: of a calibration that compares no times, the target and its
        bounds alone."""
        bounds, checks = self.wanted.bounds, candidates.checks
        table = {"target": plain_target(self.wanted.target)} | bounds.table()
        if candidates.proportions:
            table["proportions"] = candidates.proportions.table()
        if checks:
            table |= {
                "checks": [check.table() for check in checks],
                "over_2_nats_at_most": bounds.over_2_nats_at_most,
                "gpu": self.gpu,
            }
        if checks or self.wanted.objective != "time" or candidates.also_selectors:
            table |= {
                "objective": self.wanted.objective,
                "step_time_share": self.step_time_share,
                "at_time_of": self.at_time_of,
                "also_selectors": [each.table() for each in candidates.also_selectors],
                "layer_groups": [list(group) for group in candidates.layer_groups],
                "gpu": self.gpu,
            }
        return table


def check_file_name(name: str) -> None:
    """Raise UserError if --name is not the name of a file, without its ending."""
    if not name or name != Path(name).name or name.startswith(".") or name.endswith(".toml"):
        raise UserError(
            f"--name is the name of a file in --out, without its ending .toml, got {name!r}",
            f"for example --name {Path(name).name.strip('.').removesuffix('.toml') or 'schedule'}",
        )


def check_bounded(over_2_nats: float | None, checks: list[DraftCheck]) -> None:
    """Raise UserError if --check-over-2-nats is given without a check."""
    if over_2_nats is not None and not checks:
        raise UserError(
            "--check-over-2-nats bounds what a check leaves, and there is none",
            "add --check-windows 32,64,128, or leave it out",
        )


def target_of(command: typer.Context, statistic: str, target: float | None, nats: int, at_most: float | None) -> Target:
    """What the options ask every length to hold; None: the default. Raises UserError for options of another statistic."""
    if statistic not in ("acceptance", STATISTIC):
        raise UserError(f"unknown --statistic {statistic!r}", nearest(statistic, ["acceptance", STATISTIC]))
    if statistic == "acceptance":
        common.refuse_idle(command, True, f"without --statistic {STATISTIC}", "nats", "at_most")
        return target
    common.refuse_idle(command, True, f"with --statistic {STATISTIC}", "target")
    if at_most is None:
        raise UserError(f"--statistic {STATISTIC} needs --at-most", "for example --nats 10 --at-most 1e-4")
    return ImpossibleLimit(nats, at_most)


def bound_of(text: str) -> Bound:
    """What of a verified figure must meet the target."""
    if text not in ("low", "value"):
        raise UserError(f"unknown --verify-bound {text!r}", nearest(text, ["low", "value"]))
    return "low" if text == "low" else "value"


def checks_of(windows: str | None, floors: str | None) -> list[DraftCheck]:
    """Every window with every floor; none if neither is given."""
    if windows is None and floors is None:
        return []
    sizes = [DraftCheck.window_tokens] if windows is None else _numbers("--check-windows", windows, int)
    shares = [DraftCheck.floor] if floors is None else _numbers("--check-floors", floors, float)
    return [DraftCheck(int(size), share) for size in sorted(set(sizes)) for share in sorted(set(shares))]


def groups_of(text: str | None) -> tuple[tuple[int, ...], ...]:
    """The layers of each group in "2-14/15-27"; none if nothing is given."""
    if text is None:
        return ()
    groups = []
    for part in text.split("/"):
        layers: set[int] = set()
        for piece in part.split(","):
            first, _, last = piece.strip().partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                raise UserError(f"--layer-groups takes layers, got {text!r}", "for example 2-14/15-27, or 2,3/4-27")
            if int(last or first) >= _MOST_LAYERS:
                raise UserError(
                    f"--layer-groups takes layers below {_MOST_LAYERS:,}, got {piece.strip()!r}",
                    "for example 2-14/15-27",
                )
            layers.update(range(int(first), int(last or first) + 1))
        groups.append(tuple(sorted(layers)))
    if len(groups) < 2:
        raise UserError(
            f"--layer-groups takes two groups or more, got {text!r}", "separate them with a slash: 2-14/15-27"
        )
    return tuple(groups)


def proportions_of(layer_groups: LayerGroups, text: str | None) -> Proportions | None:
    """The groups in the proportion "4/1"; None if none is given."""
    if text is None:
        return None
    if not layer_groups:
        raise UserError(
            f"--group-times {text} needs the groups of layers that it is for", "for example --layer-groups 0-1/2-27"
        )
    parts = [part.strip() for part in text.split("/")]
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--group-times takes whole numbers, got {text!r}", "for example 4/1")
    return Proportions(layer_groups, tuple(map(int, parts)))


def _numbers(name: str, text: str, kind: type[int] | type[float]) -> list[float]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        example = "32,64,128" if kind is int else "0.01,0.1"
        raise UserError(f"{name} takes numbers, got {text!r}", f"for example {example}") from None
