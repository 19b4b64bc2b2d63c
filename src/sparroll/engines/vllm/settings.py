"""The plugin's settings, from `additional_config={"sparroll": ...}` or, for frameworks that forward no engine
arguments, from an environment variable. They are only parsed here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from sparroll.errors import UserError, nearest
from sparroll.schedule import Schedule

KEY = "sparroll"
SCHEDULE_VARIABLE = "SPARROLL_VLLM_SCHEDULE"
ATTENTIONS = ["triton", "fa3_pages"]


@dataclass(frozen=True)
class VLLMSettings:
    """`additional_config={"sparroll": "qwen3-4b-0.86"}`, or a table of these fields.

    >>> VLLMSettings.parse({"schedule": "qwen3-4b-0.86", "attention": "fa3_pages"})
    """

    schedule: str | Mapping[str, Any] | None = None
    """Preset, path, or the schedule itself (Schedule.inline), which also works where the engine's workers run on
    machines that have no such file. None: dense and without an index, so no schedule can be set later."""
    attention: str = "triton"
    """What attends to the chosen units on CUDA: "triton", our kernel, or "fa3_pages", FlashAttention 3 on pages per
    head."""
    force_schedule: bool = False
    """Use a schedule that was made for another model."""
    short_step_tokens: int = 0
    """Steps whose decoding requests have contexts that add up to at most so many tokens are decoded densely, where choosing
    what to read takes longer than reading it. 0: the schedule alone decides. Under full CUDA graphs this needs vLLM's V2
    model runner and our worker."""

    def __post_init__(self) -> None:
        if self.attention not in ATTENTIONS:
            raise UserError(f"unknown attention {self.attention!r}", nearest(str(self.attention), ATTENTIONS))
        check_token_count(self.short_step_tokens)
        if self.short_step_tokens and self.schedule is None:
            raise UserError("without a schedule every step is dense", "leave short_step_tokens out")

    @staticmethod
    def parse(value: Any) -> VLLMSettings:
        """The settings of the value under "sparroll": a schedule's name, path or JSON, or a table of the fields."""
        if value is None or isinstance(value, (str, os.PathLike)):
            return VLLMSettings(schedule=None if value is None else os.fspath(value))
        if not isinstance(value, Mapping):
            raise UserError(
                f'additional_config["{KEY}"] must be a schedule or a table, got {value!r}',
                'for example {"sparroll": "schedule.toml"}',
            )
        known = [field.name for field in fields(VLLMSettings)]
        if "steps" in value:
            raise UserError(
                f'additional_config["{KEY}"] is a schedule\'s own table', f'give {{"{KEY}": {{"schedule": the table}}}}'
            )
        for key in value:
            if key not in known:
                raise UserError(f'additional_config["{KEY}"] has no setting {key!r}', nearest(str(key), known))
        return VLLMSettings(**value)

    @staticmethod
    def find(vllm_config: Any) -> VLLMSettings | None:
        """The settings in force; None where the configuration and the environment do not ask for sparroll."""
        additional = getattr(vllm_config, "additional_config", None)
        if isinstance(additional, Mapping) and KEY in additional:
            return VLLMSettings.parse(additional[KEY])
        if os.environ.get(SCHEDULE_VARIABLE):
            return VLLMSettings.parse(os.environ[SCHEDULE_VARIABLE])
        return None

    def load(self, model: str) -> Schedule | None:
        """The schedule, checked against the model; None is dense."""
        return None if self.schedule is None else Schedule.load(self.schedule, model=model, force=self.force_schedule)


def check_token_count(tokens: Any) -> None:
    """Raise UserError unless `short_step_tokens` is a number of tokens."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise UserError(f"short_step_tokens must be a number of tokens, 0 or more, got {tokens!r}")
