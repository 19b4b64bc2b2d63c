"""Going on in a folder: the same question goes on, another one is refused with the key, the old value and the new."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparroll.errors import UserError
from sparroll.resume import begin_or_resume, check_flag, flat, refuse_changes, refuse_results_of_nothing

RUN = Path("run")


def test_the_first_call_writes_what_is_asked_for_and_the_same_again_goes_on(tmp_path: Path) -> None:
    path, asked = tmp_path / "config.json", {"seed": 0, "budgets": (64, 128), "train": {"lr": 0.1}}
    begin_or_resume(path, asked)
    assert json.loads(path.read_text()) == {"seed": 0, "budgets": [64, 128], "train": {"lr": 0.1}}
    written = path.stat().st_mtime_ns
    begin_or_resume(path, asked)
    assert path.stat().st_mtime_ns == written
    with pytest.raises(UserError, match="was made with seed = 0, and seed = 1 is asked for now"):
        begin_or_resume(path, asked | {"seed": 1})
    assert json.loads(path.read_text())["seed"] == 0


def test_the_error_names_folder_key_old_and_new_value_and_two_ways_out() -> None:
    with pytest.raises(UserError) as error:
        refuse_changes(RUN, {"train": {"lr": 0.1, "steps": 5}}, {"train": {"lr": 0.2, "steps": 5}})
    assert error.value.message == "run was made with train.lr = 0.1, and train.lr = 0.2 is asked for now"
    assert error.value.hint == "go on with the old value, or choose another folder with --out"


def test_all_changed_keys_are_named_and_long_values_are_cut() -> None:
    with pytest.raises(UserError) as error:
        refuse_changes(RUN, {"words": ["a" * 80], "seed": 0, "n": 1}, {"words": [], "seed": 0, "n": 2})
    cut = '["' + "a" * 55 + "..."
    assert error.value.message == f"run was made with words = {cut}, and words = [] is asked for now; also different: n"


def test_of_long_values_that_begin_alike_the_part_that_differs_is_shown() -> None:
    was, now = "a" * 80 + "old" + "b" * 80, "a" * 80 + "new" + "b" * 80
    with pytest.raises(UserError) as error:
        refuse_changes(RUN, {"text": was}, {"text": now})
    shown = [f"...{'a' * 20}{word}{'b' * 31}..." for word in ("old", "new")]
    assert error.value.message == f"run was made with text = {shown[0]}, and text = {shown[1]} is asked for now"
    assert all(len(each) == 60 for each in shown)


def test_the_hint_says_the_way_out_that_is_given() -> None:
    with pytest.raises(UserError) as error:
        refuse_changes(RUN, {"seed": 0}, {"seed": 1}, way_out="start anew")
    assert error.value.hint == "go on with the old value, or start anew"


def test_free_keys_and_free_tables_may_change() -> None:
    was, now = {"train": {"lr": 0.1, "steps": 5}, "log": {"every": 1}}, {"train": {"lr": 0.1, "steps": 9}, "log": {}}
    refuse_changes(RUN, was, now, free=("train.steps", "log"))
    with pytest.raises(UserError, match="you may change log"):
        refuse_changes(RUN, was, now, free=("log",))
    # A key is free by its whole name only.
    with pytest.raises(UserError, match=r"logs = 1"):
        refuse_changes(RUN, {"logs": 1}, {"logs": 2}, free=("log",))


@pytest.mark.parametrize("missing", ["was", "now"])
def test_a_missing_key_stands_for_its_default_or_for_null(missing: str) -> None:
    tables: dict[str, dict[str, object]] = {"was": {"seed": 0}, "now": {"seed": 0}}
    other = "now" if missing == "was" else "was"
    tables[other] |= {"dtype": None, "train": {"lr": 0.1}}
    defaults = {"train": {"lr": 0.1, "younger": 3}}
    refuse_changes(RUN, tables["was"], tables["now"], defaults=defaults)
    with pytest.raises(UserError, match=r"train\.lr = (null|0\.1), and train\.lr = (0\.1|null)"):
        refuse_changes(RUN, tables["was"], tables["now"])
    tables[other]["dtype"] = "bf16"
    with pytest.raises(UserError, match='dtype = (null|"bf16"), and dtype = ("bf16"|null)'):
        refuse_changes(RUN, tables["was"], tables["now"], defaults=defaults)


def test_a_table_in_place_of_null_is_a_change() -> None:
    refuse_changes(RUN, {"schedule": None}, {"schedule": {}})
    with pytest.raises(UserError, match=r"schedule\.name = null, and schedule\.name = \"a\""):
        refuse_changes(RUN, {"schedule": None}, {"schedule": {"name": "a"}})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"cannot read .*config\.json"):
            begin_or_resume(path, {})


def test_resume_is_asked_for_exactly_where_there_is_a_run(tmp_path: Path) -> None:
    check_flag(tmp_path, False, holds_run=False, can_go_on=False)
    check_flag(tmp_path, True, holds_run=True, can_go_on=True)
    with pytest.raises(UserError, match=r"(?s)already holds a run.*--resume"):
        check_flag(tmp_path, False, holds_run=True, can_go_on=True)
    with pytest.raises(UserError, match="there is no run to resume"):
        check_flag(tmp_path, True, holds_run=False, can_go_on=False)


def test_nested_tables_become_one_with_dots() -> None:
    assert flat({"a": {"b": {"c": 1}, "d": [2]}, "e": None}) == {"a.b.c": 1, "a.d": [2], "e": None}


def test_a_command_that_finished_nothing_binds_nobody(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    begin_or_resume(path, {"seed": 0})
    begin_or_resume(path, {"seed": 1}, begun=False)
    begin_or_resume(path, {"seed": 1})
    with pytest.raises(UserError, match="was made with seed = 1"):
        begin_or_resume(path, {"seed": 0})


def test_results_without_what_they_are_of_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(UserError, match=r"(?s)holds results but no config\.json.*another folder with --out"):
        refuse_results_of_nothing(path, begun=True)
    refuse_results_of_nothing(path, begun=False)
    path.write_text("{}")
    refuse_results_of_nothing(path, begun=True)


def test_what_another_command_asked_for_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    begin_or_resume(path, {"model": "a", "tasks": []})
    with pytest.raises(UserError, match=r"(?s)was made by another command: config\.json is not of this one.*--out"):
        begin_or_resume(path, {"model": "a", "task": None}, begun=False)
    begin_or_resume(path, {"model": "a", "tasks": []})


def test_other_prompts_are_not_shown_but_said_how_to_be_given_again() -> None:
    with pytest.raises(UserError) as refused:
        refuse_changes(Path("runs/a"), {"prompts": "d6d0", "n": 1}, {"prompts": "fcbf", "n": 2})
    assert refused.value.message == "runs/a was made with other prompts than are asked for now; also different: n"
    assert refused.value.hint == (
        "give the same file, or the same task, level, count and seed, or choose another folder with --out"
    )
