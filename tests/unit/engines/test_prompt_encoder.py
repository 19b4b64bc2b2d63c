"""Prompts as token ids: plain texts, chats and thinking mode through a tokenizer's own template."""

from __future__ import annotations

from typing import Any

import pytest

from cli_runs import tokenizer
from sparroll.engines.prompt_encoder import PromptEncoder, knows_thinking
from sparroll.errors import UserError
from sparroll.types import Prompt

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
TEXT = Prompt("t", "hi", "")
CHAT = Prompt("c", "be brief hi", "", messages=(("system", "be brief"), ("user", "hi")))


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


def texts(template: Any, *prompts: Prompt, chat_template: bool = False, thinking: bool | None = None) -> list[str]:
    encoder = PromptEncoder(Characters(template), chat_template, thinking)
    return ["".join(map(chr, ids)) for ids in encoder.ids(prompts)]


def test_a_text_is_encoded_as_it_is_or_as_a_users_turn() -> None:
    assert texts(None, TEXT, TEXT) == ["hi", "hi"]
    assert texts(TEMPLATE, TEXT, chat_template=True) == ["user:hi;assistant:"]


@pytest.mark.parametrize("chat_template", [False, True])
def test_every_turn_of_a_chat_is_written_in_the_template_whether_texts_are_or_not(chat_template: bool) -> None:
    assert texts(TEMPLATE, CHAT, chat_template=chat_template) == ["system:be brief;user:hi;assistant:"]


def test_thinking_reaches_a_template_that_knows_it() -> None:
    assert texts(TEMPLATE, TEXT, chat_template=True, thinking=True) == ["user:hi;assistant:"]
    assert texts(TEMPLATE, TEXT, chat_template=True, thinking=False) == ["user:hi;assistant:<think></think>"]


def test_a_template_that_is_missing_is_an_error_before_the_first_prompt_or_at_the_first_chat() -> None:
    with pytest.raises(UserError, match="has no chat template"):
        PromptEncoder(Characters(None), chat_template=True)
    with pytest.raises(UserError, match="'c' is a chat, and the model's tokenizer has no chat template"):
        texts(None, TEXT, CHAT)
    with pytest.raises(UserError, match="has no tokenizer"):
        PromptEncoder(None)


def test_thinking_is_refused_where_nothing_would_come_of_it() -> None:
    with pytest.raises(
        UserError, match="thinking was turned on, but the tokenizer's chat template has no enable_thinking"
    ):
        PromptEncoder(Characters("{{ messages }}"), chat_template=True, thinking=True)
    with pytest.raises(UserError, match="chat template, which is off"):
        PromptEncoder(Characters(TEMPLATE), thinking=False)
    assert not knows_thinking("{{ enable_thinking_long }}")
    assert knows_thinking({"default": TEMPLATE, "tools": ""}) and not knows_thinking({"tools": TEMPLATE})


def test_a_template_that_refuses_a_chat_names_the_prompt() -> None:
    words = tokenizer()
    words.chat_template = "{{ raise_exception('System role not supported') }}"
    chat = Prompt("mine:3", "a b", "", messages=(("system", "a"), ("user", "b")))
    with pytest.raises(UserError, match="does not take the prompt 'mine:3': TemplateError: System role not supported"):
        PromptEncoder(words).ids([chat])
