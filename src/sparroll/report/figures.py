"""The figures of a report, as SVG text for an HTML page. Computes nothing."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sparroll.report.data import PlannedDecoding, TailCurve, TrainingRun, thin, told_apart
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule

INK, QUIET, GRID = "#1f2933", "#66727f", "#e4e7eb"
DENSE, GOOD, BAD, TARGET = "#4a5560", "#0b7a75", "#c8553d", "#b7791f"
OTHERS = ("#5b6abf", "#8a4f7d", "#6b8e23", "#3d85c6")
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Arial", "DejaVu Sans"],
    "font.size": 10,
    # Names of files and runs may hold dollar signs.
    "text.parse_math": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}


def run_color(name: str, index: int) -> str:
    """The colour of a run. The three runs of the quickstart have the same colours everywhere; others take turns."""
    return {"dense": DENSE, "calibrated": GOOD, "aggressive": BAD}.get(name, OTHERS[index % len(OTHERS)])


def in_legend(name: str) -> str:
    """A name as a label. matplotlib leaves out labels that begin with an underscore, so an invisible space goes before."""
    return f"\u200b{name}" if name.startswith("_") else name


def tail_by_length(
    curves: Sequence[TailCurve], target: float | None, statistic: str, number: int = 0, narrow: bool = False
) -> str:
    """Tail against context length: a line for each budget and schedule, the dense ceiling, and the target. number: of
    the figure among its like on the page. narrow: for a phone."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 4.9) if narrow else (10.4, 4.4), layout="constrained")
        axes = figure.subplots()
        lowest = axis_begin(curves, target)
        for curve, look in zip(curves, _looks(curves), strict=True):
            _tail_line(axes, curve, look, lowest)
        if target is not None:
            axes.axhline(target, color=TARGET, linewidth=1.4, linestyle=(0, (5, 3)))
            axes.annotate(
                f"target {target:g}", (1, target), xycoords=("axes fraction", "data"), xytext=(-4, 4),
                textcoords="offset points", ha="right", color=TARGET, fontsize=9,
            )  # fmt: skip
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(statistic)
        axes.set_ylim(lowest, 1.01)
        axes.set_xlim(0, max(point.to_context_tokens for curve in curves for point in curve.points))
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        if narrow:
            figure.legend(loc="outside lower center", ncols=2)
        else:
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        return svg(figure, figure_name("tail", number, narrow))


def axis_begin(curves: Sequence[TailCurve], target: float | None) -> float:
    """Where the axis of the tail begins. Points with too little data do not stretch it, unless there are no others."""
    values = [point.low for curve in curves for point in curve.points if not thin(point)]
    values = values or [point.value for curve in curves for point in curve.points]
    return max(0.0, min([*values, target or 1.0]) - 0.04)


def _looks(curves: Sequence[TailCurve]) -> list[dict[str, Any]]:
    """The colour and the line of each curve: of budgets by their size, of other schedules one each."""
    budgets = sorted({curve.kv_budget_tokens for curve in curves if curve.kv_budget_tokens is not None})
    others = itertools.product(("-.", ":", (0, (5, 1, 1, 1, 1, 1))), OTHERS)
    looks: list[dict[str, Any]] = []
    for curve in curves:
        if curve.kind == "ceiling":
            looks.append({"color": DENSE, "linewidth": 2.2, "linestyle": "--"})
        elif curve.kind == "schedule":
            looks.append({"color": GOOD, "linewidth": 2.8})
        elif curve.kv_budget_tokens is None:
            style, color = next(others, ("-.", OTHERS[0]))
            looks.append({"color": color, "linestyle": style})
        else:
            place = budgets.index(curve.kv_budget_tokens) / max(1, len(budgets) - 1)
            looks.append({"color": mpl.colormaps["plasma"](0.08 + 0.78 * (1 - place))})
    return looks


def _tail_line(axes: Axes, curve: TailCurve, look: dict[str, Any], lowest: float) -> None:
    """lowest: where the axis begins; hollow points below it stand there, as triangles."""
    solid = [point for point in curve.points if not thin(point)]
    at = [point.middle for point in solid]
    axes.plot(at, [point.value for point in solid], marker="o", markersize=4, label=curve.name, **look)
    axes.fill_between(
        at,
        [point.low for point in solid],
        [point.high for point in solid],
        color=look["color"],
        alpha=0.13,
        linewidth=0,
    )
    hollow = [point for point in curve.points if thin(point)]
    look = {"linestyle": "none", "markersize": 4, "markerfacecolor": "none", "color": look["color"], "alpha": 0.5}
    inside = [point for point in hollow if point.value >= lowest]
    axes.plot([point.middle for point in inside], [point.value for point in inside], marker="o", **look)
    for point in hollow:
        if point.value < lowest:
            axes.plot(point.middle, lowest, marker="v", clip_on=False, **look)


