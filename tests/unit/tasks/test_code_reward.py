"""Verdicts of code: the official rules, statuses, the cache, and a sandbox's failure that is nobody's wrong answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from sparroll.errors import UserError
from sparroll.rounding import rounded_down
from sparroll.tasks.code import reward as code_reward
from sparroll.tasks.code import sandbox
from sparroll.tasks.code.limits import SandboxError, SandboxLimits
from sparroll.tasks.code.reward import CallTests, CheckTests, CodeReward, CodeVerdict, StdinTests, Tests, last_code
from sparroll.tasks.code.rules import same_output, same_value

LIMITS = SandboxLimits(wall_seconds=10, cpu_seconds=2)
SUM = StdinTests((("1 2", "3"), ("2 5", "7")))


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    with CodeReward(LIMITS, allow_unsafe_sandbox=True) as made:
        yield made


def _fenced(code: str) -> str:
    return f"Thinking.\n```python\n{code}\n```\nDone."


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3  \n", "3", True),
        ("1 \n 2\n", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        ("1 2", "1  2", True),
        ("a b", "a  b", False),
        ("1.0 2", "1 2.00", True),
        ("1e3", "1000", True),
        ("0.3333333", "0.3333334", False),
        ("50000000000000000", "50000000000000001", False),
        ("YES", "yes", False),
        ("yes 1.0", "yes 1", False),
        ("nan", "NaN", False),
        ("snan", "1", False),
        ("", "", True),
        ("", "0", False),
        ("1\n2\n3", "1\n2", False),
    ],
)
def test_output_is_compared_as_livecodebench_does(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("0.3333333333333333", "0.3333333333", True),
        ("2\n0.500001", "2\n0.5", True),
        ("0.50001", "0.5", False),
        ("0.33 x", "0.33 x", True),
        ("100001", "100000", False),
        ("1e0", "1.000001", True),
        ("nan", "0.5", False),
        ("1e999999", "1.5", False),
        ("0.5 0.5", "0.5", False),
    ],
)
def test_taco_rounds_fractions_and_nothing_else(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected, rounded=True) is same


def test_values_are_compared_as_livecodebench_and_taco_do() -> None:
    assert same_value((1, 2), [1, 2]) and same_value(1.0, 1) and same_value(True, 1)
    assert not same_value([(1, 2)], [[1, 2]])
    assert not same_value(0.1 + 0.2, 0.3)
    assert same_value(5, [5], wrapped=True) and not same_value(5, [5])
    assert not same_value(5, [], wrapped=True)
    # TACO's grader takes tuples inside for lists where it unwraps; LiveCodeBench's does not.
    assert same_value([(1, 2), (3,)], [[[1, 2], [3]]], wrapped=True)
    assert same_value(((1, 2),), [[[1, 2]]], wrapped=True) and not same_value([(1, 2)], [[1, 2]], wrapped=True)
    assert not same_value([[1, 2], (3,)], [[[1, 2], [3]]], wrapped=True)


STDIN_ENDS = [
    ("print(sum(map(int, input().split())))", "passed"),
    ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))", "passed"),
    ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(1)", "passed"),
    ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "passed"),
    ("print(sum(map(int, open(0).read().split())))", "passed"),
    ("import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()", "passed"),
    ("import atexit, os\natexit.register(lambda: os.write(1, str(sum(map(int, input().split()))).encode()))", "passed"),
    ("x = Counter(); d = deque(); print(reduce(add, map(int, input().split())))", "passed"),
    ("def f(n): return 0 if n == 0 else f(n - 1)\nf(20000)\nprint(sum(map(int, input().split())))", "passed"),
    ("import sys\nsys.__stdout__.write(str(sum(map(int, sys.__stdin__.read().split()))))", "passed"),
    (
        "import io, sys\nsys.stdout = io.StringIO()\nprint(sum(map(int, input().split())))\n"
        "sys.__stdout__.write(sys.stdout.getvalue())",
        "passed",
    ),
    ("import sys\nprint(sum(map(int, input().split())))\nsys.stdout.close()", "passed"),
    ("import sys\nprint(sum(map(int, input().split())), flush=True)\nsys.stdout = None", "passed"),
    ("import sys\nprint(3)\nsys.__stdout__.close()", "wrong answer"),
    ("print(3)", "wrong answer"),
    ("1 / 0", "crash"),
    ("print(", "crash"),
    ("import os\nos._exit(3)", "crash"),
    ("x = bytearray(1 << 34)", "memory"),
    ("while True: pass", "timeout"),
    ("print('a' * (9 << 20))", "output limit"),
]


@pytest.mark.parametrize(("code", "status"), STDIN_ENDS)
def test_a_program_on_standard_input_ends_with_its_status(code: str, status: str, reward: CodeReward) -> None:
    assert reward.grade(SUM, _fenced(code)).status == status


def test_the_first_failing_test_is_named_and_all_must_pass(reward: CodeReward) -> None:
    assert reward.grade(SUM, _fenced("print(3)")) == CodeVerdict("wrong answer", "the output differs", 1)


def test_a_large_input_arrives_whole(reward: CodeReward) -> None:
    numbers = " ".join(map(str, range(300_000)))
    tests = StdinTests(((numbers, str(sum(range(300_000)))),))
    assert reward.grade(tests, _fenced("print(sum(map(int, input().split())))")).passed


CALL_ENDS = [
    ("class Solution:\n    def add(self, a, b): return a + b", "passed"),
    ("def add(a, b): return a + b", "passed"),
    ("class Solution:\n    def add(self, a: List[int], b: Optional[int]): return a + b", "passed"),
    ("def add(a, b):\n    print('noise')\n    return a + b", "passed"),
    ("def add(a, b): return tuple(a + b) if isinstance(a, list) else a + b", "passed"),
    ("import numpy\ndef add(a, b): return a + b if isinstance(a, list) else numpy.int64(a + b)", "passed"),
    ("def add(a, b): return [a, b]", "wrong answer"),
    ("def add(a, b): return {1, 2}", "wrong answer"),
    ("def plus(a, b): return a + b", "crash"),
    ("def add(a): return a", "crash"),
    ("def add(a, b): return bytearray(1 << 34)", "memory"),
]


@pytest.mark.parametrize(("code", "status"), CALL_ENDS)
def test_a_function_ends_with_its_status(code: str, status: str, reward: CodeReward) -> None:
    tests = CallTests("add", (([1, 2], 3), ([[1], [2]], [1, 2])))
    assert reward.grade(tests, _fenced(code)).status == status


def test_a_set_of_words_has_the_same_order_in_every_sandbox(reward: CodeReward) -> None:
    code = "def order(): return list({'a', 'b', 'c', 'd', 'e'})"
    # Each is another program, so that none is answered by the cache.
    said = [reward.grade(CallTests("order", (([], []),)), _fenced(f"{code}\n# {place}")).detail for place in range(4)]
    assert "e" in said[0] and said == said[:1] * 4


def test_a_solution_keeps_its_state_from_call_to_call_as_in_livecodebench(reward: CodeReward) -> None:
    tests = CallTests("next", (([], 1), ([], 2)))
    code = "class Solution:\n    n = 0\n    def next(self):\n        self.n += 1\n        return self.n"
    assert reward.grade(tests, _fenced(code)).passed


EVALPLUS = """
import numpy as np

