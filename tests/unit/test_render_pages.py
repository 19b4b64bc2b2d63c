"""The table of the tail by page and cost: what is interpolated, what stays empty, what is bold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import render_pages

SIXTEEN, FOUR_BITS = ("page_mean", 16, None), ("quantized_mean", 4, 4)


def line(budget: int, eflops: float, tail: float, selector: dict | None) -> dict:
    found = {"task": "table-sums", "budget": budget, "eflops": eflops, "statistics": {"q05": [tail, tail, tail]}}
    return found | {"selector": selector, "engine": "vllm"}


@pytest.fixture
def measured(monkeypatch) -> None:
    """Dense rollouts cost 100; pages of 16 reach 20 to 60 of them, units in 4 bits 40 to 80."""
    pages = {"kind": "page_mean", "page_tokens": 16}
    units = {"kind": "quantized_mean", "page_tokens": 4, "bits": 4}
    lines = [
        line(None, 100, 0.98, None), line(512, 60, 0.9, pages), line(128, 20, 0.7, pages),
        line(256, 40, 0.9, units), line(512, 80, 0.96, units),
    ]  # fmt: skip
    monkeypatch.setattr(render_pages, "results", lambda name, kind: {"lines": lines})


def test_a_tail_between_two_budgets_is_interpolated_and_none_lies_beyond_them(measured: None) -> None:
    curves = render_pages.curves("table-sums")
    assert curves[SIXTEEN] == [(0.2, 0.7), (0.6, 0.9)]
    assert render_pages.at(curves[SIXTEEN], 0.4) == pytest.approx(0.8)
    assert render_pages.at(curves[SIXTEEN], 0.2) == 0.7
    assert render_pages.at(curves[SIXTEEN], 0.19) is None
    assert render_pages.at(curves[FOUR_BITS], 0.81) is None
    assert render_pages.at((), 0.4) is None


def test_the_highest_tail_of_a_column_is_bold_and_an_unreached_cell_is_empty() -> None:
    column = {SIXTEEN: 0.8, FOUR_BITS: 0.9009, ("page_mean", 4, None): None}
    assert [render_pages._cell(column, unit) for unit in column] == ["0.800", "**0.900**", ""]


def test_published_costs_are_shares_of_the_published_dense_cost() -> None:
    curve = render_pages._of_dense(render_pages.PUBLISHED[16])
    assert render_pages.at(curve, 37.75 / 263) == pytest.approx(0.818)