def schedule_budgets(
    schedule: Schedule, longest: int, others: Sequence[Schedule] = (), number: int = 0, narrow: bool = False
) -> str:
    """Budget against context length, below the diagonal that dense attention reads."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 3.9) if narrow else (10.4, 3.7), layout="constrained")
        axes = figure.subplots()
        unit = schedule.selector.unit_tokens
        # Contexts whose last unit is complete, because incomplete ones would give the curve a sawtooth edge.
        contexts = np.unique(-(-np.linspace(0, longest, 401).astype(np.int64) // unit) * unit)
        for style, label, group in _group_lines(schedule):
            read = group.read_tokens(contexts)
            axes.fill_between(contexts, read, color=GOOD, alpha=0.18, linewidth=0)
            axes.plot(contexts, read, color=GOOD, linestyle=style, label=label)
        for index, other in enumerate(others):
            for style, label, group in _group_lines(other):
                read = group.read_tokens(contexts)
                axes.plot(contexts, read, color=run_color(other.name, index), linestyle=style, label=label)
        axes.plot(contexts, contexts, color=DENSE, linestyle="--", linewidth=1.6, label="dense: the whole context")
        axes.set_xlim(0, longest)
        axes.set_ylim(0, None)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("tokens read per step")
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.legend(loc="upper left")
        return svg(figure, figure_name("schedule", number, narrow))


def _group_lines(schedule: Schedule) -> list[tuple[str, str, Schedule]]:
    """(The line's style, its label, the schedule) for each group of layers."""
    if len(schedule.groups) == 1:
        return [("-", f"{in_legend(schedule.name)}: tokens read", schedule.groups[0])]
    named = [f"{in_legend(schedule.name)}, layers {_layers(group)}: tokens read" for group in schedule.layer_groups]
    styles = itertools.cycle(("-", "-.", ":"))
    return list(zip(styles, named, schedule.groups, strict=False))


def _layers(group: tuple[int, ...]) -> str:
    """Layer numbers, in short where they are many."""
    return ", ".join(map(str, group)) if len(group) < 5 else f"{group[0]}, {group[1]}, ..., {group[-1]}"


def planned_speedups(plans: Sequence[PlannedDecoding], narrow: bool = False) -> str:
    """Predicted speed-up of decoding against context length, a line for each plan. The lines are without checks of
    drafts, also where the figure in the label is with them."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 4.4) if narrow else (10.4, 3.7), layout="constrained")
        axes = figure.subplots()
        for index, (plan, name) in enumerate(zip(plans, told_apart(plans, model=True), strict=True)):
            rows = plan.results["by_length"]
            label = f"{name}: {rounded_down(plan.speedup, 2)}x at lengths {plan.results['lengths']}"
            label += "; line without the checks" if plan.checked else ""
            axes.plot(
                [row["context_tokens"] for row in rows], [row["speedup"] for row in rows],
                marker="o", markersize=4, color=(GOOD, *OTHERS)[index % (1 + len(OTHERS))], label=label,
            )  # fmt: skip
        axes.axhline(1, color=DENSE, linestyle="--", linewidth=1.4, label="dense")
        axes.set_ylim(0, None)
        axes.set_xlim(0, None)
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel("predicted speed-up of decoding")
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        if narrow:
            figure.legend(loc="outside lower center", ncols=1)
        else:
            axes.legend(loc="lower right")
        return svg(figure, figure_name("plan", 0, narrow))


def training(runs: Sequence[TrainingRun], targets: Sequence[float], number: int = 0, narrow: bool = False) -> str:
    """Reward, tail and dense accuracy by step, with a colour for each run: side by side, or below each other. With a
    control group, also the reward gap, below the tail."""
    with mpl.rc_context(STYLE):
        figure, panels = _training_panels(4 if any(run.reward_gap for run in runs) else 3, narrow)
        reward, tail, accuracy, *gap = panels
        for index, run in enumerate(runs):
            color = run_color(run.name, index)
            reward.plot(run.steps, run.reward, color=color, alpha=0.28, linewidth=1.1)
            reward.plot(run.steps, _smooth(run.reward), color=color, label=in_legend(run.name))
            tail.plot(*_seen(run.steps, run.tail_q05), color=color, linewidth=1.2, linestyle=":")
            tail.plot(*_seen(run.steps, run.worst_bin_q05), color=color)
            # Moved sideways a little, so that the intervals of equal runs can be told apart.
            offset = 0.012 * max(run.steps) * (index - (len(runs) - 1) / 2)
            accuracy.errorbar(
                [point.step + offset for point in run.accuracy], [point.value for point in run.accuracy],
                yerr=[
                    [point.value - point.low for point in run.accuracy],
                    [point.high - point.value for point in run.accuracy],
                ],
                color=color, marker="o", markersize=4.5, elinewidth=1, capsize=2.5, label=in_legend(run.name),
            )  # fmt: skip
        for target in targets:
            tail.axhline(target, color=TARGET, linewidth=1.4, linestyle=(0, (5, 3)))
        reward.set_title("mean reward of the rollouts")
        tail.set_title("tail: worst bin, and all lengths (dotted)")
        accuracy.set_title("dense accuracy, with 95 % intervals")
        for axes in gap:
            _reward_gap(axes, runs)
        for axes in (reward, tail, accuracy, *gap):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _limit_rewards(reward, accuracy, runs)
        handles, labels = reward.get_legend_handles_labels()
        columns = min(len(runs), 3) if narrow else len(runs)
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=10.5)
        return svg(figure, figure_name("training", number, narrow))


def _limit_rewards(reward: Axes, accuracy: Axes, runs: Sequence[TrainingRun]) -> None:
    """The limits of the panels of rewards and accuracies: the same for both where rewards are shares, too."""
    rewards = [value for run in runs for value in run.reward]
    shares = [bound for run in runs for point in run.accuracy for bound in (point.low, point.high)]
    if min(rewards) >= 0 and max(rewards) <= 1:
        rewards = shares = rewards + shares
    for axes, values in ((reward, rewards), (accuracy, shares)):
        if values:
            axes.set_ylim(*_limits(min(values), max(values)))


def _limits(low: float, high: float) -> tuple[float, float]:
    """The limits of an axis with a margin: within [0, 1] where all values are."""
    if low >= 0 and high <= 1:
        return max(0.0, low - 0.05), min(1.0, high + 0.05)
    margin = 0.05 * ((high - low) or abs(high))
    return low - margin, high + margin


def _training_panels(panels: int, narrow: bool) -> tuple[Figure, list[Axes]]:
    """Three side by side, or four in two rows; on a phone all below each other."""
    rows, columns = (panels, 1) if narrow else {3: (1, 3), 4: (2, 2)}[panels]
    size = (4.4, {3: 8.6, 4: 11.4}[panels]) if narrow else (11.4, {3: 3.7, 4: 6.8}[panels])
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns).flat)


def _reward_gap(axes: Axes, runs: Sequence[TrainingRun]) -> None:
    """Dense minus sparse reward over the control group's window, with its interval and what is tolerated."""
    for index, run in enumerate(runs):
        color, at = run_color(run.name, index), [point.step for point in run.reward_gap]
        axes.plot(at, [point.value for point in run.reward_gap], color=color, marker="o", markersize=3)
        low, high = [point.low for point in run.reward_gap], [point.high for point in run.reward_gap]
        axes.fill_between(at, low, high, color=color, alpha=0.13, linewidth=0)
    axes.axhline(0, color=QUIET, linewidth=1)
    for tolerated in sorted({run.tolerated_gap for run in runs if run.tolerated_gap is not None}):
        axes.axhline(tolerated, color=TARGET, linewidth=1.4, linestyle=(0, (5, 3)))
    axes.set_title("reward gap: dense minus sparse, with 95 % intervals")


def _seen(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float]]:
    """The steps that have a value, and the values."""
    found = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    return [step for step, _ in found], [value for _, value in found]


def figure_name(what: str, number: int, narrow: bool) -> str:
    """A name that no other figure of the page has."""
    return f"{what}{number or ''}{'-narrow' if narrow else ''}"


def _smooth(values: Sequence[float], window: int = 5) -> list[float]:
    """Mean of the last `window` values at each step, which the thick line shows."""
    return [
        sum(values[max(0, end - window) : end]) / len(values[max(0, end - window) : end])
        for end in range(1, len(values) + 1)
    ]


def _thousands(value: float, _: int) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def svg(figure: Figure, name: str) -> str:
    sink = io.StringIO()
    # A salt for each figure makes the ids of several figures on one page differ, and keeps them the same in every run.
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = sink.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    # An HTML parser knows the namespaces. Without them the page holds no address of another site.
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    ids = set(re.findall(r'\bid="([^"]+)"', text))
    for one in sorted(ids, key=len, reverse=True):
        text = re.sub(rf'(id="|#){re.escape(one)}(["\)])', rf"\g<1>{name}-{one}\g<2>", text)
    return text.replace("<svg ", f'<svg role="img" class="figure" data-figure="{name}" ', 1)
