"""The thinking part of a response: what stands in it is a thought, and no answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparroll.types import Rollout

THINKING_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""How models mark their thinking."""
_LAST_TOKENS = 16
"""Of a prompt, among which a mark at its end stands."""


def after_thinking(response_text: str) -> str:
    """What a response says behind its thinking part: nothing if the thinking never ends, all of it if there is none.

    >>> after_thinking("<think>5 or 6</think>It is 6.")
    'It is 6.'
    """
    text = response_text
    for opening, closing in THINKING_MARKS:
        end = text.rfind(closing)
        if end >= 0:
            text = text[end + len(closing) :]
        start = text.find(opening)
        if start >= 0:
            text = text[:start]
    return text


def with_opened(texts: Sequence[str], rollouts: Sequence[Rollout], decode: Callable[[list[int]], str]) -> list[str]:
    """The responses as a task reads them: behind the mark of a thinking part, where the prompt already opened it, as some
    chat templates do. Otherwise a response that was cut while it thought would look like one that answers at once."""
    return [
        f"{_opened(decode(rollout.prompt_ids[-_LAST_TOKENS:]))}{text}"
        for text, rollout in zip(texts, rollouts, strict=True)
    ]


def _opened(prompt_end: str) -> str:
    """The opening mark that a prompt ends with.

    >>> _opened("Assistant: <think>\\n")
    '<think>'
    """
    end = prompt_end.rstrip()
    return next((opening for opening, _ in THINKING_MARKS if end.endswith(opening)), "")
