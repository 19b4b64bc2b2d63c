"""Which reward judges a row: a math row by its boxed answer, a code row by its tests. Judging itself is in tasks/math/
and tasks/code/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sparroll.tasks.code.reward import CallTests, CheckTests, CodeReward, StdinTests, Tests
from sparroll.tasks.data.rows import Kind, Row
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.math.reward import MathReward
from sparroll.tasks.verdicts import Verdict


class RowReward(Protocol):
    """Judges responses to rows of one kind, many at a time."""

    gives_answers: bool
    """Whether its verdicts have answers, so that responses can vote."""

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        """A verdict for each response to the row at the same place."""
        ...

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        """Whether responses to each row can be judged at all."""
        ...


def reward_for(kind: Kind, settings: DataSettings) -> RowReward:
    """The packaged reward for a kind of row. Raises UserError if its packages or a sandbox are missing."""
    return BoxedAnswer() if kind == "math" else PassedTests(settings.allow_unsafe_sandbox)


class BoxedAnswer:
    """Compares the last boxed answer with the gold one by math-verify."""

    gives_answers = True
    answer_form = r"the last \boxed{...}"

    def __init__(self) -> None:
        self._judge = MathReward()

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        """A verdict for each response. All right answers vote for the gold one, however they are written. Wrong ones
        are told apart as strings."""
        golds = [row.answer for row in rows]
        found = []
        for gold, verdict in zip(
            golds, self._judge.grade_all(list(zip(golds, response_texts, strict=True))), strict=True
        ):
            answer = gold if verdict.status == "right" else verdict.answer and "".join(verdict.answer.split())
            reward = None if verdict.status == "unparsable_gold" else verdict.reward
            found.append(Verdict(reward, verdict.status, answer))
        return found

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [not bad for bad in self._judge.unparsable_gold([row.answer for row in rows])]


class PassedTests:
    """Runs all tests of the row in a sandbox. If the sandbox itself fails, there is no reward."""

    gives_answers = False

    def __init__(self, allow_unsafe_sandbox: bool = False) -> None:
        self._judge = CodeReward(allow_unsafe_sandbox=allow_unsafe_sandbox)

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        pairs = [(_tests(row), text) for row, text in zip(rows, response_texts, strict=True)]
        return [Verdict(verdict.reward, verdict.status) for verdict in self._judge.grade_batch(pairs)]

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [row.tests is not None for row in rows]


def _tests(row: Row) -> Tests:
    assert row.tests is not None
    tests, cases = row.tests, row.tests.cases()
    pairs = tuple((case.given, case.expected) for case in cases)
    if tests.style == "stdin":
        return StdinTests(pairs)
    assert tests.entry_point is not None, "tests that call a function name it"
    if tests.style == "program":
        return CheckTests(tests.entry_point, cases[0].given)
    return CallTests(tests.entry_point, pairs, wrapped=tests.wrapped)
