"""Figures and the table of the study from its record. Draws what it is given; runs nothing.

python recipes/mismatch-study/plots.py --record runs/study/study.json --out runs/study/figures

Writes accuracy.svg, progress.svg, training.svg, tail.svg, cost.svg, seconds.svg (and each as .png with --png) and table.md;
with --only the figures that it names and nothing else. Rows of which no run went to its last step are in the table alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import matplotlib as mpl  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from study_record import KIND, is_whole  # noqa: E402

from sparroll import files, records  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.report import figures  # noqa: E402
from sparroll.report.figures import BAD, DENSE, GOOD, QUIET  # noqa: E402

FAMILY_COLOR = {
    "dense": DENSE,
    "fixed": BAD,
    "eviction": "#8a4f7d",
    "calibrated": GOOD,
    "corrected": "#b7791f",
    "verified": "#2f7ebc",
    "budgets": "#17a2a2",
    "adaptive": "#5b6abf",
}
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (9, 3)), (0, (1, 4)), (0, (6, 2, 2, 2)), (0, (3, 1, 1, 1)))
MARKS = "osD^vPX*h"
"""Of the rows of a family, by their place in it."""
PHASES = ("rollout", "score", "measure", "update", "distill", "weights", "ceiling")
PHASE_COLOR = ("#0b7a75", "#5b6abf", "#b7791f", "#c8553d", "#8a4f7d", "#6b8e23", "#66727f")
STYLE = {**figures.STYLE, "legend.fontsize": 8.5, "svg.hashsalt": "mismatch-study"}


def accuracy(results: dict[str, Any]) -> Figure:
    """Change of dense accuracy by row: a bar for the mean, a dot for each seed."""
    table = _whole_rows(results)
    figure = Figure(figsize=(9.5, 1.2 + 0.34 * len(table)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(table):
        color = FAMILY_COLOR[row["family"]]
        axes.barh(place, row["accuracy_change"]["mean"], color=color, alpha=0.35)
        seeds = [_change(run) for run in _whole_runs(results, row["row"])]
        axes.plot(seeds, [place] * len(seeds), "o", color=color, markersize=5)
    axes.axvline(0, color=QUIET, linewidth=1)
    axes.set_yticks(range(len(table)), [row["row"] for row in table])
    axes.invert_yaxis()
    axes.set_xlabel("change of dense accuracy, first to last evaluation (dots: seeds)")
    return figure


def progress(results: dict[str, Any]) -> Figure:
    """Change of dense accuracy at each evaluation: mean over the seeds that went to the last step, and their range."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for row in _whole_rows(results):
        runs = [run["dense_accuracy"] for run in _whole_runs(results, row["row"])]
        steps = [point[0] for point in runs[0]]
        changes = list(zip(*([point[1] - run[0][1] for point in run] for run in runs), strict=True))
        style = _style(results, row)
        axes.plot(steps, [fmean(each) for each in changes], label=row["row"], linewidth=1.6, marker="o", **style)
        lows, highs = [min(each) for each in changes], [max(each) for each in changes]
        axes.fill_between(steps, lows, highs, color=style["color"], alpha=0.1, linewidth=0)
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.legend(loc="best", ncols=2)
    axes.set_xlabel("step")
    axes.set_ylabel("change of dense accuracy (shaded: seeds)")
    return figure


def training(results: dict[str, Any]) -> Figure:
    """Reward by step, one panel a family, dense rollouts in each."""
    return _by_family(results, "reward/mean", "mean reward", smooth=3)


def tail(results: dict[str, Any]) -> Figure:
    """5th percentile of the acceptance by step, one panel a family."""
    figure = _by_family(results, "mismatch/acceptance_q05", "tail: 5th percentile", smooth=1)
    for axes in figure.axes:
        axes.set_ylim(0, 1)
    return figure


