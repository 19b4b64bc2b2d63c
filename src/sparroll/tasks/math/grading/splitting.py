r"""Where a cleaned answer splits: at signs outside all brackets, braces and environments. Knows no mathematics."""

from __future__ import annotations

import re
from collections.abc import Sequence

_STEP = re.compile(r'\\begin\{(\w+)\*?\}|\\end\{(\w+)\*?\}|\\[A-Za-z]+|\\.|"[^"]*"|.', re.DOTALL)
_OPEN, _CLOSE = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}


def words_in(text: str) -> list[str]:
    """The words of a text that lists them."""
    return text.split()


def split(text: str, signs: Sequence[str]) -> list[str]:
    """The parts between signs at the top level."""
    parts, last, depth = [], 0, 0
    for step in _STEP.finditer(text):
        sign = step.group()
        if step[1] or sign in _OPEN:
            depth += 1
        elif step[2] or sign in _CLOSE:
            depth = max(0, depth - 1)
        elif depth == 0 and sign in signs:
            parts.append(text[last : step.start()])
            last = step.end()
    parts.append(text[last:])
    return [part.strip() for part in parts]


def has_top(text: str, signs: Sequence[str]) -> bool:
    """Whether one of the signs stands at the top level."""
    return len(split(text, signs)) > 1


def whole_group(text: str) -> tuple[str, str, str] | None:
    """Opening sign, content and closing sign, if one bracket of any kind holds the whole text."""
    depth = 0
    first: str | None = None
    first_end = 0
    for step in _STEP.finditer(text):
        sign = step.group()
        if sign in _OPEN:
            depth += 1
            if first is None:
                first, first_end = sign, step.end()
        elif sign in _CLOSE:
            depth -= 1
            if depth == 0 and step.end() < len(text):
                return None
            if depth == 0 and first is not None:
                return first, text[first_end : step.start()].strip(), sign
        if first is None:
            return None
    return None


def stripped(text: str) -> str:
    """The text without braces or parentheses around all of it."""
    text = text.strip()
    while True:
        group = whole_group(text)
        if group is None or (group[0], group[2]) not in (("{", "}"), ("(", ")")) or has_top(group[1], (",", ";")):
            return text
        text = group[1]


def without_doubles(text: str) -> str:
    """The text with each group that holds nothing but another group of its kind reduced to one."""
    pairs: dict[int, int] = {}
    opened: list[tuple[str, int]] = []
    for place, sign in enumerate(text):
        if sign in "({" and text[place - 1 : place] != "\\":
            opened.append((sign, place))
        elif sign in ")}" and text[place - 1 : place] != "\\" and opened:
            opening, start = opened.pop()
            if opening + sign not in ("()", "{}"):
                return text
            pairs[start] = place
    doubled = {
        place
        for start, end in pairs.items()
        if pairs.get(start + 1) == end - 1 and text[start] == text[start + 1]
        for place in (start, end)
    }
    return "".join(sign for place, sign in enumerate(text) if place not in doubled)


def depth(text: str) -> int:
    """How deeply groups are nested."""
    deepest = now = 0
    for sign in text:
        now = max(0, now + (sign in "({[") - (sign in ")}]"))
        deepest = max(deepest, now)
    return deepest


_NEW_ROW = re.compile(r"\\\\\*?(?:\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in|mu)\s*\])?")
"""The end of a row, with the space behind it: `\\\\` or `\\\\[6pt]`. A row may begin with a bracket of its own."""


def environment(text: str) -> tuple[str, list[list[str]]] | None:
    r"""The name and the cells of a text that is one environment, such as a matrix."""
    found = re.fullmatch(r"\\begin\{(\w+)\*?\}(?:\{[lcr|\s]*\})?(.*)\\end\{\1\*?\}", text.strip(), re.DOTALL)
    if found is None or r"\begin" in found[2]:
        return None
    rows = [row for row in _NEW_ROW.split(found[2].replace(r"\hline", " ")) if row.strip()]
    return found[1], [[cell.strip() for cell in row.split("&")] for row in rows]
