"""From a configuration to the schedule that a run starts under, and to the watchers that may change it: the guard, the
controller, the cheaper schedules of DistillSparse. Every mistake in them is found here, before anything is computed."""

from __future__ import annotations

import itertools

from sparroll.attention.selectors import PageMean
from sparroll.control.cheaper_schedules import CheaperSchedules
from sparroll.control.controller import Controller, Rules
from sparroll.control.empty_steps import EmptySteps
from sparroll.control.guard import Guard
from sparroll.control.length_bins import LengthBins
from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.schedule import Schedule
from sparroll.train.config.sections import TrainConfig
from sparroll.train.tail_metrics import ESTIMATOR


def starting_schedule(config: TrainConfig) -> Schedule | None:
    """What the rollouts start under; None is dense."""
    if config.rollout.kv_budget_tokens is not None:
        return Schedule.fixed(config.rollout.kv_budget_tokens)
    return _schedule(config.rollout.schedule, config)


def make_guard(config: TrainConfig, schedule: Schedule | None) -> Guard:
    """Raises UserError where the guard is to act but has no target, or one of a statistic that it does not watch."""
    target = config.guard.at_least or config.controller.target
    if target is None and schedule is not None and config.guard.action != "off":
        target = _own_target(schedule, config.rollout.top_k)
        if target is None and config.guard.action != "warn":
            raise UserError(
                f"guard.action is {config.guard.action!r}, but the schedule {schedule.name!r} names no target",
                "set one: --set guard.at_least=0.86",
            )
    guard = config.guard
    if guard.action != "off" and target is not None:
        _refuse_too_few_rollouts(config, "the guard", "guard.window_steps", guard.window_steps)
    stricter = tuple(_schedule(name, config) for name in guard.stricter)
    return Guard(guard.action, target, guard.window_steps, stricter, config.mismatch.least_tokens)


def make_controller(config: TrainConfig, schedule: Schedule | None, longest_context_tokens: int) -> Controller | None:
    """None where it is off. Without a schedule it starts from a share of the context, with the published selector. Raises
    UserError where the schedule lies outside of its limits, and where no bin could ever be judged."""
    settings = config.controller
    if settings.target is None:
        return None
    _refuse_too_few_rollouts(config, "the controller", "controller.window_steps", settings.window_steps)
    names = ("target", "margin", "patience", "window_steps", "small_step")
    rules = Rules(**{name: getattr(settings, name) for name in names}, least_tokens=config.mismatch.least_tokens)
    like = schedule or Schedule.fixed(PageMean().least_budget_tokens)
    limits = settings.most_budget_tokens, settings.least_budget_tokens
    bins = LengthBins(config.mismatch.bin_tokens, longest_context_tokens, like.selector, *limits)
    target = {"statistic": "acceptance", "estimator": ESTIMATOR, "top_k": config.rollout.top_k, "quantile": 0.05}
    return Controller(
        rules,
        bins,
        bins.of_schedule(schedule) if schedule else bins.share(settings.start_share),
        dense_layers=like.dense_layers,
        model=config.model.name,
        target=target | {"at_least": settings.target},
        trust_start=schedule is not None and schedule.target is not None,
    )


def make_empty_steps(config: TrainConfig) -> EmptySteps:
    return EmptySteps(config.guard.empty_steps)


