"""The sections [train] and [correction]: steps and their arithmetic, the policy's optimizer and loss, and what makes up for
sampling from the sparse policy."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from sparroll.corrections import Correction, check_needs, correction
from sparroll.train.config.base import Section

TRAINER_GIVES: tuple[str, ...] = ("uniforms", "top_k")
"""What the loop hands to a correction beside dense_logp, sparse_logp and mask."""


class StepsSection(Section):
    """What every run that takes steps has; also the whole [train] of `sparroll distill`."""

    steps: int = Field(default=100, ge=1)
    """Steps in all. A resumed run may raise it."""
    prompts_per_step: int = Field(default=8, ge=1)
    """Prompts of one step, over all processes; each gets `samples_per_prompt` rollouts."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from lr / warmup_steps."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Memory of AdamW's gradient mean."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Memory of AdamW's gradient square. Lower adapts faster in short runs."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Padded tokens of one forward and backward pass. Bounds memory; does not change the result."""
    micro_batch_rollouts: int | None = Field(default=None, ge=1)
    """Also bound the rollouts of a pass."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the trainer's arithmetic. Weights and optimizer stay fp32, since bf16 would swallow small updates."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. Models with dropout are refused."""
    seed: int = Field(default=0, ge=0)
    """Of prompts, sampling and everything else that is drawn."""


class TrainSection(StepsSection):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after the warm-up; constant from there on, so more steps do not change earlier ones."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW, on matrices only."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """Gradients longer than this are scaled down to it; none leaves them."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Updates on the same rollouts. From the second on the clip bites."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token's ratio now/dense below 1 - clip_low brings no more gain."""
    clip_high: float = Field(default=0.28, gt=0)
    """Same above 1 + clip_high. Higher than clip_low lets unlikely tokens grow (clip-higher)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the initial model (k3 estimate). Above 0 a second copy of the model stays in memory."""
    normalise_advantage: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""


class CorrectionSection(Section):
    """The name, and beside it the settings of that correction: `name = "tis"`, `weight_max = 2.0`."""

    model_config = ConfigDict(extra="allow", validate_default=False, allow_inf_nan=True)
    tag = "name"
    name: str = "tis"
    """What makes up for sampling from the sparse policy; see corrections/."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        check_needs(self.make(), TRAINER_GIVES)
        return self

    def make(self) -> Correction:
        settings: dict[str, Any] = self.model_extra or {}
        return correction(self.name, **settings)
