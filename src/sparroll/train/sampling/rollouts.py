"""From prompts to rollouts: this process's share of a step's prompts, sampled under the engine's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparroll.engines.base import Engine
from sparroll.progress import OnProgress
from sparroll.train.runtime.distributed import Ranks
from sparroll.types import Rollout, StepReport


@dataclass(frozen=True)
class Sampling:
    """The settings of `sample`."""

    samples_per_prompt: int
    max_new_tokens: int
    temperature: float
    top_k: int


def sample(
    engine: Engine,
    prompt_ids: Sequence[Sequence[int]],
    numbers: list[int],
    seeds: list[int],
    sampling: Sampling,
    on_progress: OnProgress | None = None,
) -> list[Rollout]:
    """Rollouts of this process's prompts. `prompt_index` becomes the prompt's number within the step, over all
    processes."""
    if not prompt_ids:
        return []
    rollouts = engine.generate(
        prompt_ids,
        sampling.samples_per_prompt,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=seeds,
        top_k=sampling.top_k,
        on_progress=on_progress,
    )
    for rollout in rollouts:
        rollout.prompt_index = numbers[rollout.prompt_index]
    return rollouts


def rollout_report(rollouts: list[Rollout], engine: Engine, ranks: Ranks) -> StepReport:
    """Metrics of lengths and of how much was read, over all processes."""
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
    return {
        "rollout/count": float(len(tokens)),
        "rollout/response_tokens_mean": float(np.mean(tokens)),
        "rollout/response_tokens_max": float(max(tokens)),
        "rollout/cut_share": total["cut"] / len(tokens),
        "rollout/sparse_share": total["sparse"] / len(tokens),
        "rollout/kv_read_share": total["read"] / total["context"] if total["context"] else 1.0,
    }


def compression_report(engine: Engine, ranks: Ranks) -> StepReport:
    """Metrics of the KV cache's memory that a compression saved in this step; empty without a compression."""
    if engine.compression is None:
        return {}
    report = engine.report()
    peaks = ranks.gather([(report.peak_kv_bytes, report.peak_dense_kv_bytes)])
    kept, dense = sum(peak for peak, _ in peaks), sum(peak for _, peak in peaks)
    return {
        "compression/kv_saved_share": 1 - kept / dense if dense else 0.0,
        "compression/peak_kv_bytes": float(max(peak for peak, _ in peaks)),
    }
