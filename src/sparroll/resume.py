"""One rule for going on in a folder: what was asked for when it was made must be what is asked for now.

Every command that keeps finished work under --out writes down what was asked for. Called again on the same folder it
compares, key by key, and refuses to mix the answers to two questions. Compares plain data; knows no command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparroll import files, records
from sparroll.errors import UserError


def begin_or_resume(path: Path, asked: Mapping[str, Any], *, free: Sequence[str] = ()) -> None:
    """In a new folder, write what is asked for to `path`; where it is written, raise UserError unless it is the same."""
    asked = json.loads(json.dumps(records.plain(dict(asked))))
    if path.exists():
        refuse_changes(path.parent, files.read_table(path, "choose another folder with --out"), asked, free=free)
    else:
        files.write_json(path, asked)


def refuse_changes(
    folder: Path,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    free: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Raise UserError where a key has another value than when `folder` was made.

    Nested tables are compared key by key ("train.lr"), lists as a whole. free: keys, or tables with all their keys, that
    may change. defaults: what a key stands for that one of the two lacks, such as one that is younger than the folder; a
    key without a default stands for null.
    """
    before, after, instead = flat(was), flat(now), flat(defaults or {})
    changed = [
        key
        for key in {**before, **after}
        if not any(key == name or key.startswith(f"{name}.") for name in free)
        and before.get(key, instead.get(key)) != after.get(key, instead.get(key))
    ]
    if not changed:
        return
    key, *more = changed
    old, new = (_short(table.get(key, instead.get(key))) for table in (before, after))
    raise UserError(
        f"{folder} was made with {key} = {old}, and {key} = {new} is asked for now"
        + (f"; also different: {', '.join(more)}" if more else ""),
        "go on with the old value, or choose another folder with --out"
        + (f"; free to change: {', '.join(free)}" if free else ""),
    )


def check_flag(out: Path, resume: bool, *, holds_run: bool, can_go_on: bool) -> None:
    """Raise UserError where --resume is missing (the folder holds a run) or has nothing to go on with."""
    if not resume and holds_run:
        raise UserError(f"{out} already holds a run", "go on with --resume, or choose another folder with --out")
    if resume and not can_go_on:
        raise UserError(f"there is no run to resume in {out}", "leave --resume out to start one")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dots in the keys.

    >>> flat({"train": {"lr": 0.1}, "seed": 0})
    {'train.lr': 0.1, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
