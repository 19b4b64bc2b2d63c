"""When an answer is right: the rules of the official checkers, applied outside of the sandbox. Pure functions on plain
values.

Sources of the rules: LiveCodeBench, lcb_runner/evaluation/testing_util.py (`grade_stdio`, `grade_call_based`); TACO,
metrics/testing_util.py, for rounded output, for answers in a list, and for numbers as keys. The rules of evalplus are in
the test code of each row.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
"""How far a printed fraction may be off in TACO: numpy's own tolerance."""


def same_output(printed: str, expected: str, *, rounded: bool = False) -> bool:
    """Whether both texts, once stripped, have the same number of lines, and each line is equal, either as stripped text
    or as decimals word by word.

    Decimals are compared exactly, as in LiveCodeBench: 1.0 equals 1.00 and 1e0, but 0.3333333 does not equal 0.3333334.

    rounded: the rule of TACO. A number that is expected with a point or an exponent may be off by 1e-5 of it plus 1e-8;
    whole numbers are exact.
    """
    printed_lines, expected_lines = _lines(printed), _lines(expected)
    if len(printed_lines) != len(expected_lines):
        return False
    pairs = zip(printed_lines, expected_lines, strict=True)
    return all(_same_line(left, right, rounded) for left, right in pairs)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(printed: str, expected: str, rounded: bool) -> bool:
    if printed == expected:
        return True
    words, wanted = printed.split(), expected.split()
    try:
        return len(words) == len(wanted) and all(
            _same_number(word, right, rounded) for word, right in zip(words, wanted, strict=True)
        )
    except InvalidOperation:
        return False


def _same_number(printed: str, expected: str, rounded: bool) -> bool:
    value, right = Decimal(printed), Decimal(expected)
    if value == right:
        return True
    is_fraction = bool(set(".eE") & set(expected))
    return rounded and is_fraction and abs(float(value) - float(right)) <= _ABSOLUTE + _RELATIVE * abs(float(right))


def same_value(returned: Any, expected: Any, *, wrapped: bool = False) -> bool:
    """Whether both values are equal in Python, as in LiveCodeBench: a returned tuple counts as a list, but tuples
    inside it do not, and 1 == 1.0 == True.

    wrapped: the rule of TACO. The expected list may also be a list with one element, which is the answer; with that
    answer, tuples inside of the returned list count as lists, too, if the first of them is a tuple. A dictionary with
    whole numbers as keys arrives as `runner.NumberKeys`.
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
