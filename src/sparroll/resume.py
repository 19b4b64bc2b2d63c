"""The rule by which commands continue in a folder: they must be asked for the same as when the folder was made.

Every command that keeps finished work under --out writes down what it was asked for. When it is called on the same
folder again, it compares key by key, and refuses to mix the results of two requests. This file compares plain data and
knows no command.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparroll import files, records
from sparroll.errors import UserError

PROMPTS = "prompts"
"""The key under which commands keep their prompts, or a digest of them, which nobody could go on with."""
_SHORT = 60
_WAY_OUT = "choose another folder with --out"


def begin_or_resume(path: Path, asked: Mapping[str, Any], *, free: Sequence[str] = (), begun: bool = True) -> None:
    """Write what is asked for to `path`. If the file exists, raise UserError unless it says the same.

    begun: whether the folder holds results of what the file says. If it holds none, because the command failed before
    the first one, what is asked for now takes the file's place. A file with other keys was written by another command,
    whose results would be orphaned, so it is refused.
    """
    asked = json.loads(json.dumps(records.plain(dict(asked))))
    if path.exists():
        found = files.read_table(path, _WAY_OUT)
        if begun:
            refuse_changes(path.parent, found, asked, free=free)
            return
        refuse_another_command(path, found, asked)
    files.write_json(path, asked)


def refuse_results_of_nothing(path: Path, begun: bool) -> None:
    """Raise UserError where a folder holds results, but not the file that says what was asked for."""
    if begun and not path.exists():
        raise UserError(f"{path.parent} holds results but no {path.name}, which says what they are of", _WAY_OUT)


def refuse_another_command(path: Path, found: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UserError if the file `found` in an output folder has keys that are not among the known ones."""
    if not set(found) <= set(known):
        raise UserError(f"{path.parent} was made by another command: {path.name} is not of this one", _WAY_OUT)


def refuse_changes(
    folder: Path,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    free: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    way_out: str = _WAY_OUT,
) -> None:
    """Raise UserError if a key has another value than when `folder` was made.

    Nested tables are compared key by key ("train.lr"), lists as a whole. free: keys that may change, or tables whose
    keys may all change. defaults: the value of a key that only one of the two tables has, for example because the key
    was added after the folder was made. Without a default the value is null. way_out: what the hint says beside the old
    value.
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
    also = f"; also different: {', '.join(more)}" if more else ""
    if key == PROMPTS:
        raise UserError(
            f"{folder} was made with other prompts than are asked for now{also}",
            f"give the same file, or the same task, level, count and seed, or {way_out}",
        )
    old, new = _short(*(json.dumps(table.get(key, instead.get(key))) for table in (before, after)))
    raise UserError(
        f"{folder} was made with {key} = {old}, and {key} = {new} is asked for now{also}",
        f"go on with the old value, or {way_out}" + (f"; you may change {', '.join(free)}" if free else ""),
    )


def check_flag(out: Path, resume: bool, *, holds_run: bool, can_go_on: bool) -> None:
    """Raise UserError if the folder holds a run and --resume is missing, or if --resume finds nothing to continue."""
    if not resume and holds_run:
        raise UserError(f"{out} already holds a run", f"go on with --resume, or {_WAY_OUT}")
    if resume and not can_go_on:
        raise UserError(f"there is no run to resume in {out}", "leave --resume out to start one")


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one flat table, with dots in the keys.

    >>> flat({"train": {"lr": 0.1}, "seed": 0})
    {'train.lr': 0.1, 'seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _short(*values: str) -> list[str]:
    """Texts of 60 characters at most. Of those that begin alike for longer, the part around the first difference."""
    columns = zip(*values, strict=False)
    alike = next((place for place, each in enumerate(columns) if len(set(each)) > 1), min(map(len, values)))
    start = alike - 20 if alike > _SHORT - 10 and max(map(len, values)) > _SHORT else 0
    found = [f"...{value[start:]}" if start else value for value in values]
    return [each if len(each) <= _SHORT else f"{each[: _SHORT - 3]}..." for each in found]
