"""How sure a statistic over dependent tokens is: Poisson bootstrap weights per rollout, and the interval they give.

Tokens of one rollout depend on each other, so whole rollouts are resampled. Each rollout carries its weights in its
name: shards and ranks need not talk to agree on them. Nothing here sees a token.
"""

# R replicates

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

import hashlib
import math
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparroll.errors import UserError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

CONFIDENCE = 0.95
ONE_ROLLOUT = 1.5
"""Effective rollouts below which a bin counts as the evidence of a single one."""


def poisson_weights(seed: int, rollout_id: int | str, replicates: int) -> Int[Tensor, " R"]:
    """[R] int32: how often each replicate counts this rollout, Poisson(1). The same on every machine and in every order.

    BLAKE2b of (seed, id) starts a SplitMix64 counter, one number a replicate, inverted through the Poisson distribution.
    7 and "7" are different rollouts.
    """
    if isinstance(rollout_id, bool) or not isinstance(rollout_id, (Integral, str)):
        raise UserError(
            f"rollout_id must be an int or a string, got {rollout_id!r}", "use prompt and sample: 'aime/3#1'"
        )
    kind = "s" if isinstance(rollout_id, str) else "i"
    digest = hashlib.blake2b(f"{seed}/{kind}/{rollout_id}".encode(), digest_size=8).digest()
    start = np.uint64(int.from_bytes(digest, "little"))
    uniform_R = _splitmix(start + _GOLDEN * np.arange(1, replicates + 1, dtype=np.uint64)) >> np.uint64(11)
    return torch.from_numpy(np.searchsorted(_thresholds(), uniform_R, side="right").astype(np.int32))


def interval(
    value: float, replicates: Float[Tensor, " R"], level: float, tokens: int, effective_rollouts: float
) -> tuple[float, float]:
    """95 % interval (low, high) of a quantile from its bootstrap replicates, inside [0, 1] and around the value.

    The percentile interval, widened about the value by sqrt(n / (n - 1)) * t(n - 1) / 1.96 with n effective rollouts: the
    bootstrap of few clusters is too sure of itself (Hesterberg 2015, section 4). n = 20 gives 1.10, n = 5 gives 1.58,
    n = 2 gives 9.2. With one rollout, or one that outweighs all others (n under 1.5), nothing is known beyond it: (0, 1).
    An end that so few tokens could not tell even if they were independent (fewer than 72 for the lower end of a 5th
    percentile) is 0 or 1 as well.
    """
    spread_R = replicates[~torch.isnan(replicates)]
    if effective_rollouts < ONE_ROLLOUT or len(spread_R) < 2:
        return 0.0, 1.0
    tail = (1 - CONFIDENCE) / 2
    ends = torch.quantile(spread_R, torch.tensor([tail, 1 - tail], dtype=spread_R.dtype))
    factor = _widening(effective_rollouts)
    low = value - factor * max(0.0, value - float(ends[0]))
    high = value + factor * max(0.0, float(ends[1]) - value)
    # No token below, or none above, the true quantile: with this probability the sample says nothing on that side.
    low = 0.0 if (1 - level) ** tokens > tail else low
    high = 1.0 if level**tokens > tail else high
    return max(0.0, low), min(1.0, high)


def _widening(effective_rollouts: float) -> float:
    from scipy import special

    freedom = effective_rollouts - 1
    ratio = special.stdtrit(freedom, (1 + CONFIDENCE) / 2) / special.ndtri((1 + CONFIDENCE) / 2)
    return math.sqrt(effective_rollouts / freedom) * float(ratio)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@cache
def _thresholds() -> np.ndarray:
    """P(Poisson(1) <= k) in units of 2**-53, from a literal e**-1 so that no math library can change a bit."""
    probability, cumulative, thresholds = 0.36787944117144233, 0.0, []
    for k in range(18):
        cumulative += probability
        thresholds.append(min(cumulative, 1.0) * 2.0**53)
        probability /= k + 1
    return np.array(thresholds).astype(np.uint64)
