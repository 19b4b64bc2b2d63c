"""Chats and thinking mode through a tokenizer's own template."""

from __future__ import annotations

from typing import Any

import pytest

from sparroll.engines.prompt_encoding import chat_ids, knows_thinking, prompt_ids
from sparroll.errors import UserError
from sparroll.types import Prompt

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


class Characters:
    """One id a character; renders the template as transformers does."""

    def __init__(self, chat_template: Any):
        self.chat_template = chat_template

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(sign) for sign in text]}

    def apply_chat_template(
        self, messages: Any, *, add_generation_prompt: bool, return_dict: bool, **more: Any
    ) -> list[int]:
        from jinja2 import Template

        assert add_generation_prompt and not return_dict
        return [ord(sign) for sign in Template(self.chat_template).render(messages=messages, **more)]


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_thinking_reaches_a_template_that_knows_it() -> None:
    tokenizer, prompt = Characters(TEMPLATE), Prompt("p", "hi", "")
    assert text(prompt_ids(tokenizer, prompt, True)) == "user:hi;assistant:"
    assert text(prompt_ids(tokenizer, prompt, True, thinking=True)) == "user:hi;assistant:"
    assert text(prompt_ids(tokenizer, prompt, True, thinking=False)) == "user:hi;assistant:<think></think>"


def test_thinking_is_refused_where_nothing_would_come_of_it() -> None:
    prompt = Prompt("p", "hi", "")
    with pytest.raises(
        UserError, match="task.thinking is true, but the tokenizer's chat template has no enable_thinking"
    ):
        prompt_ids(Characters("{{ messages }}"), prompt, True, thinking=True)
    with pytest.raises(UserError, match="chat template, which is off"):
        prompt_ids(Characters(TEMPLATE), prompt, False, thinking=False)
    assert not knows_thinking("{{ enable_thinking_long }}")
    assert knows_thinking({"default": TEMPLATE, "tools": ""}) and not knows_thinking({"tools": TEMPLATE})


def test_every_turn_of_a_chat_is_written_and_never_without_a_template() -> None:
    prompt = Prompt("p", "be brief hi", "", messages=(("system", "be brief"), ("user", "hi")))
    assert text(prompt_ids(Characters(TEMPLATE), prompt, True)) == "system:be brief;user:hi;assistant:"
    with pytest.raises(UserError, match="'p' is a chat"):
        prompt_ids(Characters(TEMPLATE), prompt, False)
    with pytest.raises(UserError, match="the tokenizer has none"):
        chat_ids(Characters(None), [])
