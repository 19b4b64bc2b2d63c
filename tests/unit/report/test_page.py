"""The page: self-contained, complete, and honest about what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from report_data import config, full, measured, row, run, runs, schedule
from sparroll.mismatch import TailRow
from sparroll.mismatch.impossible import ImpossibleShare
from sparroll.report import figures
from sparroll.report.data import GapPoint, ReportData, TailCurve
from sparroll.report.figures import TARGET, schedule_budgets, tail_by_length
from sparroll.report.page import render
from sparroll.schedule import Schedule, Step

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


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures out, which take most of the time of a page."""
    for name in ("tail_by_length", "schedule_budgets", "planned_speedups", "training"):
        monkeypatch.setattr(figures, name, lambda *_, **__: "")


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
    assert page.count("<svg") == 8


def test_every_figure_is_there_for_wide_screens_and_for_phones(page: str) -> None:
    names = re.findall(r'data-figure="([^"]+)"', page)
    assert sorted(names) == sorted(
        f"{name}{width}" for name in ("tail", "schedule", "plan", "training") for width in ("", "-narrow")
    )
    assert page.count('<div class="wide">') == page.count('<div class="narrow">') == 4
    assert "@media (max-width: 700px)" in page


def test_the_answers_stand_on_top_and_the_tiles_are_about_this_model(page: str) -> None:
    questions = ["Is this schedule safe here?", "What does it save?", "Did training hold?"]
    places = [page.index(each) for each in [*questions, 'class="facts"', "<section>"]]
    assert places == sorted(places)
    assert "Other models than that of this page:</b> Qwen/Qwen3-1.7B, Qwen/Qwen3-8B" in page


@pytest.mark.parametrize(
    "term", ["acceptance is", "its tail, the 5th percentile", "<b>budget</b> is", "<b>dense ceiling</b>", "Colours:",
             "spread evenly over it", "<b>Reward</b> is", "the worst bin", "<b>Dense accuracy</b> is", "(its KV budget)"],
)  # fmt: skip
def test_every_term_is_explained(page: str, term: str) -> None:
    assert term in page


def with_point(point: TailRow) -> str:
    return render(ReportData(title="t", measured=(measured(curves=(TailCurve("a", "budget", (point,), 64),)),)))


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("value", "low", "shown"),
    [
        (0.87, 0.86, '<span class="met">0.870 <small>[0.860, 0.900]'),
        (0.87, 0.8599, '<span class="near">0.870 <small>[0.859, 0.900]'),
        (0.8599, 0.85, '<span class="missed">0.859 <small>[0.850, 0.900]'),
    ],
)
def test_a_tail_is_marked_by_its_value_and_its_lower_bound_and_rounded_down(
    value: float, low: float, shown: str
) -> None:
    assert shown in with_point(row(0, value, low, 0.9))


def test_a_bin_with_few_data_is_grey_and_does_not_stretch_the_axis() -> None:
    curve = measured().curves[-1]
    thin = TailCurve(curve.name, curve.kind, (row(0, 0.001, 0.0, 1.0, rollouts=2), *curve.points[1:]))
    page = render(ReportData(title="t", measured=(measured(curves=(thin,), schedule=None),)))
    assert '<span class="thin">0.001 <small>[0.000, 1.000]' in page
    assert ">0.2<" not in page


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ("value", "a budget was raised where the measured tail itself, not the lower end of its interval, missed"),
        ("low", "a budget was raised where that lower end missed"),
        (None, "Nobody has sampled with the schedule itself, so it is not verified."),
    ],
)
def test_what_the_schedule_had_to_meet_is_what_the_record_says(bound: str | None, said: str) -> None:
    page = render(ReportData(title="t", measured=(measured(bound=bound),)))
    assert said in page
    assert "smallest KV budget whose tail meets the target" not in page


@pytest.mark.usefixtures("words")
def test_where_drafts_are_checked_and_no_tail_had_to_hold_the_bound_is_named() -> None:
    kept = replace(schedule(64).checked(32, 0.1), target={"kl_at_most": 0.03}, made_by={"chosen": "windows of 32"})
    for bound, said in (("low", "raised where they broke a bound"), (None, "so it is not verified")):
        page = render(ReportData(title="t", measured=(measured(bound=bound, schedule=kept, target=None),)))
        assert (
            "what the checks leave has a KL of at most 0.03" in page
            and "windows of 32. The tail decided nothing" in page
        )
        assert said in page


@pytest.mark.usefixtures("words")
def test_groups_of_layers_have_a_line_each_and_their_budgets_stand_side_by_side() -> None:
    grouped = replace(
        schedule(64), steps=(Step(0, (64, 128)), Step(500, (1024, 192))), dense_layers=(0,), layer_groups=((1, 2), (3,))
    )
    page = render(ReportData(title="t", measured=(measured(schedule=grouped),)))
    assert "Groups of layers have budgets of their own, in this order: 1, 2; 3." in page
    assert "1,024 / 192" in page and "between a green line and the dashed one" in page
    drawn = schedule_budgets(grouped, 1000)
    assert "layers 1, 2: tokens read" in drawn and "layers 3: tokens read" in drawn


@pytest.mark.usefixtures("words")
def test_rewards_are_the_means_that_the_terminal_prints() -> None:
    """The single first and last step would tell the opposite story."""
    steps = (0.9, 0.1, 0.2, 0.5, 0.6, 0.3)
    one = run("one", "", 0.0, 0.9, 0.5, reward_first=0.4, reward_last=0.46666, reward_window_steps=3)
    page = render(ReportData(title="t", runs=(replace(one, steps=(1, 2, 3, 4, 5, 6), reward=steps, tail_q05=(0.9,) * 6,
                                                      worst_bin_q05=(0.7,) * 6),)))  # fmt: skip
    assert "reward, first to last 3 steps" in page
    assert "<td>0.400 to 0.466</td>" in page
    assert "0.900 to 0.300" not in page


