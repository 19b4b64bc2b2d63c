"""Which check of drafts holds under each schedule that a run may use: a switch never drops one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparroll.control.guard import Guard
from sparroll.control.watcher import described
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError
from sparroll.schedule import Schedule
from sparroll.train import TrainConfig
from sparroll.train.config.file import config_from
from sparroll.train.schedules import caveat_events, check_events, make_guard, starting_schedule


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Schedule files: two without a check, one with windows of 16 tokens, one with windows of 32."""
    plain, wide = Schedule.fixed(64), Schedule.fixed(128)
    made = {"plain": plain, "wide": wide, "by16": plain.checked(16, 0.5), "by32": wide.checked(32, 0.1)}
    return {name: str(schedule.save(tmp_path / f"{name}.toml")) for name, schedule in made.items()}


def run_of(start: str, *stricter: str, **changes: Any) -> TrainConfig:
    table: dict[str, Any] = {
        "attention": {"kind": "schedule", "name": start},
        "guard": {"action": "warn", "at_least": 0.86},
        "control": {"by": "guard", "stricter": list(stricter)},
    }
    return config_from(table | changes)


def checks_of(config: TrainConfig) -> tuple[Guard, list[DraftCheck | None]]:
    start = starting_schedule(config)
    guard = make_guard(config, start)
    return guard, [each.check if each else None for each in (start, *guard.stricter)]


def test_a_schedule_without_a_check_goes_on_with_that_of_the_schedule_before_it(files: dict[str, str]) -> None:
    config = run_of(files["by16"], files["wide"], "dense", files["plain"])
    guard, checks = checks_of(config)
    check = DraftCheck(16, 0.5)
    assert checks == [check, check, None, check]
    assert described(guard.stricter[0]) == "wide-checked-16-0.5 (drafts checked every 16 tokens at floor 0.5)"
    assert described(guard.stricter[1]) == "dense"
    because = "like those of the schedule before it, because its file names no check"
    assert check_events(config, starting_schedule(config)) == [
        f"drafts under the schedule {name!r} are checked every 16 tokens at floor 0.5, {because}"
        for name in ("wide", "plain")
    ]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """`sparroll calibrate` writes schedule.toml in each folder, and evidence under one schedule is not pooled with that
    under another."""
    paths = []
    for folder, budget in (("a", 64), ("b", 128), ("c", 256)):
        (tmp_path / folder).mkdir()
        paths.append(str(Schedule.fixed(budget).save(tmp_path / folder / "schedule.toml")))
    config = run_of(*paths)
    guard = make_guard(config, starting_schedule(config))
    assert [each.name for each in guard.stricter if each] == ["schedule-2", "schedule-3"]
    taken = str(Schedule.fixed(512).save(tmp_path / "schedule-2.toml"))
    config = run_of(paths[0], paths[1], taken)
    assert [each.name for each in make_guard(config, starting_schedule(config)).stricter if each] == [
        "schedule-3",
        "schedule-2",
    ]


def test_a_run_begins_with_what_must_be_known_of_every_schedule_it_may_come_to(
    files: dict[str, str], tmp_path: Path
) -> None:
    made_by = {"caveat": "scaled, to be calibrated on the real model"}
    scaled = str(replace(Schedule.fixed(96), made_by=made_by).save(tmp_path / "scaled.toml"))
    for config in (run_of(scaled, files["wide"]), run_of(files["plain"], files["wide"], scaled)):
        assert caveat_events(config, starting_schedule(config)) == [
            "the schedule 'scaled' is scaled, to be calibrated on the real model"
        ]
    config = run_of(files["plain"], "dense")
    assert caveat_events(config, starting_schedule(config)) == []


def test_without_a_section_each_files_own_check_holds(files: dict[str, str]) -> None:
    config = run_of(files["by16"], files["by32"])
    _, checks = checks_of(config)
    assert checks == [DraftCheck(16, 0.5), DraftCheck(32, 0.1)]
    assert check_events(config, starting_schedule(config)) == []
    _, checks = checks_of(run_of(files["plain"], files["by32"]))
    assert checks == [None, DraftCheck(32, 0.1)]


def test_the_section_replaces_the_check_of_every_file_and_an_event_says_so(files: dict[str, str]) -> None:
    config = run_of(files["plain"], files["by32"], check={"window_tokens": 8, "floor": 0.2})
    _, checks = checks_of(config)
    assert checks == [DraftCheck(8, 0.2), DraftCheck(8, 0.2)]
    assert check_events(config, starting_schedule(config)) == [
        "drafts under the schedule 'by32' are checked every 8 tokens at floor 0.2, as [check] says, and not every 32 "
        "tokens at floor 0.1 as its file says"
    ]


def test_a_run_without_checks_says_nothing_about_them(files: dict[str, str]) -> None:
    config = run_of(files["plain"], files["wide"], "dense")
    assert checks_of(config)[1] == [None, None, None]
    assert check_events(config, starting_schedule(config)) == []


@pytest.mark.parametrize(
    ("train", "why"),
    [
        ({"rollouts_behind_steps": 1}, "train.rollouts_behind_steps = 1 exclude each other: the checks score with"),
        ({"whole_union": True}, "train.whole_union exclude each other: checked drafts come from neither"),
    ],
)
def test_older_rollouts_and_whole_unions_refuse_a_file_that_checks_its_drafts(
    train: dict[str, Any], why: str, files: dict[str, str]
) -> None:
    def run(start: str, **control: Any) -> TrainConfig:
        about: dict[str, Any] = {"correction": {"name": "jackpot"}, "rollout": {"control_share": 0}}
        return run_of(start, train=train, **about, **control)

    starting_schedule(run(files["plain"], control={"by": "nobody"}))
    with pytest.raises(UserError, match=f"'by16' checks its drafts, and that and {why}"):
        starting_schedule(run(files["by16"], control={"by": "nobody"}))
    later = run(files["plain"], control={"by": "guard", "stricter": [files["by16"]]})
    with pytest.raises(UserError, match=f"'by16' checks its drafts, and that and {why}"):
        make_guard(later, starting_schedule(later))


def test_an_adapter_refuses_a_cheaper_schedule_that_checks_its_drafts(files: dict[str, str]) -> None:
    from sparroll.train.schedules import make_cheaper_schedules

    control = {"by": "cheaper", "schedules": [files["by16"]], "at_least": 0.8}
    config = run_of(files["wide"], control=control, distill={"rank": 4}, guard={"action": "off"})
    with pytest.raises(UserError, match="'by16' checks its drafts"):
        make_cheaper_schedules(config, starting_schedule(config))
