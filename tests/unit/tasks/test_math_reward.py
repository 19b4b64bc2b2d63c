"""Verdicts and their statuses, hostile answers, and worker processes: none hangs, none stays. Limits here are small."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest

from sparroll.errors import UserError
from sparroll.tasks.math import pool as math_pool
from sparroll.tasks.math import reward as math_reward
from sparroll.tasks.math.pool import Pool, PoolLimits
from sparroll.tasks.math.reward import ANSWER_CHARS, MathReward
from sparroll.types import Prompt

SOURCE = Path(__file__).parents[3] / "src"
WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2, PoolLimits(cpu_seconds=1.0))
    yield pool
    pool.close()


@pytest.fixture
def math(pool: Pool) -> MathReward:
    return MathReward(pool)


HOSTILE = {
    "tower of powers": r"9^{9^9}",
    "tower in braces": r"10^{10^{10}}",
    "tower of nines": r"9^{9^{9^{9}}}",
    "negative tower": r"2^{-9^{9^9}}",
    "factorial": "10000000!",
    "factorial of a factorial": "((100!)!)!",
    "binomial": r"\binom{10^9}{5 \cdot 10^8}",
    "sum": r"\sum_{n=1}^{10^9} n^n",
    "product": r"\prod_{n=1}^{10^9} n",
    "integral": r"\int_0^1 e^{e^{e^{e^x}}} dx",
    "expansion": "(x+y+z+w)^{3000}",
    "nested root": r"\sqrt[10^9]{9^{9^{9}}}",
    "many parentheses": "(" * 450 + "5" + ")" * 450,
    "many braces": "{" * 480 + "5" + "}" * 480,
    "many fractions": r"\frac{1}{" * 90 + "5" + "}" * 90,
    "many roots": r"\sqrt{" * 120 + "5" + "}" * 120,
    "open parentheses": "(" * 900,
    "many digits": "9" * 999,
    "many commas": ",".join("123" for _ in range(240)),
    "many minus signs": "-" * 900 + "6",
    "large matrix": r"\begin{pmatrix}" + r"\\".join("&".join("1" * 20) for _ in range(20)) + r"\end{pmatrix}",
    "power of a matrix": r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10^9}",
    "logarithm": r"\log_{1.0000001} 9^{9^9}",
    "large modulus": r"7^{9^{9^9}} \mod 10",
    "python": "__import__('os').system('echo 5')",
    "control characters": "\x00\x01\x1b[2J",
    "half a surrogate": "\ud800",
    "right to left": "\u202e\u2067" * 100 + "6",
    "combining marks": "6" + "\u0301" * 900,
    "a character too many": "6" * (ANSWER_CHARS + 1),
    "10 MB": "6" * 10_000_000,
}


@pytest.mark.slow
def test_no_hostile_answer_is_right_and_none_reaches_a_limit(pool: Pool) -> None:
    math = MathReward(Pool(2))
    verdicts = math.grade_all([("5", rf"\boxed{{{answer}}}") for answer in HOSTILE.values()])
    math.pool.close()
    # Braces and parentheses around a 5 say 5.
    right = {"many parentheses", "many braces"}
    other = {"a character too many": "too_long", "10 MB": "no_answer"}
    for name, verdict in zip(HOSTILE, verdicts, strict=True):
        assert verdict.status == ("right" if name in right else other.get(name, "wrong")), name


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that never finish an answer that is ENDLESS, as no answer does by itself."""
    worker = tmp_path / "worker.py"
    text = math_pool.WORKER.read_text(encoding="utf-8")
    busy = text.replace(
        "            if not readable",
        '            while "ENDLESS" in gold_latex:\n                pass\n            if not readable',
    )
    busy = busy.replace(
        '            return "right" if same',
        '            while "ENDLESS" in answer_latex:\n                pass\n            return "right" if same',
    )
    assert busy.count("ENDLESS") == 2
    worker.write_text(busy)
    monkeypatch.setattr(math_pool, "WORKER", worker)


def test_a_question_beyond_its_processor_time_is_a_timeout_without_reward(endless: None) -> None:
    pool = Pool(1, PoolLimits(cpu_seconds=0.5))
    verdict = MathReward(pool).grade("5", r"\boxed{ENDLESS}")
    assert (verdict.status, verdict.reward, verdict.answer) == ("timeout", 0.0, "ENDLESS")
    assert MathReward(pool).grade("ENDLESS", r"\boxed{7}").status == "unparsable_gold"
    # The question was given up, and the worker lives.
    (worker,) = pool.process_ids()
    assert MathReward(pool).grade("7", r"\boxed{7.0}").status == "right"
    assert pool.process_ids() == [worker]
    pool.close()


