"""From a model to a schedule file in one call: sweep, fit or allocate, verify, save. Each step has its own module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparroll import records
from sparroll.attention.selectors import PageMean, Selector
from sparroll.calibrate.allocation.tradeoff import trade_off, with_verification
from sparroll.calibrate.allocation.wanted import Objective, Tradeoff, Wanted, check_limit, limits_given, selector_label
from sparroll.calibrate.bounds import NO_BOUNDS, BlindSpots, holding
from sparroll.calibrate.choice import CheckChoice, Machine, choose, with_reasons
from sparroll.calibrate.defaults import VERIFY_ROUNDS
from sparroll.calibrate.effort.coarse_to_fine import Fine
from sparroll.calibrate.effort.cost_ahead import Spent
from sparroll.calibrate.fit import MIN_TOKENS, FittedSchedule
from sparroll.calibrate.measure import Measurement, Study, check_percentiles, digest
from sparroll.calibrate.prospects import check_ceiling, check_request, check_something_is_sparse
from sparroll.calibrate.store import holds_measurements
from sparroll.calibrate.sweep import Sweep, sweep_groups
from sparroll.calibrate.target import Target, check_sampled
from sparroll.calibrate.verify import Bound, Verification, verify
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.layer_groups import LayerGroups, Proportions
from sparroll.locks import locked
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.models import fingerprint
from sparroll.plan.hardware import Hardware, find_hardware
from sparroll.plan.model_shape import ModelShape, model_shape
from sparroll.plan.time_model import TimeModel
from sparroll.progress import OnProgress, Stages
from sparroll.schedule import Schedule, check_budget


@dataclass(frozen=True)
class Calibration:
    """A schedule file, with everything that it was made from."""

    schedule: Schedule
    path: Path
    sweep: Sweep
    fitted: FittedSchedule
    verification: Verification | None
    choice: CheckChoice | None = None
    """What the check and the budgets were chosen among; None without a check."""
    tradeoff: Tradeoff | None = None
    """What the selector and the budgets were chosen among; None where nothing but the target was asked for."""
    spent: Spent = field(default_factory=lambda: Spent())
    grid: tuple[int, ...] = ()
    """The budgets that were to choose among; not all of them need have been measured."""
    written: bool = True
    """Whether the file is new; else it said the same before, and tells who made it then."""

    @property
    def generated_tokens(self) -> int:
        """Tokens that were sampled for all of it, drafts taken back left out."""
        return self.spent.sampled_tokens

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the reader: bins without data, budgets that were not measured, and those that the verification
        raised."""
        refused = self.choice.notes if self.choice else ()
        refused += self.tradeoff.notes if self.tradeoff else ()
        left_out: tuple[str, ...] = ()
        if len(self.sweep.grid) < len(self.grid):
            measured = ", ".join(map(str, self.sweep.grid))
            left_out = (
                f"{len(self.sweep.grid)} of the {len(self.grid)} budgets of the grid were measured: {measured}",
            )
        verified = self.verification.notes if self.verification else ()
        return self.fitted.notes_under(self.schedule) + left_out + refused + verified

    def rows(self) -> list[dict[str, Any]]:
        """For each bin the budget, the tail under it and the dense ceiling. If there was a verification, the tail is
        from it.

        `q05` is the quantile that the settings ask for; None in bins without enough data. Where the target is a share of
        impossible tokens, it is `impossible_share` with its upper bound, and `dense_impossible_share`.
        """
        names = ("q05", "q05_low", "dense_ceiling_q05")
        ends = ("value", "low")
        if ImpossibleLimit.of_target(self.schedule.target) is not None:
            names, ends = ("impossible_share", "impossible_share_high", "dense_impossible_share"), ("value", "high")
        tails = {step.from_context_tokens: step.measured or {} for step in self.schedule.steps}
        ceilings = {bin.from_context_tokens: bin.dense_ceiling or {} for bin in self.fitted.bins}
        return [
            {
                "from_context_tokens": start,
                "kv_budget_tokens": self.schedule.step_at(start).kv_budget_tokens,
                **{name: tails.get(start, {}).get(end) for name, end in zip(names, ends, strict=False)},
                names[2]: ceilings.get(start, {}).get("value"),
            }
            for start in sorted({*tails, *ceilings})
        ]

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "schedule": self.schedule.table(),
            "rows": self.rows(),
            "notes": list(self.notes),
            "bins": [dataclasses.asdict(found) for found in self.fitted.bins],
            "sweep": self.sweep.table(),
            "verification": self.verification.table() if self.verification else None,
            "generated_tokens": self.generated_tokens,
            "taken_back_tokens": self.spent.taken_back_tokens,
            "scored_tokens": self.spent.scored_tokens,
            **({"choice": self.choice.table()} if self.choice else {}),
            **({"tradeoff": self.tradeoff.table()} if self.tradeoff else {}),
        }


