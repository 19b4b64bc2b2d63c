"""One problem of a dataset, whatever its schema was, and why a row did not become one. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from sparroll.tasks.data.code_tests import CodeTests

Raw = dict[str, Any]
"""A row as its file has it: column -> value."""

Kind = Literal["math", "code"]
Message = tuple[str, str]
"""(role, content) of one turn of a chat."""


@dataclass(frozen=True)
class Row:
    """A problem that a reward can judge.

    >>> Row(row_id="gsm8k:train/17", question="How many ...?", kind="math", answer="1234", template="math")
    """

    row_id: str
    """Set, split and place in the file: stays the same whatever is filtered."""
    question: str | tuple[Message, ...]
    """What goes into the template: text, or a chat whose last user turn it is."""
    kind: Kind
    answer: str = ""
    """Gold answer of a math row."""
    tests: CodeTests | None = None
    """What a code row's program must pass."""
    template: str = "math"
    """Packaged template that fits, unless another one is asked for."""
    starter_code: str = ""
    difficulty: str = ""
    """As the data says it: a number, a fraction such as "3/8", or a name; empty where the data says nothing."""
    contest_day: str = ""
    """When the problem was set, as 2024-08-03; empty where the data says nothing."""

    @property
    def text(self) -> str:
        """The words of the question, for comparing rows."""
        return self.question if isinstance(self.question, str) else "\n".join(content for _, content in self.question)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turns of a chat; empty where the question is a text."""
        return () if isinstance(self.question, str) else self.question

    @property
    def difficulty_number(self) -> float | None:
        """The difficulty as a number; None where it is a name or absent."""
        try:
            return float(Fraction(self.difficulty.strip()))
        except (ValueError, ZeroDivisionError):
            return None


class Skipped(Exception):
    """A row that cannot be used. The reason is counted, so it names no row."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


def required(raw: Raw, column: str) -> str:
    """A text column that a row cannot do without."""
    value = raw.get(column)
    if not isinstance(value, str) or not value.strip():
        raise Skipped(f"no {column}")
    return value
