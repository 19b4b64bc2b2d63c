"""A simulated run whose tail is known in every bin: what benchmarks/guard_simulation.py shows the guard. Judges nothing.

The acceptance of a token has the published shape: a share of `weight` agrees entirely, the rest is Beta(a, b) up to .999,
with `a` set so that the 5th percentile is what the case asks for. Tokens of one rollout in one bin depend on each other
through a Gaussian copula with correlation `correlation`; rollouts, bins and steps are independent.

A run of 1,000 steps has 18 million tokens, so they are drawn from the top down: first, for each step and bin, how many
tokens are under the target (exactly as their sum is distributed), then, only where somebody asks, every single token given
that count. Where a step has few tokens they are drawn at once, and those of a rollout depend on each other across bins, too
(`cells_of_all_bins`).
"""

# B bins, T tokens of one rollout in one bin, U rollouts of a step, C histogram cells, R bootstrap replicates

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import optimize, special, stats

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.bootstrap import poisson_weights
from sparroll.mismatch.histogram import CELLS, EDGES, INNER_CELLS, NEARLY_ONE

BIN_TOKENS = 1000


@dataclass(frozen=True)
class Shape:
    """A Beta fit of published acceptances (contexts of 20K to 22K tokens, Qwen3-1.7B), but for `a`."""

    name: str
    b: float
    weight: float

    def a(self, tail: float) -> float:
        """So that the 5th percentile of all tokens is `tail`."""
        share = 0.05 / (1 - self.weight)
        return float(optimize.brentq(lambda a: NEARLY_ONE * stats.beta.ppf(share, a, self.b) - tail, 0.2, 100))

    def share_below(self, value: np.ndarray | float, tail: float) -> np.ndarray:
        return np.asarray((1 - self.weight) * stats.beta.cdf(np.asarray(value) / NEARLY_ONE, self.a(tail), self.b))


SHAPES = (Shape("512", 0.47, 0.547), Shape("8192", 0.55, 0.727), Shape("16384", 0.55, 0.7675))
"""By the budget that each was published for."""


