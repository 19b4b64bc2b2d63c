"""Tails with a known answer for tests of the controller: exact ones, and a simulated model whose tail follows a known
monotone curve of the budget, with noise that is shared by the tokens of a rollout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparroll.control.watcher import StepEvidence
from sparroll.mismatch import TailStatistics, histogram
from sparroll.mismatch.bootstrap import poisson_weights
from sparroll.mismatch.sums import bin_sums, moments
from sparroll.schedule import Schedule

BIN = 2000


def evidence(step: int, tail: TailStatistics, schedule: Schedule | None = None, *, dense: bool = False) -> StepEvidence:
    """What a watcher of the tail sees."""
    return StepEvidence(step, schedule, dense, tail, {})


def measured(step: int, tails: dict[int, float], rollouts: int = 20, tokens: int = 100) -> TailStatistics:
    """Statistics whose 5th percentile in bin number k is `tails[k]`, known to about .003: all rollouts are alike, a tenth of
    each one's tokens lies evenly around it, and the rest is 1."""
    few = tokens // 10
    acceptance, context = [], []
    for place, tail in tails.items():
        # The value at the quantile's own rank, just under the border of a cell, comes out as the tail to 1e-5.
        low = [tail - 0.0002 + (rank + 1 - few // 2) * 0.002 * 10 / few for rank in range(few)]
        acceptance += [min(max(value, 0.0), 1.0) for value in low] + [1.0] * (tokens - few)
        context += [place * BIN + BIN // 2] * tokens
    return of_rollouts(torch.tensor(acceptance).expand(rollouts, -1), torch.tensor(context), step, replicates=20)


def of_rollouts(acceptance_UT: Tensor, context_T: Tensor, step: int, replicates: int) -> TailStatistics:
    """What `TailStatistics.add` makes of these rollouts one by one, all at once: simulated runs have many thousands."""
    (rollouts, tokens), exact_UT = acceptance_UT.shape, acceptance_UT.to(torch.float64)
    starts, place_T = torch.unique(context_T // BIN, return_inverse=True)
    cells, places = histogram.cells(exact_UT).flatten(), torch.arange(rollouts)[:, None] * len(starts) + place_T
    counts = torch.bincount(
        places.flatten() * histogram.CELLS + cells, minlength=rollouts * len(starts) * histogram.CELLS
    )
    counts_UBC = counts.view(rollouts, len(starts), histogram.CELLS)
    sums = bin_sums(exact_UT.flatten(), cells, places.flatten(), counts_UBC.sum(2).flatten())
    weights_RU = torch.stack([poisson_weights(0, f"{step}/{each}", replicates) for each in range(rollouts)], dim=1)
    state = TailStatistics(BIN, replicates=replicates).state() | {
        "bins": starts,
        "counts": counts_UBC.sum(0),
        "replicates": torch.einsum("ru,ubc->brc", weights_RU.float(), counts_UBC.float()).to(torch.int32),
        "sums": torch.tensor(sums).view(rollouts, len(starts), 5).sum(0),
        "overall": torch.tensor([rollouts, rollouts * tokens**2]),
        "moments": torch.tensor(
            [divmod(each, 2**62) for each in moments(exact_UT.flatten(), context_T.repeat(rollouts))]
        ),
    }
    return TailStatistics.from_state(state)


@dataclass(frozen=True)
class World:
    """1 - tail = miss * (quarter of the context / budget) ** exponent; dense once the budget holds the whole bin."""

    miss: float
    """1 - tail at a quarter of the context."""
    exponent: float = 0.7
    rollout_spread: float = 0.25
    """Standard deviation of the log of 1 - acceptance between rollouts; 1.5 between the tokens of one."""
    rollouts: int = 32
    tokens: int = 150
    """Of each rollout in each bin."""
    dense: float = 0.985

    def tail(self, place: int, budget: int) -> float:
        """The 5th percentile that infinitely many rollouts would have."""
        end = (place + 1) * BIN
        if budget >= end:
            return self.dense
        return min(self.dense, max(0.0, 1 - self.miss * (end / 4 / budget) ** self.exponent))

    def measure(self, step: int, budgets: Sequence[int], rng: np.random.Generator) -> TailStatistics:
        spread = math.hypot(self.rollout_spread, 1.5)
        # log(1 - acceptance) is normal, and 1.645 standard deviations above its mean lies the tail.
        means = [math.log(1 - self.tail(place, budget)) - 1.645 * spread for place, budget in enumerate(budgets)]
        context_T = torch.arange(len(means)).repeat_interleave(self.tokens) * BIN + BIN // 2
        drawn_UT = rng.standard_normal((self.rollouts, 1 + len(context_T)))
        own_UT, token_UT = self.rollout_spread * drawn_UT[:, :1], 1.5 * drawn_UT[:, 1:]
        miss_UT = np.exp(np.repeat(means, self.tokens) + own_UT + token_UT)
        return of_rollouts(torch.from_numpy(1 - np.minimum(miss_UT, 1)), context_T, step, replicates=50)
