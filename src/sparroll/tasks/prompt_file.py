"""Prompts to sample from: those of a file that the user wrote, or of a built-in task. Encodes and samples nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparroll.errors import UserError
from sparroll.tasks.base import get
from sparroll.types import Prompt

ChatMessages = list[dict[str, Any]]
"""The turns of one prompt, as a chat template takes them."""


def read_prompts(path: Path | None, task: str | None, level: int, count: int, seed: int) -> list[Prompt | ChatMessages]:
    """At most `count` prompts, from exactly one of the two places: a file, or the eval split of a task."""
    if (path is None) == (task is None):
        raise UserError("give either --prompts FILE or --task NAME", "for a first try: --task synthetic --level 3")
    if task is not None:
        return [*get(task).prompts("eval", level, seed, count)]
    assert path is not None
    entries = _jsonl(path) if path.suffix == ".jsonl" else _lines(path)
    if not entries:
        raise UserError(f"there are no prompts in {path}", "a text file holds one a line; JSONL has the key 'prompt'")
    return entries[:count]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the prompts file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts file {path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _lines(path: Path) -> list[Prompt | ChatMessages]:
    lines = [line.strip() for line in _text(path).splitlines()]
    return [Prompt(f"{path.name}:{number}", line, answer="") for number, line in enumerate(lines, 1) if line]


def _jsonl(path: Path) -> list[Prompt | ChatMessages]:
    entries: list[Prompt | ChatMessages] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON: {error}") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if isinstance(prompt, str) and prompt:
            entries.append(Prompt(f"{path.name}:{number}", prompt, answer=str(row.get("answer", ""))))
        elif isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
            entries.append(prompt)
        else:
            raise UserError(f"{where} has no prompt", 'each line needs "prompt": a string or a list of chat messages')
    return entries


def texts(entries: Sequence[Prompt | ChatMessages]) -> list[str | ChatMessages]:
    """What each prompt says, for a record."""
    return [entry.text if isinstance(entry, Prompt) else entry for entry in entries]
