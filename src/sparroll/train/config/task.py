"""The sections [model] and [task]: what is trained, and on which prompts. [data] is defined in
tasks/data/settings.py."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sparroll.train.config.base import Section


class ModelSection(Section):
    name: str = "tiny-reasoner"
    """Packaged name, hub name or folder of the model to train. The KL term's reference is loaded from here, too."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of policy and engine: auto, cpu, cuda, or a certain GPU as in cuda:1. auto: the GPU of this process if
    there is one, else the CPU."""


class TaskSection(Section):
    name: str = "synthetic"
    """Task family that writes the prompts and checks the answers."""
    level: int = Field(default=1, ge=0)
    """Difficulty. Each task defines what its levels mean."""
    train_prompts: int | None = Field(default=None, ge=1)
    """Number of different training prompts. After the last one they all come again, in another order. Default: every
    row of real data, or 1024 prompts of a task that generates them."""
    chat_template: bool = False
    """Wrap each prompt as a user's turn with the tokenizer's chat template. Meant for instruction-tuned models."""
    thinking: bool | None = None
    """Thinking mode of the chat template. It is an error where the template has no such mode. Default: the template's
    own."""

    @model_validator(mode="after")
    def _thinking_has_a_template(self) -> Self:
        if self.thinking is not None and not self.chat_template:
            raise ValueError(f"task.thinking = {str(self.thinking).lower()} needs task.chat_template = true")
        return self
