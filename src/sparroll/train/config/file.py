"""From a TOML file and `--set` overrides to a checked TrainConfig, and back to a file. Every mistake is one line."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from sparroll import files
from sparroll.errors import UserError, nearest
from sparroll.resume import refuse_changes
from sparroll.train.config.sections import TrainConfig

RESUMABLE = ("train.steps", "checkpoint", "log", "reward.async_at_once", "reward.async_seconds")
"""Keys (or whole sections) that a resumed run may change: none of them alters a step that has been taken."""


def load_config(
    path: Path | str | None = None,
    overrides: list[str] | tuple[str, ...] = (),
    defaults: dict[str, dict[str, Any]] | None = None,
) -> TrainConfig:
    """Defaults, then the file, then the overrides ("train.lr=1e-6"). Unknown keys are errors with the nearest name.

    defaults: by section, in place of some of the configuration's own.
    """
    table = _read(Path(path)) if path is not None else {}
    for name, values in (defaults or {}).items():
        if isinstance(table.setdefault(name, {}), dict):
            table[name] = values | table[name]
    for override in overrides:
        _set(table, override)
    return config_from(table)


def config_from(table: dict[str, Any]) -> TrainConfig:
    """A checked configuration from plain tables."""
    _refuse_unknown(table)
    try:
        return TrainConfig.model_validate(table)
    except ValidationError as error:
        raise _first(error) from None


def write_config(config: TrainConfig, path: Path) -> Path:
    """Every field, also those that were left at their defaults, as JSON."""
    return files.write_json(path, config.model_dump(mode="json"))


def refuse_other_config(out: Path, before: dict[str, Any], config: TrainConfig) -> None:
    """Raise UserError where a run is resumed under another configuration than it was started with."""
    # A run that is older than a setting had what is now that setting's default.
    defaults = TrainConfig().model_dump(mode="json")
    refuse_changes(out, before, config.model_dump(mode="json"), free=RESUMABLE, defaults=defaults)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration {path} is not valid TOML: {error}") from None


def _set(table: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise UserError(f"--set takes section.key=value, got {override!r}", "for example --set train.lr=1e-6")
    section = table.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise UserError(f"[{parts[0]}] must be a section, got {section!r}")
    section[parts[1]] = None if raw.strip() == "none" and _may_be_absent(*parts) else _value(raw.strip())


def _may_be_absent(section: str, key: str) -> bool:
    """Whether `none` means no value there; `correction.name=none` is the correction of that name."""
    kind = TrainConfig.model_fields[section].annotation if section in TrainConfig.model_fields else None
    field = getattr(kind, "model_fields", {}).get(key)
    return field is not None and type(None) in get_args(field.annotation)


def _value(raw: str) -> Any:
    """As TOML reads it; what TOML cannot read is a string."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _refuse_unknown(table: dict[str, Any]) -> None:
    sections = TrainConfig.model_fields
    for name, section in table.items():
        if name not in sections:
            raise UserError(f"unknown section [{name}]", nearest(name, list(sections)))
        if not isinstance(section, dict):
            raise UserError(f"[{name}] must be a section, got {section!r}")
        kind = sections[name].annotation
        assert isinstance(kind, type)
        assert issubclass(kind, BaseModel)
        if kind.model_config.get("extra") == "allow":
            continue
        for key in section:
            if key not in kind.model_fields:
                raise UserError(f"unknown key {name}.{key}", nearest(key, list(kind.model_fields)))


def _first(error: ValidationError) -> UserError:
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, ValueError):
        return UserError(str(cause))
    where = ".".join(str(part) for part in first["loc"])
    return UserError(f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}")
