"""From prompts to rollouts with rewards: our share of a step's prompts, sampled under the engine's schedule."""

# G prompts of our share, N samples per prompt

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparroll.engines.base import Engine
from sparroll.errors import UserError
from sparroll.tasks import Task
from sparroll.tasks.verdicts import judge
from sparroll.train.distributed import Ranks
from sparroll.types import Prompt, Rollout, StepReport


@dataclass(frozen=True)
class Sampling:
    """What `sample` needs beside the prompts."""

    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    top_k: int


def sample(
    engine: Engine, prompt_ids: Sequence[Sequence[int]], numbers: list[int], seeds: list[int], sampling: Sampling
) -> list[Rollout]:
    """Rollouts of our prompts; `prompt_index` becomes the prompt's number within the step, over all processes."""
    if not prompt_ids:
        return []
    rollouts = engine.generate(
        prompt_ids,
        sampling.samples_per_prompt,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=seeds,
        top_k=sampling.top_k,
    )
    for rollout in rollouts:
        rollout.prompt_index = numbers[rollout.prompt_index]
    return rollouts


def rewards(decode: Callable[[list[int]], str], task: Task, prompts: list[Prompt], rollouts: list[Rollout]) -> Tensor:
    """[G, N] reward of each response's text; NaN where nothing can be said of it (a sandbox that failed)."""
    per_prompt = len(rollouts) // max(len(prompts), 1)
    asked = [prompts[row // per_prompt] for row in range(len(rollouts))]
    verdicts = judge(task, asked, [decode(rollout.response_ids) for rollout in rollouts])
    values = [math.nan if verdict.reward is None else verdict.reward for verdict in verdicts]
    return torch.tensor(values, dtype=torch.float32).view(len(prompts), per_prompt)


def rollout_report(rollouts: list[Rollout], reward_GN: Tensor | None, engine: Engine, ranks: Ranks) -> StepReport:
    """Rewards (where there are any), lengths and what was read, over all processes."""
    layers = engine.report().layers
    mine = {
        "tokens": [len(rollout.response_ids) for rollout in rollouts],
        "cut": sum(rollout.finish_reason == "length" for rollout in rollouts),
        "sparse": sum(rollout.attention != "dense" for rollout in rollouts),
        "read": sum(layer.read_tokens for layer in layers),
        "context": sum(layer.context_tokens for layer in layers),
    }
    everyone = ranks.gather([mine])
    tokens = [count for one in everyone for count in one["tokens"]]
    total = {key: sum(one[key] for one in everyone) for key in ("cut", "sparse", "read", "context")}
    rewards = {} if reward_GN is None else _reward_report(reward_GN, ranks)
    return rewards | {
        "rollout/count": float(len(tokens)),
        "rollout/response_tokens_mean": float(np.mean(tokens)),
        "rollout/response_tokens_max": float(max(tokens)),
        "rollout/cut_share": total["cut"] / len(tokens),
        "rollout/sparse_share": total["sparse"] / len(tokens),
        "rollout/kv_read_share": total["read"] / total["context"] if total["context"] else 1.0,
    }


def _reward_report(reward_GN: Tensor, ranks: Ranks) -> StepReport:
    groups = np.array(ranks.gather(reward_GN.tolist()))
    known = groups[~np.isnan(groups)]
    if not len(known):
        raise UserError("no response of this step could be graded", "the log of the task says why; `sparroll doctor`")
    equal = [len(set(group[~np.isnan(group)])) <= 1 for group in groups]
    return {
        "reward/mean": float(known.mean()),
        "reward/std": float(known.std()),
        "reward/groups_all_equal_share": float(np.mean(equal)),
        "reward/ungraded_share": 1 - len(known) / groups.size,
    }


def compression_report(engine: Engine, ranks: Ranks) -> StepReport:
    """What the step's rollouts saved of the KV cache's memory; empty where nothing is dropped from it."""
    if engine.compression is None:
        return {}
    report = engine.report()
    peaks = ranks.gather([(report.peak_kv_bytes, report.peak_dense_kv_bytes)])
    kept, dense = sum(peak for peak, _ in peaks), sum(peak for _, peak in peaks)
    return {
        "compression/kv_saved_share": 1 - kept / dense if dense else 0.0,
        "compression/peak_kv_bytes": float(max(peak for peak, _ in peaks)),
    }