def check(candidate):
    for given, wanted in zip([[[1.0, 2.0]], [[3.0]]], [1.5, 3.0]):
        assert np.allclose(candidate(*given), wanted, rtol=1e-07, atol=1e-06)
"""
CHECK_ENDS = [
    ("def mean(x): return sum(x) / len(x)", "passed"),
    ("def mean(x): return sum(x) / len(x) + 5e-7", "passed"),
    ("def mean(x): return sum(x) / len(x) + 1e-4", "wrong answer"),
    ("def mean(x): return 'a'", "wrong answer"),
    ("def mean(x): raise KeyError(x[0])", "crash"),
    ("def other(x): return 1", "crash"),
]


@pytest.mark.parametrize(("code", "status"), CHECK_ENDS)
@pytest.mark.parametrize("ending", ["", "\ncheck(mean)\n"])
def test_evalplus_tests_decide_by_their_own_code(code: str, status: str, ending: str, reward: CodeReward) -> None:
    assert reward.grade(CheckTests("mean", EVALPLUS + ending), _fenced(code)).status == status


@pytest.mark.parametrize(
    ("returned", "status"),
    [
        ("{2: 1, 1: 2}", "passed"),
        ("{1: 2}", "wrong answer"),
        ("{1: 2, 2: 2}", "wrong answer"),
        ("{1: 2, 2: 1, 3: 0}", "wrong answer"),
        ("{'1': 2, '2': 1}", "wrong answer"),
    ],
)
def test_numbers_as_keys_are_compared_and_given(returned: str, status: str, reward: CodeReward) -> None:
    tests = CallTests("f", (([{1: 5}], [{1: 2, 2: 1}]),), wrapped=True)
    assert reward.grade(tests, _fenced(f"def f(x):\n    return {returned} if x == {{1: 5}} else 0")).status == status


NAMED = """
assert f(1) == 2
assert f(x=2) == 3
try:
    f(-1)
except ValueError:
    pass
else:
    raise AssertionError
