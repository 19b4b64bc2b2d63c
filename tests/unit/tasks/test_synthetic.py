"""Synthetic problems: the same every time, checkable, solved by their references, never shared between splits."""

from __future__ import annotations

import itertools

import pytest

from sparroll import tasks
from sparroll.errors import UserError
from sparroll.tasks import base
from sparroll.tasks.synthetic.kinds import KINDS, TASK_KINDS, VOCABULARY
from sparroll.tasks.synthetic.task import (
    LEVELS,
    RESPONSE_TOKENS,
    SyntheticTask,
    example,
    marked_answer,
    reference_response,
)
from sparroll.types import Prompt

PROMPT = Prompt("synthetic/eval/chain/1/0/0", "chain ...", "4 2", task="synthetic", level=1)

PINNED_SORT = "sort ni 0 2 ; ko 3 2 ; ti 8 1 ; fo 5 9 ; yo 2 9 ; zi 3 6 ; find zi ?"


def reward(response: str) -> float:
    return SyntheticTask().reward(PROMPT, response)


def statements(words: list[str]) -> list[list[str]]:
    return [list(group) for end, group in itertools.groupby(words, lambda word: word == ";") if not end]


def solve_chain(words: list[str]) -> str:
    *body, question = statements(words[1:])
    value = {name: int(tens + ones) for name, tens, ones in (s for s in body if len(s) == 3)}
    formulas = [s for s in body if len(s) == 5]
    while any(s[2] not in value for s in formulas):
        for left, _, name, sign, right in formulas:
            if left in value and right in value:
                value[name] = (value[left] + (value[right] if sign == "+" else -value[right])) % 100
    asked = question[question.index("find") + 1 : -1]
    return " ".join(" ".join(f"{value[name]:02d}") for name in asked)


def solve_walk(words: list[str]) -> str:
    *edges, (_, place, _, *steps, _) = statements(words[1:])
    leads = {here: (there, int(tens + ones)) for here, _, there, tens, ones in edges}
    total = 0
    for _ in range(int("".join(steps))):
        place, cost = leads[place]
        total += cost
    return " ".join(f"{total % 100:02d}")


def solve_sort(words: list[str]) -> str:
    *items, (_, asked, _) = statements(words[1:])
    ranked = [name for _, name in sorted((int(tens + ones), name) for name, tens, ones in items)]
    return " ".join(f"{ranked.index(asked) + 1:02d}")


def solve_add(words: list[str]) -> str:
    *rows, (_, tens, ones, _, *asked, _) = statements(words[1:])
    assert len(asked) == int(tens + ones)
    number = {name: int("".join(digits)) for name, *digits in rows}
    return " ".join(str(sum(number[name] for name in asked)))


SOLVE = {"chain": solve_chain, "walk": solve_walk, "sort": solve_sort, "add": solve_add}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_agree_with_a_solver_that_reads_only_the_prompt(kind: str, split: tasks.Split) -> None:
    for level in LEVELS:
        for prompt in SyntheticTask("one", (kind,)).prompts(split, level, seed=level, count=3):
            assert prompt.answer == SOLVE[kind](prompt.text.split())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
def test_reference_is_right_and_as_long_as_its_level_says(kind: str, level: int) -> None:
    task, (fewest, most) = SyntheticTask("one", (kind,)), RESPONSE_TOKENS[level]
    for seed in range(12):
        prompt = task.prompts("train", level, seed, 1)[0]
        response = reference_response("train", kind, level, seed, 0)
        assert task.reward(prompt, response) == 1.0
        assert fewest <= len(response.split()) <= most
        assert set((prompt.text + " " + response).split()) <= set(VOCABULARY)
        assert response.endswith("<eos>")


def test_levels_grow_and_span_two_hundred_to_two_thousand_tokens() -> None:
    for kind in KINDS:
        tokens = [sum(len(example("train", kind, level, 0, i)[1]) for i in range(8)) / 8 for level in LEVELS]
        assert tokens == sorted(tokens)
        assert tokens[1] < 300 and 1000 < tokens[8] < 2000


