"""Reads prompts to sample from: from a file that the user wrote, or from a built-in task. engines/prompt_encoder.py
turns them into token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparroll.errors import UserError
from sparroll.tasks.base import get
from sparroll.types import Prompt

Message = dict[str, str]

_WHAT_A_PROMPT_IS = (
    'each line needs the key "prompt": a string, or chat messages {"role": ..., "content": ...} without other keys'
)


def read_prompts(path: Path | None, task: str | None, level: int, count: int, seed: int) -> list[Prompt]:
    """At most `count` prompts, either from the file or from the task. Raises UserError unless exactly one of them is
    given."""
    if (path is None) == (task is None):
        raise UserError("give either --prompts FILE or --task NAME", "for a first try: --task synthetic --level 3")
    if task is not None:
        return get(task).prompts("eval", level, seed, count)
    assert path is not None
    entries = _jsonl(path) if path.suffix == ".jsonl" else _lines(path)
    if not entries:
        raise UserError(
            f"there are no prompts in {path}", "a text file has one prompt per line; JSONL has the key 'prompt'"
        )
    return entries[:count]


def plain_prompt(prompt: Prompt) -> str | list[Message]:
    """A prompt as a record holds it: its text, or the messages of a chat."""
    return [{"role": role, "content": content} for role, content in prompt.messages] or prompt.text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the prompts file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts file {path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _lines(path: Path) -> list[Prompt]:
    lines = [line.strip() for line in _text(path).splitlines()]
    return [Prompt(f"{path.name}:{number}", line, answer="") for number, line in enumerate(lines, 1) if line]


def _jsonl(path: Path) -> list[Prompt]:
    entries: list[Prompt] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON: {error}") from None
        prompt = row.get("prompt") if isinstance(row, dict) else None
        turns = _turns(prompt)
        text = prompt if isinstance(prompt, str) else "\n".join(content for _, content in turns)
        if not text:
            raise UserError(f"{where} has no prompt", _WHAT_A_PROMPT_IS)
        entries.append(Prompt(f"{path.name}:{number}", text, answer=str(row.get("answer", "")), messages=turns))
    return entries


def _turns(messages: Any) -> tuple[tuple[str, str], ...]:
    """(role, content) of each message; empty if this is not a chat."""
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        return ()
    return tuple((message["role"], message["content"]) for message in messages)


def _is_message(message: Any) -> bool:
    # Messages with other keys, such as tool calls, are refused, because those keys would be lost silently.
    whole = isinstance(message, dict) and message.keys() == {"role", "content"}
    return whole and all(isinstance(text, str) for text in message.values())
