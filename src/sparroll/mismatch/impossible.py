"""The share of sampled tokens that the dense policy would practically never have said: those whose log-probability under
the policy that sampled them is more than N nats above their dense one, for each N of NATS. It looks where a percentile of
the acceptance is blind, and needs nothing but two log-probabilities of each sampled token.

It is counted rollout by rollout in constant memory and can be merged over shards and ranks. Knows no target.
"""

# T tokens of one rollout, B bins, N distances (NATS), S = 1 + N sums, P = 1 + 2N products

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import CONFIDENCE
from sparroll.mismatch.divergence import NATS
from sparroll.mismatch.rare_share import design_effect, rare_interval

if TYPE_CHECKING:
    from jaxtyping import Float, Int

STATE_KEYS = ("impossible_bins", "impossible_sums", "impossible_products")
_SUMS, _PRODUCTS = 1 + len(NATS), 1 + 2 * len(NATS)


@dataclass(frozen=True)
class ImpossibleShare:
    """The share of tokens that are more than `nats` off, with its interval.

    >>> ImpossibleShare(nats=10, value=2.4e-4, low=1.1e-4, high=5.2e-4, events=12, tokens=50_000, design_effect=1.5)
    """

    nats: int
    value: float
    low: float
    """Lower end of the interval; 0 without an event."""
    high: float
    """Upper end; above 0 without an event, too, and 1 with a single rollout."""
    events: int
    """Tokens that are more than `nats` off."""
    tokens: int
    design_effect: float
    """How many times the variance of independent tokens the events have, because they come in clusters; at least 1."""

    def summary(self, rollouts: int) -> dict[str, Any]:
        """The figures that a schedule file keeps, to four digits. rollouts: those that the tokens are of."""
        figures = {"value": self.value, "low": self.low, "high": self.high}
        rounded = {name: float(f"{value:.4g}") for name, value in figures.items()}
        return {**rounded, "tokens": self.tokens, "rollouts": rollouts}


def check_nats(nats: int, name: str = "nats") -> None:
    """Raise UserError for a distance that is not counted."""
    if isinstance(nats, bool) or nats not in NATS:
        known = ", ".join(map(str, NATS))
        raise UserError(f"{name} must be one of {known}, got {nats!r}", "these distances are measured")


