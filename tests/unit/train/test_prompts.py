"""The walk over the training prompts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sparroll.engines.prompt_encoder import PromptEncoder
from sparroll.errors import UserError
from sparroll.tasks import get
from sparroll.train import TrainConfig
from sparroll.train.sampling.prompts import GivenPrompts, PromptStream
from sparroll.train.sampling.task_data import training_prompts
from sparroll.types import Prompt

ENCODER = PromptEncoder(tokenizer=len)
"""Never asked: prompts of these tasks have no limit."""


def stream(seed: int = 0, train_prompts: int = 7) -> PromptStream:
    return PromptStream(get("synthetic"), 0, seed, train_prompts)


def test_every_epoch_holds_each_prompt_once_in_an_order_of_its_own() -> None:
    walk = stream()
    epochs = [[prompt.prompt_id for prompt in walk.next(7)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 7 for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_the_size_of_a_draw_does_not_matter() -> None:
    one, other = stream(), stream()
    assert [*one.next(3), *one.next(10), *one.next(1)] == other.next(14)


def test_the_cursor_is_all_there_is_to_restore() -> None:
    walk = stream()
    walk.next(9)
    again = stream()
    again.drawn = walk.drawn
    assert again.next(5) == walk.next(5)


def test_seeds_differ() -> None:
    assert stream(0).next(7) != stream(1).next(7)


def test_a_run_on_given_prompts_walks_over_all_of_them_and_over_1024_of_an_endless_task() -> None:
    given = GivenPrompts([Prompt(str(number), f"text {number}", "") for number in range(3000)], "mine.jsonl")
    assert len(training_prompts(given, TrainConfig(), ENCODER).prompts) == 2625
    assert len(training_prompts(get("synthetic"), TrainConfig(), ENCODER).prompts) == 1024


def test_more_prompts_than_there_are_is_refused() -> None:
    given = GivenPrompts([Prompt(str(number), f"text {number}", "") for number in range(10)], "mine.jsonl")
    config = TrainConfig()
    config = config.model_copy(update={"task": config.task.model_copy(update={"train_prompts": 100})})
    with pytest.raises(UserError, match=r"task.train_prompts is 100, but mine.jsonl#.* has 8 training prompts"):
        training_prompts(given, config, ENCODER)


def test_an_epoch_is_shuffled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shuffling 53,000 prompts for each of a step's takes seconds a step."""
    shuffled = []

    class Counting(random.Random):
        def shuffle(self, x: Any) -> None:
            shuffled.append(len(x))
            super().shuffle(x)

    walk = stream(train_prompts=5)
    monkeypatch.setattr(random, "Random", Counting)
    for _ in range(3):
        walk.next(4)
    assert shuffled == [5, 5, 5]