def calibrate(
    study: Study,
    *,
    out: Path | str,
    budgets: Sequence[int],
    target: Target = None,
    selector: Selector | None = None,
    also_selectors: Sequence[Selector] = (),
    dense_layers: tuple[int, ...] = (0, 1),
    layer_groups: LayerGroups = (),
    proportions: Proportions | None = None,
    objective: Objective = "time",
    step_time_share: float | None = None,
    at_time_of: Schedule | None = None,
    most_budgets: int | None = None,
    verify_rounds: int = VERIFY_ROUNDS,
    bound: Bound = "low",
    checks: Sequence[DraftCheck] = (),
    shape: ModelShape | None = None,
    hardware: Hardware | str | Path = "H200",
    time_model: TimeModel | None = None,
    bounds: BlindSpots = NO_BOUNDS,
    min_tokens: int = MIN_TOKENS,
    min_rollouts: int = LEAST_ROLLOUTS,
    model: str | None = None,
    made_by: dict[str, Any] | None = None,
    name: str = "schedule",
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Measure `budgets`, choose the schedule, verify it, and write OUT/NAME.toml.

    target: the least 5th percentile of every length, or a largest share of impossible tokens (see target.py); None: 0.86,
    and with checks no target: then the KL of what is kept is bounded (defaults.CHECKED_KL_AT_MOST, or that of `bounds`).
    objective: "time" takes the cheapest budgets that meet `target`. The others (see allocation/wanted.py) make a loss as
    small as a decode step's time allows, in which every bin meets the target, too: `step_time_share` of a dense step, or
    that of the schedule `at_time_of`. Times are predicted for a model of this `shape`, by default the study's, on this
    `hardware`: by a roofline, or by a `time_model` of steps that were measured there.
    also_selectors: are swept like `selector`, in folders of their own, and the best one is taken.
    layer_groups: are varied alone, and get budgets of their own.  proportions: groups of layers that read so many times each
    of `budgets`, with checks or at the objective "time" of one selector.
    most_budgets: at most so many of `budgets` are run in each sweep; None: all. Where the cheapest budgets that hold a
    target are looked for, they are narrowed down (effort/coarse_to_fine.py), else they are spread over the grid. The
    verification raises budgets to the next one of the whole grid.

    Raises UserError before the first budget if it is clear that no schedule can be fitted (see prospects.py). If it was
    interrupted, a second call continues. verify_rounds = 0 leaves the verification out. If bins still miss
    the target after the last round, the file is written with their figures, and `verification.met` is false. model and
    made_by are written into the file as they are, and with the model its fingerprint, if its files are on this machine.
    checks: if there are any, every budget of every selector is measured under each of them, and the selector, the check and
    the budgets with the least predicted time of a kept token are taken (see choice.py). The tail is reported, and decides
    only with a `target`.
    bounds: what every bin must hold beside the target.
    For the other arguments see `sweep`, `fit_schedule` and `verify`.
    """
    least = {"min_tokens": min_tokens, "min_rollouts": min_rollouts}
    wanted = Wanted.of(objective, target, bounds, bool(checks), **least)
    selectors = [selector or PageMean(), *also_selectors]
    limits = limits_given(step_time_share, at_time_of)
    _check_asked(study, wanted, limits, selectors, checks, layer_groups, proportions, budgets)
    weighs_time = bool(checks) or objective != "time" or len(selectors) > 1
    shape = (shape or model_shape(study.scorer.model.config)) if weighs_time else None
    if at_time_of is not None and shape is not None:
        check_compared(at_time_of)
        _check_layers(at_time_of, shape)
    device = hardware if isinstance(hardware, Hardware) else find_hardware(hardware)

    def on_ceiling(ceiling: Measurement) -> None:
        check_ceiling(study, ceiling, wanted.target, **_least(wanted))
        for each in selectors:
            check_something_is_sparse(study, min(budgets), each, dense_layers)

    common = {"budgets": budgets, "dense_layers": dense_layers, "on_ceiling": on_ceiling}
    with locked(out, "sparroll calibrate"):
        fine = Fine(wanted, most_budgets, narrow=not weighs_time and not layer_groups)
        sweeps = _sweeps(study, out, selectors, checks, layer_groups, proportions, fine, on_progress, **common)
        machine = None
        if shape is not None:
            compared = selectors if at_time_of is None else [*selectors, at_time_of.selector]
            machine = Machine.decoding(study.dense_rollouts(), shape, device, time_model).comparing(compared)
        about: dict[str, Any] = {"model": model, "name": name}
        chosen = _choose(sweeps, machine, wanted, bool(checks), (step_time_share, at_time_of), made_by, about)
        verification = None
        if verify_rounds > 0:
            verification = verify(
                study,
                chosen.fitted.schedule,
                target=wanted.target,
                notches=budgets,
                out=_folder(out, chosen.sweep.selector, selectors),
                bound=bound,
                most_rounds=verify_rounds,
                bounds=wanted.bounds,
                proportions=proportions,
                on_progress=on_progress,
                **_least(wanted),
            )
        found, tradeoff = _as_verified(chosen, verification, machine)
        fingerprinted = None if model is None else fingerprint.of_model(model)
        schedule = replace(found, name=name, fingerprint=fingerprinted)
        path = Path(out) / f"{name}.toml"
        schedule, written = _saved(schedule, path)
    spent, grid = _spent(study, sweeps, verification), tuple(sorted(set(budgets)))
    return Calibration(
        schedule, path, chosen.sweep, chosen.fitted, verification, chosen.choice, tradeoff, spent, grid, written
    )


def _saved(schedule: Schedule, path: Path) -> tuple[Schedule, bool]:
    """The schedule that the file holds now, and whether it was written: one that says the same, but for who made it when,
    stays."""
    try:
        there = Schedule.load(path) if path.is_file() else None
    except UserError:
        there = None
    if there is not None and _said(there) == _said(schedule):
        return there, False
    schedule.save(path)
    return schedule, True


def _said(schedule: Schedule) -> Any:
    return records.without_provenance(records.plain(schedule.table()))


def _least(wanted: Wanted) -> dict[str, Any]:
    """How much data a bin needs, as keywords."""
    return {"min_tokens": wanted.min_tokens, "min_rollouts": wanted.min_rollouts}


def _check_asked(
    study: Study,
    wanted: Wanted,
    limits: int,
    selectors: Sequence[Selector],
    checks: Sequence[DraftCheck],
    layer_groups: LayerGroups,
    proportions: Proportions | None,
    budgets: Sequence[int],
) -> None:
    """Raise UserError for what no measurement could give. limits: how many limits of a step's time are given."""
    settings = study.settings
    check_request(wanted.target, len(study.prompts), settings.samples, settings.max_new_tokens, **_least(wanted))
    check_limit(wanted, limits, bool(checks), layer_groups, settings.estimator, len(selectors), proportions)
    check_sampled(wanted.target, settings)
    check_percentiles(settings)
    check_selectors(selectors, budgets)
    if wanted.bounds.over_2_nats_at_most is not None and not checks:
        raise UserError("a bound on tokens more than 2 nats off needs checked drafts", "give checks to choose among")


def check_compared(at_time_of: Schedule) -> None:
    """Raise UserError for a schedule whose decode steps are not all that a token takes."""
    if at_time_of.check is not None:
        raise UserError(
            f"--at-time-of {at_time_of.name} checks drafts, so a token takes more than its decode step",
            "name a schedule without [check], or give --step-time-share 0.4, of a dense step",
        )


def _check_layers(at_time_of: Schedule, shape: ModelShape) -> None:
    try:
        at_time_of.check_layers(shape.layers)
    except UserError as error:
        raise UserError(f"--at-time-of {at_time_of.name}: {error.message}", error.hint) from None


@dataclass(frozen=True)
class _Chosen:
    """One of the sweeps, and the schedule that was fitted to it; with a choice, what it was chosen among."""

    sweep: Sweep
    fitted: FittedSchedule
    choice: CheckChoice | None = None
    tradeoff: Tradeoff | None = None


def _choose(
    sweeps: Sequence[Sweep],
    machine: Machine | None,
    wanted: Wanted,
    with_checks: bool,
    limit: tuple[float | None, Schedule | None],
    made_by: dict[str, Any] | None,
    about: dict[str, Any],
) -> _Chosen:
    """machine: None where no time is weighed.  limit: of a step's time, as (share of a dense step, schedule that takes
    it)."""
    if machine is None:
        return _by_budget_alone(sweeps, wanted, made_by, about)
    if with_checks:
        return _by_check(sweeps, machine, wanted, made_by, about)
    return _by_time(sweeps, machine, wanted, _most_step_seconds(machine, *limit), made_by, about)


def _as_verified(
    chosen: _Chosen, verification: Verification | None, machine: Machine | None
) -> tuple[Schedule, Tradeoff | None]:
    """The schedule, and what it was chosen among, with the figures of the verification where there is one."""
    if verification is None:
        return chosen.fitted.schedule, chosen.tradeoff
    if chosen.tradeoff is None:
        return verification.schedule, None
    assert machine is not None, "a tradeoff without times"
    tradeoff, found = with_verification(chosen.tradeoff, machine, verification.schedule, verification.measurement)
    return found, tradeoff


def _by_budget_alone(
    sweeps: Sequence[Sweep], wanted: Wanted, made_by: dict[str, Any] | None, about: dict[str, Any]
) -> _Chosen:
    """The cheapest budgets of the only sweep that hold the target."""
    (only,) = sweeps
    held = wanted.bounds.least_budgets(only, **_least(wanted))
    fitted = only.fit(wanted.target, **_least(wanted), least_budgets=held, made_by=made_by, **about)
    return _Chosen(only, holding(fitted, wanted.bounds))


def _by_check(
    sweeps: Sequence[Sweep],
    machine: Machine,
    wanted: Wanted,
    made_by: dict[str, Any] | None,
    about: dict[str, Any],
) -> _Chosen:
    """The selector and the check, with their budgets, under which a kept token takes the least time."""
    choice = choose(sweeps, machine, target=wanted.target, bounds=wanted.bounds, **_least(wanted), **about)
    best = choice.best
    sweep = next(each for each in sweeps if (each.selector, each.check) == (best.selector, best.check))
    return _Chosen(sweep, with_reasons(choice, made_by, wanted.bounds), choice=choice)


def _by_time(
    sweeps: Sequence[Sweep],
    machine: Machine,
    wanted: Wanted,
    most_step_seconds: float | None,
    made_by: dict[str, Any] | None,
    about: dict[str, Any],
) -> _Chosen:
    """The selector, with its budgets, that is best by the objective and the time of a step."""
    tradeoff = trade_off(sweeps, machine, wanted, most_step_seconds, made_by=made_by, **about)
    return _Chosen(tradeoff.sweep, tradeoff.fitted, tradeoff=tradeoff)


def _sweeps(
    study: Study,
    out: Path | str,
    selectors: Sequence[Selector],
    checks: Sequence[DraftCheck],
    layer_groups: LayerGroups,
    proportions: Proportions | None,
    fine: Fine,
    on_progress: OnProgress | None,
    **common: Any,
) -> list[Sweep]:
    """A sweep for each selector, and with checks for each selector under each of them."""
    unchecked: Sequence[DraftCheck | None] = [None]
    asked = [(selector, check) for selector in selectors for check in checks or unchecked]
    stages, sweeps = Stages(on_progress, len(asked)), list[Sweep]()
    for own, check in asked:
        progress = on_progress
        if len(asked) > 1:
            named = selector_label(own)
            progress = stages.next(f"checked budgets, {named}" if check else named)
        about = {"out": _folder(out, own, selectors), "selector": own, "on_progress": progress, **common}
        if layer_groups:
            budgets = fine.spread(study, about["budgets"])
            sweeps.append(sweep_groups(study, layer_groups=layer_groups, **about | {"budgets": budgets}))
        else:
            sweeps.append(fine.swept(study, check=check, proportions=proportions, **about))
    if len(asked) > 1:
        stages.end()
    return sweeps


def check_selectors(selectors: Sequence[Selector], budgets: Sequence[int]) -> None:
    """Raise UserError for a budget that one of the selectors cannot read, and for a selector that is there twice."""
    for selector in selectors:
        for budget in budgets:
            check_budget(budget, selector)
    if len(set(selectors)) < len(selectors):
        raise UserError("a selector is named twice", "name each selector once")


def begun_last(out: Path | str, selectors: Sequence[Selector]) -> Selector:
    """The selector whose measurements an earlier call into the folder `out` began last; the first one where none did. An
    engine that has one selector starts with this one."""
    begun = [each for each in selectors if holds_measurements(_folder(out, each, selectors))]
    return begun[-1] if begun else selectors[0]


def _folder(out: Path | str, selector: Selector, selectors: Sequence[Selector]) -> Path:
    """The first selector's measurements are in `out` itself, and those of each other one in a folder of its own."""
    if selector == selectors[0]:
        return Path(out)
    return Path(out) / "selectors" / f"{selector.kind}-{digest(selector.table())}"


def _most_step_seconds(machine: Machine, step_time_share: float | None, at_time_of: Schedule | None) -> float | None:
    if at_time_of is not None:
        return machine.plan(at_time_of).sparse.seconds
    if step_time_share is None:
        return None
    return step_time_share * machine.plan(Schedule.fixed(PageMean().least_budget_tokens, dense_layers=())).dense.seconds


def _spent(study: Study, sweeps: Sequence[Sweep], verification: Verification | None) -> Spent:
    dense = sum(len(each.response_ids) for each in study.dense_rollouts())
    found = Spent(0 if study.given_rollouts else dense, 0, dense)
    measured = [each for swept in sweeps for each in swept.sampled]
    for each in (*measured, *(verification.rounds if verification else ())):
        found += Spent.of(each)
    return found
