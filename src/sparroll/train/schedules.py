"""From a configuration to the schedule that a run starts under and to its watchers: the guard, the controller, the
cheaper schedules of DistillSparse, and the watches on empty and on unrewarded steps. Mistakes in these settings are
reported here, before anything is computed. The control group is part of the guard."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

from sparroll.attention.selectors import PageMean
from sparroll.control.cheaper_schedules import CheaperSchedules
from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.controller import Controller, Rules
from sparroll.control.empty_steps import EmptySteps
from sparroll.control.guard import Guard
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.control.length_bins import LengthBins
from sparroll.control.reward_gap import RewardGap
from sparroll.control.unrewarded_steps import UnrewardedSteps
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.step_metrics import ESTIMATOR
from sparroll.schedule import Schedule, caveats_of
from sparroll.tasks import Task
from sparroll.tasks.verdicts import answer_form
from sparroll.train.config.control import ByCheaperSection, ByControllerSection, ByGuardSection
from sparroll.train.config.reward import TASK
from sparroll.train.config.rollout import BudgetAttention, ScheduleAttention
from sparroll.train.config.run import TrainConfig


def starting_schedule(config: TrainConfig) -> Schedule | None:
    """The schedule that the rollouts start under; None for dense rollouts, and for those under a compression."""
    attention = config.attention
    if isinstance(attention, BudgetAttention):
        return _with_check(Schedule.fixed(attention.kv_budget_tokens), config)
    if isinstance(attention, ScheduleAttention):
        return _with_check(Schedule.load(attention.name, model=config.model.name, force=attention.force), config)
    return None


def schedule_tables(config: TrainConfig, schedule: Schedule | None) -> dict[str, Any]:
    """The schedules that the run starts under and may go on with, by what names them in the configuration, for a
    resumed run to compare: their files may have changed since."""
    start = (
        {"attention.name": _acting(schedule)} if isinstance(config.attention, ScheduleAttention) and schedule else {}
    )
    following = [_acting(each) if each else None for each in _following(config, schedule)]
    name = "control.stricter" if isinstance(config.control, ByGuardSection) else "control.schedules"
    return start | ({name: following} if following else {})


def read_schedule_tables(table: dict[str, Any]) -> dict[str, Any]:
    """The tables that an earlier call wrote, with what schedules have got since at its default."""

    def again(each: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if each is None else _acting(Schedule.from_table(each))

    return {
        name: [again(one) for one in each] if isinstance(each, list) else again(each) for name, each in table.items()
    }


def _acting(schedule: Schedule) -> dict[str, Any]:
    """The tables of its file, without what no run depends on: where it comes from, and what was measured with it."""
    table = schedule.table()
    kept = ("format", "selector", "dense_layers", "layer_groups", "check", "target")
    steps = [{name: each for name, each in step.items() if name != "measured"} for step in table["steps"]]
    return {name: table[name] for name in kept if name in table} | {"steps": steps}


def caveat_events(config: TrainConfig, schedule: Schedule | None) -> list[str]:
    """Events for the start of a run: what must be known of the schedules that it may run under."""
    return caveats_of([schedule, *_following(config, schedule)])


def check_events(config: TrainConfig, schedule: Schedule | None) -> list[str]:
    """Events for the start of a run: which check holds under a schedule whose own file says another one, or none."""
    files, used = _files(config), _following(config, schedule)
    if isinstance(config.attention, ScheduleAttention):
        files, used = [Schedule.load(config.attention.name, force=True), *files], [schedule, *used]
    events = []
    for file, now in zip(files, used, strict=True):
        if file is None or now is None or file.check == now.check:
            continue
        if file.check is not None:
            why = f"as [check] says, and not {file.check} as its file says"
        elif config.check is None:
            why = "like those of the schedule before it, because its file names no check"
        else:
            continue
        events.append(f"drafts under the schedule {file.name!r} are checked {now.check}, {why}")
    return events


def _with_check(schedule: Schedule, config: TrainConfig, before: DraftCheck | None = None) -> Schedule:
    """The schedule with the check that holds while it is in force: that of [check]; where the run has no such section,
    its own; where its file has none, that of the schedule `before` it. So a switch never drops a check."""
    if schedule.selector.remainder is not None and config.distill is not None:
        raise UserError(
            f"the schedule {schedule.name!r} has a remainder, and [distill] trains an adapter under the schedule: attention "
            "with a remainder has no gradient",
            "take remainder out of the selector in the schedule's file, or leave [distill] out",
        )
    if schedule.check is not None and config.check is None:
        for name, why, without in config.excludes_checks:
            raise UserError(
                f"the schedule {schedule.name!r} checks its drafts, and that and {name} exclude each other: {why}",
                f"take the table [check] out of the schedule's file, or --set {without}",
            )
    check = config.check.of_drafts() if config.check is not None else schedule.check or before
    return schedule if check in (None, schedule.check) else schedule.checked(check.window_tokens, check.floor)


def make_guard(config: TrainConfig, schedule: Schedule | None) -> Guard:
    """Raises UserError where the guard has to act but has no target, or where the schedule's target is for another
    statistic than the one that a run measures."""
    control, guard = config.control, config.guard
    target, impossible = guard.at_least, guard.impossible
    if target is None and impossible is None and isinstance(control, ByControllerSection):
        target, impossible = control.target, control.impossible
    if target is None and impossible is None and schedule is not None and guard.action != "off":
        impossible = ImpossibleLimit.of_target(schedule.target)
        target = None if impossible else _own_target(schedule, config.rollout.top_k)
        acts = guard.action == "stop" or isinstance(control, ByGuardSection)
        if target is None and impossible is None and acts and not config.watches_reward_gap:
            raise UserError(
                f"the guard needs a target to act on, but the schedule {schedule.name!r} names no target",
                "set one: --set guard.at_least=0.86, or --set guard.impossible_at_most=1e-4",
            )
    if guard.action != "off" and (target is not None or impossible is not None):
        _refuse_too_few_rollouts(config, "the guard", "guard.window_steps", guard.window_steps)
    stricter = tuple(_following(config, schedule)) if isinstance(control, ByGuardSection) else ()
    return Guard(
        guard.action,
        target,
        guard.window_steps,
        stricter,
        config.mismatch.least_tokens,
        RewardGap(control_group_settings(config)) if config.control_share else None,
        impossible,
    )


def control_group_settings(config: TrainConfig) -> ControlGroupSettings:
    """The settings of the control group. The configuration refuses what these would refuse, in its own words."""
    rollout = config.rollout
    return ControlGroupSettings(
        share=config.control_share,
        share_first=rollout.control_share_first,
        first_steps=rollout.control_first_steps,
        reward_gap=config.guard.reward_gap,
    )


def make_controller(config: TrainConfig, schedule: Schedule | None, longest_context_tokens: int) -> Controller | None:
    """The controller, or None where the run has none. Without a schedule it starts from a share of the context, with
    the published selector. Raises UserError where the schedule lies outside the controller's limits, and where no bin
    could ever have enough rollouts to be judged."""
    settings = config.control
    if not isinstance(settings, ByControllerSection):
        return None
    _refuse_too_few_rollouts(config, "the controller", "control.window_steps", settings.window_steps)
    names = ("target", "impossible", "margin", "patience", "window_steps", "small_step")
    rules = Rules(**{name: getattr(settings, name) for name in names}, least_tokens=config.mismatch.least_tokens)
    like = schedule or Schedule.fixed(PageMean().least_budget_tokens)
    limits = settings.most_budget_tokens, settings.least_budget_tokens
    bins = LengthBins(config.mismatch.bin_tokens, longest_context_tokens, like.selector, *limits)
    target = {"statistic": "acceptance", "estimator": ESTIMATOR, "top_k": config.rollout.top_k, "quantile": 0.05}
    target |= {"at_least": settings.target}
    return Controller(
        rules,
        bins,
        bins.of_schedule(schedule) if schedule else bins.share(settings.start_share),
        dense_layers=like.dense_layers,
        layer_groups=like.layer_groups,
        model=config.model.name,
        target=target if settings.impossible is None else settings.impossible.table(),
        check=schedule.check if schedule else config.check.of_drafts() if config.check else None,
        trust_start=schedule is not None and schedule.target is not None,
        caveat=None if schedule is None else (schedule.made_by or {}).get("caveat"),
        measured_before=frozenset() if schedule is None else bins.measured_in(schedule),
    )


def make_empty_steps(config: TrainConfig) -> EmptySteps:
    return EmptySteps(config.guard.empty_steps)


def make_unrewarded_steps(config: TrainConfig, task: Task) -> UnrewardedSteps:
    asked = any(term.use == TASK for term in config.reward.terms)
    return UnrewardedSteps(config.train.steps, answer_form(task) if asked else None)


def make_cheaper_schedules(config: TrainConfig, schedule: Schedule | None) -> CheaperSchedules | None:
    """The cheaper schedules of DistillSparse, or None where the run has none. Raises UserError where they have no
    target to hold, where no bin could ever have enough rollouts to count, and where the guard would stop a run whose
    tail is just at that target."""
    control = config.control
    if not isinstance(control, ByCheaperSection):
        return None
    _refuse_too_small_a_replay(config, control)
    assert schedule is not None, "the configuration refuses dense rollouts with an adapter"
    target = control.at_least
    if target is None and ImpossibleLimit.of_target(schedule.target) is not None:
        raise UserError(
            f'control.by = "cheaper" measures replays, in which nothing is sampled, so it cannot hold the target of the '
            f"schedule {schedule.name!r}, a share of impossible tokens",
            "give it a target for the 5th percentile: --set control.at_least=0.86",
        )
    if target is None:
        target = _own_target(schedule, config.rollout.top_k, "--set control.at_least=0.86")
    if target is None:
        raise UserError(
            f'control.by = "cheaper" needs a target, but the schedule {schedule.name!r} names none',
            "set one: --set control.at_least=0.86",
        )
    guard = make_guard(config, schedule)
    if guard.action == "stop" and guard.at_least is not None and guard.at_least > target:
        raise UserError(
            f'control.by = "cheaper" accepts a tail of {target}, but the guard stops the run below {guard.at_least}',
            f"--set guard.at_least={target} or lower, or raise control.at_least",
        )
    schedules = [each for each in _following(config, schedule) if each is not None]
    for before, after in itertools.pairwise([schedule, *schedules]):
        _refuse_dearer(before, after)
    return CheaperSchedules(
        schedules,
        target,
        every_steps=control.every_steps,
        patience=control.patience,
        least_tokens=config.mismatch.least_tokens,
    )


def _refuse_too_few_rollouts(config: TrainConfig, who: str, field: str, window_steps: int) -> None:
    """Raise UserError where a whole window has fewer than LEAST_ROLLOUTS sparse rollouts, so no bin could ever be judged.
    Those of the control group are dense."""
    rollouts = config.train.prompts_per_step * config.rollout.samples_per_prompt

    def sparse_in(steps: int) -> int:
        return rollouts * steps - int(config.control_share * rollouts * steps)

    if sparse_in(window_steps) < LEAST_ROLLOUTS:
        enough = next(steps for steps in itertools.count(window_steps) if sparse_in(steps) >= LEAST_ROLLOUTS)
        raise UserError(
            f"{who} needs at least {LEAST_ROLLOUTS} rollouts to judge a bin, but {field} = {window_steps} steps of this run "
            f"have {sparse_in(window_steps)} sparse ones",
            f"--set {field}={enough}, or sample more rollouts a step",
        )


def _refuse_too_small_a_replay(config: TrainConfig, control: ByCheaperSection) -> None:
    """Raise UserError where a measurement has fewer than LEAST_ROLLOUTS rollouts, so the run would never switch."""
    samples = config.rollout.samples_per_prompt
    rollouts = samples * min(control.prompts, config.train.prompts_per_step)
    if rollouts < LEAST_ROLLOUTS:
        prompts = -(-LEAST_ROLLOUTS // samples)
        raise UserError(
            f"cheaper schedules need at least {LEAST_ROLLOUTS} rollouts to judge a bin, but a measurement has {rollouts}",
            f"--set control.prompts={prompts}, with train.prompts_per_step = {prompts} or more",
        )


def _refuse_dearer(before: Schedule, after: Schedule) -> None:
    """Raise UserError where `after` has a larger budget than `before` at some length, in some layer, and a smaller one
    nowhere."""
    starts = sorted({step.from_context_tokens for each in (before, after) for step in each.steps})
    grouped = {layer for each in (before, after) for group in each.layer_groups for layer in group}
    both = sorted(grouped - {*before.dense_layers, *after.dense_layers})
    pairs = [(before.of_layer(layer), after.of_layer(layer)) for layer in both] or [(before, after)]
    budgets = [
        (start, old.kv_budget_tokens(start), new.kv_budget_tokens(start)) for old, new in pairs for start in starts
    ]
    dearer = [each for each in budgets if each[2] > each[1]]
    if dearer and not any(now < was for _, was, now in budgets):
        start, was, now = dearer[0]
        raise UserError(
            f"control.schedules go from {before.name!r} to {after.name!r}, which reads more: {now} tokens instead of {was} "
            f"from {start} on",
            "list schedules from the dearest to the cheapest, each below attention.name",
        )


def _own_target(
    schedule: Schedule,
    top_k: int,
    instead: str = "--set guard.at_least=0.86, or turn the guard off, --set guard.action=off",
) -> float | None:
    """The target that the schedule was calibrated for; None where it names none."""
    if schedule.target is None or "at_least" not in schedule.target:
        # With checks of drafts, a calibration may hold bounds alone.
        return None
    watched = {"estimator": ESTIMATOR, "quantile": 0.05, "top_k": top_k}
    found = {name: schedule.target.get(name) for name in watched}
    if found != watched:
        raise UserError(
            f"the target of the schedule {schedule.name!r} is for {found}, but this run measures {watched}",
            f"set a target for this run: {instead}",
        )
    return float(schedule.target["at_least"])


def _following(config: TrainConfig, schedule: Schedule | None) -> list[Schedule | None]:
    """The schedules that the run may go on with after `schedule`, in order, with the checks that hold under them; None
    among them is dense."""
    before, following = schedule.check if schedule else None, []
    for file in _files(config):
        used = None if file is None else _with_check(file, config, before)
        before = used.check if used else before
        following.append(used)
    return following


def _files(config: TrainConfig) -> list[Schedule | None]:
    """The same schedules as their files have them. Files of one name, such as the schedule.toml of two calibrations, are
    told apart by their place: "schedule" and "schedule-2"."""
    control = config.control
    if not isinstance(control, ByGuardSection | ByCheaperSection):
        return []
    load = partial(Schedule.load, model=config.model.name, force=control.force)
    found = [None if name == "dense" else load(name) for name in control.following]
    names = (
        [Schedule.load(config.attention.name, force=True).name]
        if isinstance(config.attention, ScheduleAttention)
        else []
    )
    own = {each.name for each in found if each is not None}
    for place, each in enumerate(found):
        if each is not None and each.name in names:
            numbered = (f"{each.name}-{number}" for number in itertools.count(2))
            each = replace(each, name=next(name for name in numbered if name not in own and name not in names))
            found[place] = each
        names.append(each.name if each is not None else "dense")
    return found
