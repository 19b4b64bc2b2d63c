"""The sections [mismatch], [evaluate], [checkpoint] and [log]: what a run measures and what it keeps."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from sparroll.train.config.base import Section
from sparroll.types import LEAST_TEMPERATURE, MOST_SAMPLES


class MismatchSection(Section):
    bin_tokens: int = Field(default=2000, ge=1)
    """Width of the context-length bins that the tail is reported for, in tokens."""
    least_tokens: int = Field(default=200, ge=20)
    """A bin with fewer tokens is shown but decides nothing and is never the worst one, because its 5th percentile is
    noise."""
    ceiling_every_steps: int = Field(default=10, ge=0)
    """The dense ceiling is measured on fresh dense rollouts every this many steps; 0: only before the first step. A
    control group (`rollout.control_share`) takes their place: the ceiling is that of its rollouts, in every step that
    trains on one. Where checks of drafts give the dense log-probabilities, the fresh rollouts stay."""
    ceiling_prompts: int = Field(default=2, ge=1)
    """Dense rollouts in one such measurement, one for each prompt. With a control group: how many of its rollouts are
    pooled at least, over the newest steps, but never fewer than 8."""


class HeldOutSection(Section):
    """How held-out prompts are chosen. `sparroll distill`, which measures their tail, has no other fields in
    [evaluate]."""

    prompts: int = Field(default=64, ge=0)
    """How many prompts of the eval split are used, the same ones each time; 0 turns the evaluation off."""
    samples_per_prompt: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    """Responses per prompt. More of them narrow the interval, but less than more prompts do."""
    every_steps: int = Field(default=0, ge=0)
    """Evaluate after every this many steps. The run is always evaluated before its first and after its last step."""
    level: int | None = Field(default=None, ge=0)
    """Difficulty of the prompts. Default: the training level."""

    @model_validator(mode="after")
    def _prompts_are_evaluated(self) -> Self:
        if self.prompts == 0 and (self.every_steps or self.level is not None):
            field = "every_steps" if self.every_steps else "level"
            raise ValueError(f"evaluate.{field} does nothing with evaluate.prompts = 0, which evaluates nothing")
        return self


class EvaluateSection(HeldOutSection):
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature of the dense responses; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Below 1, each token of these responses is drawn from the fewest most likely ones with at least this mass."""

    @model_validator(mode="after")
    def _can_be_sampled_at(self) -> Self:
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"evaluate.temperature must be 0 or from {LEAST_TEMPERATURE:g} up, got {self.temperature}")
        return self

    @model_validator(mode="after")
    def _top_p_has_an_effect(self) -> Self:
        if self.temperature == 0 and self.top_p < 1:
            raise ValueError(
                f"evaluate.top_p = {self.top_p} does nothing with evaluate.temperature = 0, which is greedy"
            )
        return self


class CheckpointSection(Section):
    every_steps: int = Field(default=10, ge=0)
    """Save after every this many steps; 0: only at the end and on Ctrl-C. A kill loses the steps since the last
    checkpoint."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints stay on disk."""


class LogSection(Section):
    sinks: tuple[Literal["console", "tensorboard", "wandb", "trackio"], ...] = ("console",)
    """Where metrics go in addition to metrics.jsonl, which is always written."""
    project: str = "sparroll"
    """Project name for W&B and trackio."""
    run_name: str | None = None
    """Name of the run there. Default: the output folder's name."""
