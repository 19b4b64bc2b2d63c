"""The sections [model] and [task]: what is trained, and on which prompts. [data] is tasks/data/settings.py."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sparroll.train.config.base import Section


class ModelSection(Section):
    name: str = "tiny-reasoner"
    """Packaged name, hub name or folder of the model to train; also where the reference of the KL term comes from."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU of this process if there is one."""


class TaskSection(Section):
    name: str = "synthetic"
    """Task family that writes the prompts and checks the answers."""
    level: int = Field(default=1, ge=0)
    """Difficulty; what a level means is the task's business."""
    train_prompts: int | None = Field(default=None, ge=1)
    """Distinct training prompts; after the last one they all come again, in another order. None: every row of real data,
    1024 of a task that never ends."""
    chat_template: bool = False
    """Wrap each prompt as a user's turn with the tokenizer's chat template. For instruction-tuned models."""
    thinking: bool | None = None
    """Thinking mode of the chat template; refused where the template has none. None: the template's own default."""

    @model_validator(mode="after")
    def _thinking_has_a_template(self) -> Self:
        if self.thinking is not None and not self.chat_template:
            raise ValueError(f"task.thinking = {str(self.thinking).lower()} needs task.chat_template = true")
        return self
