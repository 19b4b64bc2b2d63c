"""The reader's questions, answered in words: is this schedule safe here, what does it save, and did training hold? The
answers follow from figures of the page by fixed rules; nothing is measured or estimated here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sparroll.calibrate.bounds import BlindSpots
from sparroll.mismatch.table import TailRow
from sparroll.report.data import (
    Answer,
    GapPoint,
    Level,
    Measured,
    PlannedDecoding,
    TrainingRun,
    differences,
    model_key,
    thin,
)
from sparroll.rounding import percent_down, percent_up, rounded_down, rounded_up, with_interval
from sparroll.schedule import Schedule

SAFE, SAVES, HELD = "Is this schedule safe here?", "What does it save?", "Did training hold?"
FINE = 0.05
"""A difference of accuracies that a yes about training must be able to see."""
_LEVELS: tuple[Level, ...] = ("no", "unknown", "probably", "yes")
"""From the worst one on."""


def answers(
    measured: Sequence[Measured], runs: Sequence[TrainingRun], plans: Sequence[PlannedDecoding]
) -> tuple[Answer, ...]:
    """Answers about the one schedule that the folder is about; empty where there is none, or more than one."""
    schedules = [each for each in measured if each.schedule is not None]
    if len(schedules) != 1 or len({model_key(name) for name in (schedules[0].model, *(run.model for run in runs))}) > 1:
        return ()
    about = schedules[0]
    under_it = [run for run in runs if _under_it(run, about)]
    return (_safe(about, under_it), _saves(about, under_it, plans), _held(under_it, runs))


def _under_it(run: TrainingRun, about: Measured) -> bool:
    """Whether what the run read, how it chose that, and how its drafts were checked is what the schedule says."""
    if run.schedule is None or about.schedule is None:
        return False
    return _reads(run.schedule) == _reads(about.schedule)


def _reads(schedule: Schedule) -> tuple[Any, ...]:
    """All that decides what rollouts under a schedule are; the budgets have the groups of layers in them."""
    return schedule.plain_budgets(), *schedule.kind


# -- is it safe ------------------------------------------------------------------------------------------------------------


def _safe(about: Measured, under_it: Sequence[TrainingRun]) -> Answer:
    alarms = [f"In training ({run.name}), {alarm}." for run in under_it for alarm in run.alarms]
    bins = [point for point in about.verified.points if not thin(point)] if about.verified else []
    if about.target is None or not bins:
        answer = "Not known: nobody has sampled enough with the schedule itself."
        if about.target is None and bins and about.schedule is not None and about.schedule.target is not None:
            held = "is a share of impossible tokens"
            if about.schedule.check is not None:
                held = f"is {BlindSpots.of_target(about.schedule.target)}, of what the checks of drafts leave"
            answer = f"Not known by its tail: what the schedule was to hold {held}, see below."
        return Answer(SAFE, "no" if alarms else "unknown", answer, tuple(alarms))
    target = f"{about.target:g}"
    missed = [point for point in bins if point.value < about.target]
    near = [point for point in bins if point.low < about.target]
    worst = min(bins, key=lambda point: point.value)
    span = f"{bins[0].from_context_tokens:,} to {bins[-1].to_context_tokens:,} tokens"
    lowest = f"the lowest is {_tail(worst)}, at contexts of {_at(worst)}"
    reasons = [
        _meaning(about),
        *alarms,
        *(_in_steps(run) for run in under_it if run.target is not None and not run.alarms),
        *(_gap(run.name, run.reward_gap[-1]) for run in under_it if run.reward_gap),
    ]
    reasons.append(
        f"Contexts outside of {span} had too little data to judge. Another model, another kind of problem or longer "
        f"responses need their own calibration."
    )
    if missed:
        where = ", ".join(_at(point) for point in missed)
        answer = f"No: the tail misses its target {target} at contexts of {where}; {lowest}."
        return Answer(SAFE, "no", answer, tuple(reasons))
    if alarms:
        answer = f"No: it held the target {target} when it was measured, but the guard raised an alarm in training."
        return Answer(SAFE, "no", answer, tuple(reasons))
    if near:
        answer = (
            f"Probably: the tail is above its target {target} in all {len(bins)} measured bins of {span}, but in "
            f"{len(near)} of them the interval reaches below it; {lowest}."
        )
        return Answer(SAFE, "probably", answer, tuple(reasons))
    answer = f"Yes: from {span}, the tail is above its target {target} with its whole interval; {lowest}."
    return Answer(SAFE, "yes", answer, tuple(reasons))


def _meaning(about: Measured) -> str:
    """What the tail is, for a reader who has not seen the page yet."""
    said = (
        f"The tail says how much of its probability sparse decoding shares with dense decoding at a token, where 1 is the "
        f"same: {percent_down(1 - about.quantile)} of the tokens share more."
    )
    if about.estimator == "top_k_lower" and about.quantile == 0.05:
        said += " In published runs of Qwen3 a tail of .86 trained stably, .80 drifted, and .75 collapsed."
    return said


def _tail(point: TailRow) -> str:
    return with_interval(point.value, point.low, point.high)


def _at(point: TailRow) -> str:
    return f"{point.from_context_tokens:,} to {point.to_context_tokens:,}"


def _in_steps(run: TrainingRun) -> str:
    """What single steps of a run without an alarm showed."""
    assert run.target is not None
    known = [value for value in run.worst_bin_q05 if value is not None]
    if not known:
        return f"In training ({run.name}) no step had enough tokens in a bin to show its tail."
    under = sum(value < run.target for value in known)
    if not under:
        return f"In training ({run.name}) the worst bin of every step was above {run.target:g} as well."
    return (
        f"In training ({run.name}) the worst bin of {under} of {len(known)} single steps was under {run.target:g}, at the "
        f"lowest {rounded_down(min(known))}. A step has few rollouts; the guard, which judges several steps together, found "
        f"no bin surely under it."
    )


def _gap(name: str, last: GapPoint) -> str:
    """What the control group of a run showed in the end."""
    gap, low, high, compared, rounded = last.value, last.low, last.high, "less", rounded_up
    if gap < 0:
        gap, low, high, compared, rounded = -gap, -high, -low, "more", rounded_down
    return (
        f"In training ({name}) sparse rollouts got {rounded(gap)} {compared} reward than dense ones of the same prompts "
        f"(95 % interval {rounded(low)} to {rounded(high)}, over the control group's window at step "
        f"{last.step})."
    )


# -- what it saves ---------------------------------------------------------------------------------------------------------


def _saves(about: Measured, under_it: Sequence[TrainingRun], plans: Sequence[PlannedDecoding]) -> Answer:
    own = [plan for plan in plans if model_key(plan.model) == model_key(about.model)]
    others = [plan for plan in plans if model_key(plan.model) != model_key(about.model)]
    reasons = [f"Predicted for this model{_speedup(plan)}." for plan in own]
    reasons += [f"For comparison, another model: predicted for {plan.model}{_speedup(plan)}." for plan in others]
    if not under_it:
        return Answer(SAVES, "unknown", "Not known yet: no training run has sampled with it.", tuple(reasons))
    most = max(under_it, key=lambda run: run.read_share)
    share = most.read_share
    points = [point for curve in about.curves for point in curve.points]
    longest = max(point.to_context_tokens for point in [each for each in points if not thin(each)] or points)
    fewer, read = percent_down(max(0.0, 1 - share)), percent_up(share)
    answer = (
        f"{fewer} of what attention reads: its rollouts read {read} of the KV cache"
        f"{f' in {most.name}, the run that read most' if len(under_it) > 1 else ''}, dense ones all of it, at contexts "
        f"up to {longest:,} tokens."
    )
    if longest <= 4096:
        reasons.insert(
            0,
            "At such short contexts that saves hardly any time. What a schedule saves grows with the context, and on a GPU "
            "with the batch.",
        )
    return Answer(SAVES, "yes" if share < 1 else "no", answer, tuple(reasons))


def _speedup(plan: PlannedDecoding) -> str:
    found = plan.results
    return (
        f" on {plan.device}, schedule {found['schedule']}, contexts {found['lengths']}: decoding "
        f"{rounded_down(plan.speedup, 2)} times as fast as dense{', checks of drafts included' if plan.checked else ''}"
    )


# -- did training hold -----------------------------------------------------------------------------------------------------


def _held(under_it: Sequence[TrainingRun], runs: Sequence[TrainingRun]) -> Answer:
    """What the worst of the runs with the schedule shows. Those that have no dense run to compare with count beside
    others only where they got worse."""
    done = [run for run in under_it if run.accuracy]
    if not done:
        return Answer(HELD, "unknown", "Not known yet: no finished run with an evaluation has trained with it.")
    beside = [(run, like) for run in done for like in runs if _comparable(run, like)]
    alone = [run for run in done if all(run is not each for each, _ in beside)]
    judged: list[tuple[TrainingRun, TrainingRun | None]] = [
        *beside,
        *((run, None) for run in alone if not beside or _level(run, None) == "no"),
    ]
    run, like = min(judged, key=lambda each: (_LEVELS.index(_level(*each)), _gained(*each)))
    level, which = _level(run, like), _which(run, [each for each, _ in judged], len(done))
    if like is None:
        return _held_alone(run, which, level)
    others = [each for each in runs if all(each is not known for known in under_it)]
    dense = f"dense rollouts{f' ({like.name})' if len({id(each) for _, each in beside}) > 1 else ''}"
    figures = (
        f"{which}after {len(run.steps)} steps the dense accuracy is {_accuracy(run)} with it and {_accuracy(like)} "
        f"with {dense}, from {rounded_down(run.accuracy[0].value)} at the start"
    )
    limits = (
        f"With {run.accuracy[-1].prompts} problems, a difference of less than about "
        f"{rounded_up(_visible(run, like), 2)} cannot be seen, and in {len(run.steps)} steps a slow drift does not show."
    )
    reasons = (_rewards(run, like), limits, *_contrast(run, others), *map(_not_compared, alone))
    said = {"no": "No", "yes": "Yes"}.get(level, "Nothing speaks against it")
    return Answer(HELD, level, f"{said}: {figures}.", reasons)


def _comparable(run: TrainingRun, like: TrainingRun) -> bool:
    """Whether `like` is a run with dense rollouts and an evaluation whose other settings are the same."""
    aside = ("attention", "check", "log", "checkpoint", "guard")
    return like.dense and bool(like.accuracy) and not differences([run, like], without=aside)


def _level(run: TrainingRun, like: TrainingRun | None) -> Level:
    """Whether training held in this run, beside a dense one or alone."""
    last = run.accuracy[-1]
    if last.high < (run.accuracy[0] if like is None else like.accuracy[-1]).low:
        return "no"
    if like is None:
        return "unknown"
    return "yes" if _visible(run, like) <= FINE else "probably"


def _gained(run: TrainingRun, like: TrainingRun | None) -> float:
    """By how much the run ended more accurate than the dense one, or than it began."""
    return run.accuracy[-1].value - (run.accuracy[0] if like is None else like.accuracy[-1]).value


def _visible(run: TrainingRun, like: TrainingRun) -> float:
    """The least difference of two accuracies that their intervals could show."""
    last, other = run.accuracy[-1], like.accuracy[-1]
    return math.hypot((last.high - last.low) / 2, (other.high - other.low) / 2)


def _which(run: TrainingRun, judged: Sequence[TrainingRun], done: int) -> str:
    """Which of the runs with the schedule a sentence is about; empty where there is only one."""
    if done == 1:
        return ""
    runs = len({id(each) for each in judged})
    return f"in {run.name}, the worst of {runs} runs, " if runs > 1 else f"in {run.name}, "


def _held_alone(run: TrainingRun, which: str, level: Level) -> Answer:
    """Without a dense run to compare with."""
    first = rounded_down(run.accuracy[0].value)
    figures = f"{which}the dense accuracy went from {first} to {_accuracy(run)} in {len(run.steps)} steps"
    if level == "no":
        return Answer(HELD, level, f"No: {figures}.")
    without = ("There is no run with dense rollouts and the same settings here to compare with.",)
    return Answer(HELD, level, f"Not known: {figures}.", without)


def _not_compared(run: TrainingRun) -> str:
    return (
        f"{run.name} has no run with dense rollouts and the same settings here to compare with; its dense accuracy "
        f"went from {rounded_down(run.accuracy[0].value)} to {_accuracy(run)}."
    )


def _accuracy(run: TrainingRun) -> str:
    point = run.accuracy[-1]
    return with_interval(point.value, point.low, point.high)


def _rewards(run: TrainingRun, dense: TrainingRun) -> str:
    def means(of: TrainingRun) -> str:
        return f"{rounded_down(of.reward_first)} to {rounded_down(of.reward_last)}"

    return (
        f"Rewards of the training rollouts, first to last {run.reward_window_steps} steps: {means(run)} with the schedule, "
        f"{means(dense)} dense."
    )


def _contrast(run: TrainingRun, runs: Sequence[TrainingRun]) -> tuple[str, ...]:
    """What those of the other runs that read less show."""
    others = [each for each in runs if each.schedule is not None and each.read_share < run.read_share]
    said = []
    for each in others:
        known = [value for value in each.worst_bin_q05 if value is not None]
        tail = f", and its worst bin's tail fell to {rounded_down(min(known))}" if known else ""
        alarm = "; the guard raised an alarm" if each.alarms else ""
        rewards = f"{rounded_down(each.reward_first)} to {rounded_down(each.reward_last)}"
        said.append(
            f"What reading less does: the run {each.name} ({each.rollouts}) has rewards of {rewards}{tail}{alarm}."
        )
    return tuple(said)
