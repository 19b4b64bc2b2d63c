"""From a TOML file and `--set` overrides to a checked configuration, and back to a file."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from pydantic_core import to_jsonable_python

from sparroll import files
from sparroll.errors import CHECK_PATH, UserError
from sparroll.resume import refuse_changes
from sparroll.train.config.base import Section, inline, tag_of
from sparroll.train.config.check import Config, as_table, checked
from sparroll.train.config.control_group import default_share
from sparroll.train.config.control_group import in_words as control_group_in_words
from sparroll.train.config.distill import DistillConfig
from sparroll.train.config.run import TrainConfig

RESUMABLE = ("train.steps", "checkpoint", "log", "reward.async_at_once", "reward.async_seconds")
"""Keys, or whole sections, that a resumed run may change, because they do not alter any step that has been taken."""


def load_config(path: Path | str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
    """The defaults, overridden by the file, overridden by `overrides` ("train.lr=1e-6"). An unknown key is an error
    that names the nearest one."""
    return _load(TrainConfig, path, overrides)


def load_distill_config(path: Path | str | None = None, overrides: list[str] | tuple[str, ...] = ()) -> DistillConfig:
    """The same for an adapter alone."""
    return _load(DistillConfig, path, overrides)


def config_from(table: dict[str, Any]) -> TrainConfig:
    """A checked configuration from plain tables."""
    return checked(TrainConfig, table)


def distill_config_from(table: dict[str, Any]) -> DistillConfig:
    """The same for an adapter alone."""
    return checked(DistillConfig, table)


def write_config(config: Section, path: Path) -> Path:
    """Every field, also those that were left at their defaults, as JSON."""
    return files.write_json(path, config.model_dump(mode="json"))


def as_toml(config: Section) -> str:
    """Every field, as a file that reads back to the same configuration."""
    table = config.model_dump(mode="json")
    sections = {name: section for name, section in table.items() if section is not None}
    # TOML has no null; `checked` reads the word "none" instead.
    text = tomli_w.dumps(
        {
            name: {key: "none" if value is None else value for key, value in section.items()}
            for name, section in sections.items()
        }
    )
    said = control_group_in_words(config) if isinstance(config, TrainConfig) else ""
    return text.replace("\ncontrol_share = ", f"\n# {said}\ncontrol_share = ") if said else text


def as_command(config: TrainConfig) -> str:
    """The command of a run with this configuration, with every setting that differs from its default."""
    words = ["sparroll", "train"]
    plain, defaults = config.model_dump(mode="json"), TrainConfig().model_dump(mode="json")
    defaults["rollout"]["control_share"] = default_share(config)
    for name, table in plain.items():
        if table is None or table == defaults[name]:
            continue
        kind, before = type(getattr(config, name)), defaults[name] or {}
        fields = {key: field for key, field in kind.model_fields.items() if not field.is_required()}
        own = {key: to_jsonable_python(field.get_default(call_default_factory=True)) for key, field in fields.items()}
        if name == "rollout":
            own["control_share"] = defaults["rollout"]["control_share"]
        if tag_of(kind) and table[tag_of(kind)] != before.get(tag_of(kind)):
            own.pop(tag_of(kind), None)
        changed = [(key, value) for key, value in table.items() if key not in own or value != own[key]]
        words += [word for key, value in changed for word in ("--set", f"{name}.{key}={inline(value)}")]
    return shlex.join(words)


def refuse_other_config(out: Path, before: dict[str, Any], config: Section) -> None:
    """Raise UserError where a run is resumed under another configuration than it was started with. A key that was added
    since then counts as at its default."""
    defaults = TrainConfig().model_dump(mode="json") if isinstance(config, TrainConfig) else None
    now = _control_share_last(config.model_dump(mode="json"))
    refuse_changes(out, _control_share_last(before), now, free=RESUMABLE, defaults=defaults)


def _control_share_last(table: dict[str, Any]) -> dict[str, Any]:
    """By default the share of the control group follows from other keys, so a change of those is named first."""
    rollout = dict(table.get("rollout") or {})
    if "control_share" not in rollout:
        return table
    return {**table, "rollout": rollout, "rollout.control_share": rollout.pop("control_share")}


def _load(config: type[Config], path: Path | str | None, overrides: list[str] | tuple[str, ...]) -> Config:
    table = _read(Path(path)) if path is not None else {}
    for override in overrides:
        _set(config, table, override)
    return checked(config, table)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"cannot read the configuration {path}: {error.strerror}",
            f"{CHECK_PATH}; `sparroll config > train.toml` writes one to start from",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration {path} is not valid TOML: {error}") from None


def _set(config: type[Section], table: dict[str, Any], override: str) -> None:
    """Apply one override to the table: section.key=value sets one key, section=value the whole section, as in
    attention=dense."""
    key, equals, raw = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) > 2 or not all(parts):
        raise UserError(f"--set takes section.key=value, got {override!r}", "for example --set train.lr=1e-6")
    value = _value(raw.strip())
    if len(parts) == 1:
        table[parts[0]] = value
        return
    name, key = parts
    section = table.get(name)
    table[name] = ({} if section in (None, "none") else as_table(config, name, section)) | {key: value}


def _value(raw: str) -> Any:
    """The value as TOML reads it; what TOML cannot read is taken as a string."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
