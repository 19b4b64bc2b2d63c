"""The distribution that tokens are drawn from, and draws in which each request has its own randomness: the same seed
gives the same response in any batch."""

# A active rows, V vocabulary

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from sparroll.errors import UserError

_KEEP, _REDRAW = 0, 1


def request_seed(seed: int, prompt_index: int, sample_index: int) -> int:
    """A 63-bit seed for one request, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{prompt_index}/{sample_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seed: int, count: int) -> Tensor:
    """[count] float64 in [0, 1): the request's draws, one per token."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class CheckDraws:
    """A request's own randomness for its checks, one draw per response position and purpose. A position that is drafted
    again uses its draw again: it was not looked at, since what came before it was rejected first."""

    def __init__(self, seed: int, max_new_tokens: int):
        self._uniforms_PT = torch.stack(
            [uniforms(request_seed(seed, 0, part), max_new_tokens) for part in (_KEEP, _REDRAW)]
        )

    def at(self, positions: slice, device: torch.device) -> tuple[Tensor, Tensor]:
        """Draws for keeping and for the residual, [N] each."""
        keep_N, redraw_N = self._uniforms_PT[:, positions].to(device)
        return keep_N, redraw_N


def log_probs(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """[.., V] float32 log-probabilities of the sampling distribution; temperature 0 gives those at temperature 1.

    top_p: below 1, only the fewest most likely tokens with at least this mass can be drawn. They share the whole mass,
    and every other token has -inf.
    """
    logits = logits.float()
    logp = torch.log_softmax(logits if temperature in (0, 1) else logits / temperature, dim=-1)
    return logp if top_p == 1 else _nucleus(logp, top_p)


def _nucleus(logp: Tensor, top_p: float) -> Tensor:
    ordered, ids = logp.sort(dim=-1, descending=True, stable=True)
    mass = ordered.double().exp()
    # A token is left out if those before it hold enough. Nothing is before the first.
    out = mass.cumsum(-1) - mass >= top_p
    out[..., 0] = False
    return torch.empty_like(logp).scatter_(-1, ids, ordered.masked_fill(out, -torch.inf)).log_softmax(-1)


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
