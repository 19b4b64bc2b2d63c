"""Which reward judges a row: math by its boxed answer, code by its tests. A seam; the judging is done elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sparroll.errors import UserError
from sparroll.tasks.data.rows import Kind, Row
from sparroll.tasks.math_reward import MathReward


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
        self._judge = MathReward()

    def __call__(self, row: Row, response_text: str) -> float:
        return self._judge.grade(row.answer, response_text).reward

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [not bad for bad in self._judge.unparsable_gold([row.answer for row in rows])]


class PassedTests:
    """All tests of the row, in a sandbox."""

    def __init__(self) -> None:
        name = "sparroll.tasks.code_reward"
        if importlib.util.find_spec(name) is None:
            raise UserError("this version of sparroll has no reward for code rows", "`sparroll data show` prints them")
        self._module: Any = importlib.import_module(name)
        self._judge = self._module.CodeReward()

    def __call__(self, row: Row, response_text: str) -> float:
        """Raises UserError where the sandbox itself failed, which says nothing about the program."""
        verdict = self._judge.grade(self._tests(row), response_text)
        if verdict.reward is None:
            raise UserError(f"the sandbox failed on {row.row_id}: {verdict.detail}", "`sparroll doctor` tries it")
        return float(verdict.reward)

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [row.tests is not None for row in rows]

    def _tests(self, row: Row) -> Any:
        assert row.tests is not None
        tests, cases = row.tests, row.tests.cases()
        if tests.style == "program":
            return self._module.CheckTests(tests.entry_point, cases[0].given)
        pairs = tuple((case.given, case.expected) for case in cases)
        if tests.style == "stdin":
            return self._module.StdinTests(pairs)
        return self._module.CallTests(tests.entry_point, pairs, wrapped=tests.wrapped)


_MAKE: dict[Kind, Callable[[], RowReward]] = {"math": BoxedAnswer, "code": PassedTests}
