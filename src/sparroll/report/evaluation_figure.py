"""The figure of an evaluation: mean@k by task on the left, pass@k against k on the right. Computes nothing."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from sparroll.report.figures import BAD, DENSE, GOOD, OTHERS, STYLE, svg

_POLICIES = {"dense": DENSE, "sparse": GOOD, "evicted": BAD}
_TASKS = (GOOD, *OTHERS, BAD)
_LABEL_SIGNS = 28


def accuracy(results: dict[str, Any], number: int, narrow: bool = False) -> str:
    """The figure as SVG. On the left colours are policies. On the right colours are tasks, and dense lines are
    dashed. narrow: for a phone, with the right part below the left one."""
    with mpl.rc_context(STYLE):
        tasks = results["tasks"]
        height = 1.9 + 0.42 * max(4, len(tasks))
        if narrow:
            figure = Figure(figsize=(4.4, 2 * height + 0.22 * len(tasks)), layout="constrained")
            left, right = figure.subplots(2, 1)
        else:
            figure = Figure(figsize=(11.4, height), layout="constrained")
            left, right = figure.subplots(1, 2, width_ratios=[1.15, 1])
        _means(left, tasks, results["samples"])
        _passes(right, tasks, narrow)
        return svg(figure, f"evaluation-{number}{'-narrow' if narrow else ''}")


def _means(axes: Axes, tasks: dict[str, Any], k: int) -> None:
    names = list(dict.fromkeys(name for task in tasks.values() for name in task["policies"]))
    for place, name in enumerate(names):
        shown = [
            (row + 0.16 * (2 * place - len(names) + 1), task["policies"][name][f"mean@{k}"])
            for row, task in enumerate(tasks.values())
            if task["policies"][name][f"mean@{k}"] is not None
        ]
        axes.errorbar(
            [found["value"] for _, found in shown], [row for row, _ in shown],
            xerr=[
                [found["value"] - found["low"] for _, found in shown],
                [found["high"] - found["value"] for _, found in shown],
            ],
            linestyle="none", marker="o", markersize=5, elinewidth=1.4, capsize=3, color=_POLICIES[name], label=name,
        )  # fmt: skip
    axes.set_yticks(range(len(tasks)), [_short(label) for label in tasks])
    axes.set_ylim(len(tasks) - 0.4, -0.6)
    axes.set_xlim(-0.02, 1.02)
    axes.grid(axis="y", visible=False)
    axes.set_title(f"mean@{k}, with 95 % intervals")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(names))


def _short(label: str) -> str:
    """A label that fits the axis: of a label that is too long, such as a path with folders, only the end."""
    return label if len(label) <= _LABEL_SIGNS else f"...{label[3 - _LABEL_SIGNS :]}"


def _passes(axes: Axes, tasks: dict[str, Any], narrow: bool) -> None:
    ks: list[int] = []
    for index, task in enumerate(tasks.values()):
        for name, found in task["policies"].items():
            points = [
                (int(metric.removeprefix("pass@")), value["value"])
                for metric, value in found.items()
                if metric.startswith("pass@") and value is not None
            ]
            ks += [k for k, _ in points]
            axes.plot(
                [k for k, _ in points], [value for _, value in points], color=_TASKS[index % len(_TASKS)],
                linestyle="--" if name == "dense" else "-", marker="o", markersize=4,
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(ks)), [str(k) for k in sorted(set(ks))])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("k")
    axes.set_title("pass@k, dense dashed")
    handles = [
        Line2D([], [], color=_TASKS[index % len(_TASKS)], label=_short(label)) for index, label in enumerate(tasks)
    ]
    place = (
        {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        if narrow
        else {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)}
    )
    axes.legend(handles=handles, **place)
