"""Verdicts on programs, which must pass all their tests. They are made outside of the sandbox, where the expected
answers stay.

>>> reward = CodeReward()
>>> reward.grade(StdinTests((("1 2", "3"),)), "```python\\nprint(sum(map(int, input().split())))\\n```").status
'passed'
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import textwrap
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sparroll.tasks.code import runner, sandbox
from sparroll.tasks.code.boundaries import Boundary, Name
from sparroll.tasks.code.limits import SandboxError, SandboxLimits, Status
from sparroll.tasks.code.rules import same_output, same_value
from sparroll.tasks.code.session import Ended, Frame, Session
from sparroll.tasks.thinking import after_thinking

ATTEMPTS = 3
"""How often a sandbox is started before its failure becomes the verdict."""


@dataclass(frozen=True)
class StdinTests:
    """Tests of a program that reads standard input: pairs of (input, expected output)."""

    cases: tuple[tuple[str, str], ...]
    rounded: bool = False
    """TACO: fractions may be rounded otherwise than the expected ones."""


@dataclass(frozen=True)
class CallTests:
    """Tests of a function, which is a method of class Solution if the program has that class: pairs of (arguments,
    expected value) in JSON data."""

    function: str
    cases: tuple[tuple[list[Any], Any], ...]
    wrapped: bool = False
    """TACO: the expected value may be a list with one element, which is the answer."""


@dataclass(frozen=True)
class CheckTests:
    """The tests of evalplus: the row's `test` code, which calls `check(candidate)` or the function by its name, and
    asserts.

    This code runs in another sandbox than the program. The function that it calls sends the call to the program's
    sandbox.
    """

    entry_point: str
    test_code: str


Tests = StdinTests | CallTests | CheckTests


@dataclass(frozen=True)
class CodeVerdict:
    status: Status
    detail: str = ""
    test: int | None = None
    """Index of the test that failed; None if none failed, and for evalplus."""

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def reward(self) -> float | None:
        """1 or 0; None if the sandbox failed. That says nothing about the program, so the response does not count."""
        return None if self.status == "sandbox error" else float(self.passed)


class CodeReward:
    """Grades responses in parallel, each pair of code and tests once. Use it as a context manager, or call `close`.

    Raises UserError when it is made if no sandbox works on this machine (see sandbox.choose).
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        sandbox_name: Name | None = None,
        allow_unsafe_sandbox: bool = False,
        workers: int | None = None,
        cache_entries: int = 65_536,
    ):
        self.limits = limits or SandboxLimits()
        self.boundary = sandbox.choose(sandbox_name, allow_unsafe_sandbox=allow_unsafe_sandbox)
        self.counts: Counter[Status] = Counter()
        """How many verdicts were given, by status, cached ones included."""
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="sandbox")
        self._cache: OrderedDict[str, Future[CodeVerdict]] = OrderedDict()
        self._cache_entries = cache_entries
        self._lock = threading.Lock()

    def __enter__(self) -> CodeReward:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def grade(self, tests: Tests, response: str) -> CodeVerdict:
        """The verdict on the last fenced block of one response."""
        return self.grade_batch([(tests, response)])[0]

    def grade_batch(
        self, pairs: Sequence[tuple[Tests, str]], limits: Sequence[SandboxLimits] | None = None
    ) -> list[CodeVerdict]:
        """A verdict for each pair, in order. limits: those of each pair, instead of the reward's own."""
        each = [self.limits] * len(pairs) if limits is None else limits
        waiting: list[Future[CodeVerdict]] = []
        try:
            for (tests, response), own in zip(pairs, each, strict=True):
                waiting.append(self._submit(tests, response, own))
            verdicts = [future.result() for future in waiting]
        except BaseException:
            # Interrupted: what has not begun would otherwise run before the process can end.
            self._cancel(waiting)
            raise
        with self._lock:
            self.counts.update(verdict.status for verdict in verdicts)
        return verdicts

    def _submit(self, tests: Tests, response: str, limits: SandboxLimits) -> Future[CodeVerdict]:
        code = last_code(response)
        if code is None:
            done: Future[CodeVerdict] = Future()
            done.set_result(CodeVerdict("wrong answer", "no fenced block"))
            return done
        key = self._key(code, tests, limits)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            future = self._pool.submit(self._verdict, code, tests, limits, key)
            self._cache[key] = future
            while len(self._cache) > self._cache_entries:
                self._cache.popitem(last=False)
            return future

    def _cancel(self, futures: Sequence[Future[CodeVerdict]]) -> None:
        cancelled = {id(future) for future in futures if future.cancel()}
        with self._lock:
            for key in [key for key, future in self._cache.items() if id(future) in cancelled]:
                del self._cache[key]

    def _key(self, code: str, tests: Tests, limits: SandboxLimits) -> str:
        content = repr((code, tests, limits, self.boundary.name))
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def _verdict(self, code: str, tests: Tests, limits: SandboxLimits, key: str) -> CodeVerdict:
        problem = ""
        for _ in range(ATTEMPTS):
            try:
                return run(code, tests, limits, self.boundary)
            except (SandboxError, OSError) as error:
                problem = str(error)
            except BaseException:
                self._forget(key)
                raise
        # The sandbox may work again the next time.
        self._forget(key)
        return CodeVerdict("sandbox error", problem[:500])

    def _forget(self, key: str) -> None:
        with self._lock:
            self._cache.pop(key, None)


