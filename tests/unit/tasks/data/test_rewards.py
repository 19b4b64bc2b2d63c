"""Rows judged by the packaged rewards, many at a time: math by math-verify, code in whatever sandbox holds here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import data_files
from sandboxes import need_sandbox
from sparroll import tasks
from sparroll.evaluate.estimators import Vote, majority
from sparroll.evaluate.rollout_file import summarise_rollouts
from sparroll.evaluate.settings import read_tasks
from sparroll.tasks.async_calls import AsyncCalls
from sparroll.tasks.code.reward import CallTests
from sparroll.tasks.data import rewards
from sparroll.tasks.data.code_tests import Case, CodeTests
from sparroll.tasks.data.rows import Row
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.data.task import DataTask
from sparroll.tasks.reward_function import FunctionJudge, RewardFunction
from sparroll.tasks.verdicts import Verdict, has_answers, judge, pooled
from sparroll.types import Prompt, Rollout


def task(folder: Path, rows: list[dict[str, object]]) -> tuple[DataTask, list[Prompt]]:
    made = DataTask("data", DataSettings(train=str(data_files.write(folder / "rows.jsonl", rows))))
    prompts = made.prompts("train", 0, 0, 99)
    return made, sorted(prompts, key=lambda prompt: prompt.prompt_id)


def test_math_rows_are_judged_together_and_right_answers_vote_as_one(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    made, (half, seven) = task(
        tmp_path, [{"prompt": "a half?", "answer": "1/2"}, {"prompt": "three and four?", "answer": "7"}]
    )
    asked = [half, half, half, seven]
    said = [r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{2}", "no box"]
    verdicts = judge(made, asked, said)
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0, 0.0]
    assert [verdict.answer for verdict in verdicts] == ["1/2", "1/2", "2", None]
    assert has_answers(made)
    assert made.reward(half, said[0]) == 1.0


def test_code_rows_are_run_and_a_broken_sandbox_is_nobodys_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_sandbox()
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
    made, (prompt,) = task(tmp_path, [{"prompt": "add", "tests": tests}])
    good = "```python\nprint(sum(map(int, input().split())))\n```"
    assert [verdict.reward for verdict in judge(made, [prompt] * 2, [good, "```python\nprint(3)\n```"])] == [1.0, 0.0]
    assert not has_answers(made)

    from sparroll.tasks.code import reward as code_reward
    from sparroll.tasks.code.limits import SandboxError

    def broken(*arguments: object) -> object:
        raise SandboxError("no more processes")

    monkeypatch.setattr(code_reward, "run", broken)
    (verdict,) = judge(made, [prompt], [good.replace("print", "print ")])
    assert (verdict.reward, verdict.status) == (None, "sandbox error")


def test_wrong_answers_vote_by_meaning_like_right_ones(tmp_path: Path) -> None:
    """Three right, four spellings of 1/4: the majority is wrong."""
    pytest.importorskip("math_verify")
    made, (half, seven) = task(
        tmp_path, [{"prompt": "a half?", "answer": "1/2"}, {"prompt": "three and four?", "answer": "7"}]
    )
    right = [r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{2/4}"]
    wrong = [r"\boxed{1/4}", r"\boxed{0.25}", r"\boxed{\frac{2}{8}}", r"\boxed{.250}"]
    other = [r"\boxed{8}", "no box", r"\boxed{08}", r"\boxed{1/4}", r"\boxed{9}"]
    asked = [half] * 7 + [seven] * 5
    verdicts = pooled(made, asked, judge(made, asked, right + wrong + other))
    answers, rewards = [verdict.answer for verdict in verdicts], [verdict.reward for verdict in verdicts]
    assert answers[:3] == ["1/2"] * 3 and len(set(answers[3:7])) == 1
    assert rewards == [1.0] * 3 + [0.0] * 9
    assert majority(answers[:7], rewards[:7]) == Vote(0.0, False)
    # An answer belongs to its own prompt, and what cannot be equal stays apart.
    assert answers[7] == answers[9] == "8" and answers[8] is None and answers[11] == "9"


def test_a_wrong_answer_does_not_vote_as_the_gold_one_that_it_is_without_spaces(tmp_path: Path) -> None:
    """Three wrong votes for 1 2, two right ones for 12; and two spellings of one wrong product."""
    pytest.importorskip("math_verify")
    made, (twelve,) = task(tmp_path, [{"prompt": "five and seven?", "answer": "12"}])
    said = [r"\boxed{1 2}"] * 3 + [r"\boxed{12}"] * 2 + [r"\boxed{2\pi r}", r"\boxed{2\pi  r}", r"\boxed{2 r \pi}"]
    verdicts = pooled(made, [twelve] * 8, judge(made, [twelve] * 8, said))
    answers, rewards = [verdict.answer for verdict in verdicts], [verdict.reward for verdict in verdicts]
    assert answers[:5] == ["1 2"] * 3 + ["12"] * 2 and answers[5:] == [r"2\pi r"] * 3
    assert majority(answers[:5], rewards[:5]) == Vote(0.0, False)


def test_a_judge_of_the_users_own_needs_no_sandbox_and_no_readable_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "Print 1.", "tests": [{"input": "", "output": "1"}]}, {"prompt": "Why?", "answer": r"\because"}]
    path = data_files.write(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr(rewards, "CodeReward", None)
    own = FunctionJudge(RewardFunction("operator:setitem", {}), AsyncCalls())
    (chosen,) = read_tasks(str(path), level=0, count=None, judge=own)
    assert len(chosen.problems) == 2


def test_a_response_without_a_verdict_is_counted_and_the_rollouts_keep_their_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("math_verify")
    made, (half,) = task(tmp_path, [{"prompt": "a half?", "answer": "1/2"}])
    lost = Verdict(None, "sandbox error")
    # A reward above 1 is no evaluation's, and a task may give it all the same.
    monkeypatch.setattr(made, "verdicts", lambda prompts, texts: [Verdict(3.0) if text else lost for text in texts])
    monkeypatch.setattr(tasks, "get", lambda name: made)
    about = {"prompt_index": 0, "response_ids": [1], "finish_reason": "stop", "kv_read_share": 1.0}
    summary = summarise_rollouts([{**about, "response": text} for text in ("a", "", "b")], [half], "mine")
    assert summary["reward_mean"] == 3 and summary["without_reward/sandbox error"] == 1
    assert summarise_rollouts([{**about, "response": ""}], [half], "mine")["reward_mean"] is None


def test_an_evaluation_pools_answers_before_they_vote(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    rows = [{"prompt": "a half?", "answer": "1/2"}]
    (chosen,) = read_tasks(str(data_files.write(tmp_path / "rows.jsonl", rows)), level=0, count=None)
    texts = [r"\boxed{1/2}", r"\boxed{1/4}", r"\boxed{0.25}"]
    rollouts = [Rollout([1], [2], torch.zeros(1), "stop")] * 3
    verdicts = chosen.verdicts(chosen.problems * 3, texts, rollouts, lambda ids: "a half?")
    assert [verdict.answer for verdict in verdicts] == ["1/2", "1/4", "1/4"]
    cut = chosen.verdicts(chosen.problems * 3, texts, rollouts, lambda ids: "a half?<think>\n")
    assert [verdict.answer for verdict in cut] == [None] * 3


@pytest.mark.parametrize(
    ("read", "meant"),
    [
        ([{"1": 5}, "2"], [{1: 5}, "2"]),
        ({"-1": [2]}, {-1: [2]}),
        ([{"a": 1}], [{"a": 1}]),
        ({"1": 1, "a": 2}, {"1": 1, "a": 2}),
        ([["1"]], [["1"]]),
        ({}, {}),
    ],
)
def test_taco_gets_back_the_numbers_that_json_made_strings_as_keys(read: object, meant: object) -> None:
    tests = CodeTests.of("function", [Case(read, read)], "f", wrapped=True)
    made = rewards._tests(Row("r", "Q", "code", tests=tests))
    assert isinstance(made, CallTests) and made.cases == ((meant, meant),)
