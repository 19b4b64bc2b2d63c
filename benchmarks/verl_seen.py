"""What verl_watch.py has written about a case, as a part of its record: the settings that were in force, what each replica
counted under which schedule, whether the trained weights arrived, and the trainer's own ceiling. Starts nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trainer_ceiling

from sparroll.schedule import Schedule
from sparroll.train.runtime.sinks import read_lines

NEAR = 1 / 4
"""The engine has the trained weights where its log-probabilities are so much nearer to them than to the first ones."""
Count = Mapping[str, Any]


def in_force(folder: Path) -> dict[str, Any]:
    """The settings, read at run time. Of several replicas, those of the first one, and of the others what differs."""
    found = {name: _read(folder / f"{name}.json") for name in ("run", "trainer")}
    engines = [_read(path) for path in sorted(folder.glob("engine-*.json"))]
    sleeps = [read_lines(path) for path in sorted(folder.glob("sleeps-*.jsonl"))]
    found = {name: value for name, value in found.items() if value}
    if engines:
        found |= {"replicas": len(engines), "engine": engines[0]}
        others = [{key: own[key] for key in own if own[key] != engines[0].get(key)} for own in engines[1:]]
        found |= {"engines_differ": others} if any(others) else {}
    if sleeps:
        levels = sorted({line["level"] for lines in sleeps for line in lines})
        found |= {"sleep_levels": levels, "sleeps": max(len(lines) for lines in sleeps)}
    return found


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def sampled_seconds(folder: Path) -> dict[int, float]:
    """Of each step of a synchronous run, from the begin of its first request to the end of its last one, over all replicas.
    verl's own time is longer: it looks every 2 s whether the rollouts are done."""
    spans: dict[int, tuple[float, float]] = {}
    for path in folder.glob("requests-*.jsonl"):
        for line in read_lines(path):
            number = (line["weights"] or 0) + 1
            began, ended = spans.get(number, (line["began"], line["ended"]))
            spans[number] = min(began, line["began"]), max(ended, line["ended"])
    return {number: ended - began for number, (began, ended) in spans.items()}


# -- what the replicas counted -------------------------------------------------------------------------------------------


def counts_by_step(folder: Path) -> list[dict[str, Any]]:
    """Of each step of sparroll_sync what every replica counted, in the order of the steps: {"step", "schedule", "replicas":
    [{"sparse_steps", "dense_steps", "measured", "workers"}]}. Weights of version n sample step n + 1. Validations and
    dense ceilings are left out.

    workers: what each worker of the replica counted in the step.
    """
    steps: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("counts-*.jsonl")):
        before: list[Count] = []
        for line in read_lines(path):
            workers = [_since(now, was) for now, was in zip(line["workers"], before or _nothing(line), strict=True)]
            before = line["workers"]
            if not line["measures"] or not line["sparse_steps"] + line["dense_steps"]:
                continue
            number = (line["weights"] or 0) + 1
            step = steps.setdefault(number, {"step": number, "schedule": line["schedule"], "replicas": []})
            kept = {name: line[name] for name in ("sparse_steps", "dense_steps", "measured")}
            step["replicas"].append(kept | {"workers": workers})
            if line["schedule"] != step["schedule"]:
                step["schedule"] = f"{step['schedule']} and {line['schedule']}"
    return [steps[number] for number in sorted(steps)]


def _nothing(line: Count) -> list[Count]:
    return [{"sparse_steps": 0, "dense_steps": 0}] * len(line["workers"])


def _since(now: Count, before: Count) -> dict[str, int]:
    return {name: int(now[name]) - int(before[name]) for name in ("sparse_steps", "dense_steps")}


def sparse_steps_of(schedule: Schedule, prompt_tokens: int, response_tokens: int) -> int:
    """Decode steps of one rollout that read a part of their context. The first token comes from the prefill, so the first
    decode step has a context of the prompt and one token.

    >>> sparse_steps_of(Schedule.fixed(64), 48, 96)  # contexts of 49 to 143 tokens
    79
    """
    contexts = range(prompt_tokens + 1, prompt_tokens + response_tokens)
    return sum(int(schedule.kv_budget_tokens(context)) < context for context in contexts)


def followed(
    steps: Sequence[Mapping[str, Any]], schedules: Mapping[str, Schedule], prompt_tokens: int, response_tokens: int
) -> list[dict[str, Any]]:
    """Whether every replica, and every worker of it, did what the step's schedule says. All rollouts are equally long, so a
    replica's share of sparse steps is known, however many of the rollouts it has sampled.

    schedules: by name.  -> the steps with `sparse_of_rollout`, the sparse ones of its response_tokens - 1 decode steps, and
    `follows`.
    """
    found = []
    for step in steps:
        schedule, decode = schedules.get(step["schedule"]), response_tokens - 1
        sparse = None if schedule is None else sparse_steps_of(schedule, prompt_tokens, response_tokens)
        counts = [count for replica in step["replicas"] for count in (replica, *replica["workers"])]
        follows = sparse is not None and all(
            count["sparse_steps"] * decode == (count["sparse_steps"] + count["dense_steps"]) * sparse
            for count in counts
        )
        found.append({**step, "sparse_of_rollout": sparse, "decode_of_rollout": decode, "follows": follows})
    return found


# -- whether the weights arrived -----------------------------------------------------------------------------------------


def arrived(folder: Path) -> dict[str, Any]:
    """The last step's comparison, what rounding alone was in the first step (`at_once`), all steps, and the verdict; empty
    where nothing was compared."""
    path = folder / "arrived.jsonl"
    lines = read_lines(path) if path.is_file() else []
    if not lines:
        return {}
    last = lines[-1]
    near = last["from_trained"] < NEAR * last["from_first"]
    found = {**last, "at_once": lines[0]["from_trained"], "arrived": bool(near and last["updates"] > 0)}
    return found | {"all_steps": lines}


def ceilings(folder: Path) -> dict[str, float]:
    return trainer_ceiling.ceilings(folder / "ceiling")
