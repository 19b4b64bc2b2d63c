"""Rows of your own files: `prompt`, `problem` or `question`, with `answer` or `tests`. Knows no published set."""

from __future__ import annotations

import json
from typing import Any

from sparroll.tasks.data.answers import answer_text
from sparroll.tasks.data.code_sets import NO_TESTS, input_output
from sparroll.tasks.data.code_tests import Case, CodeTests
from sparroll.tasks.data.rows import Message, Raw, Row, Skipped

QUESTIONS = ("prompt", "problem", "question")
VERDICTS = ("answer", "tests")
_ROLES = ("system", "user", "assistant")


def own(raw: Raw, row_id: str) -> Row:
    """A row of a file. A `prompt` is complete and gets no prompt template. A `problem` or `question` gets that of its
    kind.

    tests: a list of {"input", "output"}, or {"inputs", "outputs", "fn_name"}, or either of them as JSON text; or Python
    code that raises if the solution is wrong, with the function's name in `entry_point`. A row with tests is a code
    problem.
    """
    column, question = _asked(raw)
    starter, difficulty = str(raw.get("starter_code") or ""), raw.get("difficulty")
    named = "" if difficulty is None else str(difficulty)
    if not raw.get("tests"):
        template = "plain" if column == "prompt" else "math"
        answer = answer_text(raw.get("answer"))
        return Row(row_id, question, "math", answer=answer, template=template, difficulty=named)
    tests = _tests(raw["tests"], raw.get("entry_point"))
    if column == "prompt":
        template = "plain"
    elif tests.style == "function" and not starter:
        template, starter = "code_function", f"def {tests.entry_point}(...):"
    else:
        template = {"stdin": "code_stdin", "function": "code_function", "program": "code_complete"}[tests.style]
    return Row(row_id, question, "code", tests=tests, template=template, starter_code=starter, difficulty=named)


def asked(raw: Raw, row_id: str) -> Row:
    """A row of a file of prompts, which nothing judges: the same question in the same template, but the answer may be
    missing."""
    if raw.get("tests"):
        return own(raw, row_id)
    column, question = _asked(raw)
    answer = raw.get("answer")
    template = "plain" if column == "prompt" else "math"
    return Row(row_id, question, "math", answer="" if answer is None else str(answer), template=template)


def _asked(raw: Raw) -> tuple[str, str | tuple[Message, ...]]:
    """(name of the column with the question, the question)"""
    column = next((name for name in QUESTIONS if raw.get(name)), None)
    if column is None:
        raise Skipped(f"no {' or '.join(QUESTIONS)}")
    return column, _question(raw[column])


def _question(value: Any) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if not isinstance(value, list) or not value:
        raise Skipped("a prompt that is neither text nor a chat")
    if any(_further_keys(turn) for turn in value):
        # Tool calls, for example, would be lost silently.
        raise Skipped("a chat whose messages have more than role and content")
    turns = [(turn.get("role"), turn.get("content")) if isinstance(turn, dict) else (None, None) for turn in value]
    if any(role not in _ROLES or not isinstance(content, str) for role, content in turns) or turns[-1][0] != "user":
        raise Skipped("a chat that is not a list of {role, content} ending with the user")
    return tuple((str(role), str(content)) for role, content in turns)


def _further_keys(turn: Any) -> bool:
    # A column of Parquet has the keys of all rows in each of them.
    return isinstance(turn, dict) and any(turn[key] is not None for key in turn.keys() - {"role", "content"})


def _tests(value: Any, entry_point: Any) -> CodeTests:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except RecursionError:
            raise Skipped("tests that are nested too deeply") from None
        except ValueError:
            if not isinstance(entry_point, str) or not entry_point:
                raise Skipped("tests are code, and entry_point is missing") from None
            return CodeTests.of("program", [Case(value)], entry_point)
    if isinstance(value, dict):
        return input_output(value)
    if not isinstance(value, list) or not value:
        raise Skipped(NO_TESTS)
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in value):
        raise Skipped("a test without input and output")
    name = entry_point if isinstance(entry_point, str) and entry_point else None
    pairs = {"inputs": [test["input"] for test in value], "outputs": [test["output"] for test in value]}
    return input_output(pairs | {"fn_name": name}, wrapped=False)
