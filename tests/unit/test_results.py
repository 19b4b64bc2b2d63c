"""The tables of README and docs hold what the committed records say."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import benchmark
from sparroll import records

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return benchmark("render")


def test_tables_and_figures_are_those_of_the_records(tables: ModuleType) -> None:
    assert {"README.md", "docs/results.md", "docs/study.md"} <= set(tables.pages())
    for page in tables.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert tables.render(page, text) == text, "run: python benchmarks/render.py"


def test_a_claim_writes_its_figures_wherever_the_lines_break(tables: ModuleType) -> None:
    claims = benchmark("claims")
    claim = claims.Claim(
        "page.md", "is {fast} times as fast, at {share} % of\nit", lambda: {"fast": "1.39", "share": "73"}
    )
    assert (
        claim.written("It is 1.4\n  times as fast, at 1,000 %\nof it.")
        == "It is 1.39\n  times as fast, at 73 %\nof it."
    )
    with pytest.raises(ValueError, match=r"page.md holds 0 times: is \{fast\}"):
        claim.written("It was fast.")


def lines_of(table: str) -> dict[str, list[str]]:
    """Cells by the first one."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0].strip("`"): row[1:] for row in rows}


def steps_of(*seconds: float) -> list[dict[str, float]]:
    parts = {f"{name}_seconds": 1.0 for name in ("rollout", "score", "update")}
    return [{"step": number, "step_seconds": each, **parts} for number, each in enumerate(seconds, 1)]


def case_of(name: str, state: str, *seconds: float) -> dict[str, Any]:
    return {
        "case": name,
        "schedule": name,
        "correction": "none",
        "distill": False,
        "state": state,
        "steps": steps_of(*seconds),
    }


def test_a_training_step_counts_when_its_case_finished_a_warm_one(tables: ModuleType, monkeypatch) -> None:
    found = [case_of("dense", "finished", 90.0, 30.0), case_of("sparse", "finished", 80.0, 15.0)]
    found += [case_of("cut", "cut off", 80.0, 15.0), case_of("cold", "finished", 80.0), case_of("failed", "failed")]
    monkeypatch.setattr(tables, "results", lambda name, kind: found)
    monkeypatch.setattr(tables, "TRAINING_STEPS", tables.TRAINING_STEPS[:1])
    lines = lines_of(tables.training_step())
    assert lines["dense"] == ["dense", "1.0", "1.0", "1.0", "", "30.0", "1.00x", "0.50x"]
    assert lines["sparse"][-3:] == ["15.0", "2.00x", "1.00x"]
    for name, state in (("cut", "cut off"), ("cold", "finished"), ("failed", "failed")):
        assert lines[name] == [name, "", "", "", "", state, "", ""]
    monkeypatch.setattr(tables, "results", lambda name, kind: found[1:])
    assert lines_of(tables.training_step())["sparse"][-3:] == ["15.0", "", "1.00x"]


def test_a_checked_training_step_is_compared_with_the_sparse_one_of_its_own_record(
    tables: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    checked = case_of("verified", "finished", 80.0, 15.3) | {"schedule": "qwen3-1.7b-0.86", "verified": True}
    checked["steps"][-1] |= {"score_seconds": 0.0004}
    first, second = tables.TRAINING_STEPS
    found = {
        first: [case_of("dense", "finished", 90.0, 30.0), case_of("sparse", "finished", 80.0, 12.0)],
        second: [case_of("sparse", "finished", 80.0, 15.0), checked],
    }
    for name in found:
        (tmp_path / f"{name}.json").write_text("{}")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "results", lambda name, kind: found[name])
    lines = tables.training_step().splitlines()[2:]
    assert len(lines) == 4
    assert lines[-1] == "| `verified` | 0.86, checked | 1.0 |  | 1.0 |  | 15.3 |  | 0.98x |"


def study_of(**runs: tuple[str, int, str]) -> dict[str, Any]:
    """A study of one seed: (state, steps, why it stopped itself) of each row."""
    one = {"mean": 0.5, "low": 0.5, "high": 0.5}
    names = ("reward_last", "tail_last", "worst_tail_last", "kl", "masked_share", "response_tokens", "kv_read_share")
    made: dict[str, Any] = {"runs": [], "table": []}
    for row, (state, steps, stopped) in runs.items():
        ends = [0, 2, 4] if steps == 4 else [0] if steps else []
        points = [[step, 0.1 * step, 0.0, 1.0] for step in ends]
        made["runs"].append(
            {"row": row, "seed": 0, "state": state, "steps": steps, "stopped": stopped, "dense_accuracy": points}
        )
        summed = {"row": row, "seeds": int(steps > 0), "steps": steps, "accuracy_change": one if steps == 4 else None}
        made["table"].append(summed | dict.fromkeys(names, one if steps else None))
    return made


def test_rows_of_the_study_say_how_they_ended(tables: ModuleType, monkeypatch) -> None:
    found = study_of(
        whole=("finished", 4, ""),
        stopped=("finished", 3, "no token kept"),
        cut=("cut", 2, ""),
        waiting=("waiting", 0, ""),
        failed=("failed", 0, ""),
    )
    study = tables.render_study
    monkeypatch.setattr(study, "results", lambda name, kind: found)
    again = study_of(distill=("finished", 4, ""))
    monkeypatch.setattr(study, "_again", lambda steps: again)
    ended = {"whole": "+0.500", "stopped": "stopped itself by step 3", "cut": "cut at step 2"}
    ended |= {"waiting": "waiting", "failed": "failed"}
    lines = lines_of(study.study())
    assert lines.pop("distill`, again")[1] == "+0.500"
    assert {name: line[1] for name, line in lines.items()} == ended
    assert lines["cut"][2:] == ["0.50", "0.500", "0.500", "0.500", "50.0%", "0", "50%"]
    assert set(lines["waiting"][2:]) == {""}
    found["runs"].append(found["runs"][0] | {"steps": 2, "stopped": "no token kept"})
    assert lines_of(study.study())["whole"][1] == "+0.500; 1 more stopped early"
    longer = lines_of(study.study_longer())
    assert longer.pop("distill`, again")[1] == "+0.400 (+0.400 to +0.400)"
    assert longer["whole"][:2] == ["+0.200 (+0.200 to +0.200)", "+0.400 (+0.400 to +0.400)"]
    assert {name: line[:2] for name, line in longer.items() if name != "whole"} == {
        name: ["", how] for name, how in ended.items() if name != "whole"
    }