@pytest.mark.usefixtures("words")
def test_a_run_shows_its_worst_bin_beside_the_pooled_tail_and_its_target() -> None:
    one = run("one", "", 0.0, 0.95, 0.5, worst_bin_q05=(*[0.9] * 18, None, 0.8599))
    page = render(ReportData(title="t", runs=(one,)))
    assert "<th>lowest tail, worst bin</th><th>lowest tail, all lengths</th><th>target</th>" in page
    assert "<td>0.859</td><td>0.930</td><td>0.86</td>" in page


def test_the_target_of_a_run_is_a_line_in_its_figure() -> None:
    drawn, without = (figures.training(runs()[1:2], targets) for targets in ([0.86], []))
    assert drawn.count(TARGET) > without.count(TARGET) == 0


GAPS = (GapPoint(1, 0.2, -0.1, 0.5), GapPoint(20, 0.0313, 0.01, 0.0521))


def test_a_run_with_a_control_group_has_a_panel_with_its_gap_and_what_is_tolerated() -> None:
    one = run("one", "", 0.0, 0.95, 0.5, target=None)
    drawn = {gap: figures.training([replace(one, reward_gap=GAPS, tolerated_gap=gap)], []) for gap in (0.05, None)}
    title = "reward gap: dense minus sparse"
    assert all(title in each for each in drawn.values()) and title not in figures.training([one], [])
    assert drawn[0.05].count(TARGET) > drawn[None].count(TARGET) == 0
    assert title in figures.training([one, replace(one, reward_gap=GAPS)], [], narrow=True)


@pytest.mark.usefixtures("words")
def test_the_table_of_runs_has_the_last_gap_rounded_up_only_where_there_is_a_control_group() -> None:
    one = run("one", "", 0.0, 0.95, 0.5)
    page = render(ReportData(title="t", runs=(replace(one, reward_gap=GAPS, tolerated_gap=0.05), one)))
    assert "<th>reward gap, last window</th>" in page
    assert "<td>0.032 <small>[0.010, 0.053]</small></td>" in page and page.count("<td>-</td></tr>") == 1
    assert "the tolerated gap, 0.05" in page
    assert "reward gap" not in render(ReportData(title="t", runs=(one,)))


@pytest.mark.usefixtures("words")
def test_runs_that_differ_in_more_than_their_rollouts_say_so() -> None:
    alike = render(ReportData(title="t", runs=runs()))
    assert "The runs have the same model, prompts, seed and other settings" in alike
    other = replace(runs()[0], name="other", config=config("dense", seed=1))
    page = render(ReportData(title="t", runs=(*runs(), other)))
    assert "The runs differ in more than what their rollouts read" in page
    assert "<code>train.seed</code> (0, 1)" in page
    assert "The runs have the same" not in page


@pytest.mark.usefixtures("words")
def test_two_models_have_a_section_each_and_no_common_claim() -> None:
    other = replace(runs()[0], name="other", config=config("dense", model="another"))
    both = (measured(), measured(folder="b", model="another"))
    page = render(ReportData(title="t", models=("tiny-reasoner", "another"), runs=(runs()[0], other), measured=both))
    assert "2 models: tiny-reasoner, another. Each section names its own" in page
    for title in ("rollouts: tiny-reasoner", "rollouts: another", "from dense: calibration", "The schedule: b"):
        assert f"{title}</h2>" in page
    assert "have the same model" not in page


def test_figures_of_two_measurements_do_not_share_their_ids() -> None:
    curves = measured().curves[:1]
    drawn = [tail_by_length(curves, 0.86, "q05", number, narrow) for number in (0, 1) for narrow in (False, True)]
    ids = [found for each in drawn for found in re.findall(r'\bid="([^"]+)"', each)]
    assert len(ids) == len(set(ids))


def test_parts_without_data_are_left_out() -> None:
    page = render(ReportData(title="only a title"))
    assert "<section>" not in page
    assert "only a title" in page


@pytest.mark.usefixtures("words")
def test_names_are_escaped() -> None:
    page = render(replace(full(), models=("<b>&",), measured=(measured(notes=("<i>",), model="<u>"),)))
    assert "&lt;b&gt;&amp;" in page
    assert "<i>" not in page and "<u>" not in page


def test_the_same_data_draws_the_same_figure() -> None:
    curves = measured().curves
    assert tail_by_length(curves, 0.86, "q05") == tail_by_length(curves, 0.86, "q05")
    assert "tokens read" in schedule_budgets(Schedule.load("qwen3-1.7b-0.86"), 32_768)


def test_impossible_tokens_and_the_worst_ones_stand_in_a_table_where_they_were_measured(words: None) -> None:
    share = ImpossibleShare(10, 2.4e-4, 1.1e-4, 5.2e-4, 12, 50_000, 1.5)
    overall = replace(row(0, 0.9, 0.89, 0.91), cvar01=0.21, cvar05=0.5555, impossible=(share,) * 4)
    without = measured()
    curves = tuple(replace(curve, overall=overall) for curve in without.curves)
    page = render(ReportData(title="t", measured=(replace(without, curves=curves),)))
    assert "0.00024 <small>[0.00011, 0.00052]</small>" in page and ">0.555<" in page
    assert "over 10 nats off" not in render(ReportData(title="t", measured=(without,)))
