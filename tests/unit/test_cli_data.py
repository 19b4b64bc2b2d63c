"""`sparroll data`: what is printed of sets and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import data_files
from cli_runs import save_model
from sparroll.cli import main

Captured = pytest.CaptureFixture[str]


def test_show_prints_samples_a_histogram_and_what_was_skipped(tmp_path: Path, capsys: Captured) -> None:
    root = data_files.plain_mirror(tmp_path, "deepscaler")
    assert main(["data", "show", "deepscaler", "--mirror", str(root), "--model", "tiny-reasoner"]) == 0
    shown = capsys.readouterr().out
    assert "A farmer has 6 hens" in shown and "\\boxed{}" in shown and "answer 5" in shown
    assert "2 rows of deepscaler:train" in shown and "skipped 2: no answer" in shown
    assert "prompt tokens: " in shown and "█" in shown


def test_show_prints_a_prompt_as_the_model_sees_it(tmp_path: Path, capsys: Captured) -> None:
    """With the chat template; of a long prompt the end, too."""
    model = save_model(tmp_path / "chat")
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = "<s>{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %} now{% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    rows = [{"prompt": "word " * 300 + str(row), "answer": "1"} for row in range(2)]
    path = str(data_files.write(tmp_path / "own.jsonl", rows))
    assert main(["data", "show", path, "--model", str(model), "--chat", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "<s>" in shown and " ... " in shown and "0 now" in shown
    assert main(["data", "show", path, "--model", str(model), "--chat", "--samples", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["prompt"].endswith("0 now")


def test_show_as_json_has_the_numbers(tmp_path: Path, capsys: Captured) -> None:
    path = data_files.write(tmp_path / "own.csv", [{"prompt": "one two", "answer": "1"}, {"prompt": "x", "answer": ""}])
    assert main(["data", "show", str(path), "--json", "--samples", "5"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["rows"] == 1 and shown["skipped"] == {"no answer": 1}
    assert shown["prompt_words"] == {"min": 2, "median": 2, "max": 2}
    assert [sample["prompt"] for sample in shown["samples"]] == ["one two"]


def test_show_refuses_what_means_nothing(tmp_path: Path, capsys: Captured) -> None:
    path = str(data_files.write(tmp_path / "own.jsonl", [{"prompt": "x", "answer": "1"}]))
    assert main(["data", "show", path, "--chat"]) == 2
    assert main(["data", "show", path, "--thinking", "--model", "tiny-reasoner"]) == 2
    assert main(["data", "show", "gsm9k"]) == 2
    errors = capsys.readouterr().err
    assert "--chat needs --model" in errors and "need --chat" in errors and "did you mean 'gsm8k'" in errors


def test_check_lists_shared_rows_and_says_so_by_its_exit_code(tmp_path: Path, capsys: Captured) -> None:
    root = data_files.plain_mirror(tmp_path, "aime24", "gsm8k")
    words = "A farmer has 20 hens and sells one. How many are left? And then?"
    path = str(data_files.write(tmp_path / "own.jsonl", [{"prompt": words, "answer": "1"}]))
    arguments = ["data", "check", "--train", path, "--eval", "aime24", "--eval", "gsm8k", "--mirror", str(root)]
    assert main([*arguments, "--ngram-words", "12"]) == 1
    assert "own.jsonl/0" in capsys.readouterr().out
    assert main([*arguments, "--ngram-words", "12", "--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["overlaps"][0]["eval"] == "aime24:train/0" and shown["eval_rows"] == {
        "aime24:train": 1,
        "gsm8k:test": 1,
    }
    clean = str(data_files.write(tmp_path / "clean.jsonl", [{"prompt": "Something else", "answer": "1"}]))
    arguments[3] = clean
    assert main(arguments) == 0
    assert "0 of 1 rows" in capsys.readouterr().out


def test_show_and_check_say_that_tests_in_python_need_entry_point(tmp_path: Path, capsys: Captured) -> None:
    tests = "assert add(1, 2) == 3"
    rows = [{"prompt": "Write add(a, b).", "tests": tests, "entry_point": "add"}, {"prompt": "Add.", "tests": tests}]
    path = str(data_files.write(tmp_path / "own.jsonl", rows))
    clean = str(data_files.write(tmp_path / "clean.jsonl", [{"prompt": "Something else", "answer": "1"}]))
    reason = "tests are code, and entry_point is missing"
    assert main(["data", "show", path]) == 0
    assert f"skipped 1: {reason}" in capsys.readouterr().out
    check = ["data", "check", "--train", path, "--eval", clean]
    assert main(check) == 0
    assert f"skipped 1 of own.jsonl: {reason}" in " ".join(capsys.readouterr().out.split())
    assert main([*check, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == {"own.jsonl": {reason: 1}, "clean.jsonl": {}}


def test_check_says_that_a_shorter_row_counts_as_a_whole(tmp_path: Path, capsys: Captured) -> None:
    root = data_files.plain_mirror(tmp_path, "gsm8k")
    path = data_files.write(tmp_path / "own.jsonl", [{"prompt": "So: what is two plus two now?", "answer": "4"}])
    short = data_files.write(tmp_path / "short.jsonl", [{"prompt": "What is two plus two?", "answer": "4"}])
    assert main(["data", "check", "--train", str(path), "--eval", str(short), "--mirror", str(root)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 rows of" in shown
    assert "share 13 words in a row, or a whole shorter row, with an eval row" in shown


def test_nothing_in_a_row_reaches_the_terminal_as_a_command(tmp_path: Path, capsys: Captured) -> None:
    rows = [{"id": "\x1b]0;title\x07", "prompt": "\x1b[31mred\x9b2J\r\nover\tthere\u00a0x", "answer": "\x1b[2J7"}]
    path = str(data_files.write(tmp_path / "own.jsonl", rows))
    assert main(["data", "show", path]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\x9b" not in shown and "\r" not in shown and "\x07" not in shown
    assert "?[31mred?2J" in shown and "over" in shown and "there\u00a0x" in shown and "?[2J7" in shown
    assert main(["data", "show", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"][0]["prompt"] == rows[0]["prompt"]


def test_list_names_every_set(capsys: Captured) -> None:
    assert main(["data", "list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} >= set(data_files.FILES)
