"""The section about what a decode step's time buys: complete, in words, and with the figures of the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from report_data import full, measured
from sparroll.calibrate.allocation.wanted import FIGURES, Point
from sparroll.report import tradeoff
from sparroll.report.page import render


def point(selector: str, how: str, share: float, kl: float, budget: Any = 64) -> dict[str, Any]:
    figures = (kl, 0.01, 0.005, 0.001, 1e-4, 0.1, 0.12)
    assert len(figures) == len(FIGURES)
    return Point(selector, how, share * 0.01, share, figures, ((0, budget), (1000, budget))).table()  # type: ignore[arg-type]


def found(**changes: Any) -> dict[str, Any]:
    points = [
        point(selector, how, share, kl * (1.5 - share))
        for selector, kl in (("page_mean 16", 0.2), ("quantized_mean 4, bits <2>", 0.1))
        for how, share in (("one budget", 0.3), ("one budget", 0.5), ("allocated", 0.3), ("allocated", 0.45))
    ]
    return {
        "objective": "kl", "target": 0.86, "hardware": "H200", "dense_step_seconds": 0.01, "most_step_seconds": 0.004,
        "chosen": point("quantized_mean 4, bits <2>", "chosen", 0.39, 0.0123, [64, 128]),
        "verified": point("quantized_mean 4, bits <2>", "verified", 0.39, 0.0137),
        "points": points, "refused": ["quest 16: no budget that was measured holds the bounds"],
    } | changes  # fmt: skip


def test_the_page_has_both_figures_and_the_best_of_each_selector_in_no_more_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from sparroll.report import figures

    for name in ("tail_by_length", "schedule_budgets", "planned_speedups", "training"):
        monkeypatch.setattr(figures, name, lambda *_, **__: "")
    page = render(replace(full(), measured=(measured(tradeoff=found()),)))
    assert page.count('data-figure="tradeoff') == 2 and "http" not in page.replace("https://", "")
    assert "the least KL in 4.000 ms a step" in page and "No schedule: quest 16" in page
    assert "0.01230" in page and "0.01370" in page and "64 / 128" in page
    assert "bits &lt;2&gt;" in page and "bits <2>" not in page
    # Of page_mean the best that takes no longer than what was chosen is that at 30 %.
    row = page.partition("<td>page_mean 16</td>")[2].partition("</tr>")[0]
    assert "30.0%" in row and "0.24000" in row


def test_what_the_times_rest_on_is_said_where_the_record_has_it() -> None:
    words = tradeoff.tradeoff(found(times=["times: kernels of page_mean 16 as timed"]), "", 1)
    assert "Times: kernels of page_mean 16 as timed" in words
    assert "Times: kernels" not in tradeoff.tradeoff(found(), "", 1)


def test_without_a_limit_the_time_was_the_objective() -> None:
    words = tradeoff.tradeoff(found(objective="time", most_step_seconds=None, refused=[]), ": mine", 1)
    assert "chosen for the least time at the target" in words and "No schedule" not in words
    assert "What a decode step&#x27;s time buys: mine" in words
