"""Accuracy of an engine on a task's prompts, under the schedule that it has at the time. Nothing here trains."""

# P prompts, N responses per prompt

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sparroll.engines.base import Engine
from sparroll.errors import UserError
from sparroll.evaluate.intervals import mean_share
from sparroll.progress import OnProgress
from sparroll.tasks import Task
from sparroll.tasks.thinking import with_opened
from sparroll.tasks.verdicts import judge
from sparroll.types import Prompt


@dataclass(frozen=True)
class GradedPrompt:
    """The responses to one prompt: the rewards of those that could be graded, the lengths of all in tokens, and how
    many were cut at the length limit."""

    rewards: tuple[float, ...]
    response_tokens: tuple[int, ...]
    cut: int


@dataclass(frozen=True)
class Accuracy:
    """Mean reward over prompts, with a 95 % interval (intervals.mean_share), the same as that of `sparroll evaluate`."""

    value: float
    low: float
    high: float
    prompts: int
    samples_per_prompt: int
    response_tokens: float
    """Mean length of a response."""
    cut_share: float
    """Share of responses that were cut at `max_new_tokens`."""

    @staticmethod
    def of(graded: Sequence[GradedPrompt]) -> Accuracy:
        """The accuracy over these prompts. A prompt is left out if none of its responses could be graded."""
        graded = [one for one in graded if one.rewards]
        if not graded:
            raise UserError("no response could be graded", "`sparroll doctor` says whether a sandbox works here")
        per_prompt_P = np.array([np.mean(one.rewards) for one in graded])
        estimate = mean_share(per_prompt_P)
        lengths = [length for one in graded for length in one.response_tokens]
        return Accuracy(
            value=estimate.value,
            low=estimate.low,
            high=estimate.high,
            prompts=len(graded),
            samples_per_prompt=len(graded[0].response_tokens),
            response_tokens=float(np.mean(lengths)),
            cut_share=sum(one.cut for one in graded) / len(lengths),
        )


def grade(
    engine: Engine,
    task: Task,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[Sequence[int]],
    decode: Callable[[list[int]], str],
    *,
    n: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    on_progress: OnProgress | None = None,
) -> list[GradedPrompt]:
    """Sample `n` responses per prompt and check them. prompt_ids: the prompts as token ids for the model. decode: turns
    response ids into the text that the task reads."""
    if not prompts:
        raise UserError("there are no prompts to evaluate on", "give at least one")
    rollouts = engine.generate(
        prompt_ids,
        n,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        on_progress=on_progress,
    )
    asked = [prompt for prompt in prompts for _ in range(n)]
    texts = [decode(each.response_ids) if each.text is None else each.text for each in rollouts]
    verdicts = judge(task, asked, with_opened(texts, rollouts, decode))
    graded = []
    for index in range(len(prompts)):
        mine = rollouts[index * n : (index + 1) * n]
        rewards = tuple(v.reward for v in verdicts[index * n : (index + 1) * n] if v.reward is not None)
        lengths = tuple(len(r.response_ids) for r in mine)
        graded.append(GradedPrompt(rewards, lengths, sum(r.finish_reason == "length" for r in mine)))
    return graded
