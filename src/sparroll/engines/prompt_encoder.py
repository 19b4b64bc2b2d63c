"""Turns prompts into the token ids of the model's own tokenizer: as plain text, or as a chat in its template, with or
without thinking. Turns the ids of a response back into text.

Nothing here depends on a model's name. What the tokenizer's template cannot do is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.errors import UserError, reason_of
from sparroll.types import Prompt

SWITCH = "enable_thinking"
"""The variable by which chat templates turn thinking on and off."""


@dataclass(frozen=True)
class PromptEncoder:
    """From prompts to token ids, in the same way everywhere. Raises UserError at once for what the tokenizer cannot do.

    >>> PromptEncoder(engine.tokenizer, chat_template=True).ids(prompts)
    """

    tokenizer: Any
    """A transformers tokenizer."""
    chat_template: bool = False
    """Whether a plain text is put into the tokenizer's chat template, as a user's message. A chat always is."""
    thinking: bool | None = None
    """Passed to the chat template; None leaves it at the template's default."""

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            raise UserError(
                "the model has no tokenizer, so prompts cannot be encoded", "save one into the model's folder"
            )
        if self.thinking is not None and not self.chat_template:
            raise UserError(
                "thinking is a mode of the chat template, which is off",
                "turn it on: --chat, in a training configuration task.chat_template = true",
            )
        if self.chat_template and not self.tokenizer.chat_template:
            raise UserError(
                "the model's tokenizer has no chat template",
                "base models take plain text: leave --chat out, in a training configuration task.chat_template",
            )
        if self.thinking is not None and not knows_thinking(self.tokenizer.chat_template):
            raise UserError(
                f"thinking was turned {'on' if self.thinking else 'off'}, but the tokenizer's chat template has no {SWITCH}",
                "leave --thinking, --no-thinking or task.thinking out: this model has one mode",
            )

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for a chat that no template can write. Encodes nothing."""
        chat = next((prompt for prompt in prompts if prompt.messages), None)
        if chat is not None and not self.tokenizer.chat_template:
            raise UserError(
                f"the prompt {chat.prompt_id!r} is a chat, and the model's tokenizer has no chat template",
                "give plain text prompts, or a model that was trained for chats",
            )

    def ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt. A chat ends where the assistant's turn begins."""
        self.check(prompts)
        return [self._ids(prompt) for prompt in prompts]

    def _ids(self, prompt: Prompt) -> list[int]:
        if not self._is_chat(prompt):
            return text_ids(self.tokenizer, prompt.text, f"the prompt {prompt.prompt_id!r}")
        return list(self._templated(prompt, return_dict=False))

    def text(self, prompt: Prompt) -> str:
        """The prompt as text, for readers: a chat as the template writes it."""
        self.check([prompt])
        return str(self._templated(prompt, tokenize=False)) if self._is_chat(prompt) else prompt.text

    def _is_chat(self, prompt: Prompt) -> bool:
        return self.chat_template or bool(prompt.messages)

    def _templated(self, prompt: Prompt, **options: Any) -> Any:
        turns = prompt.messages or (("user", prompt.text),)
        for _, content in turns:
            check_unicode(content, f"the prompt {prompt.prompt_id!r}")
        messages = [{"role": role, "content": content} for role, content in turns]
        if self.thinking is not None:
            options[SWITCH] = self.thinking
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
        except Exception as error:
            # Templates raise errors of their own, for example where a model knows no system message.
            raise UserError(
                f"the model's chat template does not take the prompt {prompt.prompt_id!r}: {reason_of(error)}",
                "change the messages, or the template in the model's folder",
            ) from error


def text_ids(tokenizer: Any, text: str, what: str) -> list[int]:
    """Token ids of a text, without a template. what: name of the text in an error."""
    check_unicode(text, what)
    return list(tokenizer(text)["input_ids"])


def response_text(tokenizer: Any, response_ids: list[int]) -> str | None:
    """A response as text, without special tokens; None without a tokenizer."""
    return None if tokenizer is None else str(tokenizer.decode(response_ids, skip_special_tokens=True))


def check_unicode(text: str, what: str) -> None:
    """Raise UserError for a lone surrogate. JSON can write one, but it is no character, and no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}",
            "it is half a character, often of an emoji that was cut in two; leave it out",
        ) from None


def knows_thinking(template: str | dict[str, str]) -> bool:
    """Whether the template (the default one of several) reads the switch."""
    text = template if isinstance(template, str) else template.get("default", "")
    return re.search(rf"\b{SWITCH}\b", text) is not None
