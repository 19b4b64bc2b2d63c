"""The section [distill], for DistillSparse: a LoRA adapter that only the sparse rollouts see, trained to bring them
back to the dense policy. A training run has an adapter where the file has this section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sparroll.train.config.base import Section


class AdapterSection(Section):
    """The fields that both objectives have."""

    tag = "objective"
    objective: Literal["ppo_kl", "kl"] = "ppo_kl"
    """ppo_kl: the clipped policy loss of the sparse policy, plus kl_coefficient times the KL. kl: the KL alone."""
    rank: int = Field(default=16, ge=1)
    """Rank of the adapter's matrices. A higher one can learn more, and costs memory and a little time."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's change of a weight is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter; empty: all but the output head."""
    kl: Literal["k3", "top_k"] = "k3"
    """Estimate of the KL between the sparse and the dense policy. k3: from the sampled tokens (published). top_k: over
    the dense policy's rollout.top_k most likely tokens at each position and one bucket for the rest, which gives the
    same direction with far less noise."""
    lr: float | None = Field(default=None, gt=0)
    """Learning rate of the adapter's AdamW, with the policy's warm-up. Default: 5 times train.lr."""
    max_gradient_norm: float | None = Field(default=1.0, gt=0)
    """An adapter gradient with a larger norm than this is scaled down to it; "none" turns this off."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """Updates of the adapter on the same rollouts."""


class PPOWithKLSection(AdapterSection):
    objective: Literal["ppo_kl"] = "ppo_kl"
    """The clipped policy loss of the sparse policy, plus kl_coefficient times the KL."""
    kl_coefficient: float = Field(default=1e-3, gt=0)
    """Weight of the KL."""


class KLSection(AdapterSection):
    objective: Literal["kl"] = "kl"
    """The KL alone."""


DistillSection = PPOWithKLSection | KLSection
