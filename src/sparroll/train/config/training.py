"""The sections [train] and [correction]: the steps and their arithmetic, the policy's optimizer and loss, and the
correction for sampling from the sparse policy."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from sparroll.corrections import Correction, check_needs, correction, names
from sparroll.train.config.base import Section
from sparroll.types import LARGEST_SEED, MOST_SAMPLES

TRAINER_GIVES: tuple[str, ...] = ("uniforms", "top_k")
"""What the loop can pass to a correction in addition to dense_logp, sparse_logp and mask."""


class StepsSection(Section):
    """The fields of every run that takes steps. `sparroll distill` has no other fields in [train]."""

    steps: int = Field(default=100, ge=1)
    """Total number of steps. A resumed run may change it."""
    prompts_per_step: int = Field(default=8, ge=1, le=MOST_SAMPLES)
    """Prompts of one step, over all processes; each gets `samples_per_prompt` rollouts."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly from lr / warmup_steps."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the running mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the running mean of squared gradients. A lower one adapts faster in short runs."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Largest number of padded tokens in one forward and backward pass. It bounds memory and does not change the
    result."""
    micro_batch_rollouts: int | None = Field(default=None, ge=1)
    """Largest number of rollouts in one pass; "none": only the tokens are bounded."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the trainer's arithmetic. Weights and optimizer stay fp32, since bf16 would swallow small
    updates."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which takes less memory and about a third more time. A model with
    dropout is an error."""
    seed: int = Field(default=0, ge=0, le=LARGEST_SEED)
    """Seed of the prompts, of sampling and of all other random draws."""


class TrainSection(StepsSection):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW after the warm-up. It stays constant, so asking for more steps does not change earlier
    ones."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW, on matrices only."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """A gradient with a larger norm than this is scaled down to it; "none" turns this off."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Updates on the same rollouts. The clip has an effect only from the second one on."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """A token gains nothing more once its ratio now/dense is below 1 - clip_low."""
    clip_high: float = Field(default=0.28, gt=0)
    """The same above 1 + clip_high. A value above clip_low lets unlikely tokens grow (clip-higher)."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the initial model (k3 estimate). Above 0 a second copy of the model stays in memory."""
    rollouts_behind_steps: int = Field(default=0, ge=0, le=16)
    """Rollouts are sampled with the weights of this many steps before, as an asynchronous trainer's are; the first steps
    have fewer before them. That many copies of the weights stay in host memory and in each checkpoint, and one more on the
    device. 0: the newest weights."""
    dense_of: Literal["now", "sampler"] = "now"
    """Whose dense log-probabilities a step with older rollouts uses. now: those of the policy before its update, so the
    correction takes in sparsity and staleness together. sampler: those of the weights that sampled, so the correction
    takes in sparsity alone, and staleness is left to the clipped ratio."""
    whole_union: bool = False
    """With a correction that compares both policies' top-k lists (jackpot): a further scoring pass, under the schedule of
    the rollouts, gives the sparse policy's log-probabilities of the dense list, so that the mass covers the union of both
    lists. Costs about as much as the dense scores."""
    normalise_advantage: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""


class CorrectionSection(Section):
    """The name, and beside it the settings of that correction: `name = "tis"`, `weight_max = 2.0`."""

    model_config = ConfigDict(extra="allow", validate_default=False, allow_inf_nan=True)
    tag = "name"
    name: str = "tis"
    """The correction for sampling from the sparse policy; see docs/corrections.md."""

    @classmethod
    def further(cls) -> dict[str, Any]:
        return {name: correction(name) for name in names()}

    @model_validator(mode="after")
    def _exists(self) -> Self:
        check_needs(self.make(), TRAINER_GIVES)
        return self

    def make(self) -> Correction:
        settings: dict[str, Any] = self.model_extra or {}
        return correction(self.name, **settings)
