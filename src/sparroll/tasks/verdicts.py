"""What a task can say about a response beyond a number: whether it counts at all, and which answer it gave.

A task that only has a `reward` needs nothing from here. A task has `verdicts(prompts, responses) -> list[Verdict]` if
it grades many responses at a time, or if its checker can fail for reasons that are not the model's, such as a gold
answer that does not parse or a broken sandbox. A task whose answers can be compared as strings has
`answer_key(response_text) -> str | None`, which is all that a majority vote needs. If one answer can be written in
several ways, the task has `pooled(prompts, verdicts) -> list[Verdict]`, which gives equal answers equal strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparroll.errors import UserError
from sparroll.tasks.base import Task
from sparroll.types import Prompt

GRADED = "graded"


@dataclass(frozen=True)
class Verdict:
    """The judgement of one response.

    >>> Verdict(1.0, "right", answer="1/2")
    >>> Verdict(None, "sandbox_error")
    """

    reward: float | None
    """From 0 to 1. None if the response cannot be judged; then it is left out of every mean, and counted by its
    status."""
    status: str = GRADED
    """A word that the task chooses. For a response without a reward it says why."""
    answer: str | None = None
    """The answer as a string; `pooled` gives one string to all answers to a prompt that mean the same. None: the response
    gave no answer, and does not vote."""


def verdicts_of(task: Task, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Verdict]:
    """A verdict for each response to the prompt at the same place. Calls `task.verdicts` if the task has it. Rewards are
    the task's own, whatever their range."""
    batch = getattr(task, "verdicts", None)
    if batch is not None:
        verdicts = list(batch(prompts, responses))
    else:
        key = getattr(task, "answer_key", None)
        verdicts = [
            Verdict(float(task.reward(prompt, response)), answer=key(response) if key else None)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
    if len(verdicts) != len(responses):
        raise UserError(f"the task {task.name!r} gave {len(verdicts)} verdicts for {len(responses)} responses")
    return verdicts


def judge(task: Task, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[Verdict]:
    """The same for an evaluation. Raises UserError for rewards outside of 0 to 1."""
    verdicts = verdicts_of(task, prompts, responses)
    for verdict in verdicts:
        # This refuses NaN, too.
        if verdict.reward is not None and not 0 <= verdict.reward <= 1:
            raise UserError(
                f"the task {task.name!r} gave the reward {verdict.reward!r}", "evaluation takes rewards from 0 to 1"
            )
    return verdicts


def pooled(task: Task, prompts: Sequence[Prompt], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts for a vote: all answers to a prompt that mean the same, right or wrong, have one string. Give it all
    verdicts on a prompt at once. Calls `task.pooled` if the task has it; other answers are compared as strings."""
    pool = getattr(task, "pooled", None)
    return list(verdicts) if pool is None else list(pool(prompts, verdicts))


def has_answers(task: Task) -> bool:
    """Whether responses can vote: the task's `gives_answers` if it has that, otherwise whether it has an
    `answer_key`."""
    return bool(getattr(task, "gives_answers", hasattr(task, "answer_key")))


def answer_form(task: Task) -> str | None:
    r"""What the task reads as a response's answer, in words such as "the last \boxed{...}"; None if it does not say. It
    is the task's `answer_form`, and completes the sentence "the task reads ..."."""
    form = getattr(task, "answer_form", None)
    return form if isinstance(form, str) else None
