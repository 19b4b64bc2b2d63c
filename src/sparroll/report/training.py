"""The section of the page about RL runs, one for each model. Shows the figures of the runs; it computes none."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sparroll.report import figures
from sparroll.report.data import AccuracyPoint, TrainingRun, differences, model_key
from sparroll.report.parts import figure, items, note, section, table
from sparroll.rounding import percent_up, rounded_down, rounded_up, with_interval

_ASIDE = ("attention", "check", "log", "checkpoint")
"""Sections that say what the rollouts read, and those that change no result."""
_MOST_DIFFERENCES = 8


def training(runs: Sequence[TrainingRun]) -> str:
    """A section for each model, since runs of different models are not comparable."""
    models = list(dict.fromkeys(model_key(run.model) for run in runs))
    parts = []
    for number, model in enumerate(models):
        own = [run for run in runs if model_key(run.model) == model]
        parts.append(_section(own, number, f": {own[0].model}" if len(models) > 1 else ""))
    return "\n".join(parts)


def _section(runs: list[TrainingRun], number: int, where: str) -> str:
    targets = sorted({run.target for run in runs if run.target is not None})
    text = (
        f"Model <b>{escape(runs[0].model)}</b>. {_what_differs(runs)} Rollouts are the responses that a step samples and "
        f"learns from. <b>Reward</b> is their mean; thin lines are single steps, thick ones the mean of the last five. The "
        f"<b>tail</b> is the 5th percentile of the acceptance of the step's own rollouts: solid for the bin of context "
        f"lengths with the lowest one (the worst bin), as the guard looks at it, dotted for all lengths together. In a "
        f"single step it rests on few rollouts. <b>Dense accuracy</b> is the share of right answers to held-out "
        f"problems with full attention, whatever the rollouts read."
    )
    if targets:
        text += f" The dashed line is the target of the tail, {' and '.join(f'{target:g}' for target in targets)}."
    if any(run.reward_gap for run in runs):
        text += " " + _about_the_gap(runs)
    windows = sorted({run.reward_window_steps for run in runs})
    steps = f"{windows[0]}" if len(windows) == 1 else f"{windows[0]} to {windows[-1]}"
    rows = [_row(run) for run in runs]
    head = [
        "run",
        "steps",
        f"reward, first to last {steps} steps",
        "dense accuracy before",
        "after",
        "lowest tail, worst bin",
        "lowest tail, all lengths",
        "target",
        "KV read",
    ]
    if any(run.reward_gap for run in runs):
        head.append("reward gap, last window")
        rows = [[*row, _gap(run)] for row, run in zip(rows, runs, strict=True)]
    events = [f"{run.name}: {event}" for run in runs for event in run.events]
    return section(
        f"Reinforcement learning with these rollouts{where}",
        text,
        figure(lambda narrow: figures.training(runs, targets, number, narrow)),
        table(head, rows),
        note(
            "Rewards are means over the first and over the last steps, as <code>sparroll train</code> prints them. Brackets "
            "are 95 % intervals over problems. The lowest tails are those of any single step. <b>KV read</b> is the share "
            "of the KV cache that the rollouts read, mean over steps."
        ),
        items(events),
    )


def _row(run: TrainingRun) -> list[str]:
    first, last = (run.accuracy[0], run.accuracy[-1]) if run.accuracy else (None, None)
    return [
        f"<b>{escape(run.name)}</b> <small>{escape(run.rollouts)}</small>",
        str(len(run.steps)),
        f"{rounded_down(run.reward_first)} to {rounded_down(run.reward_last)}",
        _accuracy(first),
        _accuracy(last),
        rounded_down(lowest(run.worst_bin_q05)),
        rounded_down(lowest(run.tail_q05)),
        "-" if run.target is None else f"{run.target:g}",
        percent_up(run.read_share),
    ]


def _about_the_gap(runs: Sequence[TrainingRun]) -> str:
    tolerated = sorted({run.tolerated_gap for run in runs if run.tolerated_gap is not None})
    said = (
        "The <b>reward gap</b> is the mean reward of the control group, which is decoded densely, minus that of the sparse "
        "rollouts of the same prompts, over the last steps; above 0, sparsity costs rewards."
    )
    if tolerated:
        said += f" Its dashed line is the tolerated gap, {' and '.join(f'{gap:g}' for gap in tolerated)}."
    return said


def _gap(run: TrainingRun) -> str:
    if not run.reward_gap:
        return "-"
    last = run.reward_gap[-1]
    return f"{rounded_up(last.value)} <small>[{rounded_up(last.low)}, {rounded_up(last.high)}]</small>"


def lowest(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _what_differs(runs: list[TrainingRun]) -> str:
    """What the runs share, by their configurations."""
    if len(runs) == 1:
        return f"One run of {len(runs[0].steps)} steps; its rollouts read: {escape(runs[0].rollouts)}."
    found = differences(runs, without=_ASIDE)
    if not found:
        return "The runs have the same model, prompts, seed and other settings; only what their rollouts read differs."
    shown = [f"<code>{escape(name)}</code> ({_listed(values)})" for name, values in found.items()]
    more = f", and in {len(shown) - _MOST_DIFFERENCES} more fields" if len(shown) > _MOST_DIFFERENCES else ""
    return (
        f"<b>The runs differ in more than what their rollouts read</b>, so do not compare them as if they did not: "
        f"{', '.join(shown[:_MOST_DIFFERENCES])}{more}."
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join(escape(str(value)) for value in dict.fromkeys(map(str, values)))


def _accuracy(point: AccuracyPoint | None) -> str:
    if point is None:
        return "-"
    value, _, interval = with_interval(point.value, point.low, point.high).partition(" ")
    return f"{value} <small>{interval}</small>"
