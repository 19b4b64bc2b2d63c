"""Prompts as the model's own tokenizer writes them: plain, or as a chat in its template, with or without thinking.

Nothing here knows a model by name; what its template cannot do is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sparroll.errors import UserError
from sparroll.types import Prompt

SWITCH = "enable_thinking"


def prompt_ids(tokenizer: Any, prompt: Prompt, chat_template: bool, thinking: bool | None = None) -> list[int]:
    """Token ids of one prompt. thinking: passed to the template; None leaves it at the template's own default.

    Raises UserError for a chat without a template, and for `thinking` where the template does not know it.
    """
    if not chat_template:
        if thinking is not None:
            raise UserError("thinking is a matter of the chat template, which is off", "turn task.chat_template on")
        if prompt.messages:
            raise UserError(f"the prompt {prompt.prompt_id!r} is a chat", "turn task.chat_template on")
        return list(tokenizer(prompt.text)["input_ids"])
    messages = prompt.messages or (("user", prompt.text),)
    return chat_ids(tokenizer, [{"role": role, "content": content} for role, content in messages], thinking)


def given_ids(
    tokenizer: Any, entries: Sequence[Prompt | list[dict[str, Any]]], chat: bool, thinking: bool | None = None
) -> list[list[int]]:
    """Token ids of prompts as a user gave them: chats always go through the chat template, plain text with `chat` only."""
    return [_given_ids(tokenizer, entry, chat, thinking) for entry in entries]


def _given_ids(tokenizer: Any, entry: Prompt | list[dict[str, Any]], chat: bool, thinking: bool | None) -> list[int]:
    if isinstance(entry, Prompt):
        if not entry.messages and not chat:
            return list(tokenizer(entry.text)["input_ids"])
        messages = entry.messages or (("user", entry.text),)
        entry = [{"role": role, "content": content} for role, content in messages]
    if not tokenizer.chat_template:
        raise UserError("the model's tokenizer has no chat template", "leave --chat out and give plain text prompts")
    return chat_ids(tokenizer, entry, thinking)


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], thinking: bool | None = None) -> list[int]:
    """Token ids of a chat up to where the assistant begins."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise UserError("task.chat_template is on, but the tokenizer has none", "turn it off for base models")
    options = {} if thinking is None else {SWITCH: thinking}
    if options and not knows_thinking(template):
        raise UserError(
            f"task.thinking is {str(thinking).lower()}, but the tokenizer's chat template has no {SWITCH}",
            "leave task.thinking out: this model has one mode",
        )
    return list(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False, **options))


def knows_thinking(template: str | dict[str, str]) -> bool:
    """Whether the template (the default one of several) reads the switch."""
    text = template if isinstance(template, str) else template.get("default", "")
    return re.search(rf"\b{SWITCH}\b", text) is not None
