"""The tables of a schedule's file, in both formats: from a schedule to its tables and back. Unknown and missing keys are
errors. Opens no file (see presets/)."""

from __future__ import annotations

import dataclasses
from datetime import date, time
from typing import TYPE_CHECKING, Any

from sparroll.attention.selectors import make_selector
from sparroll.draft_check import DraftCheck
from sparroll.errors import UserError, nearest
from sparroll.layer_groups import read_groups
from sparroll.models.fingerprint import ModelFingerprint
from sparroll.schedule.steps import MOST_TOKENS, Step, is_count
from sparroll.schedule.target import check_target, is_share
from sparroll.types import is_whole

if TYPE_CHECKING:
    from sparroll.schedule.schedule import Schedule

FORMAT, GROUPED_FORMAT = 1, 2
"""Of files without and with groups of layers. A sparroll that knows no groups refuses the second by its number."""
_KEYS = [
    "format",
    "model",
    "fingerprint",
    "selector",
    "dense_layers",
    "layer_groups",
    "check",
    "target",
    "made_by",
    "steps",
]
_STEP_KEYS = ["from_context_tokens", "kv_budget_tokens", "measured"]
_SHARES = ["low", "value", "high"]
_COUNTS = ["tokens", "rollouts", "at_kv_budget_tokens"]
_FLAGS = ["verified", "interpolated", "dense"]
"""What a step's `measured` may hold, by kind."""


def fields_of(table: dict[str, Any]) -> dict[str, Any]:
    """The fields of the Schedule that a file's tables describe, without its name."""
    for key in table:
        if key not in _KEYS:
            raise UserError(f"unknown key {key!r}", nearest(key, _KEYS))
    if not is_whole(table.get("format")) or table["format"] not in (FORMAT, GROUPED_FORMAT):
        raise UserError(
            f"format must be {FORMAT} or {GROUPED_FORMAT}, got {table.get('format')!r}",
            "the file may come from another version of sparroll" if "format" in table else f"write format = {FORMAT}",
        )
    if "layer_groups" in table and table["format"] != GROUPED_FORMAT:
        raise UserError(
            f"layer_groups needs format = {GROUPED_FORMAT}, got {table['format']}", f"set format = {GROUPED_FORMAT}"
        )
    for key, kind in (("selector", dict), ("steps", list), ("dense_layers", list)):
        if not isinstance(table.get(key), kind):
            raise UserError(f"{key!r} is missing or not a {'table' if kind is dict else 'list'}")
    for key, type_, what in (
        ("model", str, "text"),
        ("fingerprint", dict, "a table"),
        ("check", dict, "a table"),
        ("target", dict, "a table"),
        ("made_by", dict, "a table"),
    ):
        if key in table and not isinstance(table[key], type_):
            raise UserError(f"{key} must be {what}, got {table[key]!r}")
    fingerprint = table.get("fingerprint")
    check_target(table.get("target") or {})
    return {
        "steps": tuple(_step(entry) for entry in table["steps"]),
        "selector": make_selector(table["selector"]),
        "dense_layers": tuple(table["dense_layers"]),
        "layer_groups": read_groups(table["layer_groups"]) if "layer_groups" in table else (),
        "check": DraftCheck.from_table(table["check"]) if "check" in table else None,
        "model": table.get("model"),
        "fingerprint": None if fingerprint is None else ModelFingerprint.from_table(fingerprint),
        "target": table.get("target"),
        "made_by": _plain(table["made_by"]) if "made_by" in table else None,
    }


def _plain(value: Any) -> Any:
    """The same with TOML's dates as text, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, date | time) else value


def table_of(schedule: Schedule) -> dict[str, Any]:
    """The tables of the schedule's file; `fields_of` gives its fields back."""
    steps = [
        {key: list(value) if isinstance(value, tuple) else value for key, value in each.items() if value is not None}
        for each in map(dataclasses.asdict, schedule.steps)
    ]
    table = {
        "format": GROUPED_FORMAT if schedule.layer_groups else FORMAT,
        "model": schedule.model,
        "fingerprint": schedule.fingerprint.table() if schedule.fingerprint else None,
        "selector": schedule.selector.table(),
        "dense_layers": list(schedule.dense_layers),
        "layer_groups": [list(group) for group in schedule.layer_groups] or None,
        "check": schedule.check.table() if schedule.check else None,
        "target": schedule.target,
        "made_by": schedule.made_by,
        "steps": steps,
    }
    return {key: value for key, value in table.items() if value is not None}


def _step(entry: Any) -> Step:
    if not isinstance(entry, dict):
        raise UserError(f"each entry of 'steps' must be a table, got {entry!r}")
    for key in entry:
        if key not in _STEP_KEYS:
            raise UserError(f"unknown key {key!r} in a step", nearest(key, _STEP_KEYS))
    start, budget = (entry.get(key) for key in _STEP_KEYS[:2])
    budgets: list[Any] = budget if isinstance(budget, list) else [budget]
    for key, value in ((_STEP_KEYS[0], start), *((_STEP_KEYS[1], each) for each in budgets)):
        if not is_count(value):
            raise UserError(
                f"{key} must be a whole number of tokens, got {entry.get(key)!r}", f"0 or more, for example {key} = 512"
            )
        if value > MOST_TOKENS:
            raise UserError(f"{key} must be at most {MOST_TOKENS:,}, got {value:,}")
    if "measured" in entry:
        _check_measured(entry["measured"])
    return Step(entry[_STEP_KEYS[0]], tuple(budgets) if isinstance(budget, list) else budgets[0], entry.get("measured"))


def _check_measured(measured: object) -> None:
    """Raise UserError for figures that no measurement gives."""
    if not isinstance(measured, dict):
        raise UserError(f"measured must be a table of figures, got {measured!r}")
    known = [*_SHARES, *_COUNTS, *_FLAGS]
    for key, value in measured.items():
        if key not in known:
            raise UserError(f"unknown key {key!r} in measured", nearest(str(key), known))
        if key in _SHARES and not is_share(value):
            raise UserError(f"measured.{key} must lie in [0, 1], got {value!r}")
        if key in _COUNTS and not is_count(value):
            raise UserError(f"measured.{key} must be a whole number, got {value!r}")
        if key in _FLAGS and not isinstance(value, bool):
            raise UserError(f"measured.{key} must be true or false, got {value!r}")
    ends = [measured[key] for key in _SHARES if key in measured]
    if ends != sorted(ends):
        raise UserError(
            "measured.value must lie between measured.low and measured.high, got "
            + ", ".join(f"{key} = {measured[key]!r}" for key in _SHARES if key in measured)
        )
