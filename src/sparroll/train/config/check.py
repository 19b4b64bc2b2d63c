"""From plain tables to a checked configuration. Each mistake is reported in one line with the key and the value, and a
hint."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sparroll.errors import UserError, nearest
from sparroll.train.config.base import Section, keys_of, kinds_of, may_be_absent, tag_of
from sparroll.train.config.moved import way_out
from sparroll.train.config.run import TrainConfig

Config = TypeVar("Config", bound=Section)


def checked(config: type[Config], table: dict[str, Any]) -> Config:
    """The configuration of a table of sections. A section or field that may be None is written as "none", since TOML
    has no null. For a section with several kinds, the name of the kind alone will do."""
    for name in table:
        if name not in config.model_fields:
            hint = _hint(config, name) or _in_another_section(config, name) or nearest(name, list(config.model_fields))
            raise UserError(f"unknown section [{name}]", hint)
    for name, field in config.model_fields.items():
        if field.is_required() and name not in table:
            raise UserError(f"[{name}] is missing", _kinds_hint(config, name))
    try:
        return config(**{name: _section(config, name, value) for name, value in table.items()})
    except ValidationError as error:
        raise one_line(error) from None


def as_table(config: type[Section], name: str, value: Any) -> dict[str, Any]:
    """A section's value as a table: "dense" alone becomes {"kind": "dense"}, with the section's tag as the key."""
    tag = tag_of(kinds_of(config.model_fields[name])[0]) if name in config.model_fields else ""
    if isinstance(value, str) and tag:
        return {tag: value}
    if not isinstance(value, dict):
        raise UserError(f"[{name}] must be a section, got {value!r}")
    return value


def one_line(error: ValidationError, section: str = "", kind: type[BaseModel] | None = None) -> UserError:
    """The first of pydantic's errors, as a UserError."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return cause
    if isinstance(cause, ValueError):
        return UserError(str(cause))
    where = ".".join([*([section] if section else []), *(str(part) for part in first["loc"])])
    if first["type"] == "missing" and kind is not None:
        return _missing(where, kind, str(first["loc"][0]))
    if first["type"] == "tuple_type":
        return UserError(
            f"{where}: must be a list, got {first['input']!r}",
            f"""write a list: --set '{where}=["a", "b"]'""",
        )
    message = f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    return UserError(message, way_out(f"{where}={first['input']}"))


def _section(config: type[Section], name: str, value: Any) -> BaseModel | None:
    if value in (None, "none") and may_be_absent(config.model_fields[name]):
        return None
    table = as_table(config, name, value)
    kind = _kind(config, name, table)
    for key in table:
        _refuse_unknown(config, name, kind, key)
    fields = kind.model_fields
    given = {key: None if value == "none" and may_be_absent(fields.get(key)) else value for key, value in table.items()}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        found = one_line(error, name, kind)
        where = ".".join([name, *map(str, error.errors()[0]["loc"][:1])])
        flag = "" if config is TrainConfig else " --distill"
        raise UserError(found.message, found.hint or f"`sparroll config {where}{flag}` says what it may be") from None


def _kind(config: type[Section], name: str, table: dict[str, Any]) -> type[BaseModel]:
    """The kind that a section's table asks for."""
    field = config.model_fields[name]
    kinds, tag = kinds_of(field), tag_of(kinds_of(field)[0])
    if len(kinds) == 1:
        return kinds[0]
    if tag not in table and field.is_required():
        raise UserError(f"{name}.{tag} is missing", _kinds_hint(config, name))
    for kind in kinds:
        if table.get(tag, _name(kinds[0])) == _name(kind):
            return kind
    known = [_name(kind) for kind in kinds]
    raise UserError(
        f"{name}.{tag} must be one of {', '.join(known)}, got {table[tag]!r}", nearest(str(table[tag]), known)
    )


def _refuse_unknown(config: type[Section], name: str, kind: type[BaseModel], key: str) -> None:
    if key in keys_of(kind):
        return
    tag, field = tag_of(kind), f"{name}.{key}"
    owners = [_name(each) for each in kinds_of(config.model_fields[name]) if key in keys_of(each)]
    if owners:
        raise UserError(
            f"{field} is for {name}.{tag} = {' or '.join(json.dumps(each) for each in owners)}, and {name}.{tag} is "
            f'"{_name(kind)}"',
            f'set {name}.{tag} = "{owners[0]}", or leave {field} out; --set {name}={_name(kind)} starts [{name}] anew',
        )
    if kind.model_config.get("extra") != "allow":
        way = _hint(config, name, key) or _in_another_section(config, key) or nearest(key, keys_of(kind))
        raise UserError(f"unknown key {field}", way)


def _missing(where: str, kind: type[BaseModel], key: str) -> UserError:
    tag, examples = tag_of(kind), kind.model_fields[key].examples
    section = where.partition(".")[0]
    needs = f', which {section}.{tag} = "{_name(kind)}" needs' if tag else ""
    return UserError(
        f"{where} is missing{needs}", f"for example {where} = {json.dumps(examples[0])}" if examples else None
    )


def _hint(config: type[Section], name: str, key: str | None = None) -> str | None:
    """A hint for an unknown section or key: its new name, or the verb that has it."""
    if found := way_out(f"{name}.{key}" if key else name):
        return found
    if config is TrainConfig or name not in TrainConfig.model_fields:
        return None
    kinds = kinds_of(TrainConfig.model_fields[name])
    if key is None or any(key in keys_of(kind) for kind in kinds):
        return "leave it out; only `sparroll train` has it: an adapter alone has no rewards and no policy update"
    return None


def _in_another_section(config: type[Section], key: str) -> str | None:
    """A hint for a key that other sections have; it may stand there without any."""
    found = [
        f"{name}.{key}"
        for name, field in config.model_fields.items()
        if any(key in keys_of(kind) for kind in kinds_of(field))
    ]
    return f"did you mean {' or '.join(found)}?" if found else None


def _kinds_hint(config: type[Section], name: str) -> str:
    """A hint for a section that a configuration must have."""
    field = config.model_fields[name]
    kinds = kinds_of(field)
    examples = f"; for example {field.examples[0]}" if field.examples else ""
    return f"{name}.{tag_of(kinds[0])} is {' or '.join(_name(kind) for kind in kinds)}{examples}"


def _name(kind: type[BaseModel]) -> str:
    """The name of a kind: the value of its tag."""
    return str(kind.model_fields[tag_of(kind)].default)
