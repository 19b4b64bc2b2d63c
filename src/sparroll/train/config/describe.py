"""What every setting of a run means, as a TOML file with comments that reads back as the defaults. The words are the
docstrings of the sections; nothing is explained here."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from sparroll.errors import UserError, nearest
from sparroll.train.config.base import Section, inline, keys_of, kinds_of, tag_of

_WIDTH = 110
_PLAIN = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "object": "a table",
}
_BOUNDS = {
    "minimum": "{} or more",
    "exclusiveMinimum": "above {}",
    "maximum": "{} or less",
    "exclusiveMaximum": "below {}",
}


def describe(config: type[Section], key: str | None = None) -> str:
    """All settings of a configuration, those of one section ("train"), or a single one ("train.lr")."""
    section, _, name = (key or "").partition(".")
    if section and section not in config.model_fields:
        raise UserError(f"there is no section [{section}]", _elsewhere(config, section))
    known = sorted(
        {each for kind in kinds_of(config.model_fields[section]) for each in keys_of(kind)} if section else ()
    )
    if name and name not in known:
        raise UserError(f"[{section}] has no key {name}", nearest(name, known))
    wanted = [section] if section else list(config.model_fields)
    return "\n\n".join("\n".join(_section(config, each, name)) + "\n" for each in wanted)


def _elsewhere(config: type[Section], name: str) -> str:
    """A hint for a name that is no section: the keys of that name, or else the nearest section."""
    sections = {
        section: {key for kind in kinds_of(field) for key in keys_of(kind)}
        for section, field in config.model_fields.items()
    }
    found = [f"{section}.{name}" for section, keys in sections.items() if name in keys]
    return f"it is a key: {', '.join(found)}" if found else nearest(name, list(sections))


def _section(config: type[Section], section: str, only: str) -> Iterator[str]:
    """The lines of a section: the kind that it has by default, then, as comments, the other kinds."""
    field = config.model_fields[section]
    kinds, default = kinds_of(field), field.default
    yield from _comment(field.description or "")
    if default is None:
        yield "# A run does not have this section unless you write it."
    if field.is_required():
        yield from _comment(f"A run needs this section; for example {', '.join(map(str, field.examples or []))}")
    yield f"[{section}]" if isinstance(default, BaseModel) else f"# [{section}]"
    for kind in sorted(kinds, key=lambda kind: not isinstance(default, kind)):
        yield from _kind(kind, kinds, default if isinstance(default, kind) else None, only)


def _kind(kind: type[BaseModel], kinds: list[type[BaseModel]], default: BaseModel | None, only: str) -> Iterator[str]:
    """The settings of one kind of a section. default: the section of a run that is told nothing, if it is this kind."""
    tag = tag_of(kind) if len(kinds) > 1 else ""
    names = [str(each.model_fields[tag].default) for each in kinds] if tag else []
    here = [name for name in kind.model_fields if name != tag or default is not None]
    here = [name for name in here if not only or name == only]
    further = keys_of(kind) != list(kind.model_fields) and only not in kind.model_fields
    further = further and (not only or only in keys_of(kind))
    if tag and default is None and (here or further):
        yield ""
        yield from _comment(f"-- with {tag} = {inline(kind.model_fields[tag].default)}: {_meaning(kind, tag)}")
    if further:
        yield from _further(kind, only)
    schema = kind.model_json_schema()
    for name in here:
        field = kind.model_fields[name]
        values = f"one of {', '.join(names)}" if name == tag else _values(schema["properties"][name], schema)
        shown = f"{name} = {_shown(field, default, name)}  # {values}"
        example = "; this is an example, there is no default" if field.is_required() else ""
        yield from ["", *_comment(_meaning(kind, name)), *_entries(schema["properties"][name], schema)]
        yield ("" if default is not None else "# ") + shown + example


def _further(kind: type[BaseModel], only: str) -> Iterator[str]:
    """The settings of each thing that the section can name, which are further keys of the section."""
    assert issubclass(kind, Section), "only our own sections take further keys"
    yield from ["", *_comment(inspect.getdoc(kind) or "")]
    for name, made in kind.further().items():
        settings = {key: value for key, value in dataclasses.asdict(made).items() if not only or key == only}
        if settings or not only:
            shown = ", ".join(f"{key} = {inline(value)}" for key, value in settings.items()) or "no settings"
            yield from _comment(f"- {name}: {shown}")


def _entries(schema: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    """The keys of each entry, if the setting is a list of tables."""
    if "$ref" in schema.get("items", {}):
        for name, about in _target(schema["items"], whole)["properties"].items():
            yield from _comment(f"- {name}: {about.get('description', '')}")


def _meaning(kind: type[BaseModel], name: str) -> str:
    return " ".join((kind.model_fields[name].description or "").split())


def _shown(field: FieldInfo, default: BaseModel | None, name: str) -> str:
    """The value that a setting has by default, or an example where it has none."""
    if default is not None:
        return inline(default.model_dump(mode="json")[name])
    if field.is_required():
        return inline((field.examples or [""])[0])
    return inline(field.get_default(call_default_factory=True))


def _values(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """What a setting may be, from its JSON schema."""
    if "anyOf" in schema:
        several = [_values(each, whole) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(several) + (', or "none"' if len(several) < len(schema["anyOf"]) else "")
    if "$ref" in schema:
        return "a table"
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("format") == "date":
        return "a date such as 2024-08-01"
    if schema.get("type") == "array":
        return f"a list, each entry {_values(schema.get('items', {'type': 'string'}), whole)}"
    kind = _PLAIN.get(schema.get("type", ""), "a text")
    bounds = [text.format(_figure(schema[name])) for name, text in _BOUNDS.items() if name in schema]
    return ", ".join([kind, *bounds])


def _figure(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


def _target(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def _comment(text: str) -> list[str]:
    lines = textwrap.wrap(" ".join(text.split()), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]
