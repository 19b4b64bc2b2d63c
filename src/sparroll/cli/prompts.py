"""Prompts for a verb: from a file of one's own, or from a built-in task. Reads and tokenises; samples nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparroll import tasks
from sparroll.engines.prompt_encoding import chat_ids
from sparroll.errors import UserError
from sparroll.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]


def read(path: Path | None, task: str | None, level: int, count: int, seed: int) -> list[Prompt] | list[list[Message]]:
    """At most `count` prompts, from exactly one of the two places."""
    if (path is None) == (task is None):
        raise UserError("give either --prompts FILE or --task NAME", "for a first try: --task synthetic --level 3")
    if task is not None:
        return tasks.get(task).prompts("eval", level, seed, count)
    assert path is not None
    entries = _jsonl(path) if path.suffix == ".jsonl" else _lines(path)
    if not entries:
        raise UserError(f"there are no prompts in {path}", "a text file holds one a line; JSONL has the key 'prompt'")
    return entries[:count]


def encode(
    prompts: list[Any], tokenizer: PreTrainedTokenizerBase, chat: bool, thinking: bool | None = None
) -> list[list[int]]:
    """Token ids. Chat messages always go through the model's chat template, plain text only with `chat`."""
    turns = [_turns(prompt) if isinstance(prompt, Prompt) else prompt for prompt in prompts]
    return [_ids(each, tokenizer, chat, thinking) for each in turns]


def _turns(prompt: Prompt) -> str | list[Message]:
    return [{"role": role, "content": content} for role, content in prompt.messages] or prompt.text


def _ids(
    prompt: str | list[Message], tokenizer: PreTrainedTokenizerBase, chat: bool, thinking: bool | None
) -> list[int]:
    if isinstance(prompt, str) and not chat:
        return list(tokenizer(prompt)["input_ids"])
    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template", "leave --chat out and give plain text prompts")
    return chat_ids(tokenizer, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, thinking)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read the prompts file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"the prompts file {path} is not UTF-8: {error.reason} at byte {error.start}") from None


def _lines(path: Path) -> list[Any]:
    lines = [line.strip() for line in _text(path).splitlines()]
    return [Prompt(f"{path.name}:{number}", line, answer="") for number, line in enumerate(lines, 1) if line]


def _jsonl(path: Path) -> list[Any]:
    entries: list[Any] = []
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
