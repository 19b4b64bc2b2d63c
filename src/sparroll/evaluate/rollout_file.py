"""Rollouts of many prompts in a JSONL file that survives a kill, and their summary. They are judged by the task's
reward only; run.py compares policies.

    OUT/config.json      the request; a later call on this folder must have the same
    OUT/rollouts.jsonl   a line for each rollout, in the order in which they were finished
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sparroll import files, tasks
from sparroll.draft_check import FAR_NATS
from sparroll.engines.base import Engine
from sparroll.engines.sampling import request_seed
from sparroll.progress import OnProgress
from sparroll.resume import begin_or_resume, refuse_results_of_nothing
from sparroll.tasks.verdicts import verdicts_of
from sparroll.types import Checks, Prompt, Rollout


class RolloutFile:
    """The file of rollouts. Finished rows survive a kill, and a second call of the same command adds only what is
    missing."""

    def __init__(self, out: Path, config: Mapping[str, Any], n: int):
        """n: rollouts per prompt."""
        self.path, self.n = out / "rollouts.jsonl", n
        begun = bool(self._lines())
        refuse_results_of_nothing(out / "config.json", begun)
        begin_or_resume(out / "config.json", config, begun=begun)
        if self.path.exists():
            # A kill while the rows of a prompt were written leaves some of them, or half a line. That prompt is sampled
            # again.
            rows = [json.loads(line) for line in self._lines() if line.endswith("\n")]
            held = Counter(row["prompt_index"] for row in rows)
            whole = [json.dumps(row) + "\n" for row in rows if held[row["prompt_index"]] == n]
            files.write_text(self.path, "".join(whole))

    def rows(self) -> list[dict[str, Any]]:
        """All finished rows, ordered by prompt and sample."""
        rows = [json.loads(line) for line in self._lines()]
        return sorted(rows, key=lambda row: (row["prompt_index"], row["sample_index"]))

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append all rows of some prompts, and wait until they are on disk."""
        with self.path.open("a", encoding="utf-8") as sink:
            sink.writelines(json.dumps(row) + "\n" for row in rows)
            sink.flush()
            os.fsync(sink.fileno())

    def _lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []


def sample_missing(
    engine: Engine,
    prompt_ids: Sequence[Sequence[int]],
    rollouts: RolloutFile,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    on_progress: OnProgress | None = None,
) -> int:
    """Sample the prompts that are missing in the file, and return how many these were. Works in groups of about four
    batches, and a kill loses at most one."""
    n = rollouts.n
    held = {row["prompt_index"] for row in rollouts.rows()}
    missing = [index for index in range(len(prompt_ids)) if index not in held]
    group = max(1, 4 * engine.max_batch // n)
    total, done = n * len(prompt_ids), n * (len(prompt_ids) - len(missing))
    if on_progress:
        on_progress(done, total, f"{done}/{total} rollouts")
    for start in range(0, len(missing), group):
        indices = missing[start : start + group]

        def on_group(finished: int, _: int, text: str = "", /, before: int = done) -> None:
            if on_progress:
                on_progress(before + finished, total, f"{before + finished}/{total} rollouts")

        sampled = engine.generate(
            [list(prompt_ids[index]) for index in indices],
            n,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=[request_seed(seed, index, sample) for index in indices for sample in range(n)],
            on_progress=on_group,
        )
        rollouts.add([_row(rollout, indices[rollout.prompt_index]) for rollout in sampled])
        done += len(sampled)
    return len(missing)


def _row(rollout: Rollout, prompt_index: int) -> dict[str, Any]:
    checked: dict[str, Any] = {}
    if rollout.checks is not None and rollout.dense_logp is not None:
        checked = {"dense_logp": _rounded(rollout.dense_logp), "checks": dataclasses.asdict(rollout.checks)}
    return {
        "prompt_index": prompt_index,
        "sample_index": rollout.sample_index,
        "seed": rollout.seed,
        "response": rollout.text,
        "finish_reason": rollout.finish_reason,
        "attention": rollout.attention,
        "schedule_name": rollout.schedule_name,
        "compression_name": rollout.compression_name,
        "kv_read_share": rollout.kv_read_share,
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.response_ids,
        "sparse_logp": _rounded(rollout.sparse_logp),
        **checked,
    }


def _rounded(logp_T: Tensor) -> list[float]:
    return [round(value, 6) for value in logp_T.tolist()]


def summarise_rollouts(rows: list[dict[str, Any]], prompts: Sequence[Any], task: str | None = None) -> dict[str, Any]:
    """Means over all rows, and what checks of drafts did in them. task: the task that the prompts come from; if it is
    given, the mean reward is there, too, and how many responses have none, by the status of their verdict."""
    tokens = [len(row["response_ids"]) for row in rows]
    summary: dict[str, Any] = {
        "rollouts": len(rows),
        "response_tokens_mean": sum(tokens) / len(tokens),
        "stopped_share": sum(row["finish_reason"] == "stop" for row in rows) / len(rows),
        "kv_read_share": sum(row["kv_read_share"] for row in rows) / len(rows),
    }
    if all("checks" in row for row in rows):
        summary |= _summarised_checks(rows)
    if task is not None:
        asked: list[Prompt] = [prompts[row["prompt_index"]] for row in rows]
        verdicts = verdicts_of(tasks.get(task), asked, [row["response"] for row in rows])
        rewards = [each.reward for each in verdicts if each.reward is not None]
        summary["reward_mean"] = sum(rewards) / len(rewards) if rewards else None
        for status, count in Counter(each.status for each in verdicts if each.reward is None).items():
            summary[f"without_reward/{status}"] = count
    return summary


def _summarised_checks(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the dense checks of drafts did in all rows, and how far the tokens that stand are from the dense policy."""
    total = Checks()
    for row in rows:
        total.add(Checks(**row["checks"]))
    nats = [q - p for row in rows for q, p in zip(row["sparse_logp"], row["dense_logp"], strict=True)]
    return {
        "check_windows": total.windows,
        "check_cut_share": total.cut_share,
        "check_drafted_per_kept": total.drafted_per_kept,
        "check_over_2_nats_share": sum(each > FAR_NATS for each in nats) / len(nats),
        "check_largest_nats": max(nats),
    }
