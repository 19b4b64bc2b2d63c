"""Accuracy and its interval; what grading asks of an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparroll.errors import UserError
from sparroll.evaluate.accuracy import Accuracy, GradedPrompt, grade
from sparroll.types import Prompt, Rollout


def test_accuracy_is_the_mean_over_prompts() -> None:
    graded = [GradedPrompt((1.0, 0.0), (3, 5), 1), GradedPrompt((1.0, 1.0), (2, 2), 0)]
    accuracy = Accuracy.of(graded)
    assert (accuracy.value, accuracy.prompts, accuracy.samples_per_prompt) == (0.75, 2, 2)
    assert (accuracy.response_tokens, accuracy.cut_share) == (3.0, 0.25)
    assert accuracy.low <= accuracy.value <= accuracy.high


def test_the_interval_is_that_of_sparroll_evaluate() -> None:
    """12 wrong responses to 12 prompts do not mean an accuracy of 0: at .265 they still have a chance of 2.5 %."""
    none = Accuracy.of([GradedPrompt((0.0,), (3,), 0)] * 12)
    assert (none.value, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(1 - 0.025 ** (1 / 12)) == pytest.approx(0.265, abs=1e-3)
    half = Accuracy.of([GradedPrompt((value,), (3,), 0) for value in (1.0, 0.0) * 200])
    # The standard error is .5 / sqrt(400) = .025.
    assert half.low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.006)
    assert half.high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.006)


class Echo:
    """An engine that answers with the prompt's ids, once per sample."""

    def generate(self, prompts: list[list[int]], n: int, **settings: object) -> list[Rollout]:
        self.settings = settings
        return [
            Rollout(list(ids), list(ids), torch.zeros(len(ids)), "length" if len(ids) > 2 else "stop")
            for ids in prompts
            for _ in range(n)
        ]


def test_each_prompt_is_graded_with_its_own_responses() -> None:
    prompts = [Prompt("a", "1", "1"), Prompt("b", "2 2 2", "wrong")]
    task = SimpleNamespace(reward=lambda prompt, text: float(text == prompt.answer))
    graded = grade(Echo(), task, prompts, [[1], [2, 2, 2]], lambda ids: " ".join(map(str, ids)), n=2, max_new_tokens=4)
    assert graded == [GradedPrompt((1.0, 1.0), (1, 1), 0), GradedPrompt((0.0, 0.0), (3, 3), 2)]
    engine = Echo()
    grade(engine, task, prompts[:1], [[1]], str, max_new_tokens=4, temperature=0.6, top_p=0.95)
    assert (engine.settings["temperature"], engine.settings["top_p"]) == (0.6, 0.95)
    with pytest.raises(UserError, match="no prompts"):
        grade(Echo(), task, [], [], str, max_new_tokens=4)
