"""The sections [mismatch], [evaluate], [checkpoint] and [log]: what a run measures and what it keeps."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparroll.train.config.base import Section


class MismatchSection(Section):
    bin_tokens: int = Field(default=2000, ge=1)
    """Width of the context-length bins that the tail is reported for, in tokens."""
    least_tokens: int = Field(default=200, ge=20)
    """A bin with fewer tokens in a step is shown, but not counted as the worst one: its 5th percentile is noise."""
    ceiling_every_steps: int = Field(default=10, ge=0)
    """How often the dense ceiling is measured on fresh dense rollouts; 0: only before the first step."""
    ceiling_prompts: int = Field(default=2, ge=1)
    """Dense rollouts of one such measurement."""


class HeldOutSection(Section):
    """Held-out prompts; also the whole [evaluate] of `sparroll distill`, which measures their tail."""

    prompts: int = Field(default=64, ge=0)
    """Prompts of the eval split, always the same; 0 turns the evaluation off."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Responses per prompt. More narrow the interval less than more prompts do."""
    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every so many steps. Before the first and after the last step it always happens."""
    level: int | None = Field(default=None, ge=0)
    """Difficulty; without one, the training level."""


class EvaluateSection(HeldOutSection):
    temperature: float = Field(default=1.0, ge=0)
    """Of the dense responses; 0 is greedy."""


class CheckpointSection(Section):
    every_steps: int = Field(default=10, ge=0)
    """Save after every so many steps; 0: only at the end and on Ctrl-C. A kill loses what came after the last one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that stay on disk."""


class LogSection(Section):
    sinks: tuple[Literal["console", "tensorboard", "wandb", "trackio"], ...] = ("console",)
    """Where metrics go beside metrics.jsonl, which is always written."""
    project: str = "sparroll"
    """Project name for W&B and trackio."""
    run_name: str | None = None
    """Run name there; without one, the output folder's name."""
