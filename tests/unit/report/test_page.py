"""The page: self-contained, complete, and honest about what is missing."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from report_data import full
from sparroll.report.data import ReportData
from sparroll.report.figures import schedule_budgets, tail_by_length
from sparroll.report.page import render
from sparroll.schedule import Schedule

VOID = {"meta", "path", "use", "rect", "circle", "line", "br", "stop"}


class _Reader(HTMLParser):
    """Collects text and attributes, and checks that tags close in order."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page() -> str:
    return render(full())


def test_nothing_is_loaded_from_elsewhere(page: str) -> None:
    reader = _Reader(page)
    assert reader.open == []
    names = {name for name, _ in reader.attributes}
    assert not names & {"src", "onclick", "onload"}
    links = [value for name, value in reader.attributes if name in ("href", "xlink:href")]
    assert all(value is not None and value.startswith("#") for value in links)
    assert "http" not in page
    assert "<script" not in page
    assert "@import" not in page
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]+)\)", page))


def test_ids_are_unique_over_all_figures_and_every_reference_finds_its_own(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_every_part_stands_on_the_page(page: str) -> None:
    text = " ".join(_Reader(page).text)
    for part in ("dense ceiling", "target 0.86", "The schedule", "3.40x", "calibrated", "aggressive", "torch"):
        assert part in text
    assert page.count("<svg") == 4


def test_a_tail_whose_lower_bound_misses_the_target_is_marked_and_rounded_down() -> None:
    data = full()
    near = dataclasses.replace(data.curves[0].points[0], quantile_value=0.8599, low=0.8599, high=0.9)
    curve = dataclasses.replace(data.curves[0], points=(near,))
    page = render(ReportData(title="t", curves=(curve,), target=0.86, estimator="exact"))
    assert '<span class="missed">0.859 <small>[0.859, 0.900]' in page


def test_a_bin_with_few_data_is_grey_and_does_not_stretch_the_axis() -> None:
    data = full()
    thin = dataclasses.replace(data.curves[0].points[0], quantile_value=0.001, low=0.0, high=1.0, rollouts=2)
    curve = dataclasses.replace(data.curves[-1], points=(thin, *data.curves[-1].points[1:]))
    page = render(ReportData(title="t", curves=(curve,), target=0.86, estimator="exact"))
    assert '<span class="thin">0.001 <small>[0.000, 1.000]' in page
    assert ">0.2<" not in page


def test_parts_without_data_are_left_out() -> None:
    page = render(ReportData(title="only a title"))
    assert "<section>" not in page
    assert "only a title" in page


def test_names_are_escaped() -> None:
    page = render(dataclasses.replace(full(), model="<b>&", notes=("<i>",)))
    assert "&lt;b&gt;&amp;" in page
    assert "<i>" not in page


def test_the_same_data_draws_the_same_figure() -> None:
    data = full()
    assert tail_by_length(data.curves, 0.86, "q05") == tail_by_length(data.curves, 0.86, "q05")
    assert "tokens read" in schedule_budgets(Schedule.load("qwen3-1.7b-0.86"), 32_768)
