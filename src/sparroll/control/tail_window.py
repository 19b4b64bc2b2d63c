"""The evidence of the last few steps, bin by bin. It keeps whole TailStatistics, so that pooled figures are those of a
single measurement over all of these rollouts. Nothing is decided here."""

# B bins, C histogram cells, R bootstrap replicates

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.bootstrap import CONFIDENCE
from sparroll.mismatch.impossible import ImpossibleTokens
from sparroll.mismatch.table import TailRow, enough

Packed = dict[str, Tensor]
"""TailStatistics.packed_state."""


class TailWindow:
    """The last `steps` steps in which something was measured. Rollout ids must differ between steps, or the bootstrap would
    take two rollouts for one."""

    def __init__(self, steps: int):
        self.steps = steps
        self.evidence: tuple[tuple[int, Packed], ...] = ()
        """(step, what it measured), oldest first. It is never changed in place, so a reference to it stays valid as a
        snapshot."""

    def add(self, step: int, statistics: TailStatistics) -> None:
        self.evidence = (*self.evidence, (step, statistics.packed_state()))[-self.steps :]

    def clear(self) -> None:
        self.evidence = ()

    @property
    def starts(self) -> list[int]:
        """Context lengths at which the bins that have tokens start, in ascending order."""
        found = {int(start) * int(each["settings"][2]) for _, each in self.evidence for start in each["bins"]}
        return sorted(found)

    @property
    def bin_tokens(self) -> int:
        """Width of a bin of the evidence, of which there must be some."""
        return int(self.evidence[-1][1]["settings"][2])

    def row(self, from_context_tokens: int, after_step: int = 0, confidence: float = CONFIDENCE) -> TailRow | None:
        """One bin's tail over the window's steps after `after_step`, with an interval of that confidence; None where
        these steps have no token in the bin."""
        return self._row([from_context_tokens], after_step, confidence)

    def merged_row(self, starts: Sequence[int], confidence: float = CONFIDENCE) -> TailRow | None:
        """The tail of several bins as if they were one, over the whole window. starts: where they start, in ascending
        order."""
        return self._row(starts, 0, confidence)

    def impossible(self, starts: Sequence[int], after_step: int = 0) -> ImpossibleTokens:
        """The impossible tokens of these bins over the window's steps after `after_step`."""
        return _impossible([each for step, each in self.evidence if step > after_step], starts)

    def amount(self, starts: Sequence[int]) -> tuple[int, int]:
        """-> (tokens, rollouts) of these bins together over the whole window; see `_sums` for the rollouts."""
        found = [(each, places) for _, each in self.evidence if (places := _places(each, starts))]
        tokens = sum(int(each["counts"][places].sum()) for each, places in found)
        return tokens, sum(int(_sums(each, places)[0]) for each, places in found)

    def groups(self, least_tokens: int) -> list[list[int]]:
        """The starts of all bins with tokens, in groups of neighbours that have enough tokens and rollouts to decide
        anything; empty where all of them together have too few.

        From the shortest contexts on, bins are merged until they have enough. What is left at the end joins the last
        group. So a bin with enough data is alone, unless shorter ones before it or the last ones after it have too
        little.
        """
        groups: list[list[int]] = []
        waiting: list[int] = []
        for start in self.starts:
            waiting.append(start)
            if enough(*self.amount(waiting), least_tokens):
                groups.append(waiting)
                waiting = []
        if groups:
            groups[-1] += waiting
        return groups

    def _row(self, starts: Sequence[int], after_step: int, confidence: float) -> TailRow | None:
        here = [each for step, each in self.evidence if step > after_step and _places(each, starts)]
        if not here:
            return None
        row = TailStatistics.pooled_row([_pooled(here, starts)], starts[0], confidence)
        assert row is not None, "pooled bins without a token"
        return dataclasses.replace(row, to_context_tokens=row.to_context_tokens + starts[-1] - starts[0])

    def state(self) -> dict[str, Any]:
        """The evidence as tensors, named "step/name"."""
        return {f"{step}/{name}": tensor for step, each in self.evidence for name, tensor in each.items()}

    def restore(self, state: dict[str, Any]) -> None:
        steps = sorted({int(key.split("/")[0]) for key in state})
        self.evidence = tuple((step, _of_step(state, step)) for step in steps)


def _of_step(state: dict[str, Any], step: int) -> Packed:
    prefix = f"{step}/"
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _places(each: Packed, starts: Sequence[int]) -> list[int]:
    """The rows of those bins that have tokens in this step."""
    known = (each["bins"] * each["settings"][2]).tolist()
    return [place for place, start in enumerate(known) if start in starts]


def _pooled(here: list[Packed], starts: Sequence[int]) -> TailStatistics:
    """The statistics of these bins as one bin, over all of these steps. Only this bin's row can be taken from them;
    figures over all bins are not set."""
    _, cells, bin_tokens, replicates, _ = here[0]["settings"].tolist()
    counts_C = torch.zeros(cells, dtype=torch.int64)
    replicates_RC = torch.zeros(replicates, cells, dtype=torch.int32)
    sums_5 = torch.zeros(5, dtype=torch.int64)
    for each in here:
        places = _places(each, starts)
        counts_C[each["cells"]] += each["counts"][places].sum(0)
        replicates_RC[:, each["cells"]] += each["replicates"][places].sum(0, dtype=torch.int32)
        sums_5 += _sums(each, places)
    one_bin = {"counts": counts_C[None], "replicates": replicates_RC[None], "sums": sums_5[None]}
    settings = {name: tensor for name, tensor in here[0].items() if name != "cells"}
    pooled = TailStatistics.from_state(settings | one_bin | {"bins": torch.tensor([starts[0] // bin_tokens])})
    pooled.impossible = _impossible(here, starts).as_one_bin(starts[0])
    return pooled


def _impossible(here: list[Packed], starts: Sequence[int]) -> ImpossibleTokens:
    """Those of these bins over all of these steps; at least one."""
    total, *others = (ImpossibleTokens.from_state(each).only(starts) for each in here)
    for each in others:
        total.merge(each)
    return total


def _sums(each: Packed, places: list[int]) -> Tensor:
    """The `sums` of a step's bins as if they were one bin.

    A step does not keep which rollouts have tokens in which bins. So of several bins, the number of rollouts is a lower
    bound, and the sum of their squared tokens is an upper one: the merged bin counts as at most as certain as it is.
    Both are exact where all rollouts have the same share of their tokens in each bin, and where no rollout has tokens
    in two.
    """
    sums_B5 = each["sums"]
    sums_5 = sums_B5[places].sum(0)
    if len(places) > 1:
        rollouts, tokens_squared = each["overall"].tolist()
        beside_5 = sums_B5.sum(0) - sums_5
        together = sum(math.sqrt(squared) for squared in sums_B5[places, 1].tolist()) ** 2
        sums_5[0] = max(int(sums_B5[places, 0].max()), rollouts - int(beside_5[0]))
        sums_5[1] = min(round(together), tokens_squared - int(beside_5[1]))
    return sums_5
