"""Your own files, in every format, whole and damaged; a large JSON array streams."""

from __future__ import annotations

import json
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import data_files
from sparroll.errors import UserError
from sparroll.tasks.data import read
from sparroll.tasks.data.code_tests import Case
from sparroll.tasks.data.load import load

ROWS = [{"prompt": f"Is {n}, \"{n}\" or 'n' näher?\nSay.", "answer": str(n)} for n in range(700)]


@pytest.mark.parametrize("suffix", read.FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert list(read.rows(data_files.write(tmp_path / f"rows{suffix}", ROWS))) == ROWS


@pytest.mark.parametrize("chunk", [1, 2, 7, 100, 1 << 20])
def test_where_a_json_array_is_cut_into_chunks_does_not_matter(
    tmp_path: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "_CHUNK_CHARACTERS", chunk)
    rows = [{"a": '[{"},\\u00e4'}, {"b": [1, {"c": None}]}, {}]
    path = tmp_path / "rows.json"
    for text in (json.dumps(rows), json.dumps(rows, indent=3) + "\n\n", "\n".join(map(json.dumps, rows))):
        path.write_text(text)
        assert list(read.rows(path)) == rows
    path.write_text(" [ ] ")
    assert list(read.rows(path)) == []


def test_a_large_json_array_is_never_whole_in_memory(tmp_path: Path) -> None:
    path = data_files.write(tmp_path / "rows.json", [{"question": "x" * 200_000}] * 200)
    assert path.stat().st_size > 40_000_000
    tracemalloc.start()
    assert sum(1 for _ in read.rows(path)) == 200
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12_000_000


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"prompt": 1}\n{oops', "line 2 of"),
        ("a.jsonl", "[1]\n", "is a list, not an object"),
        ("a.json", '[{"a": 1}, {"a"', "not valid JSON after row 1"),
        ("a.json", '[{"a": 1}', "not valid JSON after row 1"),
        ("a.json", '[{"a": 1}] more', "goes on after the end"),
        ("a.json", "[1, 2]", "row 1 of .* is a int"),
        ("a.csv", "a,b\n1\n", "row 1 of .* more or fewer cells"),
        ("a.csv", "a,b,b\n1,2,3\n", "has the column 'b' twice"),
        ("a.parquet", "PAR0", "cannot read"),
        ("a.txt", "x", "unknown format '.txt'"),
    ],
)
def test_a_damaged_file_is_one_error_that_names_the_place(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=said):
        list(read.rows(tmp_path / name))


def test_narrow_floats_of_parquet_are_the_numbers_that_were_written(tmp_path: Path) -> None:
    """As doubles, .1 would be .10000000149, and no answer would be right."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"answer": pyarrow.array([0.1, None, 2.35], pyarrow.float32()), "problem": ["a", "b", "c"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert [row["answer"] for row in read.rows(tmp_path / "a.parquet")] == [0.1, None, 2.35]


def test_a_missing_file_and_one_without_rows_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="there are no rows"):
        load(str(tmp_path / "empty.jsonl"))


def own(tmp_path: Path, *rows: dict[str, Any]) -> Any:
    return load(str(data_files.write(tmp_path / "own.jsonl", list(rows))))


def test_prompts_stay_as_they_are_and_problems_get_the_template_of_their_kind(tmp_path: Path) -> None:
    tests = [{"input": "1\n", "output": "2\n"}]
    loaded = own(
        tmp_path,
        {"prompt": "2+2?", "answer": 4},
        {"problem": "2+2?", "answer": "4.0"},
        {"question": "2+2?", "answer": 4.5},
        {"problem": "Add one.", "tests": tests},
        {"problem": "Add one.", "tests": json.dumps({"inputs": [[1]], "outputs": [2], "fn_name": "inc"})},
        {"problem": "Add one.", "tests": "assert inc(1) == 2", "entry_point": "inc"},
        {"prompt": "Add one.", "tests": tests},
    )
    assert [row.template for row in loaded.rows] == [
        "plain", "math", "math", "code_stdin", "code_function", "code_complete", "plain",
    ]  # fmt: skip
    assert [row.answer for row in loaded.rows[:3]] == ["4", "4", "4.5"]
    assert loaded.rows[3].tests.cases() == [Case("1\n", "2\n")]
    assert loaded.rows[4].tests.cases() == [Case([1], 2)]


def test_chats_are_kept_turn_by_turn(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    loaded = own(tmp_path, {"prompt": chat, "answer": "4"}, {"prompt": chat[:1], "answer": "4"})
    assert loaded.rows[0].question == (("system", "Be brief."), ("user", "2+2?"))
    assert loaded.skipped == {"a chat that is not a list of {role, content} ending with the user": 1}


def test_every_unusable_row_is_counted_by_its_reason(tmp_path: Path) -> None:
    loaded = own(
        tmp_path,
        {"prompt": "x", "answer": "1"},
        {"prompt": "x", "answer": None},
        {"prompt": "x", "answer": "  "},
        {"prompt": "x", "answer": float("nan")},
        {"prompt": "", "answer": "1"},
        {"prompt": "x", "answer": [1]},
        {"prompt": "x", "tests": [{"input": "1"}]},
        {"prompt": "x", "tests": "assert f()"},
    )
    assert len(loaded.rows) == 1 and sum(loaded.skipped.values()) == 7
    assert loaded.skipped["no answer"] == 3


def test_missing_columns_are_named_with_what_was_found(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no column prompt or problem or question\nhint: columns found: text, answer"):
        own(tmp_path, {"text": "x", "answer": "1"})
    with pytest.raises(UserError, match=r"no column answer or tests\nhint: columns found: prompt, label"):
        own(tmp_path, {"prompt": "x", "label": "1"})
    with pytest.raises(UserError, match=r"none of the 2 rows .*\nhint: reasons: no answer 2"):
        own(tmp_path, {"prompt": "x", "answer": None}, {"prompt": "y", "answer": ""})


def test_another_schema_is_noticed_before_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    lines = islice((json.dumps({"text": "x"}) for _ in range(10_000)), 1000)
    path.write_text("\n".join([*lines, "this line is never reached"]))
    with pytest.raises(UserError, match="columns found: text"):
        load(str(path))
