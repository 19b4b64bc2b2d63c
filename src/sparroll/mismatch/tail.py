"""The lower tail of the acceptance by context length. It is counted rollout by rollout in constant memory, and can be
merged over shards and ranks. Knows no engine and no schedule, and sets no target."""

# T tokens of one rollout, N tokens of many, C histogram cells, F filled ones, R bootstrap replicates, U rollouts

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparroll.errors import UserError, nearest
from sparroll.mismatch import histogram
from sparroll.mismatch.acceptance import ESTIMATORS
from sparroll.mismatch.beta import BetaFit, fit_from_histogram
from sparroll.mismatch.bootstrap import CONFIDENCE, interval, poisson_weights
from sparroll.mismatch.checks import MOST_BINS, check_settings, check_state, checked_off_nats, checked_rollout
from sparroll.mismatch.histogram import CELLS
from sparroll.mismatch.impossible import ImpossibleTokens
from sparroll.mismatch.sums import UNIT, added, bin_sums, moments, pearson
from sparroll.mismatch.table import TailRow, TailTable
from sparroll.mismatch.threads import one_thread
from sparroll.types import check_tensors

if TYPE_CHECKING:
    from jaxtyping import Float, Int

FORMAT = 2
"""Of states. Those of format 1 hold no impossible tokens, and are read as statistics that counted none."""
MOST_TOKENS_A_BIN = 2**30


@dataclass
class _Bin:
    """Everything known about one bin of context lengths."""

    counts: Tensor
    """[C] int64, number of tokens in each cell."""
    replicates: Tensor
    """[R, C] int32, the same for each replicate, which counts a rollout as often as it drew it."""
    sums: list[int] = field(default_factory=lambda: [0] * 5)
    """See sums.bin_sums."""


