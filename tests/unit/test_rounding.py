"""Figures are rounded towards the miss."""

from __future__ import annotations

import pytest

from sparroll.rounding import percent_down, percent_up, rounded_down, rounded_up, with_interval


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


@pytest.mark.parametrize(("share", "down", "up"), [(0.8993, "89%", "90%"), (0.29, "29%", "29%"), (1.0, "100%", "100%")])
def test_shares_are_rounded_towards_their_miss(share: float, down: str, up: str) -> None:
    assert (percent_down(share), percent_up(share)) == (down, up)


@pytest.mark.parametrize(
    ("value", "decimals", "down", "up"),
    [(2.3288, 2, "2.32", "2.33"), (0.029, 3, "0.029", "0.029"), (-0.0281, 3, "-0.029", "-0.028"), (7, 0, "7", "7")],
)
def test_what_should_be_high_goes_down_and_what_should_be_low_goes_up(
    value: float, decimals: int, down: str, up: str
) -> None:
    assert (rounded_down(value, decimals), rounded_up(value, decimals)) == (down, up)


def test_every_whole_percent_reads_as_itself_both_ways() -> None:
    assert [percent_down(n / 100) for n in range(101)] == [percent_up(n / 100) for n in range(101)]


def test_a_sign_stands_before_gains_and_zero_has_no_minus() -> None:
    assert [rounded_down(0.2071, sign=True), rounded_up(-0.0001, sign=True)] == ["+0.207", "+0.000"]