_FENCE = re.compile(
    # Behind text on its line, a fence opens a block only if it names a language.
    r"^(?:[ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?|[^\n`]*(?=`{3,}[A-Za-z]\S*[ \t]*$))"
    r"(`{3,}|~{3,})[^\n`]*\n"
    r"(.*?)"
    # One word behind a fence is the language of another block; anything else stands behind the end of this one.
    r"(?:^[ \t]*\1[`~]*(?![ \t]*[A-Za-z][\w+#-]*[ \t]*$)[^\n`]*$|\Z)",
    re.M | re.S,
)


def last_code(response: str) -> str | None:
    """The last fenced block of a response behind its thinking part, even if the response ends within it; None if there is no
    block. Code that is indented as a whole, as in a list, moves to the left margin."""
    found = None
    for block in _FENCE.finditer(after_thinking(response).replace("\r\n", "\n")):
        found = block.group(2)
    if found is not None and found.lstrip("\n")[:1] in (" ", "\t"):
        return textwrap.dedent(found)
    return found


def run(code: str, tests: Tests, limits: SandboxLimits, boundary: Boundary) -> CodeVerdict:
    """Run a program against its tests, up to the first that fails. Raises SandboxError if the sandbox fails."""
    if isinstance(tests, StdinTests):
        return _run_programs(code, tests, limits, boundary)
    if isinstance(tests, CallTests):
        return _run_calls(code, tests, limits, boundary)
    return _run_check(code, tests, limits, boundary)


def _run_programs(code: str, tests: StdinTests, limits: SandboxLimits, boundary: Boundary) -> CodeVerdict:
    with Session(boundary, limits, "programs", code) as session:
        for place, (text, expected) in enumerate(tests.cases):
            try:
                frame = session.exchange({}, text.encode("utf-8", "surrogatepass"))
            except Ended as ended:
                return CodeVerdict(ended.status, ended.detail, place)
            failed = _failed_program(frame)
            if failed is not None:
                return CodeVerdict(failed, str(frame.head.get("problem"))[:300], place)
            if not same_output(frame.body.decode("utf-8", "replace"), expected, rounded=tests.rounded):
                return CodeVerdict("wrong answer", "the output differs", place)
    return CodeVerdict("passed")


def _failed_program(frame: Frame) -> Status | None:
    exit_code = frame.head.get("exit")
    if frame.head.get("over"):
        return "output limit"
    if exit_code == 0:
        return None
    if exit_code == runner.MEMORY_EXIT:
        return "memory"
    # -24 is SIGXCPU, and -9 is SIGKILL from the hard limit of processor time.
    return "timeout" if exit_code in (-24, -9) else "crash"


def _run_calls(code: str, tests: CallTests, limits: SandboxLimits, boundary: Boundary) -> CodeVerdict:
    start = {"function": tests.function, "in_class": True, "official": True, "calls": len(tests.cases)}
    with Session(boundary, limits, "calls", code, **start) as session:
        for place, (arguments, expected) in enumerate(tests.cases):
            try:
                frame = session.exchange({}, runner.encode([arguments, {}]))
                failed = _failed_call(frame)
                if failed is not None:
                    return CodeVerdict(failed, str(frame.head.get("problem", ""))[:300], place)
                value = runner.decode_json(json.loads(frame.body))
            except Ended as ended:
                return CodeVerdict(ended.status, ended.detail, place)
            except (ValueError, TypeError, LookupError, RecursionError, MemoryError, AttributeError):
                return CodeVerdict("crash", "the result does not read", place)
            if not same_value(value, expected, wrapped=tests.wrapped):
                return CodeVerdict("wrong answer", "the value differs", place)
    return CodeVerdict("passed")


def _failed_call(frame: Frame) -> Status | None:
    """What a program's answer counts as; None for a value. The program may have written the answer itself."""
    kinds: dict[str, Status | None] = {"value": None, "memory": "memory", "over": "output limit"}
    kind = frame.head.get("kind")
    return kinds.get(kind, "crash") if isinstance(kind, str) else "crash"


def _run_check(code: str, tests: CheckTests, limits: SandboxLimits, boundary: Boundary) -> CodeVerdict:
    """Run the tests in one sandbox and the program in another. We pass on calls and answers, so that the code of one
    never gets into the other."""
    name = tests.entry_point
    # The limits are for the program's calls. The tests compare the answers to all of them in one go.
    grading = limits.with_test(max(limits.wall_seconds, SandboxLimits().wall_seconds), None)
    with Session(boundary, grading, "grade", tests.test_code, function=name) as grader:
        start = {"function": name, "in_class": False, "official": False, "calls": 1000}
        with Session(boundary, limits, "calls", code, **start) as program:
            return _messages(grader, program, grading)


def _messages(grader: Session, program: Session, limits: SandboxLimits) -> CodeVerdict:
    last, status, answer = "", None, Frame({"kind": "go"}, b"")
    while True:
        try:
            asked = grader.exchange(answer.head, answer.body, wall_seconds=10 * limits.wall_seconds)
        except Ended as ended:
            # After a call, the program's value made the tests end. Before the first call, the tests themselves do not
            # run.
            if answer.head["kind"] == "go":
                raise SandboxError(f"the tests do not run: {ended.detail}") from None
            return CodeVerdict(ended.status, f"while its answer was checked: {ended.detail}")
        kind = asked.head.get("kind")
        if kind == "held":
            return CodeVerdict("passed")
        if kind == "failed":
            return CodeVerdict(status or "wrong answer", last or str(asked.head.get("problem"))[:300])
        if kind != "call":
            raise SandboxError(f"the tests do not run: {asked.head.get('problem')}")
        try:
            answer = program.exchange({}, asked.body)
        except Ended as ended:
            return CodeVerdict(ended.status, ended.detail)
        status = _failed_call(answer)
        last = "" if status is None else str(answer.head.get("problem", ""))[:300]
