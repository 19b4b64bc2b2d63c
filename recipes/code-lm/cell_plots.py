"""Figures of measured cells, as one self-contained page. Draws what it is given; runs nothing.

    python recipes/code-lm/cell_plots.py --records runs/code-lm/seed-0/cells/cells.json --out runs/code-lm/cells.html

For each record and bin of context lengths: the 5th percentile, the KL and the share of impossible tokens against budget,
with intervals over sequences where there are enough of them; and the ratio of budgets against the published budget.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import matplotlib as mpl  # noqa: E402
import numpy as np  # noqa: E402
from cells import PUBLISHED  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from scale_presets import KIND  # noqa: E402

from sparroll import files, records  # noqa: E402
from sparroll.errors import UserError  # noqa: E402
from sparroll.report import figures  # noqa: E402

COLORS = ("#4a5560", "#0b7a75", "#c8553d", "#5b6abf", "#b7791f", "#8a4f7d", "#6b8e23")
LEAST_BUDGETS = 4
"""A rule with fewer budgets has no line; it is in the table of the record."""
STATISTICS = (
    ("q05", "5th percentile of acceptance", "linear"),
    ("kl_sparse_to_dense", "KL(sparse || dense), nats", "log"),
    ("over_10_nats", "drawn tokens more than 10 nats off", "log"),
)


def against_budget(results: dict[str, Any], statistic: str, title: str, scale: str) -> Figure:
    bins = results["cells"][0]["bins"]
    figure = Figure(figsize=(3.7 * len(bins) + 2, 4.2), layout="constrained")
    panels = figure.subplots(1, len(bins), sharey=True, squeeze=False)[0]
    for place, axes in enumerate(panels):
        for color, (rule, cells) in zip(COLORS, _lines(results).items(), strict=False):
            rows = [cell["bins"][place] for cell in cells]
            budgets = [cell["budget"] for cell in cells]
            # Zeros have no place on a logarithmic scale.
            known = [row[statistic] if scale == "linear" or row[statistic] > 0 else None for row in rows]
            axes.plot(budgets, known, "o-", color=color, label=rule, markersize=4)
            if f"{statistic}_interval" in rows[0]:
                # An interval that does not exist is null in the record, and NaN is not drawn.
                low, high = np.array([row[f"{statistic}_interval"] for row in rows], dtype=float).T
                axes.fill_between(budgets, low, high, color=color, alpha=0.15, linewidth=0)
        _by_budget(axes, results, f"contexts of {bins[place]['from_context_tokens']:,} on", "tokens read")
    if any(row[statistic] > 0 for cells in _lines(results).values() for cell in cells for row in cell["bins"]):
        panels[0].set_yscale(scale)
    panels[0].set_ylabel(title)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def ratio(results: dict[str, Any]) -> Figure:
    """Times fewer tokens at equal statistic: filled marks are the 5th percentile, open ones the KL."""
    bins = results["cells"][0]["bins"]
    figure = Figure(figsize=(3.7 * len(bins) + 2, 4.2), layout="constrained")
    panels = figure.subplots(1, len(bins), sharey=True, squeeze=False)[0]
    for place, axes in enumerate(panels):
        for color, rule in zip(COLORS, _lines(results), strict=False):
            if rule == PUBLISHED.name:
                continue
            for statistic, mark in (("q05", color), ("kl_sparse_to_dense", "none")):
                rows = [
                    row
                    for row in results["ratios"]
                    if (row["rule"], row["statistic"], row["from_context_tokens"])
                    == (rule, statistic, bins[place]["from_context_tokens"])
                    and row["bound"] is None
                ]
                for row in rows:
                    if row["low"] is None:
                        continue
                    at = [row["published_budget"]] * 2
                    axes.plot(at, [row["low"], row["high"]], color=color, alpha=0.4)
                label = rule if statistic == "q05" else None
                points = [row["published_budget"] for row in rows], [row["ratio"] for row in rows]
                axes.plot(*points, "o", color=color, markerfacecolor=mark, label=label)
        axes.axhline(1, color=figures.QUIET, linewidth=1)
        _by_budget(
            axes, results, f"contexts of {bins[place]['from_context_tokens']:,} on", "tokens that page means read"
        )
    panels[0].set_ylabel("times fewer tokens at equal statistic")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def page(named: dict[str, dict[str, Any]]) -> str:
    """HTML with the figures of each record inside."""
    parts = ["<!doctype html><meta charset='utf-8'><title>code-lm: cells</title>"]
    parts.append("<body style='font-family: sans-serif; max-width: 90rem; margin: 2rem auto'>")
    for name, results in named.items():
        about = ", ".join(f"{key} {value}" for key, value in results["text"].items() if not key.endswith("_digest"))
        parts.append(f"<h2>{escape(name)}</h2><p>{escape(about)}; {len(results['cells'])} cells</p>")
        makes: list[Callable[[], Figure]] = [
            *(lambda each=each, results=results: against_budget(results, *each) for each in STATISTICS),
            lambda results=results: ratio(results),
        ]
        parts += [_svg(make) for make in makes]
    return "\n".join(parts) + "\n"


def _lines(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    rules: dict[str, list[dict[str, Any]]] = {}
    for cell in sorted(results["cells"], key=lambda cell: cell["budget"]):
        rules.setdefault(cell["rule"], []).append(cell)
    in_order = dict.fromkeys(cell["rule"] for cell in results["cells"])
    whole = {rule: rules[rule] for rule in in_order if len(rules[rule]) >= LEAST_BUDGETS}
    return dict(list((whole or rules).items())[: len(COLORS)])


def _by_budget(axes: Axes, results: dict[str, Any], title: str, label: str) -> None:
    budgets = [cell["budget"] for cell in results["cells"]]
    # Given limits, because a panel may have no points to take them from.
    axes.set_xlim(min(budgets) / 1.2, max(budgets) * 1.2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_title(title)
    axes.set_xlabel(label)


def _svg(make: Callable[[], Figure]) -> str:
    with mpl.rc_context({**figures.STYLE, "svg.hashsalt": "code-lm"}):
        drawn = io.StringIO()
        make().savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return drawn.getvalue()[drawn.getvalue().index("<svg") :]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True, help="an .html file")
    args = parser.parse_args(argv)
    try:
        named = {str(path): records.read(path, KIND)["results"] for path in args.records}
        print(f"wrote {files.write_text(args.out, page(named))}")
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