def make_cheaper_schedules(config: TrainConfig, schedule: Schedule | None) -> CheaperSchedules | None:
    """Raises UserError where cheaper schedules are named but no target that they must hold, where no bin could ever count,
    and where the guard would stop a run for holding just that."""
    if not config.distill.cheaper:
        return None
    _refuse_too_small_a_replay(config)
    assert schedule is not None, "the configuration refuses dense rollouts with an adapter"
    target = config.distill.cheaper_at_least
    if target is None:
        target = _own_target(schedule, config.rollout.top_k, "--set distill.cheaper_at_least=0.86")
    if target is None:
        raise UserError(
            f"distill.cheaper is given, but the schedule {schedule.name!r} names no target",
            "set one: --set distill.cheaper_at_least=0.86",
        )
    guard = make_guard(config, schedule)
    if guard.action == "stop" and guard.at_least is not None and guard.at_least > target:
        raise UserError(
            f"distill.cheaper goes on with a tail of {target}, and the guard stops the run below {guard.at_least}",
            f"--set guard.at_least={target} or lower, or raise distill.cheaper_at_least",
        )
    schedules = [each for name in config.distill.cheaper if (each := _schedule(name, config)) is not None]
    for before, after in itertools.pairwise([schedule, *schedules]):
        _refuse_dearer(before, after)
    return CheaperSchedules(
        schedules,
        target,
        every_steps=config.distill.cheaper_every_steps,
        patience=config.distill.cheaper_patience,
        least_tokens=config.mismatch.least_tokens,
    )


def _refuse_too_few_rollouts(config: TrainConfig, who: str, field: str, window_steps: int) -> None:
    """A window of fewer than LEAST_ROLLOUTS rollouts decides nothing, so no bin could ever be judged."""
    rollouts = config.train.prompts_per_step * config.rollout.samples_per_prompt
    if rollouts * window_steps < LEAST_ROLLOUTS:
        raise UserError(
            f"{who} judges a bin by {LEAST_ROLLOUTS} rollouts or more, and {field} = {window_steps} steps of this run have "
            f"{rollouts * window_steps}",
            f"--set {field}={-(-LEAST_ROLLOUTS // rollouts)}, or more rollouts a step",
        )


def _refuse_too_small_a_replay(config: TrainConfig) -> None:
    """A measurement of fewer than LEAST_ROLLOUTS rollouts decides nothing, so the run would never switch."""
    samples = config.rollout.samples_per_prompt
    rollouts = samples * min(config.distill.cheaper_prompts, config.train.prompts_per_step)
    if rollouts < LEAST_ROLLOUTS:
        prompts = -(-LEAST_ROLLOUTS // samples)
        raise UserError(
            f"distill.cheaper judges a bin by {LEAST_ROLLOUTS} rollouts or more, and a measurement has {rollouts}",
            f"--set distill.cheaper_prompts={prompts}, with train.prompts_per_step = {prompts} or more",
        )


def _refuse_dearer(before: Schedule, after: Schedule) -> None:
    starts = sorted({step.from_context_tokens for each in (before, after) for step in each.steps})
    budgets = [(start, before.kv_budget_tokens(start), after.kv_budget_tokens(start)) for start in starts]
    dearer = [each for each in budgets if each[2] > each[1]]
    if dearer and not any(now < was for _, was, now in budgets):
        start, was, now = dearer[0]
        raise UserError(
            f"distill.cheaper goes from {before.name!r} to {after.name!r}, which reads more: {now} tokens instead of {was} "
            f"from {start} on",
            "list schedules from the dearest to the cheapest, each below rollout.schedule",
        )


def _own_target(
    schedule: Schedule,
    top_k: int,
    instead: str = "--set guard.at_least=0.86, or turn the guard off, --set guard.action=off",
) -> float | None:
    """What the schedule was calibrated to hold; None where it does not say."""
    if schedule.target is None:
        return None
    watched = {"estimator": ESTIMATOR, "quantile": 0.05, "top_k": top_k}
    found = {name: schedule.target.get(name) for name in watched}
    if found != watched:
        raise UserError(
            f"the schedule {schedule.name!r} holds a target for {found}, this run measures {watched}",
            f"give a target of its own: {instead}",
        )
    return float(schedule.target["at_least"])


def _schedule(name: str, config: TrainConfig) -> Schedule | None:
    if name == "dense":
        return None
    return Schedule.load(name, model=config.model.name, force=config.rollout.force_schedule)
