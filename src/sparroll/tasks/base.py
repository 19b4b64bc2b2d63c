"""What a task is, and the tasks by name. A task writes prompts and checks answers; it knows no tokenizer or model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from sparroll.errors import UserError, nearest
from sparroll.types import Prompt

Split = Literal["train", "eval"]


class Task(Protocol):
    """A family of prompts with verifiable answers."""

    name: str

    def prompts(self, split: Split, level: int, seed: int, count: int) -> list[Prompt]:
        """The first `count` prompts of a stream. The same arguments always give the same prompts.

        A finite task returns fewer if it has fewer.
        """
        ...

    def reward(self, prompt: Prompt, response_text: str) -> float:
        """1.0 if the response answers the prompt correctly, else 0.0."""
        ...


_FACTORIES: dict[str, Callable[[], Task]] = {}


def register(name: str, factory: Callable[[], Task]) -> None:
    """Make `get(name)` return `factory()`. Each name can be registered once."""
    if name in _FACTORIES:
        raise UserError(f"task {name!r} is already registered", "choose another name")
    _FACTORIES[name] = factory


def names() -> list[str]:
    return sorted(_FACTORIES)


def get(name: str) -> Task:
    if name not in _FACTORIES:
        raise UserError(f"unknown task {name!r}", nearest(name, names()))
    task = _FACTORIES[name]()
    missing = [member for member in ("name", "prompts", "reward") if not hasattr(task, member)]
    if missing:
        raise UserError(
            f"the task {name!r} has no {' and no '.join(missing)}", "a task has a name, `prompts` and `reward`"
        )
    return task
