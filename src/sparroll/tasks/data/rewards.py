"""Which reward judges a row: math by its boxed answer, code by its tests. A seam; the judging is done elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sparroll.errors import UserError
from sparroll.tasks.data.rows import Kind, Row


class RowReward(Protocol):
    """Judges responses to rows of one kind."""

    def __call__(self, row: Row, response_text: str) -> float:
        """1.0 for a right response, else 0.0."""
        ...

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        """Of each row, whether a response to it can be judged at all."""
        ...


def reward_for(kind: Kind) -> RowReward:
    """The packaged reward of a kind of row. Raises UserError where this version has none, or its packages are missing."""
    return _MAKE[kind]()


class BoxedAnswer:
    """The last boxed answer against the gold one, by math-verify."""

    def __init__(self) -> None:
        self._judge = _packaged("math_reward", "math").MathReward()

    def __call__(self, row: Row, response_text: str) -> float:
        return float(self._judge.grade(row.answer, response_text).reward)

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [not bad for bad in self._judge.unparsable_gold([row.answer for row in rows])]


class PassedTests:
    """All tests of the row, in a sandbox."""

    def __init__(self) -> None:
        self._judge = _packaged("code_reward", "code").CodeReward()

    def __call__(self, row: Row, response_text: str) -> float:
        assert row.tests is not None
        return float(self._judge.grade(row.tests, response_text).reward)

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [row.tests is not None for row in rows]


_MAKE: dict[Kind, Callable[[], RowReward]] = {"math": BoxedAnswer, "code": PassedTests}


def _packaged(module: str, kind: str) -> Any:
    name = f"sparroll.tasks.{module}"
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"this version of sparroll has no reward for {kind} rows", "load the rows with `sparroll data show`"
        )
    return importlib.import_module(name)
