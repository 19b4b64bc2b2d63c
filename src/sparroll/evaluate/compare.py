"""Compares two finished evaluations, paired by problem. Reads records; it samples nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparroll import files, records
from sparroll.errors import UserError
from sparroll.evaluate.summary import paired

RECORD = "evaluation.json"


def compare(first: Path, second: Path) -> dict[str, Any]:
    """The differences second - first for each task and policy that both have. Tasks that cannot be paired are listed
    under "refused", with the reason. Raises UserError if no task can be paired.

    If the evaluations share no policy and each has only one, these two are compared.
    """
    hint = "give two folders that evaluate --out named"
    found = [files.existing_folder(folder, hint) / RECORD for folder in (first, second)]
    one, other = (records.read(path, "evaluation") for path in found)
    pairs = _policies(one, other)
    left, right = one["results"]["tasks"], other["results"]["tasks"]
    compared: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for label in sorted(left.keys() | right.keys()):
        reason = _unlike(label, left, right, first, second)
        if reason is None:
            compared[label] = _task(left[label]["policies"], right[label]["policies"], pairs)
        else:
            refused[label] = reason
    if not compared:
        first_reason = next(f"{label}: {reason}" for label, reason in refused.items())
        raise UserError(f"{first} and {second} cannot be paired; {first_reason}", "evaluate both on the same problems")
    return {
        "first": str(first),
        "second": str(second),
        "differs_in": _settings(one["config"], other["config"]),
        "tasks": compared,
        "refused": refused,
    }


def _policies(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str]]:
    left, right = (list(record["config"]["policies"]) for record in (one, other))
    shared = [name for name in left if name in right]
    if shared:
        return [(name, name) for name in shared]
    if len(left) == len(right) == 1:
        return [(left[0], right[0])]
    raise UserError(f"the runs share no policy: {', '.join(left)} and {', '.join(right)}")


def _task(left: dict[str, Any], right: dict[str, Any], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    found = {}
    for before, after in pairs:
        name = before if before == after else f"{before} to {after}"
        found[name] = paired(left[before]["by_problem"], right[after]["by_problem"])
    return found


def _unlike(label: str, left: dict[str, Any], right: dict[str, Any], first: Path, second: Path) -> str | None:
    """Why the task cannot be paired; None if it can."""
    for table, folder in ((left, first), (right, second)):
        if label not in table:
            return f"{folder} did not evaluate it"
    one, other = (_problems(table[label]) for table in (left, right))
    only = len(one.keys() ^ other.keys())
    if only:
        return f"{only} of {len(one.keys() | other.keys())} problems are in one run only"
    changed = [name for name, digest in one.items() if other[name] != digest]
    if changed:
        return f"{len(changed)} of {len(one)} problems have another text or answer, {changed[0]} the first of them"
    return None if list(one) == list(other) else "the problems are the same in another order"


def _problems(task: dict[str, Any]) -> dict[str, str]:
    first = next(iter(task["policies"].values()))
    return {problem["prompt_id"]: problem["digest"] for problem in first["by_problem"]}


def _settings(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[Any]]:
    """Settings that differ, so that nobody takes their effect for the model's."""
    names = sorted((one.keys() | other.keys()) - {"tasks", "problems"})
    return {name: [one.get(name), other.get(name)] for name in names if one.get(name) != other.get(name)}
