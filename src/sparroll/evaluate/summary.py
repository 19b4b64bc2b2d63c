"""From the log to the figures: each policy on each task, and sparse against dense, paired by problem. Runs no model."""

# P problems, T response tokens of one sample

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparroll.evaluate.estimators import ks_up_to, majority_at_k, pass_at_k
from sparroll.evaluate.intervals import Estimate, mean_difference, mean_share, sign_flip_test
from sparroll.evaluate.log import SampleLog
from sparroll.evaluate.settings import ESTIMATOR, EvalTask, EvaluationSettings, Policy
from sparroll.mismatch import TailStatistics
from sparroll.types import Checks


@dataclass
class _Cell:
    """What the log says of one policy on one task."""

    statistics: TailStatistics
    problems: dict[int, dict[str, Any]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    sparse: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    checks: Checks | None = None


def summarise(
    log: SampleLog, tasks: Sequence[EvalTask], policies: Sequence[Policy], settings: EvaluationSettings
) -> dict[str, Any]:
    """The figures as plain data for the record, by task and policy. Kills and resumes change nothing but the times."""
    cells = {
        (task.label, policy.name): _Cell(TailStatistics(settings.bin_tokens)) for task in tasks for policy in policies
    }
    votes = {task.label: task.has_answers for task in tasks}
    for line in log.lines():
        cell = cells[line["task"], line["policy"]]
        if line["kind"] == "commit":
            cell.totals.update(
                {name: line[name] for name in ("generate_seconds", "response_tokens", "read_tokens", "context_tokens")}
            )
            if "checks" in line:
                cell.checks = cell.checks or Checks()
                cell.checks.add(Checks(**line["checks"]))
        else:
            _take(cell, line, settings, votes[line["task"]])
    table: dict[str, Any] = {}
    for task in tasks:
        found = {policy.name: cells[task.label, policy.name] for policy in policies}
        table[task.label] = {
            "task": task.task.name,
            "level": task.level,
            "problems": len(task.problems),
            "policies": {name: _policy_table(cell, settings) for name, cell in found.items()},
            "paired": _against_dense({name: cell.problems for name, cell in found.items()}),
        }
    return {
        "samples": settings.samples,
        "top_p": settings.top_p,
        "estimator": ESTIMATOR if settings.tail else None,
        "tasks": table,
    }


def _take(cell: _Cell, group: dict[str, Any], settings: EvaluationSettings, votes: bool) -> None:
    samples = group["samples"]
    counted = [sample for sample in samples if sample["reward"] is not None]
    rewards = [sample["reward"] for sample in counted]
    answers = [sample["answer"] for sample in counted]
    cell.problems[group["problem"]] = {
        "problem": group["problem"],
        "prompt_id": group["prompt_id"],
        "digest": group["digest"],
        "samples": len(counted),
    } | problem_values(rewards, answers if votes else None, settings.samples)
    cell.statuses.update(sample["status"] for sample in samples)
    cell.excluded.update(sample["status"] for sample in samples if sample["reward"] is None)
    for sample in samples:
        cell.lengths.append(len(sample["response_ids"]))
        cell.truncated += sample["finish_reason"] == "length"
        cell.sparse += sample["attention"] != "dense"
        if sample["acceptance"] is not None:
            accepted_T = torch.tensor(sample["acceptance"], dtype=torch.float32)
            context_T = group["prompt_tokens"] + torch.arange(len(accepted_T))
            cell.statistics.add(accepted_T, context_T, f"{group['task']}/{group['problem']}#{sample['sample']}")


def problem_values(rewards: Sequence[float], answers: Sequence[str | None] | None, samples: int) -> dict[str, Any]:
    """One problem's value of each metric: "mean", "pass@k" and, if there are answers, "majority@k" and "tied@k".

    A value is None if too few samples have a verdict. A sample passes with a reward of 1.
    """
    count, passed = len(rewards), sum(reward >= 1 for reward in rewards)
    values: dict[str, Any] = {"passed": passed, "mean": float(np.mean(rewards)) if count else None}
    for k in ks_up_to(samples):
        values[f"pass@{k}"] = pass_at_k(count, passed, k) if count >= k else None
        if answers is not None:
            found = majority_at_k(answers, rewards, k) if count >= k else []
            values[f"majority@{k}"] = float(np.mean([vote.value for vote in found])) if found else None
            values[f"tied@{k}"] = float(np.mean([vote.tied for vote in found])) if found else None
    return values


def _policy_table(cell: _Cell, settings: EvaluationSettings) -> dict[str, Any]:
    problems = [cell.problems[number] for number in sorted(cell.problems)]
    totals, count = cell.totals, len(cell.lengths)
    names = [f"pass@{k}" for k in ks_up_to(settings.samples)]
    voted = "majority@1" in problems[0]
    if voted:
        names += [f"majority@{k}" for k in ks_up_to(settings.samples)]
    lengths = np.array(cell.lengths)
    return {
        f"mean@{settings.samples}": _estimate([problem["mean"] for problem in problems]),
        **{name: _estimate([problem[name] for problem in problems]) for name in names},
        "tied_share": _mean([problem[f"tied@{settings.samples}"] for problem in problems]) if voted else None,
        "excluded_samples": dict(sorted(cell.excluded.items())),
        "statuses": dict(sorted(cell.statuses.items())),
        "response_tokens": {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "q95": float(np.quantile(lengths, 0.95)),
            "max": int(lengths.max()),
        },
        "truncated_share": cell.truncated / count,
        "sparse_share": cell.sparse / count,
        "kv_read_share": totals["read_tokens"] / totals["context_tokens"] if totals["context_tokens"] else 1.0,
        **({"checks": cell.checks.table()} if cell.checks else {}),
        "tokens_per_second": totals["response_tokens"] / totals["generate_seconds"],
        "generate_seconds": totals["generate_seconds"],
        "tail": cell.statistics.table(ESTIMATOR).table() if settings.tail else None,
        "by_problem": problems,
    }


def _estimate(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = np.array([value for value in values if value is not None])
    if not len(known):
        return None
    return dataclasses.asdict(mean_share(known)) | {"problems_left_out": len(values) - len(known)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def _against_dense(found: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Every other policy minus dense; empty if there is no dense policy."""
    if "dense" not in found:
        return {}
    dense = found["dense"]
    return {
        f"{name} - dense": paired(
            [dense[number] for number in sorted(dense)], [other[number] for number in sorted(dense)]
        )
        for name, other in found.items()
        if name != "dense"
    }


def paired(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """after - before over the same problems: every metric that both have, with its interval, and a sign-flip test of
    the mean. A problem that has no value on one side is left out of that metric. None if no problem has a value on both
    sides."""
    table: dict[str, Any] = {}
    for name in (key for key in before[0] if key == "mean" or key.startswith(("pass@", "majority@"))):
        both = [
            (one[name], other[name])
            for one, other in zip(before, after, strict=True)
            if one.get(name) is not None and other.get(name) is not None
        ]
        if not both:
            continue
        difference_P = np.array([other - one for one, other in both])
        table[name] = _difference(mean_difference(difference_P))
        if name == "mean":
            table[name] |= {"sign_flip": dataclasses.asdict(sign_flip_test(difference_P))}
    return table or None


def _difference(estimate: Estimate) -> dict[str, Any]:
    return dataclasses.asdict(estimate)
