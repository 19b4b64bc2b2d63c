"""One problem of a data set, independent of the set's schema, and the reason why a row cannot be used. Data only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from sparroll.tasks.code.limits import SandboxLimits
from sparroll.tasks.data.code_tests import CodeTests

Raw = dict[str, Any]
"""A row as it is in its file: column -> value."""

Kind = Literal["math", "code"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Message = tuple[str, str]
"""(role, content) of one turn of a chat."""


@dataclass(frozen=True)
class Row:
    """A problem that a reward can judge.

    >>> Row(row_id="gsm8k:train/17", question="How many ...?", kind="math", answer="1234", template="math")
    """

    row_id: str
    """Set, split and place in the file. It does not depend on filters."""
    question: str | tuple[Message, ...]
    """What goes into the template: a text, or the last user turn of a chat."""
    kind: Kind
    answer: str = ""
    """Gold answer of a math row."""
    tests: CodeTests | None = None
    """The tests that the program for a code row must pass."""
    limits: SandboxLimits | None = None
    """What the official grader of the set allows for one test; None: no grader says it."""
    template: str = "math"
    """Name of the packaged template that is used unless another one is asked for."""
    starter_code: str = ""
    difficulty: str = ""
    """As it is in the data: a number, a fraction such as "3/8", or a name. Empty if the data has none."""

    @property
    def text(self) -> str:
        """The text of the question, for comparing rows."""
        return self.question if isinstance(self.question, str) else "\n".join(content for _, content in self.question)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns of a chat; empty if the question is a text."""
        return () if isinstance(self.question, str) else self.question

    @property
    def difficulty_number(self) -> float | None:
        """The difficulty as a number; None if it is a name or absent."""
        text = self.difficulty.strip()
        try:
            # A fraction of "1e999999999" would be a number of as many digits.
            number = float(Fraction(text)) if "/" in text else float(text)
        except (ValueError, ZeroDivisionError, OverflowError):
            return None
        return number if math.isfinite(number) else None


class Skipped(Exception):
    """A row cannot be used. Rows are counted by reason, so the reason names no row."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


def check_text(row: Row) -> None:
    """Raise Skipped if the question or the answer has a lone surrogate: JSON can write one, but it is no character, so
    no tokenizer takes it and no file can hold it."""
    try:
        f"{row.text}{row.answer}".encode()
    except UnicodeEncodeError:
        raise Skipped("text with a lone surrogate, which is not Unicode") from None


def required(raw: Raw, column: str) -> str:
    """The text in a column that every row needs. Raises Skipped if it is missing."""
    value = raw.get(column)
    if not isinstance(value, str) or not value.strip():
        raise Skipped(f"no {column}")
    return value