def test_same_arguments_give_the_same_prompts() -> None:
    first, again = (tasks.get("synthetic").prompts("train", 2, seed=7, count=12) for _ in range(2))
    assert first == again
    assert reference_response("train", "chain", 2, 7, 0) == reference_response("train", "chain", 2, 7, 0)


def test_a_problem_is_pinned_for_ever() -> None:
    prompt = SyntheticTask("one", ("sort",)).prompts("eval", 0, seed=0, count=1)[0]
    assert prompt.text == PINNED_SORT


def test_seeds_indices_levels_and_splits_give_different_prompts() -> None:
    task = SyntheticTask()
    streams = [
        task.prompts(split, level, seed, 8) for split in ("train", "eval") for level in (0, 3) for seed in (0, 1)
    ]
    texts = [prompt.text for stream in streams for prompt in stream]
    assert len(set(texts)) == len(texts)


def test_prompts_can_be_read_from_the_middle_of_a_stream() -> None:
    task = SyntheticTask()
    assert task.prompts("train", 1, 0, 4, start=6) == task.prompts("train", 1, 0, 10)[6:]


def test_a_text_belongs_to_one_split_whatever_the_seed() -> None:
    seen = {"train": set(), "eval": set()}
    for split in ("train", "eval"):
        for seed in range(5):
            seen[split] |= {prompt.text for prompt in SyntheticTask().prompts(split, 0, seed, 200)}
    assert len(seen["train"]) > 900 and len(seen["eval"]) > 900
    assert not seen["train"] & seen["eval"]


def test_references_of_one_kind_take_their_free_choices_in_different_ways() -> None:
    orders = {tuple(reference_response("train", "add", 1, 0, i).split()[5:38:9]) for i in range(6)}
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("ba = 4 2 ; answer 4 2 <eos>", 1.0),
        ("answer 4 2", 1.0),
        ("answer 4 2 <eos> <pad> <pad>", 1.0),
        ("answer 4 2 <pad>", 1.0),
        ("answer 4 3 <eos>", 0.0),
        ("answer 4 <eos>", 0.0),
        ("answer 4 2 0 <eos>", 0.0),
        ("answer 4 2 ; <eos>", 0.0),
        ("answer 4 3 ; answer 4 2 <eos>", 1.0),
        ("answer 4 2 ; answer 4 3 <eos>", 0.0),
        ("answer 4 2 answer", 0.0),
        ("4 2 <eos>", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_marked_answer_counts(response: str, expected: float) -> None:
    assert reward(response) == expected


def test_marked_answer_is_none_without_a_mark() -> None:
    assert marked_answer("ba = 4 2 ;") is None


def test_the_kinds_that_the_packaged_model_solves_are_tasks_and_the_mixed_one_takes_turns() -> None:
    found = {name for name in tasks.names() if name.startswith("synthetic")}
    assert found == {"synthetic", "synthetic_walk", "synthetic_add"}
    mixed = [prompt.text.split()[0] for prompt in tasks.get("synthetic").prompts("train", 0, 0, 3)]
    assert mixed == ["walk", "add", "walk"] and set(TASK_KINDS) < set(KINDS)
    walk = tasks.get("synthetic_walk").prompts("eval", 0, 0, 3)
    assert [(p.text.split()[0], p.task, p.level) for p in walk] == [("walk", "synthetic_walk", 0)] * 3


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'syntetic'\nhint: did you mean 'synthetic'"):
        tasks.get("syntetic")


@pytest.mark.parametrize(
    ("split", "level", "message"),
    [("test", 1, "unknown split 'test'"), ("train", 9, "level must be 0 to 8, got 9"), ("train", -1, "got -1")],
)
def test_bad_arguments_are_refused_with_their_value(split: str, level: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SyntheticTask().prompts(split, level, 0, 1)  # type: ignore[arg-type]


def test_a_task_without_prompts_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        name = "bare"

        def reward(self, prompt: Prompt, response_text: str) -> float:
            return 1.0

    monkeypatch.setitem(base._FACTORIES, "bare", Bare)
    with pytest.raises(UserError, match="the task 'bare' has no prompts") as refused:
        tasks.get("bare")
    assert refused.value.hint == "a task has a name, `prompts` and `reward`"
