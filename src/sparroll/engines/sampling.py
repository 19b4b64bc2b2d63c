"""Draws tokens so that each request has its own randomness: the same seed gives the same response in any batch."""

# A active rows, V vocabulary

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sparroll.errors import UserError


def request_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """A 63-bit seed for one request, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{prompt_index}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seed: int, count: int) -> Tensor:
    """[count] float64 in [0, 1): the request's draws, one per token."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """[.., V] float32 log-probabilities of the sampling distribution; temperature 0 gives those at temperature 1."""
    logits = logits.float()
    return torch.log_softmax(logits if temperature in (0, 1) else logits / temperature, dim=-1)


def sample(logp: Tensor, uniform: Tensor, greedy: bool) -> Tensor:
    """Token ids [A] from log-probabilities [A, V]: the most likely one, or the inverse of the cumulative distribution
    at `uniform` [A]. A token of probability zero is never drawn."""
    if greedy:
        return logp.argmax(-1)
    cumulative = logp.double().exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return drawn.clamp_max(logp.shape[-1] - 1)


def check_finite(logp_A: Tensor, where: str) -> None:
    """Raise UserError if a sampled token's log-probability is NaN, which is what NaN logits lead to."""
    if bool(logp_A.isnan().any()):
        raise UserError(
            f"the model produced NaN logits {where}",
            "check the weights for NaN (a diverged checkpoint?), or run in a wider dtype: float32 or bfloat16",
        )
