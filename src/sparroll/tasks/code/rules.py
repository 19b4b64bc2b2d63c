"""When an answer is right: the rules of the official checkers, applied outside of the sandbox. Pure functions on plain
values.

Sources of the rules: LiveCodeBench, lcb_runner/evaluation/testing_util.py (`grade_stdio`, `grade_call_based`); TACO's
`testing_util.py` for the answers that it wraps in a list. The rules of evalplus are in the test code of each row.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any


def same_output(printed: str, expected: str) -> bool:
    """Whether both texts, once stripped, have the same number of lines, and each line is equal, either as stripped text
    or as decimals word by word.

    Decimals are compared exactly, as in LiveCodeBench: 1.0 equals 1.00 and 1e0, but 0.3333333 does not equal 0.3333334.
    """
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    if len(printed_lines) != len(expected_lines):
        return False
    return all(_same_line(left, right) for left, right in zip(printed_lines, expected_lines, strict=True))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    try:
        return [Decimal(word) for word in printed.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False


def same_value(returned: Any, expected: Any, *, wrapped: bool = False) -> bool:
    """Whether both values are equal in Python, as in LiveCodeBench: a returned tuple counts as a list, but tuples
    inside it do not, and 1 == 1.0 == True.

    wrapped: the rule of TACO. The expected list may also be a list with one element, which is the answer; with that
    answer, tuples inside of the returned list count as lists, too, if the first of them is a tuple.
    """
    if isinstance(returned, tuple):
        returned = list(returned)
    if returned == expected:
        return True
    if not (wrapped and isinstance(expected, list) and expected):
        return False
    if isinstance(returned, list) and returned and isinstance(returned[0], tuple):
        returned = [list(part) if isinstance(part, tuple) else part for part in returned]
    return returned == expected[0]