def test_a_control_group_stands_beside_the_tail_with_its_record_and_only_then(
    tables: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    study = tables.render_study
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert study.study_control() == ""

    def run(row: str, gaps: list[float | None], alarms: list[int]) -> dict[str, Any]:
        series = {"mismatch/acceptance_q05": [0.88] * len(gaps), study.FIRST_BIN: [0.94, None], "control/pairs": [8.0]}
        series |= {"control/step_reward_gap": gaps} if gaps else {}
        return {"row": row, "steps": len(gaps), "reward_gap_alarms": alarms, "series": series}

    runs = [run("a", [0.1, 0.3], [5, 9]), run("a", [0.2, None], [8]), run("b", [0.0, 0.0], []), run("dense", [], [])]
    monkeypatch.setattr(study, "results", lambda name, kind: {"runs": [*runs, run("b", [0.0], [4])]})
    (tmp_path / f"{study.CONTROL}.json").write_text("{}")
    # Student's t with two degrees of freedom is 4.303, and the standard error of .1, .3 and .2 is .0577.
    assert lines_of(study.study_control()) == {
        "a": ["0.880", "0.940", "0.200 [-0.048, 0.449]", "6.5", "5, 8", "2, 2"],
        "b": ["0.880", "0.940", "0.000 [0.000, 0.000]", "none", "none, 4", "2, 1"],
    }


def checked_run(row: str, state: str, steps: int) -> dict[str, Any]:
    series = {"check/cut_share": [0.1], "check/drafted_per_kept": [1.05], "check/largest_nats": [2.3]}
    return study_of(**{row: (state, steps, "")})["runs"][0] | {"series": series}


def test_rows_of_other_checks_stand_beside_the_usual_one_once_they_ran_whole(
    tables: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    study = benchmark("render_study")
    plain = study_of(**dict.fromkeys(("dense", "fixed-tis", "calibrated-0.75", "calibrated-0.86"), ("finished", 4, "")))
    for run in plain["runs"]:
        run["series"] = {}
    names = ["fixed-verified", "calibrated-0.75-verified", "calibrated-0.86-verified"]
    usual = {"runs": [checked_run(name, "finished", 4) for name in names]}
    usual["table"] = [study_of(**{name: ("finished", 4, "")})["table"][0] for name in names]
    grid = {"runs": [checked_run("fixed-verified-32-0.1", "finished", 4), checked_run("cut", "cut", 2)]}
    grid["table"] = study_of(**{"fixed-verified-32-0.1": ("finished", 4, ""), "cut": ("cut", 2, "")})["table"]
    found = {study.STUDIES[60]: plain, study.VERIFIED: usual, study.CHECK_GRID: grid}
    monkeypatch.setattr(study, "results", lambda name, kind: found[name])
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert list(lines_of(study.study_verified_rollouts())) == [
        *("dense", "fixed-tis", "fixed-verified", "calibrated-0.75", "calibrated-0.75-verified"),
        *("calibrated-0.86", "calibrated-0.86-verified"),
    ]
    (tmp_path / f"{study.CHECK_GRID}.json").write_text("{}")
    lines = lines_of(study.study_verified_rollouts())
    assert list(lines)[2:4] == ["fixed-verified", "fixed-verified-32-0.1"] and len(lines) == 8
    assert lines["fixed-verified-32-0.1"][-3:] == ["10.0%", "1.05", "2.30"]


def test_the_table_of_checks_stands_with_its_record_and_only_then(tables: ModuleType, tmp_path, monkeypatch) -> None:
    study = benchmark("render_study")
    monkeypatch.setattr(study, "RESULTS", tmp_path)
    assert study.study_checks() == ""
    about = {"reward": 0.53125, "reward_standard_error": 0.0441, "kl": 0.02512, "largest_nats": 4.58}
    about |= {"over_2_nats_share": 5.31e-4, "over_10_nats_share": 0.0, "over_20_nats_share": 0.0}
    of = {"kv_budget_tokens": 128, "window_tokens": 64, "floor": 0.01, "cut_share": 0.171, "drafted_per_kept": 1.132}
    plain = {"kv_budget_tokens": None, "window_tokens": None, "floor": None, "draft_acceptance_q05": None}
    rows = [about | plain, about | of | {"draft_acceptance_q05": 0.7391}]
    config = {"task": "table_sums", "level": 124, "temperature": 0.8, "problems": 128, "dtype": "fp32"}
    path = tmp_path / "mismatch-study-checks-h200.json"
    records.write(path, "study-checks", {"rows": rows, "missing": []}, config=config)
    made = study.study_checks()
    assert "128 held-out" in made.replace("\n", " ") and max(map(len, made.splitlines()[:4])) <= 120
    assert "| dense | 0.531 +- 0.045 | 0.0252 | 5.4e-04 | 0 | 0 | 4.6 |  |  | - |" in made
    verified = (
        "| verified, 128 tokens, windows of 64, floor 0.01 | 0.531 +- 0.045 | 0.0252 | 5.4e-04 | 0 | 0 | 4.6 | 18% |"
    )
    assert f"{verified} 1.14 | 0.73 |" in made
    assert study.tiny_checks() == ""
    path.rename(tmp_path / "tiny-reasoner-checks-cpu.json")
    assert study.study_checks() == "" and "Measured with tiny-reasoner (" in study.tiny_checks()


def verified_cell(engine: str, rate: float, **more: Any) -> dict[str, Any]:
    schedule = None if engine == "dense" else "a"
    return {"engine": engine, "schedule": schedule, "tokens_per_second": rate, **more}


def test_verified_rollouts_stand_beside_what_ran_with_the_same_requests(
    tables: ModuleType, tmp_path: Path, monkeypatch
) -> None:
    speed = benchmark("render_speed")
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    assert len(speed.verified_rollouts().splitlines()) == 2 and speed.verified_runs() == ""
    batch = {"set": "batch", "step": 0, "batch": 32, "context_tokens": 960_000}
    check = {"window_tokens": 64, "floor": 0.01, "kept_share_forced": 0.9993}
    did = {"cut_share": 0.0365, "drafted_per_kept": 1.0045, "of_unverified": 0.8737}
    cells = [
        verified_cell("dense", 100.0, **batch),
        verified_cell("sparse", 300.5, **batch),
        verified_cell("verified", 250.0, **batch, **check, **did),
        verified_cell("sparse", 500.0, **batch) | {"schedule": "whose checks were not timed"},
    ]

    def write(size: str, of: list[dict[str, Any]], which: str = "") -> None:
        path = tmp_path / f"verified-rollouts-qwen3-{size}{which}-h200.json"
        records.write(path, "verified-rollouts", of, config={"model": f"qwen3-{size}"})

    write("1.7b", cells)
    write("1.7b", cells, "-65-rows")
    assert speed.verified_rollouts().splitlines()[2:] == [
        "| Qwen3-1.7B | H200 | 32 x 30,000 | a | none |  |  | 300 | 3.00x |  |",
        "| Qwen3-1.7B | H200 | 32 x 30,000 | a | 64 | 3.7% | 1.01 | 250 | 2.50x | 0.873 |",
    ]
    assert speed.verified_runs() == ""
    # Moments of a set, and what they say about the whole run, without stock attention beside it.
    moment = {"set": "steady", "step": 0, "batch": 90, "context_tokens": 900_000}
    more = [verified_cell("verified", 240.0, **moment, **check, **did | {"cut_share": share}) for share in (0.02, 0.04)]
    more.append(verified_cell("verified", 245.0, set="steady", moments=2, **check, of_unverified=0.9))
    write("8b", [*cells, *more])
    assert len(speed.verified_rollouts().splitlines()) == 6
    made = speed.verified_runs()
    assert "2 moments of the steady one" in made.replace("\n", " ")
    assert made.splitlines()[-1] == "| Qwen3-8B | H200 | steady |  | a | 64 | 3.0% | 1.01 | 245 |  | 0.900 |"


def test_no_budget_of_checked_drafts_gains_by_its_call(tables: ModuleType, monkeypatch) -> None:
    """Each counts with its slowest call, beside the fastest dense runs of all."""
    drafts = benchmark("render_drafts")

    def run(engine: str, rate: float, **more: Any) -> dict[str, Any]:
        return {"set": "steady", "moments": 3, "engine": engine, "tokens_per_second": rate, **more}

    kept, fewer = {"kept_share_forced": 0.9999}, {"kept_share_forced": 0.9993}
    calls = {
        "first": [run("dense", 100.0), run("verified", 390.0, schedule="wide-512-4x4", **kept)],
        "second": [
            run("dense", 98.0),
            run("verified", 395.0, schedule="wide-512-4x4", **kept),
            run("verified", 420.0, schedule="wide-512-4x2", **kept),
            run("verified", 300.0, schedule="wide-512-4x2", **fewer),
            {"set": "steady", "engine": "verified", "schedule": "wide-512-4x2", "tokens_per_second": 1.0, **kept},
        ],
    }
    monkeypatch.setattr(drafts, "CALLS", tuple(calls))
    monkeypatch.setattr(drafts, "results", lambda name, kind: calls[name])
    assert drafts.speeds() == {("512", "steady"): 3.9, ("512_4x2", "steady"): 4.2}


ABSOLUTE_PATH = re.compile(r"(?<![\w./])/\w")
"""A slash that begins a word; in text, slashes stand within words or between spaces."""


@pytest.mark.parametrize("text", ["/tmp/step", 'File "/work/x.py", line 3', "--model /root/model", "cache=/mnt"])
def test_paths_of_one_machine_are_seen_wherever_they_stand(text: str) -> None:
    assert ABSOLUTE_PATH.search(text)
    assert not ABSOLUTE_PATH.search(
        "12 tokens/s, runs/study/folder, https://example.org/a, reward/mean, dense / sparse"
    )


RECORDS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
DEVELOPERS_CORES = 2
"""Of the machine where git held the history before records said who named their commit; GPU hosts have more."""


def test_a_record_says_what_code_made_it_or_that_it_cannot() -> None:
    assert RECORDS
    for path in RECORDS:
        record = records.read(path)
        told = record["commit"]
        known = told.get("said_by") is not None or record["hardware"]["cores"] <= DEVELOPERS_CORES
        proven = known and told["id"] is not None and told["dirty"] is False
        assert proven or record.get("caveat"), f"{path.name} cannot show what code made it: say so in `caveat`"
        assert known or told["dirty"] is not False, f"{path.name} claims what nothing recorded"


def test_no_two_records_took_the_same_seconds() -> None:
    """Runs never do, so one of them was filled in by hand. Those that end by the clock (`minutes`) may; then their results
    differ. Where nothing was timed, as for graded pairs alone, it is 0."""
    found: dict[tuple[float, str], list[str]] = {}
    for path in RECORDS:
        record = records.read(path)
        if record["wall_seconds"] and not record.get("caveat"):
            what = json.dumps(record["results"]) if (record["config"] or {}).get("minutes") else ""
            found.setdefault((record["wall_seconds"], what), []).append(path.name)
    assert [names for names in found.values() if len(names) > 1] == []


def test_a_record_is_younger_than_the_commit_that_made_it() -> None:
    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("git does not hold the history here")
    made = {}
    for path in RECORDS:
        record = records.read(path)
        made.setdefault(record["commit"]["id"], []).append((datetime.fromisoformat(record["date"]), path.name))
    for commit, dates in made.items():
        committed = git("show", "-s", "--format=%cI", f"{commit}^{{commit}}")
        assert committed is not None, f"{dates[0][1]} names {commit}, which is no commit"
        for date, name in dates:
            assert datetime.fromisoformat(committed) <= date, f"{name} is older than the code that made it"


def test_every_record_is_whole() -> None:
    for path in RECORDS:
        record = records.read(path)
        text = path.read_text(encoding="utf-8").replace("\\n", " ")
        assert not ABSOLUTE_PATH.search(text), f"{path.name} has a path of one machine"
        assert {"date", "commit", "hardware", "versions", "config"} <= record.keys(), path.name