def test_a_worker_that_python_cannot_interrupt_is_stopped_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = tmp_path / "worker.py"
    text = math_pool.WORKER.read_text(encoding="utf-8")
    deaf = text.replace(
        '            return "right" if same',
        "            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGVTALRM})\n"
        "            while True:\n"
        "                pass\n"
        '            return "right" if same',
    )
    assert deaf != text
    worker.write_text(deaf)
    monkeypatch.setattr(math_pool, "WORKER", worker)
    pool = Pool(1, PoolLimits(cpu_seconds=0.5))
    assert MathReward(pool).grade("5", r"\boxed{5}").status == "timeout"
    assert pool.process_ids() == []
    pool.close()


def test_powers_beyond_all_writing_are_compared_by_form(math: MathReward) -> None:
    pairs = [("9^{9^9}", r"9^{9^{9}}"), ("5", "9^{9^9}"), ("10^{10^{10}}", "10^{10^{11}}"), ("2^{10^6}", "4^{500000}")]
    assert [verdict.status for verdict in math.grade_answers(pairs)] == ["right", "wrong", "wrong", "right"]


GOLDS = [
    (5, "5"),
    (5.0, "5"),
    (0.5, r"\frac{1}{2}"),
    (1 / 3, r"\frac{1}{3}"),
    (0.1 + 0.2, "0.3"),
    (2**70, "2^{70}"),
    (10**30, "10^{30}"),
    (1e25, "10^{25}"),
    (-7, "-7"),
    (np.int64(12), "12"),
    (np.float64(0.25), "1/4"),
    (np.float32(0.1), "0.1"),
    (Fraction(2, 3), r"\frac{2}{3}"),
    (Decimal("1.50"), "1.5"),
]


def test_golds_of_every_type_of_number_are_compared_as_numbers(math: MathReward) -> None:
    right = math.grade_answers([(gold, answer) for gold, answer in GOLDS])
    assert [verdict.status for verdict in right] == ["right"] * len(GOLDS)
    wrong = math.grade_answers([(gold, "41") for gold, _ in GOLDS])
    assert [verdict.status for verdict in wrong] == ["wrong"] * len(GOLDS)


UNUSABLE = [
    None,
    float("nan"),
    np.nan,
    "nan",
    float("inf"),
    "",
    "  ",
    [],
    [5],
    {},
    True,
    (1, 2),
    10**5000,
    b"5",
    1 + 2j,
]


def test_golds_that_no_answer_can_equal_give_no_reward(math: MathReward) -> None:
    verdicts = math.grade_all([(gold, r"\boxed{5}") for gold in UNUSABLE])
    assert [verdict.status for verdict in verdicts] == ["unparsable_gold"] * len(UNUSABLE)
    for verdict in verdicts:
        with pytest.raises(UserError, match="does not parse"):
            _ = verdict.reward
    assert math.unparsable_gold([*UNUSABLE, 5]) == [True] * len(UNUSABLE) + [False]


@pytest.mark.parametrize("gold", [r"\frac{", "", " ", "????", "x^2+", "5" * (ANSWER_CHARS + 1)])
def test_a_gold_answer_that_does_not_parse_has_no_reward(math: MathReward, gold: str) -> None:
    verdict = math.grade(gold, r"\boxed{5}")
    assert verdict.status == "unparsable_gold"
    with pytest.raises(UserError, match="does not parse"):
        _ = verdict.reward


def test_prompts_with_a_gold_answer_that_does_not_parse_are_dropped_and_counted(math: MathReward) -> None:
    prompts = [Prompt(str(i), "?", gold) for i, gold in enumerate(["5", "", r"\frac{", r"\text{east}", "[1,2)"])]
    kept, dropped = math.with_parsable_gold(prompts)
    assert [prompt.answer for prompt in kept] == ["5", r"\text{east}", "[1,2)"]
    assert dropped == 2


def test_the_gold_answer_comes_first(math: MathReward) -> None:
    one_way, other_way = math.grade_answers([("7", "y = 7"), ("y = x + 7", "7")])
    assert (one_way.status, other_way.status) == ("right", "wrong")
    one_way, other_way = math.grade_answers([(r"1010_2", "1010"), ("1010", r"1010_2")])
    assert (one_way.status, other_way.status) == ("right", "wrong")