@dataclass(frozen=True)
class Tail:
    """The tokens of one bin in one step: a shape, its true tail, and how alike the tokens of a rollout are."""

    shape: Shape
    tail: float
    target: float
    correlation: float
    rollouts: int = 64
    tokens: int = 16
    """Of each rollout."""

    @cached_property
    def sums_NC(self) -> np.ndarray:
        """[rollouts + 1, tokens in all + 1]: how many tokens of N rollouts are under the target."""
        most = self.rollouts * self.tokens
        transform = np.fft.rfft(self._below_T, 2 * most)
        powers = [np.fft.irfft(transform**count, 2 * most)[: most + 1] for count in range(self.rollouts + 1)]
        return np.clip(powers, 0, None) / np.clip(powers, 0, None).sum(1, keepdims=True)

    def draw(self, rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        """Tokens under the target, of all rollouts together."""
        return np.searchsorted(self.sums_NC[-1].cumsum(), rng.random(size)).clip(max=self.rollouts * self.tokens)

    def cells(self, rng: np.random.Generator, below: int) -> np.ndarray:
        """[U, C] histogram of each rollout, given how many tokens are under the target in all."""
        below_U, left = np.zeros(self.rollouts, dtype=int), below
        for place in range(self.rollouts):
            counts = np.arange(min(self.tokens, left) + 1)
            chance = self._below_T[counts] * self.sums_NC[self.rollouts - place - 1, left - counts]
            below_U[place] = np.searchsorted(chance.cumsum() / chance.sum(), rng.random())
            left -= below_U[place]
        assert left == 0, "the counts do not add up"
        level_U = self._levels(rng, below_U)
        own, shared = np.sqrt(1 - self.correlation), np.sqrt(self.correlation)
        border_U = special.ndtr((self._border - shared * level_U) / own)[:, None]
        under_UT = np.arange(self.tokens)[None] < below_U[:, None]
        uniform_UT = rng.random(under_UT.shape)
        uniform_UT = np.where(under_UT, uniform_UT * border_U, border_U + uniform_UT * (1 - border_U))
        latent_UT = shared * level_U[:, None] + own * special.ndtri(uniform_UT)
        return histograms_of(np.searchsorted(self._edges, latent_UT, side="right"))

    @property
    def design_effect(self) -> float:
        """Variance of the share under the target, in units of what independent tokens would have."""
        counts, share = np.arange(self.tokens + 1), float(self.shape.share_below(self.target, self.tail))
        variance = (self._below_T * counts**2).sum() - (self._below_T * counts).sum() ** 2
        return float(variance / (self.tokens * share * (1 - share)))

    @cached_property
    def _border(self) -> float:
        """The target on the normal scale."""
        return float(special.ndtri(self.shape.share_below(self.target, self.tail)))

    @cached_property
    def _edges(self) -> np.ndarray:
        """Borders of the histogram's cells on the normal scale. The target must be one of them."""
        assert round(self.target * INNER_CELLS) == self.target * INNER_CELLS, "a target between two cells"
        edges = EDGES.numpy()
        return special.ndtri(self.shape.share_below(np.minimum(edges, NEARLY_ONE), self.tail))

    @cached_property
    def _grid(self) -> tuple[np.ndarray, np.ndarray]:
        """Levels of a rollout, and [T + 1, levels] the probability of a count and a level."""
        levels = np.linspace(-6, 6, 1201)
        prior = stats.norm.pdf(levels) / stats.norm.pdf(levels).sum()
        share = special.ndtr((self._border - np.sqrt(self.correlation) * levels) / np.sqrt(1 - self.correlation))
        return levels, stats.binom.pmf(np.arange(self.tokens + 1)[:, None], self.tokens, share[None]) * prior

    @cached_property
    def _below_T(self) -> np.ndarray:
        """[T + 1] probability that so many tokens of one rollout are under the target."""
        return self._grid[1].sum(1)

    def cells_of_all_bins(self, rng: np.random.Generator, bins: int) -> np.ndarray:
        """[B, U, T] cell of each token of a step, where the tokens of a rollout depend on each other across its bins,
        too."""
        own, shared = np.sqrt(1 - self.correlation), np.sqrt(self.correlation)
        level_U = rng.standard_normal(self.rollouts)
        latent_BUT = shared * level_U[:, None] + own * rng.standard_normal((bins, self.rollouts, self.tokens))
        return np.searchsorted(self._edges, latent_BUT, side="right")

    @property
    def border_cell(self) -> int:
        """The last cell under the target."""
        return round(self.target * INNER_CELLS)

    def _levels(self, rng: np.random.Generator, below_U: np.ndarray) -> np.ndarray:
        levels, joint = self._grid
        cumulative_UL = joint[below_U].cumsum(1)
        drawn_U = rng.random(len(below_U)) * cumulative_UL[:, -1]
        return levels[(cumulative_UL < drawn_U[:, None]).sum(1).clip(max=len(levels) - 1)]


def histograms_of(cells_UT: np.ndarray) -> np.ndarray:
    """[U, C] from the cells of the tokens of each rollout."""
    rollouts = len(cells_UT)
    places_UT = cells_UT + CELLS * np.arange(rollouts)[:, None]
    return np.bincount(places_UT.ravel(), minlength=rollouts * CELLS).reshape(rollouts, CELLS)


def statistics_of(histograms: dict[int, np.ndarray], rollout_ids: list[str], replicates: int = 200) -> TailStatistics:
    """What `TailStatistics.add` gives for rollouts with these histograms ([U, C] by bin number), but for figures that need
    the values themselves: mean, Beta fit and correlation with length are not set."""
    weights_RU = torch.stack([poisson_weights(0, each, replicates) for each in rollout_ids], dim=1).float()
    counts_BUC = torch.from_numpy(np.stack([histograms[place] for place in sorted(histograms)]))
    state = TailStatistics(BIN_TOKENS, replicates=replicates).state()
    tokens_BU = counts_BUC.sum(2)
    tokens_U = tokens_BU.sum(0)
    sums_B5 = torch.zeros(len(histograms), 5, dtype=torch.int64)
    sums_B5[:, 0], sums_B5[:, 1] = (tokens_BU > 0).sum(1), (tokens_BU**2).sum(1)
    state |= {
        "bins": torch.tensor(sorted(histograms)),
        "counts": counts_BUC.sum(1),
        "replicates": (weights_RU @ counts_BUC.float()).to(torch.int32),
        "sums": sums_B5,
        "overall": torch.stack([(tokens_U > 0).sum(), (tokens_U**2).sum()]),
    }
    return TailStatistics.from_state(state)