def cost(results: dict[str, Any]) -> Figure:
    """What a row reads of the KV cache against what it gains."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    axes = figure.subplots()
    rows = _whole_rows(results)
    for place, row in enumerate(rows):
        read, gain, color = row["kv_read_share"]["mean"], row["accuracy_change"], FAMILY_COLOR[row["family"]]
        mark = MARKS[sum(other["family"] == row["family"] for other in rows[:place])]
        axes.plot([read, read], [gain["low"], gain["high"]], color=color, alpha=0.5)
        axes.plot(read, gain["mean"], mark, color=color, markersize=7, linestyle="", label=row["row"])
    figure.legend(loc="outside right upper")
    axes.axhline(0, color=QUIET, linewidth=1)
    axes.set_xlim(0, 1.05)
    axes.set_xlabel("share of the KV cache read, all layers (mean over steps)")
    axes.set_ylabel("change of dense accuracy (range over seeds)")
    return figure


def seconds(results: dict[str, Any]) -> Figure:
    """Wall time of a step by phase."""
    table = _whole_rows(results)
    figure = Figure(figsize=(9.5, 1.4 + 0.34 * len(table)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(table):
        start = 0.0
        for phase, color in zip(PHASES, PHASE_COLOR, strict=True):
            values = [_series_mean(run, f"time/{phase}_seconds") for run in _whole_runs(results, row["row"])]
            width = fmean(values) if values else 0.0
            axes.barh(place, width, left=start, color=color, label=phase if not place else None)
            start += width
    axes.set_yticks(range(len(table)), [row["row"] for row in table])
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step, several runs sharing a GPU")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES))
    return figure


def _by_family(results: dict[str, Any], metric: str, title: str, smooth: int) -> Figure:
    families = [family for family in FAMILY_COLOR if family != "dense" and _rows_of(results, family)]
    figure = Figure(figsize=(11.4, 4.4), layout="constrained")
    panels = figure.subplots(1, max(1, len(families)), sharey=True, squeeze=False)[0]
    for axes, family in zip(panels, families, strict=False):
        for row in [*_rows_of(results, "dense"), *_rows_of(results, family)]:
            curve = _mean_curve([run["series"][metric] for run in _whole_runs(results, row["row"])], smooth)
            axes.plot(range(1, len(curve) + 1), curve, label=row["row"], linewidth=1.6, **_style(results, row))
        axes.set_title(family)
        axes.set_xlabel("step")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14))
    panels[0].set_ylabel(title)
    return figure


def _style(results: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A colour for the family, and a kind of line for the row in it."""
    index = _rows_of(results, row["family"]).index(row)
    return {"color": FAMILY_COLOR[row["family"]], "linestyle": LINES[index]}


def _rows_of(results: dict[str, Any], family: str) -> list[dict[str, Any]]:
    return [row for row in _whole_rows(results) if row["family"] == family]


def _whole_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of which a run went to its last step."""
    return [row for row in results["table"] if _whole_runs(results, row["row"]) and row["accuracy_change"]]


def _whole_runs(results: dict[str, Any], row: str) -> list[dict[str, Any]]:
    return [run for run in results["runs"] if run["row"] == row and is_whole(run)]


def _change(run: dict[str, Any]) -> float:
    return run["dense_accuracy"][-1][1] - run["dense_accuracy"][0][1]


def _series_mean(run: dict[str, Any], name: str) -> float:
    known = [value for value in run["series"].get(name, []) if value is not None]
    return fmean(known) if known else 0.0


def _mean_curve(curves: list[list[float]], smooth: int) -> list[float]:
    """Mean over seeds at each step, then over the last `smooth` steps."""
    means = [fmean(values) for values in zip(*curves, strict=True)]
    return [fmean(means[max(0, end - smooth) : end]) for end in range(1, len(means) + 1)]


COLUMNS = (
    ("accuracy_before", "dense accuracy before", 3),
    ("accuracy_after", "after", 3),
    ("accuracy_change", "change", 3),
    ("tail", "tail", 3),
    ("tail_last", "tail, last 5 steps", 3),
    ("masked_share", "tokens masked", 4),
    ("kv_read_share", "KV read", 3),
    ("kv_saved_share", "KV memory saved", 3),
    ("kl", "KL", 4),
    ("response_tokens", "response tokens", 0),
    ("step_seconds", "s a step", 1),
)


def table(results: dict[str, Any]) -> str:
    """Markdown: per row the mean over seeds, and the range where seeds differ."""
    lines = ["| row | seeds | " + " | ".join(title for _, title, _ in COLUMNS) + " |"]
    lines.append("|" + " --- |" * (len(COLUMNS) + 2))
    for row in results["table"]:
        cells = [_cell(row[name], digits) for name, _, digits in COLUMNS]
        lines.append(f"| {row['row']} | {row['seeds']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(spread: dict[str, float] | None, digits: int) -> str:
    if spread is None:
        return "-"
    # + 0.0 after rounding: no figure is "-0.000".
    mean, low, high = (f"{round(spread[part], digits) + 0.0:.{digits}f}" for part in ("mean", "low", "high"))
    return mean if low == high else f"{mean} ({low} to {high})"


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "accuracy": accuracy,
    "progress": progress,
    "training": training,
    "tail": tail,
    "cost": cost,
    "seconds": seconds,
}


def draw(record: Path, out: Path, png: bool = False, only: Collection[str] = ()) -> list[Path]:
    results = records.read(record, KIND)["results"]
    most = max(len(_rows_of(results, family)) for family in FAMILY_COLOR)
    if most > len(LINES):
        raise UserError(f"a family has {most} rows, and figures tell {len(LINES)} apart", "draw a record of fewer rows")
    out.mkdir(parents=True, exist_ok=True)
    written = [] if only else [files.write_text(out / "table.md", table(results))]
    for name, make in FIGURES.items():
        if only and name not in only:
            continue
        with mpl.rc_context(STYLE):
            figure = make(results)
            for ending in ("svg", "png") if png else ("svg",):
                metadata = {"Date": None, "Creator": None} if ending == "svg" else None
                figure.savefig(out / f"{name}.{ending}", dpi=150, metadata=metadata)
                written.append(out / f"{name}.{ending}")
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--png", action="store_true")
    parser.add_argument("--only", nargs="+", default=(), choices=list(FIGURES), help="these figures and no table")
    args = parser.parse_args()
    try:
        for path in draw(args.record, args.out, args.png, args.only):
            print(path)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