def test_rewards_are_one_and_zero_and_counted_by_status(math: MathReward) -> None:
    verdicts = math.grade_all([("5", r"\boxed{5}"), ("5", r"\boxed{6}"), ("5", "5"), ("5", r"\boxed{5} \boxed{")])
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 0.0, 0.0]
    assert math.counts == {"right": 1, "wrong": 1, "no_answer": 2}


def test_nothing_asked_is_nothing_answered(math: MathReward) -> None:
    assert math.grade_all([]) == []


def test_answers_of_the_greatest_length_are_read_and_longer_ones_are_not(math: MathReward) -> None:
    answers = ["0" * (ANSWER_CHARS - 1) + "5", "0" * ANSWER_CHARS + "5"]
    verdicts = math.grade_answers([("5", answer) for answer in answers])
    assert [verdict.status for verdict in verdicts] == ["right", "too_long"]


def test_an_equal_pair_is_compared_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = pool.ask
    monkeypatch.setattr(pool, "ask", lambda questions: asked.append(len(questions)) or ask(questions))
    math = MathReward(pool)
    pairs = [("5", r"\boxed{5}"), ("5", r"so \boxed{5}."), ("5", r"\boxed{５}"), ("5", r"\boxed{7}")]
    first, second = math.grade_all(pairs), math.grade_all(pairs)
    assert [verdict.status for verdict in first] == ["right", "right", "right", "wrong"]
    assert [verdict.status for verdict in second] == [verdict.status for verdict in first]
    assert asked == [2, 0]


def test_threads_share_a_pool(math: MathReward) -> None:
    statuses: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        pairs = [(str(number), rf"\boxed{{{number + i % 2}.0}}") for i in range(6)]
        statuses[number] = [verdict.status for verdict in math.grade_all(pairs)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == {number: ["right", "wrong"] * 3 for number in range(4)}


def test_a_worker_that_was_killed_is_replaced(math: MathReward, pool: Pool) -> None:
    assert math.grade("5", r"\boxed{5.0}").status == "right"
    for worker in pool.process_ids():
        os.kill(worker, signal.SIGKILL)
    assert math.grade("6", r"\boxed{6.0}").status == "right"


def test_a_worker_that_stops_answering_is_killed_by_the_wall_clock() -> None:
    pool = Pool(1, PoolLimits(wall_seconds=1.0))
    math = MathReward(pool)
    assert math.grade("5", r"\boxed{5.0}").status == "right"
    (first,) = pool.process_ids()
    os.kill(first, signal.SIGSTOP)
    assert math.grade("6", r"\boxed{6.0}").status == "unparsable_gold"
    assert math.grade("8", r"\boxed{8.0}").status == "right"
    assert not psutil.pid_exists(first)
    pool.close()


def test_a_gold_answer_that_parsed_once_is_not_blamed_for_a_worker_that_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_reward, "CACHED_VERDICTS", 1)
    pool = Pool(1, PoolLimits(wall_seconds=1.0))
    math = MathReward(pool)
    assert math.unparsable_gold(["6", "7"]) == [False, False]
    os.kill(pool.process_ids()[0], signal.SIGSTOP)
    assert math.grade("6", r"\boxed{6.0}").status == "timeout"
    pool.close()


def test_workers_are_replaced_after_their_share_of_questions() -> None:
    pool = Pool(1, PoolLimits(questions_per_worker=2))
    seen = set()
    for number in range(5):
        assert MathReward(pool).grade(str(number), rf"\boxed{{{number}.0}}").status == "right"
        seen |= set(pool.process_ids())
    assert len(seen) >= 2
    pool.close()


def test_a_closed_pool_leaves_no_process_and_starts_again_when_asked() -> None:
    pool = Pool(2)
    math = MathReward(pool)
    math.grade_all([(str(n), rf"\boxed{{{n}.0}}") for n in range(8)])
    workers = pool.process_ids()
    assert workers
    pool.close()
    assert not any(psutil.pid_exists(worker) for worker in workers)
    assert math.grade("55", r"\boxed{55.0}").status == "right"
    pool.close()


