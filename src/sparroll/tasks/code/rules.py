"""When an answer is right: the official checkers' rules, outside the sandbox. Pure functions on plain values.

Sources of the rules: LiveCodeBench, lcb_runner/evaluation/testing_util.py (`grade_stdio`, `grade_call_based`); TACO's
`testing_util.py` for the answers that it wraps in a list. evalplus brings its rule in each row's own test code.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any


def same_output(printed: str, expected: str) -> bool:
    """Both stripped, equally many lines, and each line equal once stripped, or equal as decimals word by word.

    The decimals are exact: 1.0 is 1.00 and 1e0, but 0.3333333 is not 0.3333334, as LiveCodeBench has it.
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
    """Python's own equality, once a tuple has become a list, as LiveCodeBench has it: 1 == 1.0 == True, and inner tuples
    are no lists.

    wrapped: TACO's rule. The expected list may also be a list of one that holds the answer.
    """
    if isinstance(returned, tuple):
        returned = list(returned)
    if returned == expected:
        return True
    return wrapped and isinstance(expected, list) and bool(expected) and returned == expected[0]
