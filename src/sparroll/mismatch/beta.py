"""The shape of the acceptance's distribution in three numbers: a Beta below 0.999, and a point mass from there on.

This describes distributions, to compare them. It does not estimate the tail: the quantiles of tail.py are counted, not
read from this fit.
"""

# N values

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch import histogram
from sparroll.mismatch.histogram import NEARLY_ONE, NEARLY_ONE_CELL

if TYPE_CHECKING:
    from jaxtyping import Float, Int

LEAST_VALUES = 20
"""There is no fit to fewer values below 0.999 than this."""
SMALLEST_SHARE = 1e-6
"""Values closer than this to 0 or to 0.999 (as a share of 0.999) are moved to this distance, since the fit takes
logarithms."""


@dataclass(frozen=True)
class BetaFit:
    """Maximum-likelihood fit of Beta(a, b) on [0, 0.999] to the values below 0.999.

    >>> BetaFit(a=2.209, b=0.47, weight=0.547, ks=0.029, values=1_000_000)      # published: budget 512 at 20k-22k
    """

    a: float
    b: float
    weight: float
    """Share of values at or above 0.999, which the Beta does not describe. The published weight is the same share. It
    rises
    with the budget: .547, .727 and .768 at 512, 8192 and 16384 tokens."""
    ks: float
    """Kolmogorov-Smirnov distance of the values below 0.999 to the Beta: the largest gap between the cumulative
    shares."""
    values: int
    """Number of values in all."""


def log_shares(values: Float[Tensor, " N"]) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """(log x, log(1 - x)) with x = value / 0.999, of values below 0.999. The fit needs nothing but the sums of
    these."""
    share_N = (values.to(torch.float64) / NEARLY_ONE).clamp(SMALLEST_SHARE, 1 - SMALLEST_SHARE)
    return share_N.log(), (-share_N).log1p()


def fit_beta(values: Float[Tensor, " N"]) -> BetaFit:
    """Fit a Beta to acceptances in [0, 1]. Raises UserError if fewer than 20 values are below 0.999, or if all of these
    are equal."""
    flat_N = torch.as_tensor(values).detach().cpu().to(torch.float64).flatten()
    if not bool(((flat_N >= 0) & (flat_N <= 1)).all()):
        raise UserError("acceptances must be in [0, 1], without NaN", "pass what mismatch.acceptance returns")
    below_N = flat_N[flat_N < NEARLY_ONE]
    log_x, log_rest = log_shares(below_N)
    a, b = fit_from_sums(float(log_x.sum()), float(log_rest.sum()), len(below_N), len(flat_N))
    return BetaFit(a, b, 1 - len(below_N) / len(flat_N), _ks_of_values(below_N, a, b), len(flat_N))


def fit_from_histogram(counts: Int[Tensor, " C"], log_sum: float, log_rest_sum: float) -> BetaFit:
    """The same fit from counts per cell (see histogram.py) and the sums of `log_shares` over the values below 0.999.

    a, b and weight are the same as those of `fit_beta` on the values. ks is taken at the borders of the cells, and is
    too small by the share of one cell at most.
    """
    below, total = int(counts[:NEARLY_ONE_CELL].sum()), int(counts.sum())
    a, b = fit_from_sums(log_sum, log_rest_sum, below, total)
    return BetaFit(a, b, 1 - below / total, _ks_of_histogram(counts, a, b), total)


def fit_from_sums(log_sum: float, log_rest_sum: float, below: int, total: int) -> tuple[float, float]:
    """The a and b that solve the likelihood equations: digamma(a) - digamma(a + b) = mean of log x, and the same with b
    and log(1 - x)."""
    from scipy import optimize, special

    if below < LEAST_VALUES:
        few = (
            "measure more tokens"
            if total < 10 * LEAST_VALUES
            else "nearly all tokens agree, and the share at or above 0.999 says so"
        )
        raise UserError(f"a Beta fit needs {LEAST_VALUES} values below {NEARLY_ONE}, got {below} of {total}", few)
    mean_log, mean_rest = log_sum / below, log_rest_sum / below
    gap = 1 - math.exp(mean_log) - math.exp(mean_rest)
    if gap < 1e-7:
        raise UserError(
            f"a Beta fit needs different values, but all {below} below {NEARLY_ONE} are near "
            f"{NEARLY_ONE * math.exp(mean_log):.4g}"
        )

    def loss(log_ab: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = np.exp(log_ab)
        value = special.betaln(a, b) - (a - 1) * mean_log - (b - 1) * mean_rest
        slope = special.digamma([a, b]) - special.digamma(a + b) - [mean_log, mean_rest]
        return value, slope * [a, b]

    # Starts from the geometric means (Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions 2, section
    # 25.4).
    start = np.log([0.5 + math.exp(mean_log) / (2 * gap), 0.5 + math.exp(mean_rest) / (2 * gap)])
    found = optimize.minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-10})
    a, b = np.exp(found.x)
    return float(a), float(b)


def _ks_of_values(below_N: Tensor, a: float, b: float) -> float:
    from scipy import special

    expected = special.betainc(a, b, np.sort((below_N / NEARLY_ONE).clamp(max=1).numpy()))
    steps = np.arange(len(expected) + 1) / len(expected)
    return float(max((steps[1:] - expected).max(), (expected - steps[:-1]).max()))


def _ks_of_histogram(counts: Tensor, a: float, b: float) -> float:
    """The distance at the borders of the inner cells up to 0.999. The cell of exactly 0 lies below all of them."""
    from scipy import special

    below = counts[:NEARLY_ONE_CELL].to(torch.float64)
    observed = below.cumsum(0) / below.sum()
    borders = histogram.EDGES[:NEARLY_ONE_CELL] / NEARLY_ONE
    expected = torch.from_numpy(special.betainc(a, b, borders.clamp(max=1).numpy()))
    return float((observed - expected).abs().max())
