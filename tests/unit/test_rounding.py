"""Tails are rounded towards the miss."""

from __future__ import annotations

import pytest

from sparroll.rounding import rounded_down, with_interval


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.86, "0.860"), (0.8599999, "0.859"), (0.29, "0.290"), (0.9999, "0.999"), (1.0, "1.000"), (0.0, "0.000")],
)
def test_three_decimals_never_read_as_more_than_was_measured(value: float, text: str) -> None:
    assert rounded_down(value) == text


def test_every_whole_thousandth_reads_as_itself() -> None:
    assert [rounded_down(number / 1000) for number in range(1001)] == [f"{n / 1000:.3f}" for n in range(1001)]


def test_a_figure_that_does_not_exist_is_a_dash() -> None:
    assert rounded_down(None) == "-"


def test_an_interval_stands_in_brackets_behind_its_value() -> None:
    assert with_interval(0.8659, 0.861, 0.8714) == "0.865 [0.861, 0.871]"
