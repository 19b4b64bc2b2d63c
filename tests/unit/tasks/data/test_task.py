"""Rows as a task: filters, order, templates, contamination, rewards by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import data_files
from sparroll import tasks
from sparroll.errors import UserError
from sparroll.tasks.data.code_tests import Case, CodeTests, spread
from sparroll.tasks.data.contamination import overlaps
from sparroll.tasks.data.rows import Row
from sparroll.tasks.data.settings import DataSettings
from sparroll.tasks.data.task import DataTask, task_settings
from sparroll.tasks.data.templates import filled, template_names
from sparroll.tasks.verdicts import Verdict, answer_form
from sparroll.train.sampling.prompts import PromptStream


class ExactMatch:
    """A stand-in that wants the answer itself."""

    gives_answers = True

    def judge(self, rows: Sequence[Row], response_texts: Sequence[str]) -> list[Verdict]:
        return [Verdict(float(text == row.answer), answer=text) for row, text in zip(rows, response_texts, strict=True)]

    def usable(self, rows: Sequence[Row]) -> list[bool]:
        return [row.answer != "?" for row in rows]


STAND_INS = {"math": ExactMatch(), "code": ExactMatch()}


def task(
    path: Path, rows: list[dict[str, Any]], evaluation: list[dict[str, Any]] | None = None, **more: Any
) -> DataTask:
    more["train"] = str(data_files.write(path / "train.jsonl", rows))
    if evaluation is not None:
        more["eval"] = (str(data_files.write(path / "eval.jsonl", evaluation)),)
    return DataTask("data", DataSettings(**more), STAND_INS)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {n}", "answer": str(n), "difficulty": f"{n}/8"} for n in range(count)]


def ids(made: DataTask, split: Any = "train", seed: int = 0, count: int = 99) -> list[int]:
    return [int(prompt.prompt_id.rpartition("/")[2]) for prompt in made.prompts(split, 0, seed, count)]


def test_the_order_is_the_seeds_and_the_first_prompts_do_not_depend_on_the_count(tmp_path: Path) -> None:
    made = task(tmp_path, rows(20))
    assert ids(made) == ids(task(tmp_path, rows(20))) != ids(made, seed=1)
    assert sorted(ids(made)) == list(range(20))
    assert ids(made, count=5) == ids(made)[:5]


def test_a_walk_that_goes_on_from_its_cursor_draws_what_the_straight_one_draws(tmp_path: Path) -> None:
    straight = PromptStream(task(tmp_path, rows(7)), 0, 3, None)
    drawn = straight.next(30)
    again = PromptStream(task(tmp_path, rows(7)), 0, 3, None)
    again.drawn = 11
    assert again.next(19) == drawn[11:]
    assert all(len({prompt.prompt_id for prompt in drawn[start : start + 7]}) == 7 for start in (0, 7, 14, 21))


def test_a_reward_judges_the_row_behind_the_prompt(tmp_path: Path) -> None:
    made = task(tmp_path, rows(4))
    prompt = made.prompts("train", 0, 0, 1)[0]
    assert made.reward(prompt, prompt.answer) == 1 and made.reward(prompt, "no") == 0
    other = tasks.get("synthetic").prompts("train", 0, 0, 1)[0]
    with pytest.raises(UserError, match="does not belong to the task"):
        made.reward(other, "")


def test_rows_that_no_response_can_be_judged_by_are_left_out_of_both_splits(tmp_path: Path) -> None:
    made = task(tmp_path, [*rows(3), {"prompt": "x", "answer": "?"}], [*rows(2), {"prompt": "y", "answer": "?"}],
                contamination="off")  # fmt: skip
    assert (len(ids(made)), len(ids(made, "eval"))) == (3, 2)
    assert made.report()["removed"] == {"no response can be judged": 1, "no response can be judged (eval)": 1}
    said = "no response can be judged 1, no response can be judged (eval) 1"
    assert made.left_out().endswith(f": 2 of 7 rows are not used: {said}")


def test_rows_without_an_answer_are_counted_with_those_that_a_filter_takes(tmp_path: Path) -> None:
    made = task(tmp_path, [*rows(9), {"prompt": "no answer"}], min_difficulty=0.25, max_difficulty=0.5)
    assert made.left_out().endswith(": 7 of 10 rows are not used: difficulty 6, no answer 1")
    assert task(tmp_path, rows(3)).left_out() == ""


def test_difficulties_are_a_range_of_numbers_or_names(tmp_path: Path) -> None:
    made = task(tmp_path, [*rows(9), {"prompt": "none", "answer": "1"}], min_difficulty=0.25, max_difficulty=0.5)
    assert sorted(ids(made)) == [2, 3, 4] and made.removed == {"difficulty": 7}
    named = [{"prompt": f"{n}", "answer": "1", "difficulty": name} for n, name in enumerate(["EASY", "hard", "Easy"])]
    assert sorted(ids(task(tmp_path, named, difficulties=("easy",)))) == [0, 2]
    with pytest.raises(UserError, match=r"has the difficulty 'medium'\nhint: difficulties there: easy, hard"):
        task(tmp_path, named, difficulties=("medium",))
    with pytest.raises(UserError, match="no training row has a difficulty that is a number"):
        task(tmp_path, named, min_difficulty=1)


def test_a_contest_window_takes_rows_of_its_days_and_leaves_sets_without_dates_alone(tmp_path: Path) -> None:
    mirror = str(data_files.plain_mirror(tmp_path, "livecodebench", "gsm8k"))

    def left(**window: Any) -> dict[str, int]:
        settings = DataSettings(eval=("livecodebench", "gsm8k"), mirror=mirror, **window)
        found = DataTask("data", settings, STAND_INS).prompts("eval", 0, 0, 99)
        return Counter(prompt.prompt_id.split(":")[0] for prompt in found)

    # Eight problems of the 15th of July, August and September.
    assert left() == {"livecodebench": 8, "gsm8k": 1}
    assert left(contest_from="2024-08-01") == {"livecodebench": 5, "gsm8k": 1}
    assert left(contest_from="2024-08-15", contest_before="2024-09-15") == {"livecodebench": 2, "gsm8k": 1}
    with pytest.raises(UserError, match="no row of livecodebench:test is in the contest window"):
        left(contest_before="2024-07-15")
    with pytest.raises(ValidationError, match="is not before"):
        left(contest_from="2024-08-01", contest_before="2024-08-01")


def test_an_empty_result_names_the_filters_and_their_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no training rows are left of .*\nhint: left out: difficulty 4"):
        task(tmp_path, rows(4), min_difficulty=7)


def test_duplicates_go_up_to_case_spacing_and_unicode_forms(tmp_path: Path) -> None:
    same = ["A  question", "a question\n", "Ａ question", "another", "a question"]
    made = task(tmp_path, [{"prompt": text, "answer": str(n // 4)} for n, text in enumerate(same)])
    assert sorted(ids(made)) == [0, 3]
    assert made.removed == {"duplicate": 2, "duplicate with another answer": 1}
    assert len(ids(task(tmp_path, [{"prompt": text, "answer": "1"} for text in same], dedup=False))) == 5


def test_prompts_that_are_too_long_are_left_out_as_the_model_sees_them(tmp_path: Path) -> None:
    made = task(tmp_path, [{"prompt": "w " * n, "answer": "1"} for n in range(1, 9)], max_prompt_tokens=5)
    made.limit_prompt_tokens(lambda prompts: [len(prompt.text.split()) + 2 for prompt in prompts])
    assert sorted(ids(made)) == [0, 1, 2] and made.removed == {"longer than 5 tokens": 5}
    with pytest.raises(UserError, match="no training rows are left"):
        made.limit_prompt_tokens(lambda prompts: [6] * len(prompts))


LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"


def problems(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "answer": "1"} for text in texts]


def test_thirteen_shared_words_are_found_through_punctuation_and_case() -> None:
    words = LONG.split()
    train = [
        Row("copy", ", ".join(words[:13]).upper(), "math"),
        Row("twelve", " ".join(words[:12]), "math"),
        Row("inside", f"$x$ \\text{{{' '.join(words[2:])}}}?", "math"),
        Row("short", "What is 1 + 1 , then ?", "math"),
        Row("tiny", "Solve it.", "math"),
        Row("longer tiny", "Solve it. Now.", "math"),
    ]
    evaluation = [Row("e", LONG, "math"), Row("s", "what is 1+1 then", "math"), Row("t", "Solve it!", "math")]
    found = overlaps(train, evaluation)
    assert [(each.train_id, each.eval_id) for each in found] == [
        ("copy", "e"),
        ("inside", "e"),
        ("short", "s"),
        ("tiny", "t"),
    ]
    assert len(found[0].words) == 13
    assert [each.train_id for each in overlaps(train, evaluation, 12)][:2] == ["copy", "twelve"]
    assert overlaps(train, []) == [] == overlaps([], evaluation)


def test_contaminated_rows_are_removed_counted_or_refused_as_asked(tmp_path: Path) -> None:
    train, evaluation = problems(LONG, "something else"), problems(f"Say: {LONG}")
    made = task(tmp_path, train, evaluation)
    assert ids(made) == [1] and made.removed == {"contaminated": 1} and made.report()["contaminated"] == 1
    counting = task(tmp_path, train, evaluation, contamination="count")
    assert len(ids(counting)) == 2 and counting.report()["contaminated"] == 1
    assert task(tmp_path, train, evaluation, contamination="off").report()["contaminated"] == 0
    with pytest.raises(UserError, match=r"1 training rows share 13 words .* train.jsonl/0 with eval.jsonl/0"):
        task(tmp_path, train, evaluation, contamination="refuse")


def test_held_out_rows_are_the_same_for_every_seed_and_never_trained_on(tmp_path: Path) -> None:
    made = task(tmp_path, rows(12), holdout_rows=4)
    held = ids(made, "eval")
    assert len(held) == 4 and held == sorted(held) and sorted(held + ids(made, seed=5)) == list(range(12))
    assert ids(made, "eval", seed=9) == held
    with pytest.raises(UserError, match="holdout_rows is 12 of 12"):
        task(tmp_path, rows(12), holdout_rows=12)


def test_the_fingerprint_changes_with_any_row_and_with_nothing_else(tmp_path: Path) -> None:
    first = task(tmp_path, rows(5)).fingerprint()
    assert task(tmp_path, rows(5)).fingerprint() == first
    changed = rows(5)
    changed[3]["answer"] = "other"
    assert task(tmp_path, changed).fingerprint() != first


def test_rows_whose_answers_cannot_be_read_are_said_to_need_others(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"left out: no response can be judged 3; math rows need an answer"):
        task(tmp_path, [{"prompt": f"which way {place}?", "answer": "?"} for place in range(3)])


def test_a_split_without_rows_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no eval rows\nhint: set data.eval or data.holdout_rows"):
        task(tmp_path, rows(3)).prompts("eval", 0, 0, 1)


def test_rows_that_nobody_can_judge_are_the_reason_where_none_is_left(tmp_path: Path) -> None:
    source = str(data_files.write(tmp_path / "eval.jsonl", [{"prompt": "which way?", "answer": r"\frac{"}]))
    made = DataTask(source, DataSettings(eval=(source,)))
    with pytest.raises(UserError, match="no eval rows left; left out: .*no response can be judged") as refused:
        made.prompts("eval", 0, 0, 1)
    assert "sparroll data show" in str(refused.value.hint)


def test_a_sets_name_stands_for_its_rows() -> None:
    none = DataSettings()
    assert task_settings("polaris", none).train == "polaris"
    assert task_settings("gsm8k", none).eval == ("gsm8k",)
    assert task_settings("gsm8k", DataSettings(eval=("aime24",))).eval == ("aime24",)
    assert task_settings("aime24", none).train is None and task_settings("aime24", none).eval == ("aime24",)
    with pytest.raises(UserError, match="exclude each other"):
        task_settings("polaris", DataSettings(train="taco"))
    with pytest.raises(UserError, match=r"needs data.train or data.eval"):
        task_settings("data", none)
    assert (
        {"data", "polaris", "aime24"} <= set(tasks.names()) and tasks.is_data("taco") and not tasks.is_data("synthetic")
    )


def test_tests_are_cut_evenly_from_the_first_to_the_last(tmp_path: Path) -> None:
    cases = [Case(str(n), "") for n in range(10)]
    assert [case.given for case in spread(cases, 4)] == ["0", "3", "6", "9"]
    assert spread(cases, None) == cases and spread(cases, 1) == cases[:1]
    root = data_files.plain_mirror(tmp_path, "taco")
    made = DataTask("taco", DataSettings(train="taco", mirror=str(root), max_tests=2), STAND_INS)
    tests = {row.tests.style: row.tests for row in map(made.row, made.prompts("train", 0, 0, 9)) if row.tests}
    assert {style: len(each.cases()) for style, each in tests.items()} == {"stdin": 2, "function": 1}
    assert tests["stdin"].rounded and tests["function"].wrapped


def test_templates_fill_once_and_refuse_what_does_not_fit(tmp_path: Path) -> None:
    assert template_names() == ["code_complete", "code_function", "code_stdin", "math", "plain"]
    row = Row("r", "What of {starter_code} and \\frac{1}{2}?", "math")
    assert filled(row, None).text.startswith(row.text) and "\\boxed{}" in filled(row, None).text
    assert filled(row, "plain").text == row.text
    own = tmp_path / "own.txt"
    own.write_text("Q: {problem} A:")
    assert filled(row, str(own)).text == f"Q: {row.text} A:"
    chat = Row("c", (("system", "Be brief."), ("user", "2+2?")), "math")
    assert filled(chat, str(own)).question == (("system", "Be brief."), ("user", "Q: 2+2? A:"))
    function = Row("f", "Add.", "code", tests=CodeTests.of("function", [], "f"), starter_code="def f():")
    assert "def f():" in filled(function, "code_function").text
    with pytest.raises(UserError, match=r"has no \{starter_code\}, which f needs"):
        filled(function, "math")
    with pytest.raises(UserError, match=r"unknown prompt template 'maths'\nhint: did you mean 'math'"):
        filled(row, "maths")
    (tmp_path / "bad.txt").write_text("no place")
    with pytest.raises(UserError, match=r"has no \{problem\}"):
        filled(row, str(tmp_path / "bad.txt"))


class BoxReader(ExactMatch):
    answer_form = "the last box"


def test_a_task_says_what_it_reads_where_the_rewards_of_all_its_rows_do(tmp_path: Path) -> None:
    path = str(data_files.write(tmp_path / "train.jsonl", rows(3)))
    assert answer_form(DataTask("data", DataSettings(train=path), {"math": BoxReader()})) == "the last box"
    assert answer_form(DataTask("data", DataSettings(train=path), STAND_INS)) is None