PARENT = """
import json, os, signal, sys
from sparroll.tasks.math.pool import Pool
from sparroll.tasks.math.reward import MathReward
pool = Pool(2)
math = MathReward(pool)
math.grade_all([(str(n), rf"\\boxed{{{n}.0}}") for n in range(8)])
print(json.dumps(pool.process_ids()), flush=True)
if sys.argv[1] == "killed-busy":
    import threading
    nested = r"\\frac{1}{1+x" * 39 + "}" * 39
    threading.Thread(target=math.grade, args=("5", rf"\\boxed{{{nested}}}"), daemon=True).start()
sys.stdin.readline()
if sys.argv[1] == "killed-busy":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "interrupted":
    signal.raise_signal(signal.SIGINT)
if sys.argv[1] == "terminated":
    signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize("end", ["finished", "interrupted", "terminated", "killed-busy"])
def test_a_parent_that_ends_in_any_way_leaves_no_worker(end: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", PARENT, end]
    parent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    assert parent.stdin is not None and parent.stdout is not None
    workers = [psutil.Process(number) for number in json.loads(parent.stdout.readline())]
    assert workers
    parent.stdin.write(b"\n")
    parent.stdin.close()
    parent.wait(WAIT_SECONDS)
    parent.stdout.close()
    assert not psutil.wait_procs(workers, timeout=WAIT_SECONDS)[1]


def test_a_forked_copy_of_the_process_has_workers_of_its_own(math: MathReward, pool: Pool) -> None:
    math.grade("5", r"\boxed{5.0}")
    before = pool.process_ids()
    child = os.fork()
    if child == 0:
        right = MathReward(pool).grade("9", r"\boxed{9.0}").status == "right"
        pool.close()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.process_ids() == before
    assert math.grade("11", r"\boxed{11.0}").status == "right"


def test_a_worker_that_cannot_start_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("import a_module_that_is_not_there\n")
    monkeypatch.setattr(math_pool, "WORKER", broken)
    with pytest.raises(UserError, match="does not start"):
        MathReward(Pool(1)).grade("5", r"\boxed{5}")


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        Pool(0)


def test_a_worker_may_not_use_more_memory_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux limits the address space")
    worker = tmp_path / "worker.py"
    text = math_pool.WORKER.read_text(encoding="utf-8")
    greedy = text.replace('say(f"= {verdict}")', 'held = bytearray(600 * 2**20); say(f"= {verdict}")')
    assert greedy != text
    worker.write_text(greedy)
    monkeypatch.setattr(math_pool, "WORKER", worker)
    small, large = Pool(1, PoolLimits(memory_mib=512)), Pool(1, PoolLimits(memory_mib=2048))
    assert MathReward(small).grade("5", r"\boxed{5.0}").status == "crashed"
    assert MathReward(large).grade("5", r"\boxed{5.0}").status == "right"
    small.close()
    large.close()


WORDS = {
    "wrong": [
        ("infinitely many", "not infinitely many"), ("undefined", "not undefined"),
        ("all real numbers", "all real numbers except zero"), ("all real numbers", "all real numbers greater than two"),
        ("no solution", "there is no solution unless x is even"), ("Yes", "yes if n is even"), ("Yes", "yes, if n is even"),
        ("True", "true only for even n"), ("No", "no more than five"), ("No", "no idea"), ("No", "no solution"),
        ("New York City", "New"), ("perfect square", "perfect"), ("isosceles right triangle", "isosceles"),
        ("Tuesday", "the day before Tuesday"),
    ],
    "right": [
        ("Yes", "yes, it does not depend on n"), ("Yes", "yes it does not depend on n"), ("No", "the answer is no"),
        ("No", "no it is not"), ("infinitely many", "there are infinitely many solutions"), ("scalene triangle", "scalene"),
        ("scalene", "scalene triangle"), ("no solution", "there are no solutions for x"),
        ("undefined", "the slope is undefined"), ("does not exist", "the limit does not exist"), ("Alice", "Alice wins"),
        ("right triangle", "right"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("status", WORDS)
def test_words_that_deny_or_limit_an_answer_are_not_that_answer(status: str, math: MathReward) -> None:
    pairs = [(rf"\text{{{gold}}}", rf"\text{{{answer}}}") for gold, answer in WORDS[status]]
    assert [verdict.status for verdict in math.grade_answers(pairs)] == [status] * len(pairs)


def test_the_value_of_a_variable_is_no_choice(math: MathReward) -> None:
    values = [("A", "a=3"), ("B", "b=2"), ("C", r"c=\frac{1}{2}"), ("D", "d=10"), (r"\text{(B)}", "b=2")]
    assert {verdict.status for verdict in math.grade_answers(values)} == {"wrong"}
    marked = [("A", r"\text{A} = 5"), ("A", "(A) = 5"), ("B", "B = 7"), ("B", r"\text{option b} = 7")]
    assert {verdict.status for verdict in math.grade_answers(marked)} == {"right"}
