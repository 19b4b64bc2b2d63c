"""What a reader can see in the figures: that nothing lies outside of the axes, and which line is which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from report_data import TARGET, measured, row, run, runs
from sparroll.report import figures
from sparroll.report import measured as section
from sparroll.report.data import AccuracyPoint, TailCurve, TrainingRun

ONE = run("one", "", 0.0, 0.9, 0.5)


@pytest.fixture(autouse=True)
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are returned as they are, and not as SVG."""
    monkeypatch.setattr(figures, "svg", lambda figure, _: figure)


def training(*shown: TrainingRun) -> tuple[tuple[float, float], tuple[float, float]]:
    """The limits of the panels of rewards and of accuracies."""
    figure: Any = figures.training(shown, [])
    reward, _, accuracy, *_ = figure.axes
    return reward.get_ylim(), accuracy.get_ylim()


@pytest.mark.parametrize("rewards", [(-3.0, -1.0), (-1.0, 1.0), (5.0, 40.0), (-2.0, -2.0)])
def test_rewards_outside_of_0_and_1_lie_on_their_own_axis(rewards: tuple[float, float]) -> None:
    one = replace(ONE, reward=(rewards[0], *[rewards[1]] * 19))
    (low, high), accuracy = training(one)
    assert low < min(rewards) <= max(rewards) < high
    assert accuracy == pytest.approx((0.29, 0.55))


def test_rewards_that_are_shares_have_the_axis_of_the_accuracies() -> None:
    point = AccuracyPoint(20, 0.9, 0.8, 0.97, 128)
    one = replace(ONE, reward=(0.02, *[0.5] * 19), accuracy=(point,))
    assert training(one) == ((0.0, 1.0), (0.0, 1.0))
    assert training(replace(one, reward=(0.2, *[0.5] * 19)))[0] == pytest.approx((0.15, 1.0))


def tail(*curves: TailCurve) -> Figure:
    figure: Any = figures.tail_by_length(curves, TARGET, "q05")
    return figure


def test_a_point_with_little_data_that_is_below_the_plot_is_a_triangle_on_its_edge() -> None:
    solid = [row(250 * place, 0.9, 0.88, 0.92) for place in (1, 2)]
    curve = TailCurve("budget 64", "budget", (row(0, 0.001, 0.0, 1.0, 2), *solid, row(750, 0.95, 0.0, 1.0, 2)), 64)
    (axes,) = tail(curve).axes
    low = axes.get_ylim()[0]
    assert low == pytest.approx(TARGET - 0.04)
    found = {line.get_marker(): line.get_xydata().tolist() for line in axes.get_lines()[1:-1]}
    assert found == {"o": [[875.0, 0.95]], "v": [[125.0, pytest.approx(low)]]}
    assert "triangles on its edge" in section.measurements((measured(curves=(curve,)),))
    above = replace(curve, points=curve.points[1:])
    assert "triangles" not in section.measurements((measured(curves=(above,)),))


def test_points_with_little_data_set_the_axis_where_there_are_no_others() -> None:
    (axes,) = tail(TailCurve("budget 64", "budget", (row(0, 0.3, 0.0, 1.0, rollouts=2),), 64)).axes
    assert axes.get_ylim()[0] == pytest.approx(0.26)


def test_every_schedule_without_a_single_budget_has_a_look_of_its_own() -> None:
    points = (row(0, 0.9, 0.88, 0.92),)
    curves = [TailCurve(f"schedule {number}", "budget", points) for number in range(9)]
    budgets = [TailCurve(f"budget {budget}", "budget", points, budget) for budget in (64, 128)]
    looks = [(each["color"], each.get("linestyle")) for each in figures._looks([*curves, *budgets])]
    assert len(set(looks)) == len(looks) == 11
    assert figures._looks(budgets) == figures._looks([*curves, *budgets])[9:]


def test_the_training_figure_of_the_quickstart_keeps_its_axes() -> None:
    assert training(*runs())[0] == training(*runs())[1]
