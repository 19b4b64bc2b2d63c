"""`--prompts FILE`: the same file means the same prompts to every verb, and what is no prompt is named."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from cli_runs import error_of
from sparroll.cli import main
from sparroll.errors import UserError
from sparroll.tasks import prompt_file
from sparroll.tasks.data import read
from sparroll.tasks.prompt_file import plain_prompt, read_prompts

ROWS = [{"problem": "What is 1 + 1?", "answer": "2"}, {"problem": 'Say "x, y".', "answer": "7"}]


def _read(path: Path, count: int = 99) -> list[str]:
    return [prompt.text for prompt in read_prompts(path, None, 0, count, 0)]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        import csv

        with path.open("w", newline="") as sink:
            table = csv.DictWriter(sink, rows[0].keys())
            table.writeheader()
            table.writerows(rows)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_a_file_of_rows_is_read_as_data_show_reads_it(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write(tmp_path / f"x.{suffix}", ROWS)
    assert main(["data", "show", str(path), "--json"]) == 0
    shown = [row["prompt"] for row in json.loads(capsys.readouterr().out)["samples"]]
    assert _read(path) == shown
    assert "What is 1 + 1?" in shown[0]
    assert _read(path, count=1) == shown[:1]


def test_prompts_need_no_answer_and_never_show_one(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.csv", [{"prompt": "a b", "answer": "secret"}, {"prompt": "c", "answer": ""}])
    assert _read(path) == ["a b", "c"]
    assert _read(_write(tmp_path / "x.JSON".lower(), [{"prompt": "a b"}])) == ["a b"]


def test_text_has_one_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffa b\n\n  c d\n", encoding="utf-8")
    assert _read(path) == ["a b", "c d"]


def test_chats_keep_their_messages_and_none_of_their_keys_is_lost(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a b"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": chat}) + "\n")
    (found,) = read_prompts(path, None, 0, 9, 0)
    assert (found.text, found.messages) == ("be brief\na b", (("system", "be brief"), ("user", "a b")))
    assert plain_prompt(found) == chat
    last_is_system = chat[:1]
    for bad in (
        [],
        [{"role": "user"}],
        [{"role": "user", "content": 1}],
        last_is_system,
        [chat[1] | {"tool_calls": []}],
    ):
        path.write_text(json.dumps({"prompt": bad}) + "\n")
        with pytest.raises(UserError, match="row 1 .* is no prompt: .*\nhint: .* no other keys"):
            read_prompts(path, None, 0, 9, 0)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"prompt": "a b"}\n{"title": "d"}\n', "row 2 of {path} is no prompt: no prompt or problem"),
        ("x.json", '[{"prompt": "a b"}, {"prompt": 3}]', "row 2 of {path} is no prompt: a prompt that is neither"),
        ("x.jsonl", '{"prompt": "lone \\ud800"}', "row 1 of {path} is no prompt: text with a lone surrogate"),
        ("x.jsonl", '{"prompt": "a b"', "line 1 of {path} is not valid JSON"),
        ("x.jsonl", "[" * 100_000, "line 1 of {path} is not valid JSON"),
        ("x.json", "[" * 100_000, "{path} is not valid JSON"),
        ("x.json", '"one"', "row 1 of {path} is a str"),
        ("x.tsv", "prompt\na b\n", "cannot read prompts from {path}: unknown format '.tsv'"),
        ("x.csv", "prompt,answer\n", "there are no prompts in {path}"),
        ("x.txt", " \n", "there are no prompts in {path}"),
    ],
)
def test_what_is_no_prompt_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        _read(path)
    assert caught.value.message.startswith(message.format(path=path))


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json", "x.csv"])
def test_a_line_without_an_end_does_not_fill_the_memory(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "LONGEST_ROW", 1000)
    monkeypatch.setattr(read, "_CHUNK_CHARACTERS", 100)
    monkeypatch.setattr(prompt_file, "LONGEST_LINE", 1000)
    path = tmp_path / name
    path.write_text('{"prompt": "' + "a" * 100_000)
    with pytest.raises(UserError, match="longer than 1,000 characters"):
        _read(path)


@pytest.mark.parametrize("verb", ["rollout", "calibrate", "profile", "distill"])
def test_every_verb_has_this_reader(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "x.json", [{"prompt": "a b"}, {"title": "c"}])
    asked = [verb, "--model", "tiny-reasoner", "--out", str(tmp_path / "out"), "--budget", "64", "--prompts", str(path)]
    message, _ = error_of(asked, capsys)
    assert message.startswith(f"row 2 of {path} is no prompt")


@pytest.mark.parametrize(("verb", "default"), [("rollout", 16), ("profile", 16), ("calibrate", 24)])
def test_a_verb_says_how_many_prompts_of_a_file_its_default_leaves_out(
    verb: str, default: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise UserError("far enough")

    monkeypatch.setattr(importlib.import_module(f"sparroll.cli.{verb}"), "Progress", stop)

    def said(path: Path, *more: str) -> str:
        asked = [verb, "--model", "tiny-reasoner", "--out", str(tmp_path / "out"), "--budget", "64", *more]
        assert main([*asked, "--prompts", str(path)]) == 2
        said = capsys.readouterr().err
        assert said.endswith("error: far enough\n")
        return said.removesuffix("error: far enough\n")

    rows = [{"prompt": f"a {row}"} for row in range(default + 8)]
    lines = tmp_path / "x.txt"
    lines.write_text("a b\n\n" * 1200)
    for path in (_write(tmp_path / "x.jsonl", rows), lines):
        assert said(path) == f"the first {default} prompts of {path}; --count takes more\n"
        assert said(path, "--count", str(default)) == ""
    fewer = _write(tmp_path / "y.jsonl", rows[:default])
    assert said(fewer) == said(fewer, "--count", str(default)) == ""
    assert said(fewer, "--count", "30") == f"{fewer} has {default} prompts, fewer than --count 30\n"
    # What stands behind them is no matter of a command that does not take it.
    damaged = _write(tmp_path / "z.jsonl", rows[:default])
    damaged.write_text(damaged.read_text().rstrip() + '\n{"prompt": ')
    assert said(damaged) == ""


def test_a_task_gives_no_endless_number_of_prompts() -> None:
    with pytest.raises(UserError, match="at most 1,000,000 prompts, got a count of 1,000,000,000"):
        read_prompts(None, "synthetic", 1, 10**9, 0)
