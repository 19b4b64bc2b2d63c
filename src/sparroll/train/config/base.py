"""What a section of a configuration is, and how a section with several kinds knows them. Has no field of any run itself."""

from __future__ import annotations

from typing import ClassVar, get_args

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """One table of the file. A section with several kinds, such as [attention], has a class for each, and one field, its
    tag, says which of them a run has."""

    # config.json holds every value, and JSON has no infinity.
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    tag: ClassVar[str] = ""
    """The field that says which kind it is. Empty: there is only this one."""

    @classmethod
    def known_keys(cls) -> list[str]:
        """All keys that this kind of section can have."""
        return list(cls.model_fields)


def kinds_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The classes that a section of a configuration may be; the first is the one it is by default."""
    found = [each for each in get_args(field.annotation) or (field.annotation,) if each is not type(None)]
    assert all(isinstance(each, type) and issubclass(each, BaseModel) for each in found), f"{found} are no sections"
    return found


def tag_of(kind: type[BaseModel]) -> str:
    return kind.tag if issubclass(kind, Section) else ""


def keys_of(kind: type[BaseModel]) -> list[str]:
    return kind.known_keys() if issubclass(kind, Section) else list(kind.model_fields)


def may_be_absent(field: FieldInfo | None) -> bool:
    """Whether "none" is a value of it."""
    return field is not None and type(None) in get_args(field.annotation)
