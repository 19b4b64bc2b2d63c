"""The section about what a decode step's time buys: KL and worst tail against the time of a step, for every selector that
was swept. Shows the points of a calibration's record; it computes none."""

from __future__ import annotations

from html import escape
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparroll.layer_groups import budgets_in_words
from sparroll.report import figures
from sparroll.report.figures import BAD, GOOD, OTHERS, STYLE, TARGET, svg
from sparroll.report.parts import figure, note, section, table
from sparroll.rounding import percent_up, rounded_down, rounded_up

_COLORS = (GOOD, *OTHERS)
_HOW = {
    "one budget": "one budget at every length",
    "allocated": "the best budgets for each time",
    "chosen": "chosen, as the sweep predicts it",
    "verified": "chosen, as new rollouts measured it",
}
Point = dict[str, Any]


def tradeoff(found: dict[str, Any], where: str, number: int) -> str:
    """The section. found: what `Tradeoff.table` wrote."""
    most = found["most_step_seconds"]
    asked = (
        "the least time at the target"
        if most is None
        else f"the least {_LOSS[found['objective']]} in {rounded_up(1e3 * most, 3)} ms a step"
    )
    text = (
        "A tail does not see the worst tokens of a hundred, so the KL is shown beside it. Both are better where a decode "
        f"step reads more, which takes longer. Times are predicted on {escape(str(found['hardware']))}, as shares of a "
        f"dense step ({1e3 * found['dense_step_seconds']:.3f} ms). The schedule was chosen for {asked}, with the lower "
        f"bound of the tail at {found['target']:g} or more at every length."
    )
    said = (
        "Lines: the best budgets that hold the target, for each time. Rings: one budget at every length. Diamond: chosen, "
        "as the sweep predicts it; star: as new rollouts under it measured it. Further left is faster, and what is lower on "
        "the left and higher on the right is better."
    )
    rows = [_row(point) for point in _shown(found)]
    heads = ["selector", "", "of a dense step's time", "KL", "probability over 20 nats off", "worst tail", "budgets"]
    refused = [note(f"No schedule: {escape(line)}") for line in found["refused"]]
    # Records of before the kernels were timed have none.
    times = [note(escape(line[:1].upper() + line[1:])) for line in found.get("times", ())]
    return section(
        f"What a decode step's time buys{where}",
        text,
        figure(lambda narrow: figure_of(found, number, narrow)),
        note(said),
        table(heads, rows),
        *refused,
        *times,
    )


_LOSS = {"kl": "KL", "far_mass": "probability of tokens far off", "tail": "1 - tail", "time": "time"}


def _shown(found: dict[str, Any]) -> list[Point]:
    """The chosen point, and of every other selector the best one that takes no longer."""
    chosen, rivals = found["chosen"], dict[str, Point]()
    for point in found["points"]:
        fits = point["step_seconds"] <= chosen["step_seconds"] * 1.001
        if point["how"] == "allocated" and point["selector"] != chosen["selector"] and fits:
            rivals[point["selector"]] = point
    verified = [found["verified"]] if "verified" in found else []
    return [chosen, *verified, *rivals.values()]


def _row(point: Point) -> list[str]:
    budgets = [
        f"{start:,}: {budgets_in_words(tuple(budget) if isinstance(budget, list) else budget)}"
        for start, budget in point["budgets"]
    ]
    return [
        escape(point["selector"]),
        _HOW[point["how"]],
        percent_up(point["step_time_share"], 1),
        rounded_up(point["kl"], 5),
        f"{point['over_20_nats_share']:.1e}",
        rounded_down(point["worst_tail"]),
        f"<small>{escape('; '.join(budgets))}</small>",
    ]


def figure_of(found: dict[str, Any], number: int, narrow: bool) -> str:
    """KL and worst tail against the time of a step, side by side, or below each other for a phone."""
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(4.4, 7.2) if narrow else (10.4, 4.2), layout="constrained")
        kl, tail = drawn.subplots(2, 1) if narrow else drawn.subplots(1, 2)
        for color, selector in zip(_cycled(len(_selectors(found))), _selectors(found), strict=True):
            points = [point for point in found["points"] if point["selector"] == selector]
            _draw(kl, points, "kl", color, selector)
            _draw(tail, points, "worst_tail", color, selector)
        for point, marker in ((found["chosen"], "D"), (found.get("verified"), "*")):
            if point is not None:
                look: dict[str, Any] = {"color": BAD, "marker": marker, "markersize": 11 if marker == "*" else 7}
                kl.plot(100 * point["step_time_share"], point["kl"], linestyle="none", zorder=4, **look)
                tail.plot(100 * point["step_time_share"], point["worst_tail"], linestyle="none", zorder=4, **look)
        tail.axhline(found["target"], color=TARGET, linewidth=1.4, linestyle=(0, (5, 3)))
        kl.set_title("mean KL")
        tail.set_title("tail of the worst length")
        if min(point["kl"] for point in found["points"]) > 0:
            kl.set_yscale("log")
        for axes in (kl, tail):
            axes.set_xlabel("time of a decode step, % of a dense one")
        handles, labels = kl.get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside lower center", ncols=1 if narrow else 3)
        return svg(drawn, figures.figure_name("tradeoff", number, narrow))


def _selectors(found: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(point["selector"] for point in found["points"]))


def _cycled(count: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(count)]


def _draw(axes: Axes, points: list[Point], figure: str, color: str, selector: str) -> None:
    best = [point for point in points if point["how"] == "allocated"]
    fixed = [point for point in points if point["how"] == "one budget"]
    axes.plot(_share(best), [point[figure] for point in best], color=color, marker="o", markersize=3, label=selector)
    axes.plot(
        _share(fixed), [point[figure] for point in fixed],
        linestyle="none", marker="o", markersize=6, markerfacecolor="none", color=color, alpha=0.7,
    )  # fmt: skip


def _share(points: list[Point]) -> list[float]:
    return [100 * point["step_time_share"] for point in points]
