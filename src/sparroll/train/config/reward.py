"""The section [reward]: the terms that are weighted and added up to a response's reward, and what long responses
lose."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from sparroll.errors import nearest
from sparroll.tasks.async_calls import AT_ONCE, SECONDS
from sparroll.train.config.base import Section

TASK = "task"
"""Name of the reward term that is the task's own verdict."""


class RewardTerm(Section):
    """One term of the reward."""

    use: str = Field(default=TASK, pattern=r"^(task|[^\W\d][\w.]*:[^\W\d][\w.]*)$")
    """"task" is the task's own verdict, from 0 to 1; "package.module:function" your own function: docs/rewards.md."""
    weight: float = 1.0
    """Its values are multiplied by this. A term of weight 0 is only measured."""
    name: str = Field(default="", pattern=r"^[\w.-]+$")
    """Name in the metrics. Default: "task", or the function's own name."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments that are passed to the function by name."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        for key in table.keys() - cls.model_fields.keys():
            raise ValueError(f"unknown key {key!r} of reward.terms: {nearest(key, list(cls.model_fields))}")
        return {"name": str(table.get("use", TASK)).rpartition(":")[2].rpartition(".")[2]} | table

    @model_validator(mode="after")
    def _task_has_no_settings(self) -> Self:
        if self.use == TASK and self.settings:
            raise ValueError("the reward term 'task' takes no settings; those of the task are in [task] and [data]")
        return self


class RewardSection(Section):
    terms: tuple[RewardTerm, ...] = Field(default=(RewardTerm(),), min_length=1)
    """The terms that are weighted and added up. Default: the task's verdict alone."""
    async_at_once: int = Field(default=AT_ONCE, ge=1)
    """Each process has at most this many calls of an async function in flight at a time."""
    async_seconds: float = Field(default=SECONDS, gt=0)
    """Time limit of one such call. When a call exceeds it, the run stops and can be resumed. Functions that are not
    async have no time limit."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Soft overlong punishment (DAPO): over this many tokens before rollout.max_new_tokens, the penalty grows linearly
    from 0. 0: there is no such penalty."""
    overlong_penalty: float = Field(default=1.0, gt=0, le=1e6)
    """Reward that a response of rollout.max_new_tokens tokens loses."""
    leave_out_truncated: bool = False
    """Leave truncated responses out of the loss and its denominator (overlong filtering). Their reward still counts for
    the mean of their group."""

    @model_validator(mode="after")
    def _prefers_something(self) -> Self:
        names = [term.name for term in self.terms]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two reward terms are named {name!r}; give one another `name`")
        if not any(term.weight for term in self.terms):
            raise ValueError("every weight of reward.terms is 0, so no response would be better than another")
        if self.overlong_penalty != 1.0 and not self.overlong_buffer_tokens:
            raise ValueError("reward.overlong_penalty does nothing without reward.overlong_buffer_tokens")
        return self
