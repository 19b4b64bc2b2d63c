"""Chooses selector, window, floor and budgets together: of all checked schedules that hold what is asked for, a bound on
the KL of what is kept or a target of the tail, the one with the least predicted seconds a token. Arithmetic on sweeps;
nothing here runs a model.

A check makes small budgets cheap to try: what they break is taken back, at the price of drafting it again. So the smallest
budgets that hold it need not be the fastest, and every budget of the grid is tried as the least one of a
schedule. How many tokens a schedule drafts for each that stands follows from the sweep: at one budget, all drafts beyond
one a token are put down to the bins in which that budget reads a part of the context, and a schedule has in each bin
those of its budget there. Drafts behind a stop id are those of the whole sweep, whatever the budget. Rollouts with the
schedule itself then measure it (verify.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sparroll.attention.selectors import Selector
from sparroll.calibrate.allocation.wanted import selector_label
from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots
from sparroll.calibrate.fit import FittedSchedule
from sparroll.calibrate.sweep import Sweep
from sparroll.calibrate.target import Target
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.plan.hardware import Hardware
from sparroll.plan.kernel_times import KernelTimes, if_timed, kernel_times_of
from sparroll.plan.length_mix import LengthMix
from sparroll.plan.model_shape import ModelShape
from sparroll.plan.speedup import Plan, kernels_said, plan
from sparroll.plan.time_model import TimeModel
from sparroll.rounding import rounded_down, rounded_up
from sparroll.schedule import Schedule
from sparroll.types import Checks, Rollout


@dataclass(frozen=True)
class Machine:
    """What the predicted seconds are for: a model's shape on a device, with requests of these lengths in flight."""

    shape: ModelShape
    hardware: Hardware
    lengths: LengthMix
    time_model: TimeModel | None = None
    """Of measured steps of this model on this device; None: `kernels`, or the roofline."""
    kernels: KernelTimes | None = None
    """What the decode kernels take on this device; None: they count by their bytes."""
    untimed: str = ""
    """The selectors for whose sake `kernels` are left out, in words."""

    @staticmethod
    def decoding(
        rollouts: Sequence[Rollout], shape: ModelShape, hardware: Hardware, time_model: TimeModel | None = None
    ) -> Machine:
        """With the lengths that a batch of such rollouts has while it decodes, and with the kernels as they were timed on
        this device, where they were."""
        ends = [len(each.prompt_ids) + len(each.response_ids) for each in rollouts]
        prompt_tokens = min(len(each.prompt_ids) for each in rollouts)
        lengths = LengthMix.parse(ends).decode_contexts(prompt_tokens)
        return Machine(shape, hardware, lengths, time_model, None if time_model else kernel_times_of(hardware.name))

    def kernels_of(self, selector: Selector) -> KernelTimes | None:
        """The kernels that are used; None where those of the selector were not timed, or not for this model."""
        return if_timed(self.kernels, selector, self.shape.gqa_ratio)

    @property
    def element_bytes(self) -> int:
        """Bytes of a cached number in its steps."""
        return 2 if self.time_model is None else self.time_model.element_bytes

    def comparing(self, selectors: Sequence[Selector]) -> Machine:
        """The same, for a comparison of these: without timed kernels where only some of them were timed. The others would
        count by their bytes alone, and win by that."""
        different = dict.fromkeys(selectors)
        if self.kernels is None or len(different) < 2:
            return self
        untimed = [selector_label(each) for each in different if self.kernels_of(each) is None]
        return replace(self, kernels=None, untimed=", ".join(untimed)) if untimed else self

    def plan(self, schedule: Schedule, drafted_per_kept: float | None = None) -> Plan:
        """What the schedule is predicted to cost here."""
        return plan(
            self.shape,
            schedule,
            hardware=self.hardware,
            lengths=self.lengths,
            time_model=self.time_model,
            kernels=self.kernels,
            drafted_per_kept=drafted_per_kept,
            force_schedule=True,
        )

    def times_said(self, selector: Selector) -> str:
        """What the times of a selector's steps rest on."""
        if self.time_model is not None:
            return f"steps are predicted by a time model that was fitted to {self.time_model.steps} measured ones"
        if self.kernels is None:
            why = f"no kernels that were timed on {self.hardware.name} are used, so steps"
            if self.untimed:
                why = f"kernels of {self.untimed} were not timed on {self.hardware.name}, so the steps of all selectors"
            return (
                f"times: {why} are predicted by their bytes alone, at peak rates; that favours small pages, whose choice "
                "takes longer"
            )
        return f"times: {kernels_said(self.hardware.name, selector, self.shape.gqa_ratio, self.kernels)}"