"""


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("if x < 0: raise ValueError(x)\n    return x + 1", "passed"),
        ("if x < 0: raise KeyError(x)\n    return x + 1", "crash"),
        ("return x + 1", "wrong answer"),
    ],
)
def test_tests_may_name_arguments_and_expect_errors(body: str, status: str, reward: CodeReward) -> None:
    assert reward.grade(CheckTests("f", NAMED), _fenced(f"def f(x):\n    {body}")).status == status


@pytest.mark.parametrize("tests", [CallTests("f", (([1], 1),)), CheckTests("f", "assert f(1) == 1")])
def test_a_function_may_write_more_to_stderr_than_a_pipe_holds(tests: Tests, reward: CodeReward) -> None:
    code = "import sys\ndef f(x):\n    sys.stderr.write('x' * 100_000)\n    return x"
    assert reward.grade(tests, _fenced(code)).status == "passed"


@pytest.mark.parametrize("kind", ["[]", "{}", "None"])
def test_an_answer_that_the_program_made_up_is_a_crash(kind: str, reward: CodeReward) -> None:
    code = (
        "import sys\ndef f(x):\n    channel = sys._getframe(1).f_locals['channel']\n"
        f"    channel.write({{'kind': {kind}}}, b'')\n    return x"
    )
    for tests in (CallTests("f", (([1], 1),)), CheckTests("f", "assert f(1) == 1")):
        assert reward.grade(tests, _fenced(code)).status == "crash"


def test_a_function_that_remembers_its_values_may_go_deep() -> None:
    code = (
        "import functools, sys\nsys.setrecursionlimit(10**6)\n@functools.cache\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(int(input())))"
    )
    with CodeReward(SandboxLimits(memory_bytes=2 << 30), allow_unsafe_sandbox=True) as roomy:
        assert roomy.grade(StdinTests((("20000", "20000"),)), _fenced(code)).status == "passed"


def test_an_evalplus_test_of_a_function_that_never_returns_ends_with_its_time() -> None:
    with CodeReward(SandboxLimits(wall_seconds=2, cpu_seconds=2), allow_unsafe_sandbox=True) as hasty:
        for ending in ("", "\ncheck(mean)\n"):
            code = _fenced("def mean(x):\n    while True: pass")
            assert hasty.grade(CheckTests("mean", EVALPLUS + ending), code).status == "timeout"


def test_mbpp_plus_calls_the_function_by_its_name_with_tuples(reward: CodeReward) -> None:
    tests = CheckTests("swap", "for given, wanted in [((1, 2), (2, 1)), (('a', None), (None, 'a'))]:\n"
                               "    out = swap(given)\n    assert out == wanted and type(out) is tuple\n")  # fmt: skip
    assert reward.grade(tests, _fenced("def swap(x): return x[1], x[0]")).passed
    assert reward.grade(tests, _fenced("def swap(x): return [x[1], x[0]]")).status == "wrong answer"


def test_tests_that_do_not_run_are_not_the_programs_failure(reward: CodeReward) -> None:
    verdict = reward.grade(CheckTests("mean", "import nothing_of_this_name\n"), _fenced("def mean(x): return 1"))
    assert verdict.status == "sandbox error" and verdict.reward is None


def test_code_is_taken_from_the_last_fenced_block() -> None:
    assert last_code("```python\na = 1\n```\ntext\n```\nb = 2\n```\n") == "b = 2\n"
    assert last_code("~~~py\na\n~~~") == "a\n"
    assert last_code("````\n```\ninner\n```\n````") == "```\ninner\n```\n"
    assert last_code("```python\ncut off") == "cut off"
    assert last_code("no code") is None
    assert last_code("<think>\n```python\na\n```\n</think>\nI cannot.") is None
    assert last_code("<think>```\na\n```</think>\n```\nb\n```") == "b\n"
    assert last_code("```python\n```") == ""


LOOP = "for n in range(2):\n    print(n)\n"


@pytest.mark.parametrize(
    "response",
    [
        f"```python\n{LOOP}```",
        f"Solution: ```python\n{LOOP}```\nDone.",
        f"1. ```\n{LOOP}```\nDone.",
        f"**Solution** ```python3 \n{LOOP}```",
        f"```python\n{LOOP}```.",
        f"```python\n{LOOP}```<|im_end|>",
        f"```python\n{LOOP}``` This prints 0 and 1.",
        f"```python\n{LOOP}```Done.",
        f"~~~python\n{LOOP}~~~.",
        f"```python\n{LOOP}```\nIt writes ``` a fence, and ```text``` too.",
        f"Put it between ``` and\n```python\n{LOOP}```",
        f"I will use ```\n```python\n{LOOP}```",
        f"```text\n0\n```.\n```python\n{LOOP}```",
        f"```python\n{LOOP}```\nOutput: ```\n0\n1\n```",
        "1. The code:\n   ```python\n   for n in range(2):\n       print(n)\n   ```\n2. Done.",
        "- ```python\n  for n in range(2):\n      print(n)\n  ```",
        "\t```python\n\tfor n in range(2):\n\t    print(n)\n\t```",
        f"```python\n{LOOP}```\n".replace("\n", "\r\n"),
    ],
)
def test_code_is_the_same_however_its_fences_stand(response: str) -> None:
    assert last_code(response) == LOOP


def test_code_within_its_margin_keeps_every_space() -> None:
    text = 's = """\n  \n ```python\n"""\n    \n'
    assert last_code(f"```\n{text}```") == text


def test_an_indented_program_after_windows_line_ends_passes(reward: CodeReward) -> None:
    response = "Solution: ```python\r\n  a, b = input().split()\r\n  print(int(a) + int(b))\r\n  ```.\r\n"
    assert reward.grade(SUM, response).passed


def test_a_response_without_code_is_wrong(reward: CodeReward) -> None:
    assert reward.grade(SUM, "I do not know").reward == 0.0


def test_identical_pairs_are_run_once_and_order_is_kept(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def count(code: str, tests: Tests, *rest: object) -> CodeVerdict:
        ran.append(code)
        return CodeVerdict("passed" if "good" in code else "wrong answer")

    monkeypatch.setattr(code_reward, "run", count)
    pairs = [(SUM, _fenced(code)) for code in ("good 1", "bad 1", "good 1", "bad 1", "good 2")]
    assert [verdict.passed for verdict in reward.grade_batch(pairs)] == [True, False, True, False, True]
    assert sorted(ran) == ["bad 1\n", "good 1\n", "good 2\n"]
    reward.grade(StdinTests((("1", "1"),)), _fenced("good 1"))
    assert len(ran) == 4


def test_a_sandbox_error_is_retried_counted_excluded_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fail(*_: object) -> CodeVerdict:
        ran.append(1)
        raise SandboxError("no room")

    with CodeReward(LIMITS, allow_unsafe_sandbox=True) as reward:
        monkeypatch.setattr(code_reward, "run", fail)
        verdict = reward.grade(SUM, _fenced("print(1)"))
        assert verdict == CodeVerdict("sandbox error", "no room")
        assert verdict.reward is None and len(ran) == code_reward.ATTEMPTS
        assert reward.counts == {"sandbox error": 1}
        monkeypatch.setattr(code_reward, "run", lambda *_: CodeVerdict("passed"))
        assert reward.grade(SUM, _fenced("print(1)")).passed


def test_without_a_sandbox_a_run_is_refused_at_its_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sandbox, "probes", sandbox.probes.__wrapped__)
    with pytest.raises(UserError, match="no sandbox works.*bwrap is not installed"):
        CodeReward()
    with pytest.raises(UserError, match="bubblewrap does not hold"):
        CodeReward(sandbox_name="bubblewrap", allow_unsafe_sandbox=True)
    with pytest.raises(UserError, match="does not contain programs"):
        CodeReward(sandbox_name="unsafe")
    with CodeReward(allow_unsafe_sandbox=True) as reward:
        assert reward.boundary.name == "unsafe"


def test_limits_and_tests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="wall_seconds must be positive and finite, got 0"):
        SandboxLimits(wall_seconds=0)


def test_the_docs_name_every_hostile_boundary() -> None:
    text = (Path(__file__).parents[3] / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert all(name in text for name in ("bubblewrap", "firejail", "unsafe", "data.allow_unsafe_sandbox"))
    record = Path(__file__).parents[3] / "benchmarks/results/verdicts-code-cpu.json"
    results = json.loads(record.read_text(encoding="utf-8"))["results"]
    assert f"{rounded_down(results['verdicts_per_second'], 1)} verdicts a second" in text


def test_an_interrupt_leaves_no_program_to_be_run(reward: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is taken back, and a later call grades it anew."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(code: str, *_: object) -> CodeVerdict:
        begun.set()
        go_on.wait(30)
        return CodeVerdict("passed", code)

    with CodeReward(sandbox_name=reward.boundary.name, allow_unsafe_sandbox=True, workers=1) as own:
        monkeypatch.setattr(code_reward, "run", slow)
        pairs = [(StdinTests((("", ""),)), f"```\n{number}\n```") for number in range(5)]
        monkeypatch.setattr(Future, "result", lambda future: (begun.wait(30), interrupted()))
        with pytest.raises(KeyboardInterrupt):
            own.grade_batch(pairs)
        monkeypatch.undo()
        monkeypatch.setattr(code_reward, "run", slow)
        assert len(own._cache) == 1, "the one that runs"
        go_on.set()
        assert [verdict.detail.strip() for verdict in own.grade_batch(pairs)] == list("01234")


def interrupted() -> None:
    raise KeyboardInterrupt
