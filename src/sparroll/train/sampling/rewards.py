"""From responses to rewards: the task's verdict and your own functions, weighted and added up, minus the overlong
penalty. groups.py chooses the prompts that are trained on."""

# G prompts, N rollouts per prompt

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.tasks import Task
from sparroll.tasks.async_calls import AsyncCalls
from sparroll.tasks.reward_function import LARGEST, RewardFunction
from sparroll.tasks.thinking import with_opened
from sparroll.tasks.verdicts import has_answers, judge
from sparroll.train.config.reward import TASK, RewardSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.types import Prompt, Rollout, StepReport


@dataclass(frozen=True)
class Graded:
    """The rewards of the rollouts of G prompts; float32, NaN where a response could not be graded."""

    terms_GN: dict[str, Tensor]
    """The values of each term by its name, before they are weighted."""
    total_GN: Tensor
    """The terms, weighted and added up; NaN where a term with a weight is NaN."""
    penalty_GN: Tensor
    """What each response loses for its length, 0 or more."""
    unanswered_GN: Tensor | None = None
    """Whether the task found no answer in a response; None where its verdicts carry no answers, or are not asked for."""

    @property
    def reward_GN(self) -> Tensor:
        """The rewards that are trained on."""
        return self.total_GN - self.penalty_GN


class Rewards:
    """Computes the terms of [reward]. Raises UserError where your own function cannot be found or cannot be called like
    a reward."""

    def __init__(self, settings: RewardSection, samples_per_prompt: int, max_new_tokens: int):
        self.settings, self.samples_per_prompt, self.max_new_tokens = settings, samples_per_prompt, max_new_tokens
        self.functions = {
            term.name: RewardFunction(term.use, term.settings) for term in settings.terms if term.use != TASK
        }
        self.calls = AsyncCalls(settings.async_at_once, settings.async_seconds)

    def __call__(
        self, task: Task, prompts: list[Prompt], rollouts: list[Rollout], decode: Callable[[list[int]], str]
    ) -> Graded:
        """Grade `samples_per_prompt` rollouts of each prompt, in the order of the prompts."""
        asked = [prompt for prompt in prompts for _ in range(self.samples_per_prompt)]
        texts = [decode(each.response_ids) if each.text is None else each.text for each in rollouts]
        assert len(asked) == len(texts), f"{len(texts)} rollouts for {len(prompts)} prompts"
        shape = (len(prompts), self.samples_per_prompt)
        found, unanswered = self._terms(task, asked, texts, rollouts, decode)
        terms = {name: values.view(shape) for name, values in found.items()}
        total_GN = torch.zeros(shape, dtype=torch.float64)
        for term in self.settings.terms:
            # A term of weight 0 is only measured. It must not be added, because 0 * NaN would make the response
            # ungraded.
            if term.weight:
                total_GN += term.weight * terms[term.name]
        _refuse_swallowing(total_GN)
        buffer, most = self.settings.overlong_buffer_tokens, self.settings.overlong_penalty
        lost = [
            overlong_penalty(len(rollout.response_ids), self.max_new_tokens, buffer, most) if buffer else 0.0
            for rollout in rollouts
        ]
        return Graded(
            {name: values.float() for name, values in terms.items()},
            total_GN.float(),
            torch.tensor(lost, dtype=torch.float32).view(shape),
            None if unanswered is None else torch.tensor(unanswered, dtype=torch.bool).view(shape),
        )

    def _terms(
        self,
        task: Task,
        asked: list[Prompt],
        texts: list[str],
        rollouts: list[Rollout],
        decode: Callable[[list[int]], str],
    ) -> tuple[dict[str, Tensor], list[bool] | None]:
        """-> (the values of each term, whether each response has no answer: see Graded)"""
        found: dict[str, Tensor] = {}
        unanswered = None
        for term in self.settings.terms:
            if term.use == TASK:
                verdicts = judge(task, asked, with_opened(texts, rollouts, decode)) if texts else []
                values = [math.nan if verdict.reward is None else verdict.reward for verdict in verdicts]
                if has_answers(task):
                    unanswered = [verdict.answer is None for verdict in verdicts]
            else:
                values = self.functions[term.name](asked, texts, rollouts, self.calls)
            found[term.name] = torch.tensor(values, dtype=torch.float64)
        return found, unanswered

    def record(self) -> list[dict[str, Any]]:
        """For each of your own functions: its term, import path, settings, file and the file's digest."""
        return [{"name": name} | each.table() for name, each in self.functions.items()]

    def digests(self) -> dict[str, str]:
        """The digest of each function's file by the term's name. A resumed run compares them."""
        return {name: each.digest for name, each in self.functions.items()}

    def changes(self, before: dict[str, str]) -> list[str]:
        """An event for each function whose file has changed."""
        return [
            f"the reward {each.path} has changed since the checkpoint: its file was {before[name][:12]} and is "
            f"{each.digest[:12]} now (sha256)"
            for name, each in self.functions.items()
            if before.get(name, each.digest) != each.digest
        ]


