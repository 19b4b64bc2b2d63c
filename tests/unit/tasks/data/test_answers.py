"""Gold answers of rows as text: numbers of every type, and what is no answer."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest

from sparroll.tasks.data.answers import after_hashes, answer_text
from sparroll.tasks.data.rows import Skipped

TEXTS: list[tuple[object, str]] = [
    (142, "142"),
    (142.0, "142"),
    ("142.0", "142"),
    (" 7 ", "7"),
    (0.1, "0.1"),
    (0.1 + 0.2, "0.3"),
    (1e25, "1" + "0" * 25),
    (2**70, "1180591620717411303424"),
    (-(2**64), "-18446744073709551616"),
    (Decimal("2.50"), "2.50"),
    (Fraction(1, 3), "1/3"),
    (1 / 3, r"\approx 0.333333333333333"),
]


@pytest.mark.parametrize(("value", "text"), TEXTS)
def test_numbers_keep_every_digit_that_they_have(value: object, text: str) -> None:
    assert answer_text(value) == text


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "", " ", "nan", [], [5], {}, True, b"5"])
def test_what_is_no_answer_is_skipped(value: object) -> None:
    with pytest.raises(Skipped):
        answer_text(value)


def test_a_solution_of_gsm8k_ends_with_its_number() -> None:
    assert after_hashes("so she has 1,234 left.\n#### $1,234") == "1234"
    with pytest.raises(Skipped):
        after_hashes("no number")
