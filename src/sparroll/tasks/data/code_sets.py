"""Rows of the published code sets. There is one function per schema, which takes a raw row and its id. It raises
Skipped for a row that cannot be used."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from sparroll.tasks.code.private_tests import load_private_tests
from sparroll.tasks.data.code_tests import Case, CodeTests
from sparroll.tasks.data.rows import Raw, Row, Skipped, required

NO_TESTS = "no tests"


def taco(raw: Raw, row_id: str) -> Row:
    """`input_output` is JSON with inputs, outputs and, if a function is to be called, fn_name."""
    starter = str(raw.get("starter_code") or "").strip("\n")
    tests = replace(input_output(raw.get("input_output")), rounded=True)
    function = tests.style == "function"
    return Row(
        row_id,
        required(raw, "question"),
        "code",
        tests=tests,
        template="code_function" if function else "code_stdin",
        # Without starter code the prompt must still name the function that the tests call.
        starter_code=starter or (f"def {tests.entry_point}(...):" if function else ""),
        difficulty=str(raw.get("difficulty") or ""),
    )


def input_output(value: Any, wrapped: bool = True) -> CodeTests:
    """Tests from {"inputs": [...], "outputs": [...], "fn_name": ...}, given as a dict or as JSON text.

    wrapped: a function's outputs may be lists with one element, which is the value, as in published sets of this form.
    """
    table = _parsed(value, "input_output")
    if not isinstance(table, dict) or not isinstance(table.get("inputs"), list) or not table["inputs"]:
        raise Skipped(NO_TESTS)
    inputs, outputs, name = table["inputs"], table.get("outputs"), table.get("fn_name")
    if not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise Skipped("inputs and outputs differ in number")
    pairs = zip(inputs, outputs, strict=True)
    if name:
        cases = [Case(_arguments(given), want) for given, want in pairs]
        return CodeTests.of("function", cases, str(name), wrapped=wrapped)
    return CodeTests.of("stdin", [Case(_text(given), _text(want)) for given, want in pairs])


def livecodebench(raw: Raw, row_id: str) -> Row:
    """Tests are public and private. Private ones stay packed until a reward opens them."""
    public = _parsed(raw.get("public_test_cases"), "public_test_cases")
    private, metadata = raw.get("private_test_cases"), _parsed(raw.get("metadata") or "{}", "metadata")
    if not isinstance(public, list) or not isinstance(private, str):
        raise Skipped(NO_TESTS)
    function = metadata.get("func_name") if isinstance(metadata, dict) else None
    starter = str(raw.get("starter_code") or "").strip("\n")
    if bool(starter) != bool(function):
        raise Skipped("starter_code and func_name do not fit")
    tests = CodeTests.of(
        "function" if function else "stdin",
        [_function_case(test) if function else _stdin_case(test) for test in public],
        function,
        unopened=private,
        open_more=_private_function_cases if function else _private_stdin_cases,
    )
    return Row(
        row_id,
        required(raw, "question_content"),
        "code",
        tests=tests,
        template="code_function" if function else "code_stdin",
        starter_code=starter,
        difficulty=str(raw.get("difficulty") or ""),
    )


def humaneval(raw: Raw, row_id: str) -> Row:
    """`prompt` is the head of a function, and `test` defines check(candidate)."""
    name = required(raw, "entry_point")
    program = f"{required(raw, 'test')}\n\ncheck({name})\n"
    tests = CodeTests.of("program", [Case(program)], name)
    fenced = f"```python\n{required(raw, 'prompt').strip()}\n```"
    return Row(row_id, fenced, "code", tests=tests, template="code_complete")


def mbpp(raw: Raw, row_id: str) -> Row:
    """`prompt` is a sentence, `test_list` has assertions about the function, and `test` is a program of many more. As in
    evalplus, the model gets a docstring of the sentence and the first assertion. The function's name is taken from the
    reference solution."""
    program, assertions = required(raw, "test"), raw.get("test_list")
    if not isinstance(assertions, list) or not assertions or not isinstance(assertions[0], str):
        raise Skipped("no assertion for the prompt")
    names = re.findall(r"^def\s+(\w+)", str(raw.get("code") or ""), flags=re.M)
    called = [name for name in names if re.search(rf"\b{name}\b", program)]
    if not called:
        raise Skipped("no function that the test calls")
    docstring = f'"""\n{required(raw, "prompt").strip()}\n{assertions[0].strip()}\n"""'
    tests = CodeTests.of("program", [Case(program)], called[-1])
    return Row(row_id, f"```python\n{docstring}\n```", "code", tests=tests, template="code_complete")


def _stdin_case(test: Raw) -> Case:
    return Case(_text(test["input"]), _text(test["output"]))


def _function_case(test: Raw) -> Case:
    """Each line of the input is an argument in JSON, and the output is the expected value in JSON."""
    return Case([json.loads(line) for line in test["input"].split("\n")], json.loads(test["output"]))


def _private_stdin_cases(text: str) -> list[Case]:
    return [_stdin_case(test) for test in load_private_tests(text)]


def _private_function_cases(text: str) -> list[Case]:
    return [_function_case(test) for test in load_private_tests(text)]


def _arguments(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _text(value: Any) -> str:
    """Standard input or output as text. Some rows have it as a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise Skipped("a test that is not text")
    return value


def _parsed(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise Skipped(f"{column} is not JSON") from None