def _refuse_swallowing(total_GN: Tensor) -> None:
    """Raise UserError for sums above LARGEST, the bound for a single reward: in fp32, differences between larger ones
    get lost."""
    largest = max(total_GN.nan_to_num().flatten().tolist(), key=abs, default=0.0)
    if abs(largest) > LARGEST:
        raise UserError(
            f"the reward.terms add up to {largest:g} for a response, and beyond {LARGEST:g} fp32 loses small differences",
            "lower reward.terms.weight: normalised advantages are the same at any scale",
        )


def overlong_penalty(tokens: int, most_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What a response of `tokens` tokens loses: 0 up to most_tokens - buffer_tokens, then linearly up to `penalty` at
    `most_tokens` (DAPO, arXiv 2503.14476)."""
    beyond = tokens - (most_tokens - buffer_tokens)
    return penalty * min(max(beyond, 0) / buffer_tokens, 1.0)


def agreed(grade: Callable[[], Graded], ranks: Ranks) -> Graded:
    """The result of `grade`. A UserError on one process is raised on all of them, so that none waits for a process that
    has ended."""
    graded: Graded | None = None
    problem: UserError | None = None
    try:
        graded = grade()
    except UserError as error:
        problem = error
    problems = ranks.gather([(problem.message, problem.hint) if problem else None])
    if problem is not None:
        raise problem
    for other in filter(None, problems):
        raise UserError(*other)
    assert graded is not None
    return graded


def _why_ungraded(graded: list[Graded], settings: RewardSection, ranks: Ranks) -> str:
    for term in settings.terms:
        values = ranks.gather([bool(part.terms_GN[term.name].isnan().all()) for part in graded])
        if term.weight and term.use != TASK and all(values):
            return f"the reward term {term.name} gave none of them a reward"
    return "the log of the task says why; `sparroll doctor`"


def reward_report(graded: list[Graded], settings: RewardSection, ranks: Ranks) -> StepReport:
    """Metrics of all sampled rollouts, over all processes. Terms are reported where there is more than the task's
    verdict, the penalty where there is one."""
    groups = _gathered([part.reward_GN for part in graded], ranks)
    known = groups[~np.isnan(groups)]
    if not len(known):
        raise UserError("no response of this step could be graded", _why_ungraded(graded, settings, ranks))
    equal = [len(set(group[~np.isnan(group)])) <= 1 for group in groups]
    report = {
        "reward/mean": float(known.mean()),
        "reward/std": float(known.std()),
        "reward/groups_all_equal_share": float(np.mean(equal)),
        "reward/rewarded_share": _rewarded_share(_gathered([part.total_GN for part in graded], ranks)),
        "reward/ungraded_share": 1 - len(known) / groups.size,
    }
    if graded[0].unanswered_GN is not None:
        without = [part.unanswered_GN for part in graded if part.unanswered_GN is not None]
        report["reward/no_answer_share"] = float(_gathered(without, ranks).mean())
    if settings.terms != RewardSection().terms:
        for term in settings.terms:
            values = _gathered([part.terms_GN[term.name] for part in graded], ranks)
            if not np.isnan(values).all():
                report[f"reward/term/{term.name}"] = float(np.nanmean(values))
    if settings.overlong_buffer_tokens:
        lost = _gathered([part.penalty_GN for part in graded], ranks)
        report |= {
            "reward/overlong_share": float((lost > 0).mean()),
            "reward/overlong_penalty_mean": float(lost.mean()),
        }
    return report


def _rewarded_share(total_GN: np.ndarray) -> float:
    """Share of the graded responses whose terms add up to more than 0. Where a function gives negative rewards alone, to
    more than the least of them."""
    known = total_GN[~np.isnan(total_GN)]
    return float((known > min(0.0, known.min())).mean()) if len(known) else 0.0


def _gathered(parts: list[Tensor], ranks: Ranks) -> np.ndarray:
    """[G, N] of all processes and rounds."""
    return np.array(ranks.gather([row for part in parts for row in part.tolist()]))
