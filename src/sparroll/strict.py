"""Strict, the base of all settings that are read from files. Refuses values that pydantic would quietly turn into
another kind: true for a number, a number for true, a text for a number."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class Strict(BaseModel):
    @field_validator("*", mode="before")
    @classmethod
    def _is_of_its_own_kind(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        problem = _problem(_kinds(cls.model_fields[info.field_name].annotation), value)
        if problem:
            raise PydanticCustomError("another_kind", problem)  # type: ignore[arg-type]
        return value


def _problem(kinds: set[Any], value: Any) -> str | None:
    numeric = bool(kinds & {int, float})
    if numeric and bool not in kinds and isinstance(value, bool):
        return "must be a number, not true or false"
    if numeric and str not in kinds and isinstance(value, str):
        return "must be a number, not text"
    if int in kinds and isinstance(value, (int, float)) and abs(value) >= 2**63:
        return "must be below 2^63"
    if bool in kinds and value is not None and not isinstance(value, bool):
        return "must be true or false"
    return None


def _kinds(annotation: Any) -> set[Any]:
    """The plain types in an annotation such as `int | None` or Literal[0, 1]. Those inside a list or a table are left
    out."""
    if get_origin(annotation) is Literal:
        return {type(value) for value in get_args(annotation)}
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*(_kinds(each) for each in get_args(annotation)))
    return {annotation}