class TailStatistics:
    """Quantiles of the acceptance per bin of context lengths, with intervals, from rollouts that are added one by one.

    Add each rollout once, with all its tokens, under an id that no other rollout of any step, prompt or rank has.
    Statistics with the same settings can be merged. Merged statistics are equal to those of one pass to the last bit,
    in whatever order they are merged, because all sums are of whole numbers, and a rollout's bootstrap weights depend
    only on its id.

    Memory: a bin with tokens takes `replicates` * 2002 cells * 4 bytes + 16 KB, which is 1.6 MB at 200 replicates.
    Contexts up to 32K in bins of 2000 take 26 MB, however many rollouts are added. Quantiles are exact up to a cell,
    0.0005.

    Impossible tokens are counted beside the acceptance, of those rollouts whose log-probabilities are given, too.

    >>> statistics = TailStatistics(bin_tokens=2000)
    >>> statistics.add(acceptance_T, rollout.context_tokens, rollout_id="aime24/7#3")
    >>> print(statistics.table(estimator="exact"))
    """

    def __init__(self, bin_tokens: int = 2000, quantile: float = 0.05, replicates: int = 200, seed: int = 0):
        check_settings(bin_tokens, quantile, replicates, seed)
        self.bin_tokens = bin_tokens
        self.quantile = float(quantile)
        self.replicates = replicates
        """Bootstrap replicates. 200 give the width of an interval within 5 %. Memory is proportional to them."""
        self.seed = seed
        """Seed of the bootstrap weights. Only statistics with the same seed can be merged."""
        self._bins: dict[int, _Bin] = {}
        self._rollouts = 0
        self._tokens_squared = 0
        self._moments = [0] * 5
        self.impossible = ImpossibleTokens(bin_tokens)
        """Of the rollouts that were added with their log-probabilities."""

    @property
    def tokens(self) -> int:
        """Tokens added so far, over all bins."""
        return sum(int(each.counts.sum()) for each in self._bins.values())

    @property
    def rollouts(self) -> int:
        """Rollouts with tokens that were added so far."""
        return self._rollouts

    @property
    def starts(self) -> list[int]:
        """Context lengths at which the bins with tokens start, in rising order."""
        return [start * self.bin_tokens for start in sorted(self._bins)]

    @one_thread()
    def add(
        self,
        acceptance_T: Float[Tensor, " T"],
        context_tokens_T: Int[Tensor, " T"],
        rollout_id: int | str,
        off_nats_T: Float[Tensor, " T"] | None = None,
    ) -> None:
        """Count the tokens of one rollout. `context_tokens_T` is Rollout.context_tokens. After an error nothing is
        counted.

        off_nats_T: of_rollouts.off_nats_of the rollout; None where its tokens were not sampled by the policy that is
        measured, as in a replay, or their log-probabilities are not known. No impossible tokens are counted then.

        A rollout without tokens is ignored. Rollouts with the same id are resampled together.
        """
        weights_R = poisson_weights(self.seed, rollout_id, self.replicates)
        acceptance_T, context_T = checked_rollout(acceptance_T, context_tokens_T, rollout_id)
        off_T = None if off_nats_T is None else checked_off_nats(off_nats_T, len(context_T), rollout_id)
        if len(acceptance_T) == 0:
            return
        starts, place_T = torch.unique(context_T // self.bin_tokens, return_inverse=True)
        cells_T = histogram.cells(acceptance_T)
        counts_BC = torch.bincount(place_T * CELLS + cells_T, minlength=len(starts) * CELLS).view(-1, CELLS)
        sums_B5 = bin_sums(acceptance_T, cells_T, place_T, counts_BC.sum(1))
        self._make_bins(starts.tolist(), counts_BC.sum(1).tolist())
        for start, counts_C, sums in zip(starts.tolist(), counts_BC, sums_B5, strict=True):
            each = self._bins[start]
            each.counts += counts_C
            # A rollout fills few of the 2,002 cells of a bin.
            filled_F = counts_C.nonzero()[:, 0]
            each.replicates.index_add_(1, filled_F, weights_R[:, None] * counts_C[filled_F].to(torch.int32))
            each.sums = added(each.sums, sums)
        self._rollouts += 1
        self._tokens_squared += len(acceptance_T) ** 2
        self._moments = added(self._moments, moments(acceptance_T, context_T))
        if off_T is not None:
            self.impossible.add(off_T, context_T)

    def merge(self, other: TailStatistics) -> None:
        """Add the rollouts of other statistics, which stay as they are. Raises UserError unless all settings agree."""
        for name in ("bin_tokens", "quantile", "replicates", "seed"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise UserError(
                    f"statistics with different {name} cannot be merged: {mine} and {theirs}",
                    "measure all shards with the same settings",
                )
        self._make_bins(list(other._bins), [int(each.counts.sum()) for each in other._bins.values()])
        for start, theirs in other._bins.items():
            each = self._bins[start]
            each.counts += theirs.counts
            each.replicates += theirs.replicates
            each.sums = added(each.sums, theirs.sums)
        self._rollouts += other._rollouts
        self._tokens_squared += other._tokens_squared
        self._moments = added(self._moments, other._moments)
        self.impossible.merge(other.impossible)

    @one_thread()
    def table(self, estimator: str) -> TailTable:
        """The table of everything added so far. estimator: what the added acceptances are, one of
        mismatch.acceptance.ESTIMATORS."""
        if estimator not in ESTIMATORS:
            raise UserError(f"unknown estimator {estimator!r}", nearest(estimator, list(ESTIMATORS)))
        if not self._bins:
            raise UserError("no tokens were measured, so there is no tail", "add rollouts that have response tokens")
        starts = sorted(self._bins)
        rows = [self._row(start, start + 1, self._bins[start], *self._bins[start].sums[:2]) for start in starts]
        overall = self._row(starts[0], starts[-1] + 1, self._overall(), self._rollouts, self._tokens_squared)
        return TailTable(rows, overall, self.quantile, estimator, self.length_correlation())

    @staticmethod
    def pooled_row(
        many: Sequence[TailStatistics], from_context_tokens: int, confidence: float = CONFIDENCE
    ) -> TailRow | None:
        """The row of one bin as `merge` and `table` would give it; None if no statistics have a token in the bin.
        `confidence` is that of the row's interval.

        As for `merge`, settings must agree and ids must differ. Nothing is changed, and only this bin is added up.
        """
        here = [each for each in many if from_context_tokens // each.bin_tokens in each._bins]
        if not here:
            return None
        start, rest = divmod(from_context_tokens, here[0].bin_tokens)
        assert rest == 0, f"no bin starts at {from_context_tokens}"
        total = here[0]._only(start)
        for each in here[1:]:
            total.merge(each._only(start))
        rollouts, tokens_squared = total._bins[start].sums[:2]
        return total._row(start, start + 1, total._bins[start], rollouts, tokens_squared, confidence)

    def _only(self, start: int) -> TailStatistics:
        """Statistics with a copy of one bin, from which only that bin's row can be made. Sums over all bins are not
        set."""
        one, whole = TailStatistics(self.bin_tokens, self.quantile, self.replicates, self.seed), self._bins[start]
        one._bins[start] = _Bin(whole.counts.clone(), whole.replicates.clone(), list(whole.sums))
        one.impossible = self.impossible.only([start * self.bin_tokens])
        return one

    def length_correlation(self) -> float | None:
        """Pearson correlation of acceptance with context length over tokens; None if one of them does not vary."""
        return pearson(self.tokens, self._moments)

    def beta(self, from_context_tokens: int | None = None) -> BetaFit:
        """Beta fit (see beta.py) of the bin that starts at this context length, or of all tokens.

        Raises UserError if fewer than 20 tokens are below 0.999, or if all of these are equal.
        """
        if from_context_tokens is None:
            each = self._overall()
        else:
            start, rest = divmod(from_context_tokens, self.bin_tokens)
            if rest or start not in self._bins:
                known = [self.bin_tokens * start for start in sorted(self._bins)]
                raise UserError(f"no bin with tokens starts at {from_context_tokens}", f"bins start at {known}")
            each = self._bins[start]
        return fit_from_histogram(each.counts, each.sums[3] / UNIT, each.sums[4] / UNIT)

    def state(self) -> dict[str, Tensor]:
        """Everything, settings included, as plain tensors that safetensors can save. `from_state` is the inverse."""
        bins = [self._bins[start] for start in sorted(self._bins)]
        return {
            "settings": torch.tensor([FORMAT, CELLS, self.bin_tokens, self.replicates, self.seed]),
            "quantile": torch.tensor([self.quantile], dtype=torch.float64),
            "bins": torch.tensor(sorted(self._bins), dtype=torch.int64),
            "counts": _stacked([each.counts for each in bins], (CELLS,), torch.int64),
            "replicates": _stacked([each.replicates for each in bins], (self.replicates, CELLS), torch.int32),
            "sums": torch.tensor([each.sums for each in bins], dtype=torch.int64).view(len(bins), 5),
            "overall": torch.tensor([self._rollouts, self._tokens_squared]),
            "moments": torch.tensor([divmod(moment, 2**62) for moment in self._moments]),
            **self.impossible.state(),
        }

    @one_thread()
    def packed_state(self) -> dict[str, Tensor]:
        """`state` with those histogram cells alone that hold a token, their numbers under "cells", and replicates in the
        narrowest integers that hold them: about a third of its bytes. To be sent, or kept for many steps."""
        state = self.state()
        cells_F = state["counts"].sum(0).nonzero().flatten()
        counts_BF, replicates_BRF = state["counts"][:, cells_F], state["replicates"][:, :, cells_F]
        return state | {
            "cells": cells_F,
            "counts": counts_BF.contiguous(),
            "replicates": _narrow(replicates_BRF).contiguous(),
        }

    @staticmethod
    @one_thread()
    def from_state(state: dict[str, Tensor]) -> TailStatistics:
        """Statistics from what `state` or `packed_state` returned, in this process or in another."""
        check_state(state, FORMAT)
        if "cells" in state:
            state = state | {name: _unpacked(state[name], state["cells"]) for name in ("counts", "replicates")}
        _, _, bin_tokens, replicates, seed = state["settings"].tolist()
        made = TailStatistics(bin_tokens, float(state["quantile"][0]), replicates, seed)
        for row, start in enumerate(state["bins"].tolist()):
            counts, drawn = state["counts"][row].clone(), state["replicates"][row].to(torch.int32, copy=True)
            made._bins[start] = _Bin(counts, drawn, state["sums"][row].tolist())
        made._rollouts, made._tokens_squared = state["overall"].tolist()
        made._moments = [high * 2**62 + low for high, low in state["moments"].tolist()]
        made.impossible = ImpossibleTokens.from_state(state)
        return made

    def _make_bins(self, starts: list[int], tokens: list[int]) -> None:
        """Make the bins for everything that will be added. Raises UserError before anything is added, if there are too
        many."""
        if len(self._bins.keys() | set(starts)) > MOST_BINS:
            raise UserError(
                f"more than {MOST_BINS} bins of {self.bin_tokens} tokens", "use a larger bin_tokens, for example 2000"
            )
        for start, more in zip(starts, tokens, strict=True):
            if start in self._bins and int(self._bins[start].counts.sum()) + more > MOST_TOKENS_A_BIN:
                raise UserError(
                    f"more than {MOST_TOKENS_A_BIN:,} tokens in one bin",
                    "start new statistics, or use a smaller bin_tokens",
                )
        for start in starts:
            if start not in self._bins:
                empty = torch.zeros(self.replicates, CELLS, dtype=torch.int32)
                self._bins[start] = _Bin(torch.zeros(CELLS, dtype=torch.int64), empty)

    def _overall(self) -> _Bin:
        bins = list(self._bins.values())
        total = _Bin(torch.zeros(CELLS, dtype=torch.int64), torch.zeros(self.replicates, CELLS, dtype=torch.int64))
        for each in bins:
            total.counts += each.counts
            total.replicates += each.replicates
            total.sums = added(total.sums, each.sums)
        return total

    def _row(
        self,
        start: int,
        stop: int,
        each: _Bin,
        rollouts: int,
        tokens_squared: int,
        confidence: float = CONFIDENCE,
    ) -> TailRow:
        tokens = int(each.counts.sum())
        value = float(histogram.quantile(each.counts, self.quantile))
        effective_rollouts = tokens * tokens / tokens_squared
        low, high = interval(each.counts, each.replicates, self.quantile, effective_rollouts, confidence)
        here = self.impossible.only(range(start * self.bin_tokens, stop * self.bin_tokens, self.bin_tokens))
        q01, q05, q10 = (float(histogram.quantile(each.counts, level)) for level in (0.01, 0.05, 0.10))
        return TailRow(
            from_context_tokens=start * self.bin_tokens,
            to_context_tokens=stop * self.bin_tokens,
            tokens=tokens,
            rollouts=rollouts,
            mean=each.sums[2] / UNIT / tokens,
            q01=q01,
            q05=q05,
            q10=q10,
            quantile_value=value,
            low=low,
            high=high,
            share_above_999=float(histogram.share_nearly_one(each.counts)),
            cvar01=histogram.mean_of_lowest(each.counts, 0.01),
            cvar05=histogram.mean_of_lowest(each.counts, 0.05),
            skew=histogram.skew(each.counts),
            impossible=here.shares(confidence),
        )


def tail(
    acceptance: Float[Tensor, " N"],
    context_tokens: Int[Tensor, " N"],
    rollout_ids: Int[Tensor, " N"] | Sequence[int | str],
    bin_tokens: int = 2000,
    quantile: float = 0.05,
    *,
    estimator: str = "exact",
    replicates: int = 200,
    seed: int = 0,
) -> TailTable:
    """The tail of tokens that are all in memory. Each argument has one entry per token, in any order.

    rollout_ids: which tokens belong to one rollout, and so depend on each other. estimator: how `acceptance` was
    computed.
    """
    check_tensors(acceptance=acceptance, context_tokens=context_tokens)
    if not len(acceptance) == len(context_tokens) == len(rollout_ids):
        raise UserError(
            f"acceptance, context_tokens and rollout_ids must have one entry per token, got {len(acceptance)}, "
            f"{len(context_tokens)} and {len(rollout_ids)}",
            "repeat each rollout's id for all of its tokens: torch.repeat_interleave(ids, response_tokens)",
        )
    statistics = TailStatistics(bin_tokens, quantile, replicates, seed)
    acceptance, context_tokens = acceptance.detach().cpu(), context_tokens.detach().cpu()
    for rollout_id, where in _by_rollout(rollout_ids):
        statistics.add(acceptance[where], context_tokens[where], rollout_id)
    return statistics.table(estimator)


def _by_rollout(rollout_ids: Tensor | Sequence[int | str]) -> Iterator[tuple[int | str, Tensor]]:
    """Each id with the positions of its tokens, in the order in which the ids first appear."""
    ids = rollout_ids.tolist() if isinstance(rollout_ids, (Tensor, np.ndarray)) else list(rollout_ids)
    numbers: dict[int | str, int] = {}
    number_N = torch.tensor([numbers.setdefault(each, len(numbers)) for each in ids], dtype=torch.int64)
    order = torch.argsort(number_N, stable=True)
    yield from zip(numbers, order.split(torch.bincount(number_N, minlength=len(numbers)).tolist()), strict=True)


def _narrow(counts: Tensor) -> Tensor:
    """The same whole numbers of 0 or more, in as few bytes as hold the largest one."""
    largest = int(counts.max()) if counts.numel() else 0
    return counts.to(next(each for each in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(each).max))


def _unpacked(filled: Tensor, cells_F: Tensor) -> Tensor:
    """[..., C] with these cells filled, and all others 0."""
    whole = filled.new_zeros(*filled.shape[:-1], CELLS)
    whole[..., cells_F] = filled
    return whole


def _stacked(rows: list[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=dtype)
