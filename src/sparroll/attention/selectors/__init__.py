"""Selectors by name: the built-in ones, those registered in this process, and those of installed packages. A selector
says how a unit of the KV cache is summed up and scored. Each selector is one small file.

A package can offer its own selector through the entry-point group `sparroll.selectors` (name = kind, value = class);
docs/selectors.md has the six steps.
"""

from __future__ import annotations

import dataclasses
from importlib.metadata import entry_points
from typing import Any

from sparroll.attention.selectors.base import Selector
from sparroll.attention.selectors.head_softmax import HeadSoftmax
from sparroll.attention.selectors.oracle import OraclePage, OracleToken
from sparroll.attention.selectors.page_mean import PageMean
from sparroll.attention.selectors.quantized_mean import QuantizedMean
from sparroll.attention.selectors.quest import Quest
from sparroll.attention.selectors.remainder import Remainder
from sparroll.attention.selectors.streaming import Streaming
from sparroll.errors import UserError, nearest

_SELECTORS: dict[str, type[Selector]] = {
    selector.kind: selector
    for selector in (PageMean, QuantizedMean, Quest, HeadSoftmax, Streaming, OraclePage, OracleToken)
}


def register_selector(selector: type[Selector]) -> type[Selector]:
    """Make a Selector subclass known under its `kind`; usable as a class decorator. Raises UserError where the kind is
    taken."""
    taken = _SELECTORS.get(selector.kind)
    if taken is not None and taken is not selector:
        raise UserError(
            f"selector kind {selector.kind!r} is already taken by {taken.__qualname__}", "pick another kind"
        )
    _SELECTORS[selector.kind] = selector
    return selector


def selector_kinds() -> list[str]:
    """Every kind that `make_selector` accepts, including those of installed packages."""
    return sorted({*_SELECTORS, *(point.name for point in entry_points(group="sparroll.selectors"))})


def make_selector(table: dict[str, Any]) -> Selector:
    """A selector from a schedule file's table: {"kind": "page_mean", "page_tokens": 16, ...}.

    Raises UserError for an unknown kind, an unknown key, or a value the selector refuses.
    """
    settings = dict(table)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise UserError(f"the kind of a selector must be text, got {kind!r}", f"known: {', '.join(selector_kinds())}")
    if kind not in _SELECTORS:
        for point in entry_points(group="sparroll.selectors", name=str(kind)):
            register_selector(point.load())
    if kind not in _SELECTORS:
        raise UserError(f"unknown selector kind {kind!r}", nearest(str(kind), selector_kinds()))
    known = [field.name for field in dataclasses.fields(_SELECTORS[kind])]
    for key in settings:
        if key not in known:
            raise UserError(f"selector {kind!r} has no setting {key!r}", nearest(key, known))
    if "remainder" in settings:
        settings["remainder"] = Remainder.from_table(settings["remainder"])
    return _SELECTORS[kind](**settings)


__all__ = [
    "HeadSoftmax",
    "OraclePage",
    "OracleToken",
    "PageMean",
    "QuantizedMean",
    "Quest",
    "Remainder",
    "Selector",
    "Streaming",
    "make_selector",
    "register_selector",
    "selector_kinds",
]