@dataclass(frozen=True)
class Candidate:
    """One checked schedule that holds what is asked for in the sweep, and what it is predicted to cost."""

    check: DraftCheck
    least_budget_tokens: int
    """The least budget of any bin that was asked for."""
    fitted: FittedSchedule
    drafted_per_kept: float
    token_seconds: float
    """Seconds in which each request of the batch gets a token that stands; see plan.VerifiedTime."""
    tokens_per_second: float
    dense_seconds: float
    """Seconds of a dense step of the same batch."""

    @property
    def selector(self) -> Selector:
        return self.fitted.schedule.selector

    @property
    def label(self) -> str:
        """A short name of the selector."""
        return selector_label(self.selector)

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        steps = [[step.from_context_tokens, step.kv_budget_tokens] for step in self.fitted.schedule.steps]
        shown = ("least_budget_tokens", "drafted_per_kept", "token_seconds", "tokens_per_second", "dense_seconds")
        about = {**self.check.table(), "selector": self.selector.table()}
        return {**about, **{name: getattr(self, name) for name in shown}, "steps": steps}


@dataclass(frozen=True)
class CheckChoice:
    """All candidates, the fastest first, and why some checks have none."""

    candidates: tuple[Candidate, ...]
    hardware: str
    refused: tuple[str, ...]
    several: bool = False
    """Whether several selectors were swept."""
    times: tuple[str, ...] = ()
    """What the times of the selectors rest on, in words."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Pairs without a schedule, and what the times rest on."""
        return (*self.refused, *self.times)

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def said(self) -> str:
        """One line for `made_by`."""
        best = self.best
        named = f"{best.label} with " if self.several else ""
        return (
            f"{named}windows of {best.check.window_tokens}, floor {best.check.floor:g} and budgets from "
            f"{best.least_budget_tokens} have the least predicted time of {len(self.candidates)} on "
            f"{self.hardware}: {rounded_up(1e3 * best.token_seconds, 2)} ms a token, "
            f"{rounded_up(best.drafted_per_kept, 2)} drafted per kept"
        )

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        candidates = [each.table() for each in self.candidates]
        about = {"hardware": self.hardware, "times": list(self.times)}
        return {**about, "candidates": candidates, "refused": list(self.refused)}


def choose(
    sweeps: Sequence[Sweep],
    machine: Machine,
    *,
    target: Target,
    bounds: BlindSpots = NO_BOUNDS,
    **fit: Any,
) -> CheckChoice:
    """The candidates of these sweeps, each of which has a selector and a check of its own.

    target: None where the tail decides nothing.  bounds: what every bin must hold beside the target, of what is sampled,
    checks included.  fit: what `Sweep.fit` takes. Raises the last sweep's error where no sweep holds that at any budget.
    """
    candidates: list[Candidate] = []
    refused: list[str] = []
    several = len({each.selector for each in sweeps}) > 1
    error: UserError | None = None
    for sweep in sweeps:
        assert sweep.check is not None, "only checked sweeps are compared"
        try:
            candidates += _candidates(sweep, machine, target, bounds, fit)
        except UserError as found:
            error = found
            named = f"{selector_label(sweep.selector)}, " if several else ""
            tried = f"{named}windows of {sweep.check.window_tokens}, floor {sweep.check.floor:g}"
            refused.append(f"{tried}: {found.message}")
    if not candidates:
        assert error is not None, "there is a sweep"
        raise error
    candidates.sort(key=lambda each: each.token_seconds)
    times = tuple(dict.fromkeys(machine.times_said(each.selector) for each in sweeps))
    return CheckChoice(tuple(candidates), machine.hardware.name, tuple(refused), several, times)


