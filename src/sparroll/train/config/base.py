"""What a section of a configuration is, and how a section can have several kinds. No setting of a run is defined
here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from sparroll.strict import Strict


class Section(Strict):
    """One table of the file. A section with several kinds, such as [attention], has a class for each kind. One field,
    its tag, says which kind a run has."""

    # config.json holds every value, and JSON has no infinity.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    tag: ClassVar[str] = ""
    """Name of the field that says which kind this is. Empty: the section has only one kind."""

    @classmethod
    def further(cls) -> dict[str, Any]:
        """For a section whose further keys are the settings of something that it names: each thing that it can name,
        as a dataclass with its default settings."""
        return {}

    @classmethod
    def known_keys(cls) -> list[str]:
        """All keys that this kind of section can have."""
        settings = (field.name for each in cls.further().values() for field in dataclasses.fields(each))
        return list(dict.fromkeys([*cls.model_fields, *settings]))


def kinds_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes of a section's kinds; the first is the default."""
    found = [each for each in get_args(field.annotation) or (field.annotation,) if each is not type(None)]
    assert all(isinstance(each, type) and issubclass(each, BaseModel) for each in found), f"{found} are no sections"
    return found


def tag_of(kind: type[BaseModel]) -> str:
    return kind.tag if issubclass(kind, Section) else ""


def keys_of(kind: type[BaseModel]) -> list[str]:
    return kind.known_keys() if issubclass(kind, Section) else list(kind.model_fields)


def may_be_absent(field: FieldInfo | None) -> bool:
    """Whether the section or field may be None, which a file writes as "none"."""
    return field is not None and type(None) in get_args(field.annotation)


def inline(value: Any) -> str:
    """A value as TOML has it on one line; "none" stands for null, which TOML lacks.

    >>> inline([{"use": "task", "weight": 0.5}, None])
    '[{ use = "task", weight = 0.5 }, "none"]'
    """
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline(item) for item in value)}]"
    return json.dumps(value)
