"""Each published schema, with its traps, through the same path as a hub copy."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import data_files
from sparroll.errors import UserError
from sparroll.tasks.code.limits import SandboxLimits
from sparroll.tasks.data import hub
from sparroll.tasks.data.catalog import SETS
from sparroll.tasks.data.code_tests import Case
from sparroll.tasks.data.load import Loaded, load
from sparroll.tasks.data.rewards import limits_for
from sparroll.tasks.data.settings import DataSettings

ROWS = {
    "polaris": 10, "deepscaler": 2, "aime24": 1, "aime25": 2, "aime26": 1, "amc": 2, "amc12_2024": 1, "math500": 1,
    "gsm8k": 2, "taco": 2, "livecodebench": 8, "humaneval_plus": 1, "mbpp_plus": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(data_files.plain_mirror(tmp_path_factory.mktemp("mirror")))


@pytest.mark.parametrize("layout", [data_files.plain_mirror, data_files.cached_mirror])
def test_every_set_loads_from_a_mirror_in_either_layout(tmp_path: Path, layout: Any) -> None:
    layout(tmp_path)
    assert set(ROWS) == {name for name in SETS if not name.startswith("livecodebench_v")}
    assert {name: len(load(name, mirror=str(tmp_path)).rows) for name in ROWS} == ROWS


def test_without_a_mirror_an_offline_process_reads_the_hubs_cache(tmp_path: Path) -> None:
    data_files.cached_mirror(tmp_path, "gsm8k")
    code = (
        "from sparroll.tasks.data.load import load\n"
        "print([row.answer for row in load('gsm8k').rows], [row.answer for row in load('openai/gsm8k:test').rows])\n"
        "try:\n    load('aime24')\nexcept ValueError as error:\n    print(error)\n"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    first, rest = done.stdout.split("\n", 1)
    assert first == "['1234', '-5'] ['4']"
    assert "HuggingFaceH4/aime_2024 is not in the hub's cache" in rest and "HF_HUB_OFFLINE" in rest


def answers(loaded: Loaded) -> list[str]:
    return [row.answer for row in loaded.rows]


def test_missing_answers_are_skipped_and_counted(mirror: str) -> None:
    loaded = load("deepscaler", mirror=mirror)
    assert answers(loaded) == ["2", "5"] and loaded.skipped == {"no answer": 2}
    assert [row.row_id for row in loaded.rows] == ["deepscaler:train/0", "deepscaler:train/3"]


def test_floats_and_ints_become_the_text_that_a_person_writes(mirror: str) -> None:
    assert answers(load("amc", mirror=mirror)) == ["142", "1.5"]
    assert answers(load("aime26", mirror=mirror)) == ["22"]
    assert answers(load("aime24", mirror=mirror)) == ["019"]


def test_gsm8k_answers_lose_their_commas_and_keep_their_sign(mirror: str) -> None:
    assert answers(load("gsm8k", mirror=mirror)) == ["1234", "-5"]
    assert answers(load("gsm8k", "eval", mirror=mirror)) == ["4"]


def test_a_fraction_is_a_difficulty(mirror: str) -> None:
    numbers = [row.difficulty_number for row in load("polaris", mirror=mirror).rows]
    assert numbers[:3] == [0.25, 0.375, 0.5]
    assert load("math500", mirror=mirror).rows[0].difficulty_number == 3


def test_taco_tests_are_of_standard_input_or_of_a_function(mirror: str) -> None:
    loaded = load("taco", mirror=mirror)
    stdin, function = (row.tests for row in loaded.rows)
    assert loaded.skipped == {"no tests": 1}
    assert stdin is not None and stdin.cases()[1] == Case("1\n", "2\n") and stdin.style == "stdin" and stdin.rounded
    assert function is not None and function.wrapped and function.cases() == [Case([1, 2], [3])]
    assert [row.template for row in loaded.rows] == ["code_stdin", "code_function"]


def test_livecodebench_opens_pickled_private_tests_after_the_public_ones(mirror: str) -> None:
    rows = load("livecodebench", mirror=mirror).rows
    stdin, function = rows[0].tests, rows[2].tests
    assert stdin is not None and stdin.cases() == [Case("1 2\n", "3\n")] * 3
    assert function is not None and function.cases() == [Case([[1, 2], 3], True)] * 2
    assert function.entry_point == "has" and rows[2].starter_code.startswith("class Solution")


def test_each_release_of_livecodebench_is_the_first_files(mirror: str, tmp_path: Path) -> None:
    assert [len(load(f"livecodebench_v{n}", mirror=mirror).rows) for n in range(1, 6)] == [3, 4, 5, 6, 7]
    root = data_files.plain_mirror(tmp_path, "livecodebench")
    (root / SETS["livecodebench"].repository / "test4.jsonl").unlink()
    with pytest.raises(UserError, match=r"lacks the files test4.jsonl"):
        load("livecodebench", mirror=str(root))
    assert len(load("livecodebench_v3", mirror=str(root)).rows) == 5


def test_a_loading_script_beside_the_files_is_never_run(tmp_path: Path) -> None:
    root = data_files.plain_mirror(tmp_path, "livecodebench")
    script = root / SETS["livecodebench"].repository / "code_generation_lite.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert len(load("livecodebench", mirror=str(root)).rows) == 8
    assert not (tmp_path / "ran").exists()


def test_evalplus_rows_check_the_function_by_name(mirror: str) -> None:
    human, mbpp = load("humaneval_plus", mirror=mirror).rows[0], load("mbpp_plus", mirror=mirror).rows[0]
    assert human.tests is not None and human.tests.entry_point == "one"
    assert human.tests.cases()[0].given.endswith("check(one)\n")
    assert mbpp.tests is not None and mbpp.tests.entry_point == "double"


def test_mbpp_prompts_are_evalplus_docstrings_with_one_assertion(mirror: str, tmp_path: Path) -> None:
    (row,) = load("mbpp_plus", mirror=mirror).rows
    assert row.text == '```python\n"""\nWrite a function that doubles.\nassert double(2) == 4\n"""\n```'
    raw = data_files.FILES["mbpp_plus"]["data/test-00000-of-00001.parquet"][0]
    path = tmp_path / SETS["mbpp_plus"].repository / "test.jsonl"
    data_files.write(path, [raw, raw | {"test_list": []}])
    loaded = load("mbpp_plus", mirror=str(tmp_path))
    assert len(loaded.rows) == 1 and loaded.skipped == {"no assertion for the prompt": 1}


def test_rows_outside_of_the_contest_window_are_dropped_before_their_tests_are_read(tmp_path: Path) -> None:
    inside, outside = data_files.livecodebench_rows(1)[0], data_files.livecodebench_rows(2)[0]
    assert (inside["contest_date"][:7], outside["contest_date"][:7]) == ("2024-08", "2024-09")
    large = outside | {"private_test_cases": "x" * 4_000_000}
    rows = [large, outside | {"private_test_cases": 7}, inside, *[large] * 8]
    path = data_files.write(tmp_path / SETS["livecodebench"].repository / "test.jsonl", rows)
    tracemalloc.start()
    loaded = load("livecodebench_v1", mirror=str(tmp_path), in_window=lambda day: day < "2024-09-01")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The id is the place in the file, whatever the window.
    assert [row.row_id for row in loaded.rows] == ["livecodebench_v1:test/2"]
    assert (loaded.outside, loaded.dated, loaded.skipped) == (10, True, {})
    assert path.stat().st_size > 36_000_000 and peak < 24_000_000
    with pytest.raises(UserError, match=r"no row of livecodebench_v1:test is in the contest window"):
        load("livecodebench_v1", mirror=str(tmp_path), in_window=lambda day: False)


def test_programs_have_the_limits_of_the_sets_official_graders(mirror: str, tmp_path: Path) -> None:
    settings = DataSettings()
    expected = {"livecodebench": (6, 4), "taco": (4, 4), "humaneval_plus": (4, 4), "mbpp_plus": (4, 4)}
    for name, (seconds, gib) in expected.items():
        limits = limits_for(load(name, mirror=mirror).rows[0], settings)
        assert (limits.wall_seconds, limits.cpu_seconds, limits.memory_bytes) == (seconds, seconds, gib << 30)
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    (own,) = load(str(data_files.write(tmp_path / "own.jsonl", [{"prompt": "add one", "tests": tests}]))).rows
    assert limits_for(own, settings) == SandboxLimits()
    asked = limits_for(own, DataSettings(test_seconds=2.5, test_memory_gib=0.5))
    assert (asked.wall_seconds, asked.cpu_seconds, asked.memory_bytes) == (2.5, 3, 1 << 29)


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match=r"unknown data 'polariss'\nhint: did you mean 'polaris'"):
        load("polariss")


def test_a_set_of_another_version_is_refused_with_its_columns(tmp_path: Path) -> None:
    data_files.write(tmp_path / "openai/gsm8k/main/train.jsonl", [{"q": "1+1?", "a": "2"}])
    with pytest.raises(UserError, match=r"no column question\nhint: columns found: q, a"):
        load("gsm8k", mirror=str(tmp_path))


def test_a_missing_shard_and_a_missing_split_are_errors(tmp_path: Path) -> None:
    row = [{"question": "1+1?", "answer": "#### 2"}]
    data_files.write(tmp_path / "openai/gsm8k/main/train-00001-of-00002.parquet", row)
    with pytest.raises(UserError, match=r"lacks the files main/train-00000-of-00002.parquet"):
        load("gsm8k", mirror=str(tmp_path))
    with pytest.raises(UserError, match=r"no data files of the split 'test'.*\nhint: found in"):
        load("gsm8k:test", mirror=str(tmp_path))


def test_a_mirror_without_the_set_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no openai/gsm8k"):
        load("gsm8k", mirror=str(tmp_path))


def test_an_evaluation_set_is_trained_on_only_when_its_split_is_named(mirror: str) -> None:
    with pytest.raises(UserError, match=r"aime24 is made for evaluation\nhint: .*write aime24:train"):
        load("aime24", "train", mirror=mirror)
    assert len(load("aime24:train", "train", mirror=mirror).rows) == 1


def test_files_are_chosen_by_split_configuration_and_format() -> None:
    there = ["main/test-0.parquet", "main/train-0.parquet", "other/train-0.parquet", "main/train.csv"]
    assert hub.choose(there, "train", "main") == ["main/train-0.parquet"]
    assert hub.choose(["trainable.json", "polaris.json"], "train") == ["polaris.json", "trainable.json"]
    assert hub.choose(["a.json"], "test") == []


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import HfApi

    from sparroll.tasks.data import hub

    unreachable = type("ConnectError", (Exception,), {"__module__": "httpx2"})

    def fails(*_: object, **__: object) -> None:
        raise unreachable("[Errno -2] Name or service not known")

    monkeypatch.setattr(HfApi, "list_repo_files", fails)
    with pytest.raises(UserError, match=r"cannot get openai/gsm8k from the hub: \[Errno -2\].*\nhint: HF_HUB_OFFLINE"):
        hub._remote_listing("openai/gsm8k", None)