def _candidates(
    sweep: Sweep, machine: Machine, target: Target, bounds: BlindSpots, fit: dict[str, Any]
) -> list[Candidate]:
    """One for each different schedule that the sweep's budgets give."""
    assert sweep.check is not None
    held = bounds.least_budgets(sweep, **{key: fit[key] for key in ("min_tokens", "min_rollouts") if key in fit})
    starts = {cell.from_context_tokens for cell in sweep.cells()}
    found: dict[tuple[tuple[int, int], ...], Candidate] = {}
    for least in sweep.budgets:
        fitted = sweep.fit(target, least_budgets={start: max(least, held.get(start, 0)) for start in starts}, **fit)
        key = tuple((step.from_context_tokens, step.budgets[0]) for step in fitted.schedule.steps)
        if key in found:
            continue
        drafted_per_kept = predicted_drafts(sweep, fitted.schedule)
        planned = machine.plan(fitted.schedule, drafted_per_kept)
        assert planned.verified is not None, "the schedule has a check"
        figures = drafted_per_kept, planned.verified.seconds, planned.verified.tokens_per_second, planned.dense.seconds
        found[key] = Candidate(sweep.check, least, fitted, *figures)
    return list(found.values())


def predicted_drafts(sweep: Sweep, schedule: Schedule) -> float:
    """Tokens that the schedule is expected to draft for each that stands, from what the sweep's budgets drafted."""
    assert sweep.check is not None
    tokens = {row.from_context_tokens: (row.to_context_tokens, row.tokens) for row in sweep.ceiling.tail().rows}
    whole = sum(count for _, count in tokens.values())

    def partly(budget: int, end: int) -> bool:
        return budget < end - 1

    nothing_taken_back = sweep.check.drafts / sweep.check.window_tokens
    budgets, excess, total = [], [], Checks()
    for budget, measured in zip(sweep.budgets, sweep.measurements, strict=True):
        assert measured.checked is not None, "a checked sweep"
        share = sum(count for end, count in tokens.values() if partly(budget, end)) / whole
        budgets.append(np.log(budget))
        total.add(measured.checked.checks)
        looked_at = replace(measured.checked.checks, behind_stop_tokens=0).drafted_per_kept
        excess.append((looked_at / nothing_taken_back - 1) / share if share else 0.0)
    here = [
        count / whole * np.interp(np.log(budget), budgets, excess)
        for start, (end, count) in tokens.items()
        if partly(budget := min(schedule.step_at(start).budgets), end)
    ]
    behind_stop = total.drafted_per_kept - replace(total, behind_stop_tokens=0).drafted_per_kept
    return nothing_taken_back * (1 + float(sum(here))) + behind_stop


def with_reasons(choice: CheckChoice, made_by: dict[str, Any] | None, bounds: BlindSpots) -> FittedSchedule:
    """The best schedule. It says in `made_by` what it was chosen among and what its tails leave out, and in its target
    all bounds that it holds."""
    fitted = choice.best.fitted
    target = {**(fitted.schedule.target or {}), **bounds.table()}
    left_out = rounding_left_out(fitted)
    made_by = {**(made_by or {}), "chosen": choice.said(), "left_out": left_out}
    schedule = replace(fitted.schedule, target=target, made_by=made_by)
    return replace(fitted, schedule=schedule, notes=(*fitted.notes, left_out, *_not_worth_it(choice)))


def _not_worth_it(choice: CheckChoice) -> list[str]:
    """A note where even the fastest schedule is predicted to be no faster than dense decoding."""
    best = choice.best
    if best.token_seconds < best.dense_seconds:
        return []
    return [
        f"a token is predicted to take {rounded_up(1e3 * best.token_seconds, 3)} ms on {choice.hardware}, and a dense step "
        f"{rounded_up(1e3 * best.dense_seconds, 3)} ms: dense rollouts are faster. Checks pay in long contexts; allow a "
        "larger KL or lower floors, or decode densely"
    ]


def rounding_left_out(fitted: FittedSchedule) -> str:
    """What the tails of checked rollouts leave out, with the dense ceiling as its measure: both policies that they
    compare are the engine's."""
    ceilings = [found.dense_ceiling["value"] for found in fitted.bins if found.dense_ceiling]
    said = "the tails compare two policies of the engine, so the rounding between engine and trainer is not in them"
    if not ceilings:
        return said
    return (
        f"{said}; dense rollouts have {rounded_down(min(ceilings))} against the trainer at their worst length, so against "
        f"the trainer the tails may be lower by about {rounded_up(1 - min(ceilings), 3)}"
    )
