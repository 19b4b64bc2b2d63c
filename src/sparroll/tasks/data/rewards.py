"""Which reward judges a row: a math row by its boxed answer, a code row by its tests. Judging itself is in tasks/math/
and tasks/code/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from sparroll.tasks.code.limits import SandboxLimits
from sparroll.tasks.code.reward import CallTests, CheckTests, CodeReward, StdinTests, Tests
from sparroll.tasks.data.rows import Kind, Row
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.math.reward import MathReward
from sparroll.tasks.verdicts import Verdict

_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,18}")


class RowReward(Protocol):
    """Judges responses to rows of one kind, many at a time."""

    gives_answers: bool
    """Whether its verdicts have answers, so that responses can vote."""

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        """A verdict for each response to the row at the same place."""
        ...

    def pooled(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts with one string for all answers to a row that mean the same."""
        ...

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        """Whether responses to each row can be judged at all."""
        ...


def reward_for(kind: Kind, settings: DataSettings) -> RowReward:
    """The packaged reward for a kind of row. Raises UserError if its packages or a sandbox are missing."""
    return BoxedAnswer() if kind == "math" else PassedTests(settings)


def limits_for(row: Row, settings: DataSettings) -> SandboxLimits:
    """What a program for the row may use for one test: what the settings say, else what the set's official grader
    allows, else the defaults of the sandbox."""
    return (row.limits or SandboxLimits()).with_test(settings.test_seconds, settings.test_memory_gib)


class JudgedElsewhere:
    """For rows whose responses a judge of the user's own reads. It needs no packages and no sandbox, and leaves no row
    out."""

    gives_answers = False

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        raise AssertionError("the judge of the user's own was not asked")

    def pooled(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[Verdict]:
        return list(verdicts)

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [True] * len(rows)


class BoxedAnswer:
    """Compares the last boxed answer with the gold one by math-verify."""

    gives_answers = True
    answer_form = r"the last \boxed{...}"

    def __init__(self) -> None:
        self._judge = MathReward()

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        """A verdict for each response. All right answers have the gold one's string, however they are written. Wrong
        ones keep their spelling, which `pooled` replaces."""
        golds = [row.answer for row in rows]
        found = []
        for gold, verdict in zip(
            golds, self._judge.grade_all(list(zip(golds, response_texts, strict=True))), strict=True
        ):
            answer = gold if verdict.status == "right" else verdict.answer and " ".join(verdict.answer.split())
            reward = None if verdict.status == "unparsable_gold" else verdict.reward
            found.append(Verdict(reward, verdict.status, answer))
        return found

    def pooled(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Wrong answers to a row that are equal by the math reward get the string of the first of them. Otherwise right
        answers would pool and wrong ones split, and a majority would be right too often."""
        left: dict[str, list[str]] = {}
        for row, verdict in zip(rows, verdicts, strict=True):
            spellings = left.setdefault(row.row_id, [])
            if verdict.answer is not None and verdict.status != "right" and verdict.answer not in spellings:
                spellings.append(verdict.answer)
        names: dict[tuple[str, str | None], str] = {}
        while any(left.values()):
            # In each round the first answer of every row that is left is compared with the row's others.
            names |= {(row_id, spellings[0]): spellings[0] for row_id, spellings in left.items() if spellings}
            pairs = [(row_id, spellings[0], other) for row_id, spellings in left.items() for other in spellings[1:]]
            same = self._equal([(first, other) for _, first, other in pairs])
            names |= {(row_id, other): first for (row_id, first, other), yes in zip(pairs, same, strict=True) if yes}
            left = {row_id: [each for each in all_ if (row_id, each) not in names] for row_id, all_ in left.items()}
        return [
            replace(verdict, answer=names.get((row.row_id, verdict.answer), verdict.answer))
            for row, verdict in zip(rows, verdicts, strict=True)
        ]

    def _equal(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Whether both answers of each pair are equal, whichever of them is taken for the gold one."""
        integers = [(_integer(one), _integer(other)) for one, other in pairs]
        unsure = [pair for pair, both in zip(pairs, integers, strict=True) if None in both]
        forth_and_back = self._judge.grade_answers([*unsure, *((other, one) for one, other in unsure)])
        right = [verdict.status == "right" for verdict in forth_and_back]
        compared = iter([forth or back for forth, back in zip(right[: len(unsure)], right[len(unsure) :], strict=True)])
        return [next(compared) if None in both else both[0] == both[1] for both in integers]

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [not bad for bad in self._judge.unparsable_gold([row.answer for row in rows])]


class PassedTests:
    """Runs all tests of the row in a sandbox. If the sandbox itself fails, there is no reward."""

    gives_answers = False

    def __init__(self, settings: DataSettings) -> None:
        self._settings = settings
        self._judge = CodeReward(allow_unsafe_sandbox=settings.allow_unsafe_sandbox)

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        pairs = [(_tests(row), text) for row, text in zip(rows, response_texts, strict=True)]
        limits = [limits_for(row, self._settings) for row in rows]
        return [Verdict(verdict.reward, verdict.status) for verdict in self._judge.grade_batch(pairs, limits)]

    def pooled(self, rows: Sequence[Row], verdicts: Sequence[Verdict]) -> list[Verdict]:
        return list(verdicts)

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [row.tests is not None for row in rows]


def _integer(answer: str) -> int | None:
    """A plain whole number, which needs no parser to be compared with another one."""
    return int(answer) if _PLAIN_INTEGER.fullmatch(answer) else None


def _tests(row: Row) -> Tests:
    assert row.tests is not None
    tests, cases = row.tests, row.tests.cases()
    pairs = tuple((case.given, case.expected) for case in cases)
    if tests.style == "stdin":
        return StdinTests(pairs, rounded=tests.rounded)
    assert tests.entry_point is not None, "tests that call a function name it"
    if tests.style == "program":
        return CheckTests(tests.entry_point, cases[0].given)
    if tests.wrapped:
        pairs = tuple((_with_number_keys(given), _with_number_keys(expected)) for given, expected in pairs)
    return CallTests(tests.entry_point, pairs, wrapped=tests.wrapped)


def _with_number_keys(value: Any) -> Any:
    """TACO: the first argument and the answer, where they are dictionaries whose keys JSON made strings of numbers."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_with_number_keys(value[0]), *value[1:]]
    if isinstance(value, dict) and value and all(re.fullmatch(r"-?\d{1,15}", key) for key in value):
        return {int(key): part for key, part in value.items()}
    return value
