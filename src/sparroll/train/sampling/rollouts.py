"""From prompts to rollouts: this process's share of a step's prompts, sampled under the engine's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparroll.draft_check import FAR_NATS
from sparroll.engines.base import Engine
from sparroll.progress import OnProgress
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.sampling.control_group import in_control_group
from sparroll.types import Checks, Rollout, StepReport


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
    control: list[bool] | None = None,
) -> list[Rollout]:
    """Rollouts of this process's prompts. `prompt_index` becomes the prompt's number within the step, over all
    processes. control: whether each of them is decoded densely beside sparse ones, prompt by prompt."""
    if not prompt_ids:
        return []
    rollouts = engine.generate(
        prompt_ids,
        sampling.samples_per_prompt,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        seed=seeds,
        top_k=sampling.top_k,
        dense=control,
        on_progress=on_progress,
    )
    if control is not None:
        assert [in_control_group(each) for each in rollouts] == control, "the engine lost the control group's flags"
    for rollout in rollouts:
        rollout.prompt_index = numbers[rollout.prompt_index]
    return rollouts


def rollout_report(rollouts: list[Rollout], engine: Engine, ranks: Ranks) -> StepReport:
    """Metrics of lengths and of how much was read, over all processes; of all rollouts, the control group included. Beside
    one also what the others read."""
    report = engine.report()
    read, context = report.read_and_context_tokens
    sparse_read, sparse_context = report.sparse_read_and_context_tokens
    mine = {
        "tokens": [len(rollout.response_ids) for rollout in rollouts],
        "cut": sum(rollout.finish_reason == "length" for rollout in rollouts),
        "sparse": sum(rollout.attention != "dense" for rollout in rollouts),
        "control": sum(map(in_control_group, rollouts)),
        "read": read,
        "context": context,
        "sparse_read": sparse_read,
        "sparse_context": sparse_context,
    }
    everyone = ranks.gather([mine])
    tokens = [count for one in everyone for count in one["tokens"]]
    total = {key: sum(one[key] for one in everyone) for key in mine if key != "tokens"}
    of_sparse = {}
    if total["control"] and total["sparse_context"]:
        of_sparse = {"control/sparse_kv_read_share": total["sparse_read"] / total["sparse_context"]}
    return {
        "rollout/count": float(len(tokens)),
        "rollout/response_tokens_mean": float(np.mean(tokens)),
        "rollout/response_tokens_max": float(max(tokens)),
        "rollout/cut_share": total["cut"] / len(tokens),
        "rollout/sparse_share": total["sparse"] / len(tokens),
        "rollout/kv_read_share": total["read"] / total["context"] if total["context"] else 1.0,
        **of_sparse,
    }


def check_report(rollouts: list[Rollout], engine: Engine, ranks: Ranks) -> StepReport:
    """Metrics of the dense checks of drafted tokens, over all processes; empty where no drafts are checked. Figures of
    single tokens are of sparse drafts: those of a control group come from the dense policy itself."""
    if engine.schedule is None or engine.schedule.check is None:
        return {}
    report = engine.report()
    rollouts = [rollout for rollout in rollouts if not in_control_group(rollout)]
    off = [rollout.sparse_logp - rollout.dense_logp for rollout in rollouts if rollout.dense_logp is not None]
    drafts = [rollout.draft_acceptance for rollout in rollouts if rollout.draft_acceptance is not None]
    everyone = ranks.gather([(report.checks, report.check_seconds, torch.cat(off), torch.cat(drafts))] if off else [])
    total = Checks()
    for checks, *_ in everyone:
        total.add(checks)
    off_N, drafts_N = (torch.cat([one[column] for one in everyone]) for column in (2, 3))
    return {
        "check/window_tokens": float(engine.schedule.check.window_tokens),
        "check/floor": engine.schedule.check.floor,
        "check/windows": float(total.windows),
        "check/cut_share": total.cut_share,
        "check/drafted_per_kept": total.drafted_per_kept,
        "check/draft_acceptance_mean": float(drafts_N.mean()),
        "check/draft_acceptance_q05": float(np.quantile(drafts_N.numpy(), 0.05)),
        "check/over_2_nats_share": float((off_N > FAR_NATS).float().mean()),
        "check/largest_nats": float(off_N.max()),
        "time/check_seconds": max(seconds for _, seconds, *_ in everyone),
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
