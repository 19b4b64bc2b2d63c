"""The published schedules, one TOML file each, and reading the tables of a schedule from wherever it is given. What the
tables mean is in schedule/file_tables.py."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from sparroll.errors import CHECK_PATH, UserError, nearest

_FOLDER = resources.files(__name__)


def presets() -> list[str]:
    """Names of the schedules that ship with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def is_inline(source: object) -> bool:
    """Whether this is a schedule itself: a table, or JSON, which is a text that starts with a brace."""
    return isinstance(source, Mapping) or _is_json(source)


def read_table(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """(The tables, the name) of a schedule: of a preset by name, of a TOML file by path, or of what is given itself.
    Raises UserError where it cannot be found or read."""
    return _read_inline(source) or _read_file(str(source))


def _is_json(source: object) -> bool:
    return isinstance(source, str) and source.lstrip().startswith("{")


def _read_inline(source: str | Path | Mapping[str, Any]) -> tuple[dict[str, Any], str] | None:
    """(The tables, the name) of a schedule that is given itself; None where `source` names one."""
    if isinstance(source, Mapping):
        table = dict(source)
    elif isinstance(source, str) and _is_json(source):
        try:
            table = json.loads(source)
        except json.JSONDecodeError as error:
            raise UserError(
                f"the schedule starts with a brace, but is not valid JSON: {error}",
                "`sparroll schedule show qwen3-1.7b-0.86 --json` prints a schedule as JSON; a preset or a file is "
                "given by its name or path",
            ) from None
    else:
        return None
    name = table.pop("name", "inline")
    if not isinstance(name, str) or not name:
        raise UserError(f"the name of a schedule must be text, got {name!r}", "leave it out to call it 'inline'")
    return table, name


def _read_file(name_or_path: str) -> tuple[dict[str, Any], str]:
    path, name = _find(name_or_path)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")), name
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"the schedule file {name_or_path} is not valid TOML: {error}",
            "`sparroll schedule show qwen3-1.7b-0.86 --json` shows what a schedule file holds",
        ) from None
    except OSError as error:
        raise UserError(f"cannot read the schedule file {name_or_path}: {error.strerror}", CHECK_PATH) from None


def _find(name_or_path: str) -> tuple[Path, str]:
    if name_or_path in presets():
        return Path(str(_FOLDER / f"{name_or_path}.toml")), name_or_path
    path = Path(name_or_path)
    if path.suffix == ".toml" or "/" in name_or_path:
        if not path.is_file():
            raise UserError(f"no schedule file at {name_or_path}", "`sparroll schedule list` names the presets")
        return path, path.stem
    raise UserError(f"unknown schedule preset {name_or_path!r}", nearest(name_or_path, presets()))