class ImpossibleTokens:
    """Counts per bin of context lengths, from rollouts that are added one by one.

    For each pair of bins it keeps sums over rollouts of products of their counts. So the variance between rollouts is
    known exactly for every set of bins, and everything is a sum of whole numbers: merged counts are those of one pass to
    the last bit. Memory: 72 bytes for each pair of bins with tokens.

    >>> counted = ImpossibleTokens(bin_tokens=2000)
    >>> counted.add(rollout.sparse_logp - dense.logp, rollout.context_tokens)
    >>> counted.share(10)
    """

    def __init__(self, bin_tokens: int):
        self.bin_tokens = bin_tokens
        self._numbers: list[int] = []
        """Of the bins with tokens, in rising order; a bin starts at its number times `bin_tokens`."""
        self._sums_BS = torch.zeros(0, _SUMS, dtype=torch.int64)
        """Tokens, and events at each distance."""
        self._products_BBP = torch.zeros(0, 0, _PRODUCTS, dtype=torch.int64)
        """Sums over rollouts, n tokens and k events of a rollout in a bin: n n', then k n' and k k' for each distance."""

    @property
    def tokens(self) -> int:
        """Tokens added so far, over all bins."""
        return int(self._sums_BS[:, 0].sum())

    def add(self, off_nats_T: Float[Tensor, " T"], context_tokens_T: Int[Tensor, " T"]) -> None:
        """Count the tokens of one rollout. off_nats_T: log-probability under the policy that sampled minus the dense
        one; inf where the dense policy excludes the token. NaN and -inf are refused, see `of_rollouts.off_nats_of`."""
        if bool((off_nats_T.isnan() | (off_nats_T == -torch.inf)).any()):
            raise UserError("off_nats_T holds NaN or -inf, so a pass of one of the policies is broken")
        numbers, place_T = torch.unique(context_tokens_T // self.bin_tokens, return_inverse=True)
        limits_N = torch.tensor(NATS, dtype=torch.float64)
        far_TN = off_nats_T.to(torch.float64)[:, None] > limits_N
        one_TS = torch.cat([torch.ones_like(place_T)[:, None], far_TN.to(torch.int64)], dim=1)
        sums_bS = torch.zeros(len(numbers), _SUMS, dtype=torch.int64).index_add_(0, place_T, one_TS)
        self._add(numbers.tolist(), sums_bS, _products(sums_bS))

    def merge(self, other: ImpossibleTokens) -> None:
        """Add the counts of other rollouts. Bins must have the same width."""
        assert self.bin_tokens == other.bin_tokens, "bins of different widths"
        self._add(other._numbers, other._sums_BS, other._products_BBP)

    def _add(self, numbers: list[int], sums_bS: Tensor, products_bbP: Tensor) -> None:
        self._make_bins(numbers)
        places = torch.tensor([self._numbers.index(number) for number in numbers], dtype=torch.int64)
        self._sums_BS[places] += sums_bS
        self._products_BBP[places[:, None], places] += products_bbP

    def _make_bins(self, numbers: list[int]) -> None:
        known = sorted({*self._numbers, *numbers})
        if known == self._numbers:
            return
        kept = torch.tensor([known.index(number) for number in self._numbers], dtype=torch.int64)
        sums, products = self._sums_BS, self._products_BBP
        self._sums_BS = torch.zeros(len(known), _SUMS, dtype=torch.int64)
        self._products_BBP = torch.zeros(len(known), len(known), _PRODUCTS, dtype=torch.int64)
        self._sums_BS[kept] = sums
        self._products_BBP[kept[:, None], kept] = products
        self._numbers = known

    def only(self, starts: Sequence[int]) -> ImpossibleTokens:
        """A copy of the bins that start at these context lengths; those without tokens are left out."""
        part = ImpossibleTokens(self.bin_tokens)
        places = [place for place, number in enumerate(self._numbers) if number * self.bin_tokens in starts]
        part._numbers = [self._numbers[place] for place in places]
        part._sums_BS = self._sums_BS[places].clone()
        part._products_BBP = self._products_BBP[places][:, places].clone()
        return part

    def as_one_bin(self, start: int) -> ImpossibleTokens:
        """The counts of all bins in the bin that starts there."""
        one = ImpossibleTokens(self.bin_tokens)
        if self._numbers:
            sums_1S, products_11P = self._sums_BS.sum(0)[None], self._products_BBP.sum((0, 1))[None, None]
            one._add([start // self.bin_tokens], sums_1S, products_11P)
        return one

    def share(self, nats: int, confidence: float = CONFIDENCE) -> ImpossibleShare | None:
        """The share over all bins that have tokens, as if they were one; None where nothing was counted. The truth lies
        beyond each end of the interval with probability (1 - confidence) / 2 at most; see rare_share.py.

        The lower end takes the clusters that the events at this distance come in. The upper end takes the larger of
        those and of the ones at shorter distances, where there are more events to see clusters by.
        """
        check_nats(nats)
        if not self.tokens:
            return None
        tokens, *events = self._sums_BS.sum(0).tolist()
        squared, *products = self._products_BBP.sum((0, 1)).tolist()
        mixed, own = products[: len(NATS)], products[len(NATS) :]
        place, effective_rollouts = NATS.index(nats), tokens * tokens / squared
        designs = [
            design_effect(events[j], tokens, own[j], mixed[j], squared, effective_rollouts) for j in range(place + 1)
        ]
        counts = events[place], tokens, effective_rollouts
        low, _ = rare_interval(*counts, designs[-1], confidence)
        _, high = rare_interval(*counts, max(designs), confidence)
        return ImpossibleShare(nats, events[place] / tokens, low, high, events[place], tokens, designs[-1])

    def shares(self, confidence: float = CONFIDENCE) -> tuple[ImpossibleShare, ...]:
        """`share` for each of NATS; empty where nothing was counted."""
        found = (self.share(nats, confidence) for nats in NATS)
        return tuple(each for each in found if each is not None)

    def state(self) -> dict[str, Tensor]:
        """The counts as plain tensors, by STATE_KEYS."""
        numbers = torch.tensor(self._numbers, dtype=torch.int64)
        return dict(zip(STATE_KEYS, (numbers, self._sums_BS.clone(), self._products_BBP.clone()), strict=True))

    @staticmethod
    def from_state(state: dict[str, Tensor]) -> ImpossibleTokens:
        """What a state of TailStatistics holds; nothing counted where its format is 1, which had none. Raises UserError
        where tensors are missing or have other shapes."""
        written, _, bin_tokens, *_ = state["settings"].tolist()
        if written == 1:
            return ImpossibleTokens(bin_tokens)
        bins = len(state.get(STATE_KEYS[0], ()))
        shapes = ((bins,), (bins, _SUMS), (bins, bins, _PRODUCTS))
        for key, shape in zip(STATE_KEYS, shapes, strict=True):
            if key not in state or state[key].shape != shape:
                found = f"is {list(state[key].shape)}, not {list(shape)}" if key in state else "is missing"
                raise UserError(f"not a state of tail statistics: {key} {found}", "the file may be incomplete")
        made = ImpossibleTokens(bin_tokens)
        numbers, sums_BS, products_BBP = (state[key] for key in STATE_KEYS)
        made._add(numbers.tolist(), sums_BS, products_BBP)
        return made


def share_named(shares: Sequence[ImpossibleShare], nats: int) -> ImpossibleShare | None:
    """The one of these shares that is for this distance."""
    return next((each for each in shares if each.nats == nats), None)


def _products(sums_bS: Tensor) -> Tensor:
    """[b, b, P] products of one rollout's counts, see ImpossibleTokens."""
    tokens_b, events_bN = sums_bS[:, 0], sums_bS[:, 1:]
    tokens_bb1 = (tokens_b[:, None] * tokens_b)[..., None]
    mixed_bbN = events_bN[:, None] * tokens_b[None, :, None]
    own_bbN = events_bN[:, None] * events_bN[None]
    return torch.cat([tokens_bb1, mixed_bbN, own_bbN], dim=2)
