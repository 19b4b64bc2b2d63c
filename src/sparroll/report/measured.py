"""The sections of the page about what a profile or calibration measured: the tail by length, and the schedule. Shows the
figures of the records; it computes none."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from sparroll.calibrate.bounds import BlindSpots
from sparroll.calibrate.fit import MIN_TOKENS
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.layer_groups import budgets_in_words
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.divergence import NATS
from sparroll.mismatch.table import TailRow
from sparroll.report import figures
from sparroll.report.data import Measured, TailCurve, thin
from sparroll.report.parts import figure, items, note, section, table
from sparroll.report.tradeoff import tradeoff
from sparroll.rounding import percent_up, rounded_down, rounded_up, with_interval
from sparroll.schedule import Schedule


def measurements(all_measured: tuple[Measured, ...]) -> str:
    """Two or three sections for each calibration, and one for each profile. Where there are several, titles name their
    folders."""
    parts = []
    for number, measured in enumerate(all_measured):
        where = f": {measured.folder}" if len(all_measured) > 1 else ""
        parts += [_tail(measured, number, where), _schedule(measured, number, where)]
        if measured.tradeoff is not None:
            parts.append(tradeoff(measured.tradeoff, where, number))
    return "\n".join(part for part in parts if part)


def _tail(measured: Measured, number: int, where: str) -> str:
    rank = f"{100 * measured.quantile:g}{'th percentile' if measured.quantile == 0.05 else ' % quantile'}"
    text = (
        f"Model <b>{escape(measured.model)}</b>. At each token, the acceptance is the probability that sparse and dense "
        f"decoding share: 1 means that both would say the same, 0 that they never would. Its mean hides the few bad tokens "
        f"that make training unstable. So this is its tail, the {rank}: {100 * (1 - measured.quantile):g} of 100 "
        f"tokens have a higher acceptance. It is shown by context length, which is the number of tokens that a decoding "
        f"step could read (estimator "
        f"<code>{escape(measured.estimator)}</code>)."
    )
    said = (
        "A <b>budget</b> is a fixed number of tokens that each step reads, darker lines read more. The <b>dense ceiling</b> "
        "(dashed) is the same statistic with rollouts that read everything: what is missing to 1 there is the noise of the "
        "measurement and of the engine, and no budget can be expected to do better. "
    )
    if measured.verified is not None:
        said += "The <b>calibrated schedule</b> (thick, green) was sampled with the schedule itself. "
    said += "Bands and brackets are 95 % intervals of a bootstrap over rollouts. Hollow points have too little data."
    begin = figures.axis_begin(measured.curves, measured.target)
    if any(thin(point) and point.value < begin for curve in measured.curves for point in curve.points):
        said += " Where the plot does not reach down to them, triangles on its edge stand for them."
    checked = [curve for curve in measured.curves if curve.check is not None and curve.checked is not None]
    if checked:
        check = checked[0].check
        assert check is not None, "a curve with a check"
        said += (
            f" With a <b>check</b> such as {check} the dense policy looks at windows of {check.window_tokens} tokens and "
            f"takes back what it would hardly sample, so that no token is more than log(1 / {check.floor:g}) nats off. The "
            "tail is that of what drafts and check sample together."
        )
    bins = sorted({(p.from_context_tokens, p.to_context_tokens) for curve in measured.curves for p in curve.points})
    rows = []
    for curve in measured.curves:
        found = {point.from_context_tokens: point for point in curve.points}
        rows.append([escape(curve.name), *(_cell(found.get(start), measured.target) for start, _ in bins)])
    few = f"fewer than {MIN_TOKENS} tokens or {LEAST_ROLLOUTS} rollouts, which is too little to judge"
    colours = f'<span class="thin">Grey, slanted</span>: {few}.'
    if measured.target is not None:
        colours = (
            f'Colours: <span class="met">green</span>: even the lower end of the interval is at the target '
            f'{measured.target:g} or above; <span class="near">ochre</span>: the tail is, but the lower end of its interval '
            f'is not; <span class="missed">red</span>: the tail misses the target. {colours}'
        )
    return section(
        f"How far sparse decoding is from dense{where}",
        text,
        figure(
            lambda narrow: figures.tail_by_length(measured.curves, measured.target, f"tail ({rank})", number, narrow)
        ),
        note(said),
        table(["tail at contexts of", *(f"{start:,} to {end:,}" for start, end in bins)], rows),
        note(colours),
        _worst_tokens(measured.curves),
        _checks(checked),
    )


def _worst_tokens(curves: Sequence[TailCurve]) -> str:
    """What the percentile does not show, over all lengths; nothing for records from before it was measured."""
    rows = []
    for curve in curves:
        if curve.overall is None or curve.overall.cvar01 is None or curve.overall.cvar05 is None:
            continue
        shares = [
            f"{each.value:.2g} <small>[{each.low:.2g}, {each.high:.2g}]</small>" for each in curve.overall.impossible
        ]
        worst = [rounded_down(curve.overall.cvar01), rounded_down(curve.overall.cvar05)]
        rows.append([escape(curve.name), *worst, *(shares or ["-"] * len(NATS))])
    if not rows:
        return ""
    heads = ["all lengths", "mean of the worst 1 %", "of the worst 5 %", *(f"over {nats} nats off" for nats in NATS)]
    said = (
        "The percentile is blind to the worst tokens. The first columns are the mean acceptance of these. The others are "
        "the share of sampled tokens whose log-probability is so much higher under the policy that sampled them than under "
        "the dense one: ten nats mean that the dense policy says them 22,000 times less often. A replay samples nothing, so "
        "it has none."
    )
    return table(heads, rows) + note(said)


def _checks(checked: list[TailCurve]) -> str:
    """What the checks of drafts did under each budget; nothing where none were made."""
    rows = [
        [
            escape(curve.name),
            f"{did['windows']:,}",
            percent_up(did["cut_share"]),
            rounded_up(did["drafted_per_kept"], 2),
            rounded_up(did["over_2_nats_share"], 4),
        ]
        for curve in checked
        if (did := curve.checked) is not None
    ]
    heads = ["checks of drafts", "windows", "windows cut", "drafted per kept", "share over 2 nats off"]
    return table(heads, rows) if rows else ""


def _cell(point: TailRow | None, target: float | None) -> str:
    if point is None:
        return "-"
    value, _, interval = with_interval(point.value, point.low, point.high).partition(" ")
    text = f"{value} <small>{interval}</small>"
    if thin(point):
        return f'<span class="thin">{text}</span>'
    if target is None:
        return text
    kind = "met" if point.low >= target else "near" if point.value >= target else "missed"
    return f'<span class="{kind}">{text}</span>'


def _schedule(measured: Measured, number: int, where: str) -> str:
    schedule = measured.schedule
    if schedule is None:
        return ""
    ends = [step.from_context_tokens for step in schedule.steps[1:]]
    points = [point.to_context_tokens for curve in measured.curves for point in curve.points]
    longest = max([*points, *ends]) if points or ends else 32_768
    limit = ImpossibleLimit.of_target(schedule.target)
    statistic = "tail" if limit is None else f"share over {limit.nats} nats off"
    rows = []
    for step, end in zip(schedule.steps, [*ends, None], strict=True):
        found = step.measured or {}
        tail = "-"
        if found and limit is not None:
            tail = f"{found['value']:.2g} [{found['low']:.2g}, {found['high']:.2g}]"
        elif found:
            tail = with_interval(found["value"], found["low"], found["high"])
        context = f"{step.from_context_tokens:,} to {'...' if end is None else f'{end:,}'}"
        rows.append([context, budgets_in_words(step.kv_budget_tokens), tail, _origin(found)])
    selector = schedule.selector.table()
    text = (
        f"A schedule says how many tokens of the KV cache a decoding step reads at each context length (its KV budget). "
        f"{_how_chosen(measured)} Which tokens these are is chosen anew at each step by the selector "
        f"<code>{escape(selector['kind'])}</code>, in pages of {selector['page_tokens']} tokens. Layers that always read "
        f"everything: {', '.join(map(str, schedule.dense_layers)) or 'none'}.{_grouped(schedule)}{_checked(schedule)}"
    )
    return section(
        f"The schedule{where}",
        text,
        figure(lambda narrow: figures.schedule_budgets(schedule, longest, number=number, narrow=narrow)),
        note("The distance between a green line and the dashed one is what a step need not read.")
        if len(schedule.groups) > 1
        else note("The distance between the green line and the dashed one is what a step need not read."),
        table(
            ["context", "KV budget", f"{statistic} [95 % interval]", f"where the {statistic.split()[0]} is from"], rows
        ),
        items(measured.notes),
    )


def _grouped(schedule: Schedule) -> str:
    """Which layers have budgets of their own, in a sentence; nothing if all have the same."""
    if len(schedule.layer_groups) < 2:
        return ""
    groups = "; ".join(", ".join(map(str, group)) for group in schedule.layer_groups)
    return f" Groups of layers have budgets of their own, in this order: {groups}."


def _checked(schedule: Schedule) -> str:
    """How drafts are checked, in a sentence; nothing if they are not."""
    if schedule.check is None:
        return ""
    nats = rounded_up(schedule.check.most_nats, 2)
    return (
        f" The dense policy checks windows of {schedule.check.window_tokens} tokens that are drafted like this. No token "
        f"that stands is more than {nats} nats less likely under it than under what sampled it."
    )


def _how_chosen(measured: Measured) -> str:
    """What the budgets had to meet, as it was in this calibration."""
    limit = ImpossibleLimit.of_target(measured.schedule.target if measured.schedule else None)
    if limit is not None:
        return (
            f"For each length it is the smallest budget under which, with the upper end of its interval, at most "
            f"{limit.at_most:g} of the sampled tokens were more than {limit.nats} nats off."
        )
    schedule = measured.schedule
    if measured.target is None and schedule is not None and schedule.check is not None:
        return _by_bounds(measured, schedule)
    target = f"the target {measured.target:g}"
    first = (
        f"For each length it is the smallest budget whose tail, with the lower end of its interval, met {target} among "
    )
    first += "the budgets that were measured, or between two of them."
    if measured.schedule is not None and measured.schedule.check is not None:
        chosen = escape(str((measured.schedule.made_by or {}).get("chosen", "they have the least predicted time")))
        first = (
            f"Window, floor and budgets were chosen together among schedules whose tail, with the lower end of its "
            f"interval, met {target} at every length: {chosen}."
        )
    if measured.tradeoff is not None and measured.schedule is not None:
        chosen = escape(str((measured.schedule.made_by or {}).get("chosen")))
        first = (
            f"Its tail had to meet {target} at every length, with the lower end of its interval. Among the budgets that "
            f"were measured it has {chosen}."
        )
    if measured.bound is None:
        return f"{first} Nobody has sampled with the schedule itself, so it is not verified."
    what = (
        "the measured tail itself, not the lower end of its interval,"
        if measured.bound == "value"
        else "that lower end"
    )
    return (
        f"{first} Then new rollouts were sampled with the schedule itself, and a budget was raised where {what} missed the "
        f"target there."
    )


def _by_bounds(measured: Measured, schedule: Schedule) -> str:
    """The same where drafts are checked and no target of the tail had to hold."""
    chosen = escape(str((schedule.made_by or {}).get("chosen", "they have the least predicted time")))
    first = (
        f"Window, floor and budgets were chosen together among schedules under which what the checks leave has "
        f"{BlindSpots.of_target(schedule.target)} at every length: {chosen}. The tail decided nothing."
    )
    if measured.bound is None:
        return f"{first} Nobody has sampled with the schedule itself, so it is not verified."
    then = "Then new rollouts were sampled with the schedule itself, and a budget was raised where they broke a bound."
    return f"{first} {then}"


def _origin(measured: dict[str, Any]) -> str:
    """Where a step's tail is from, in words."""
    if not measured:
        return "not measured: see the notes below"
    if measured.get("dense"):
        return "dense: the budget is as large as every context"
    if measured.get("verified"):
        return "measured with this schedule"
    return "interpolated between measured budgets" if measured.get("interpolated") else "measured at this budget"
