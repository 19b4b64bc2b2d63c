"""How certain a statistic over dependent tokens is: Poisson bootstrap weights per rollout, and the interval from them.

Tokens of one rollout depend on each other, so whole rollouts are resampled. A rollout's weights are computed from its
name, so shards and ranks agree on them without communication. Nothing here sees a token.
"""

# R replicates, C histogram cells

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

import hashlib
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch import histogram

if TYPE_CHECKING:
    from jaxtyping import Int

CONFIDENCE = 0.95
ONE_ROLLOUT = 1.5
"""With fewer effective rollouts than this, a bin counts as if it had a single rollout."""
LEAST_ROLLOUTS = 8
"""With fewer rollouts than this, a bootstrap over rollouts says little, so nothing is decided by its interval."""


def poisson_weights(seed: int, rollout_id: int | str, replicates: int) -> Int[Tensor, " R"]:
    """[R] int32: how often each replicate counts this rollout, drawn from Poisson(1). The same on every machine.

    BLAKE2b of (seed, id) starts a SplitMix64 counter. It gives one number per replicate, which is turned into a draw by
    the inverse of the Poisson distribution. 7 and "7" are different rollouts.
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
    counts: Int[Tensor, " C"],
    replicates: Int[Tensor, "R C"],
    level: float,
    effective_rollouts: float,
    confidence: float = CONFIDENCE,
) -> tuple[float, float]:
    """Two-sided interval (low, high) of a quantile, from the histogram of all tokens and those of the replicates. The
    truth lies beyond each end with probability (1 - confidence) / 2.

    The variance over replicates of the share of tokens below the quantile tells how many independent tokens the data
    are worth. With that number of tokens, the exact binomial interval of the share (Clopper and Pearson, with Student's
    correction for few rollouts: Korn and Graubard 1998) gives two levels. The quantiles at these levels are the ends of
    the interval (Woodruff 1952). Percentiles of the replicates themselves would put `low` above the truth too often:
    see tests/unit/mismatch/test_coverage.py.

    If no token of the data lies beyond an end, that end is 0 or 1. For the lower end of a 5th percentile this happens
    with fewer than about 72 tokens. With one rollout, or with one that outweighs the others (fewer than 1.5 effective
    rollouts), the interval is (0, 1). No interval can account for a kind of rollout that never occurred. Where a few
    rollouts in a hundred hold most of the lowest tokens, samples without them are common, and `low` lies above the truth
    more often than said: with means drawn from Beta(8, 1) in 16 % of simulations of 8 rollouts, 9 % of 30, 6 % of 100
    and 3 % of 300 (tests/unit/mismatch/test_coverage.py).
    """
    from scipy import special

    if effective_rollouts < ONE_ROLLOUT:
        return 0.0, 1.0
    tail, tokens = (1 - confidence) / 2, int(counts.sum())
    worth = _independent_tokens(counts, replicates, level, effective_rollouts, confidence)
    below = worth * level
    lower_level = float(special.betaincinv(below, worth - below + 1, tail))
    upper_level = float(special.betaincinv(below + 1, worth - below, 1 - tail))
    low = float(histogram.quantile(counts, lower_level)) if lower_level * tokens >= 1 else 0.0
    high = float(histogram.quantile(counts, upper_level)) if (1 - upper_level) * tokens >= 1 else 1.0
    return low, high


def _independent_tokens(
    counts: Tensor, replicates: Tensor, level: float, effective_rollouts: float, confidence: float
) -> float:
    """Size of a simple random sample that would give the share below the quantile as precisely as these rollouts."""
    from scipy import special

    freedom, tokens = effective_rollouts - 1, int(counts.sum())
    cell = int(histogram.quantile_cell(counts, level))
    drawn_R = replicates.sum(1)
    worth = float(tokens)
    # Looks at both borders of the quantile's cell. If many values lie in it, one border may show no variation.
    for border in (cell, cell + 1):
        share = float(counts[:border].sum()) / tokens
        share_R = (replicates[:, :border].sum(1).to(torch.float64) / drawn_R)[drawn_R > 0]
        variance = float(share_R.var()) * effective_rollouts / freedom
        if variance > 0:
            worth = min(worth, share * (1 - share) / variance)
    few = special.ndtri((1 + confidence) / 2) / special.stdtrit(freedom, (1 + confidence) / 2)
    return worth * float(few) ** 2


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _splitmix(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@cache
def _thresholds() -> np.ndarray:
    """P(Poisson(1) <= k) in units of 2**-53. Starts from a literal e**-1, so that no math library can change a bit."""
    probability, cumulative, thresholds = 0.36787944117144233, 0.0, []
    for k in range(18):
        cumulative += probability
        thresholds.append(min(cumulative, 1.0) * 2.0**53)
        probability /= k + 1
    return np.array(thresholds).astype(np.uint64)
