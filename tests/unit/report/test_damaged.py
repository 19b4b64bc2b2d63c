"""What a report says of files that are damaged, and of runs that have not ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from report_data import plans
from report_folders import write_profile, write_run
from sparroll import records
from sparroll.cli import main
from sparroll.errors import UserError
from sparroll.report import collect, figures, write_report


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the figures out, which take most of the time of a page."""
    for name in ("tail_by_length", "schedule_budgets", "planned_speedups", "training"):
        monkeypatch.setattr(figures, name, lambda *_, **__: "")


def refused(folder: Path, path: Path, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"cannot read {path}: ") + said) as error:
        write_report(folder)
    assert error.value.hint


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda text: "", "it has no step of training"),
        (lambda text: text.partition("\n")[0] + "\n", "it has no step of training"),
        (lambda text: text[:-20], "line 7 is no JSON table"),
        (lambda text: f"{text}7\n", "line 8 is no JSON table"),
        (lambda text: text.replace("rollout/kv_read_share", "other"), "it lacks 'rollout/kv_read_share'"),
        (lambda text: text.replace("evaluate/prompts", "other"), "it lacks 'evaluate/prompts'"),
    ],
)
def test_a_damaged_log_of_a_run_is_named(damage: Callable[[str], str], said: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(damage(path.read_text()))
    refused(tmp_path, path, said)


def test_a_run_whose_record_lacks_its_configuration_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"config": {"model": {"name": "tiny-reasoner"}}}))
    refused(tmp_path, path, "it lacks 'attention'")


@pytest.mark.parametrize(
    "name", ["calibration.json", "plan.json", "evaluation.json", "result.json", "plans/plan-1.json"]
)
def test_a_record_that_was_cut_is_named_and_not_left_out(name: str, tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", "first")
    path = tmp_path / name
    write_profile(path, "first", "plan")
    path.write_text(path.read_text()[:300])
    refused(tmp_path, path, "Unterminated|Expecting")


def test_cut_files_of_other_programs_are_left_out(tmp_path: Path) -> None:
    write_profile(tmp_path / "profile.json", "first")
    (tmp_path / "other.json").write_text('{"format": 1, "ki')
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "plan.json").write_text('{"resource": {}}')
    assert len(collect(tmp_path).provenance) == 1


def without(table: dict[str, Any], *path: str) -> dict[str, Any]:
    name, *inner = path
    return {
        key: without(value, *inner) if key == name else value for key, value in table.items() if key != name or inner
    }


@pytest.mark.parametrize("lacking", ["assumptions", "by_length", "hardware.name", "sparse.tokens_per_second"])
def test_a_plan_that_lacks_what_the_page_shows_is_named(lacking: str, tmp_path: Path) -> None:
    whole = records.plain(plans()[0].results)
    records.write(tmp_path / "plan.json", "plan", without(whole, *lacking.split(".")), config={"model": "Qwen3-1.7B"})
    refused(tmp_path, tmp_path / "plan.json", f"it lacks '{lacking}'")
    records.write(tmp_path / "plan.json", "plan", whole, config={"model": "Qwen3-1.7B"})
    write_report(tmp_path)


def places(table: Any, *inside: Any) -> Iterator[tuple[Any, ...]]:
    """Of everything in nested tables and lists, the outermost ones first."""
    for place, value in (
        table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    ):
        yield (*inside, place)
        yield from places(value, *inside, place)


def with_null(table: Any, place: Any, *inner: Any) -> Any:
    copy = table.copy()
    copy[place] = with_null(table[place], *inner) if inner else None
    return copy


@pytest.mark.parametrize("kind", ["plan", "profile", "calibration", "train"])
def test_a_record_with_a_null_is_shown_or_named_wherever_it_stands(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"{kind}.json"
    if kind == "plan":
        records.write(path, kind, records.plain(plans()[0].results), config={"model": "Qwen3-1.7B"})
    elif kind == "train":
        write_run(tmp_path / "run")
        path = tmp_path / "run" / "result.json"
    else:
        write_profile(path, "first", kind)
    record, errors = json.loads(path.read_text()), list[str]()
    edited = [(part, *place) for part in ("results", "config") for place in places(record[part])]
    for place in edited:
        path.write_text(json.dumps(with_null(record, *place)))
        try:
            write_report(tmp_path)
        except UserError as error:
            errors.append(error.message)
    assert all(message.startswith(f"cannot read {path}: ") for message in errors)
    assert 0 < len(errors) < len(edited), "some of them are not on the page"


def test_an_evaluation_or_a_profile_without_its_figures_is_named(tmp_path: Path) -> None:
    policy = {"tail": None, "truncated_share": 0.0, "kv_read_share": 1.0, "tokens_per_second": 9.0}
    results = {
        "samples": 1,
        "estimator": None,
        "top_p": 1.0,
        "tasks": {"a": {"paired": {}, "policies": {"dense": policy}}},
    }
    records.write(tmp_path / "evaluation.json", "evaluation", results)
    refused(tmp_path, tmp_path / "evaluation.json", "it lacks 'response_tokens.mean'")
    (tmp_path / "evaluation.json").unlink()
    records.write(tmp_path / "profile.json", "profile", {"schedules": []}, config={"model": "first"})
    refused(tmp_path, tmp_path / "profile.json", "it lacks 'dense_ceiling'")


def interrupted(folder: Path) -> None:
    """A run as it is before it has ended."""
    write_run(folder)
    (folder / "result.json").unlink()
    (folder / "config.json").write_text("{}")


def test_a_run_that_has_not_ended_is_said_to_need_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(tmp_path / "a")
    for folder, run in ((tmp_path, tmp_path / "a"), (tmp_path / "a", tmp_path / "a")):
        assert main(["report", "--run", str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"nothing to report in {folder} yet: the run {run} is not finished, it has no result.json" in said
        assert "--resume" in said
    write_run(tmp_path / "b")
    page = write_report(tmp_path).read_text()
    assert "The run <b>a</b> is not finished, so it is not on this page." in page and "--resume" in page
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert "not finished" not in write_report(tmp_path).read_text()


def test_a_run_that_was_resumed_and_interrupted_has_the_rewards_of_its_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    last = {"step": 7, "reward/mean": 1.0, "rollout/kv_read_share": 0.5, "mismatch/acceptance_q05": 0.9}
    path.write_text(path.read_text() + json.dumps(last) + "\n")
    (run,) = collect(tmp_path).runs
    assert run.gone_on and run.reward_last == pytest.approx((0.6 + 0.3 + 1.0) / 3)
    page = write_report(tmp_path).read_text()
    assert "The run <b>run</b> was resumed and has not ended yet; it is shown up to its step 7." in page


def test_a_run_that_went_back_behind_its_end_has_not_ended(tmp_path: Path) -> None:
    """As after a damaged last checkpoint: fewer steps than its result.json says."""
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    (run,) = collect(tmp_path).runs
    assert run.gone_on
