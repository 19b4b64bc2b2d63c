"""The planned savings of a report: what a prediction is made from, and which plan a figure is of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from report_data import measured, runs
from sparroll import records
from sparroll.plan.hardware import Hardware
from sparroll.plan.speedup import plan
from sparroll.plan.time_model import TimeModel
from sparroll.report import collect, figures, savings
from sparroll.report.answers import SAVES, answers
from sparroll.report.data import PlannedDecoding, ReportData, told_apart
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule

PRESET = Schedule.load("qwen3-1.7b-0.86")
TIMED = TimeModel(1e-3, 1e-6, 1e-12, 1e-6, 0.031, 12, ("timed on this machine",))
HERE = Hardware("here", 1e12, 1e11, 16e9, "measured, seed 0, torch 2.13.0")


def planned(model: str = "Qwen/Qwen3-1.7B", schedule: Schedule = PRESET, **about: object) -> PlannedDecoding:
    """As `sparroll plan` writes it and a report reads it."""
    table = plan(model, schedule, **about).table()  # type: ignore[arg-type]
    return PlannedDecoding(model, json.loads(json.dumps(records.plain(table))))


CHECKED = planned(schedule=PRESET.checked(16, 0.1))


def section(*plans: PlannedDecoding) -> str:
    return savings.plans(ReportData(title="t", models=("Qwen/Qwen3-1.7B",), plans=plans))


def write(path: Path, of: PlannedDecoding) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write(path, "plan", of.results, config={"model": of.model})


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figure out, which takes most of the time."""
    monkeypatch.setattr(figures, "svg", lambda figure, _: "\n".join(_labels(figure)))


def _labels(figure: Figure) -> list[str]:
    return [str(line.get_label()) for axes in figure.axes for line in axes.get_lines()]


def test_the_speedup_of_a_checked_schedule_is_with_its_checks_wherever_it_stands(tmp_path: Path) -> None:
    found = CHECKED.results
    fast, slow = (f"{rounded_down(found[name], 2)}" for name in ("speedup", "verified_speedup"))
    assert CHECKED.speedup == found["verified_speedup"] < found["speedup"] and fast != slow
    page = section(CHECKED)
    assert f"<b>{slow}x</b>" in page and f"<td>{found['verified']['tokens_per_second']:,.0f}</td>" in page
    assert f"<td>{found['sparse']['tokens_per_second']:,.0f}</td>" not in page and f"{fast}x" not in page
    assert f"Qwen3-1.7B on H200: {slow}x at lengths 0-32768; line without the checks" in page
    assert "include the checks; the lines are without them" in page
    (saves,) = (each for each in answers([measured(model=CHECKED.model)], (), [CHECKED]) if each.question == SAVES)
    assert f"decoding {slow} times as fast as dense, checks of drafts included." in saves.reasons[0]
    write(tmp_path / "plan.json", CHECKED)
    assert collect(tmp_path).facts == {"as fast as dense on H200, predicted": f"{slow}x"}
    assert "without the checks" not in section(planned()) and "without them" not in section(planned())


def test_what_a_prediction_is_made_from_is_said_of_each_plan() -> None:
    sheet, rates = planned(), planned(hardware=HERE, batch=4)
    steps = planned(hardware=HERE, batch=4, time_model=TIMED, lengths=4096)
    assert "the device's data sheet; nothing was run for it." in section(sheet)
    assert "rates, which were measured on it; no decoding step was run for it." in section(rates)
    timed = section(steps)
    assert "decoding steps that were timed on the device." in timed and "a time model says that was fitted" in timed
    assert "nothing was run for it" not in timed and "whichever is longer" not in timed
    both = section(sheet, steps)
    assert "<b>Qwen3-1.7B on H200:</b> A prediction" in both and "<b>Qwen3-1.7B on here:</b> A prediction" in both


def test_what_only_one_plan_assumes_is_named_as_its_own() -> None:
    caveat = replace(PRESET, name="scaled", made_by={"caveat": "scaled, to be calibrated on the real model"})
    page = section(planned(), planned(schedule=caveat))
    said = "<li>Qwen3-1.7B on H200 under scaled: the schedule is scaled, to be calibrated on the real model</li>"
    assert said in page
    assert page.count("all weights are read once per step</li>") == 1
    assert "<li>roofline: a step takes the larger" in page


def test_two_plans_on_one_device_have_a_figure_each(tmp_path: Path) -> None:
    for folder, schedule in (("a", PRESET), ("b", PRESET.checked(16, 0.1))):
        write(tmp_path / folder / "plan.json", planned(schedule=schedule))
    names = [f"as fast as dense on H200 under qwen3-1.7b-0.86{end}, predicted" for end in ("", "-checked-16-0.1")]
    assert list(collect(tmp_path).facts) == names
    write(tmp_path / "b" / "plan.json", planned(lengths=30_000))
    assert list(collect(tmp_path).facts) == [
        f"as fast as dense on H200 under qwen3-1.7b-0.86 at lengths {lengths}, predicted"
        for lengths in ("0-32768", 30_000)
    ]
    same = [replace(planned(), folder=folder) for folder in ("a", "b")]
    assert told_apart(same, model=True)[1] == "Qwen3-1.7B on H200 under qwen3-1.7b-0.86 at lengths 0-32768 (b)"


def test_a_built_in_model_is_the_same_with_its_owner_and_without(tmp_path: Path) -> None:
    for folder, model in (("a", "Qwen/Qwen3-1.7B"), ("b", "qwen3-1.7B")):
        write(tmp_path / folder / "plan.json", planned(model, hardware="H200" if folder == "a" else "B200"))
    data = collect(tmp_path)
    assert data.models == ("Qwen/Qwen3-1.7B",) and len(data.facts) == 2
    assert "Other models" not in section(*data.plans) and "Other models" in section(
        planned("Qwen3-8B", Schedule.fixed(512))
    )
    about = measured(model="Qwen/Qwen3-1.7B")
    run = replace(runs()[1], config=runs()[1].config | {"model": {"name": "Qwen3-1.7B"}})
    (saves,) = (each for each in answers([about], [run], data.plans) if each.question == SAVES)
    assert sum(reason.startswith("Predicted for this model") for reason in saves.reasons) == 2
