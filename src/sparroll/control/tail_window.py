"""The evidence of the last few steps, bin by bin. It keeps whole TailStatistics, so that pooled figures are those of a
single measurement over all of these rollouts. Nothing is decided here."""

# B bins, C histogram cells, K cells that hold a token, R bootstrap replicates

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.bootstrap import CONFIDENCE
from sparroll.mismatch.table import TailRow

Packed = dict[str, Tensor]
"""The state of TailStatistics with only those histogram cells that hold a token, usually a few hundred of 2002."""


class TailWindow:
    """The last `steps` steps. Rollout ids must differ between steps, or the bootstrap would take two rollouts for
    one."""

    def __init__(self, steps: int):
        self.steps = steps
        self.evidence: tuple[tuple[int, Packed], ...] = ()
        """(step, what it measured), oldest first. It is never changed in place, so a reference to it stays valid as a
        snapshot."""

    def add(self, step: int, statistics: TailStatistics) -> None:
        self.evidence = (*self.evidence, (step, packed(statistics)))[-self.steps :]

    def clear(self) -> None:
        self.evidence = ()

    @property
    def starts(self) -> list[int]:
        """Context lengths at which the bins that have tokens start, in ascending order."""
        found = {int(start) * int(each["settings"][2]) for _, each in self.evidence for start in each["bins"]}
        return sorted(found)

    def row(self, from_context_tokens: int, after_step: int = 0, confidence: float = CONFIDENCE) -> TailRow | None:
        """One bin's tail over the window's steps after `after_step`, with an interval of that confidence; None where
        these steps have no token in the bin."""
        here = [
            each for step, each in self.evidence if step > after_step and _place(each, from_context_tokens) is not None
        ]
        return (
            TailStatistics.pooled_row([_pooled(here, from_context_tokens)], from_context_tokens, confidence)
            if here
            else None
        )

    def state(self) -> dict[str, Any]:
        """The evidence as tensors, named "step/name"."""
        return {f"{step}/{name}": tensor for step, each in self.evidence for name, tensor in each.items()}

    def restore(self, state: dict[str, Any]) -> None:
        steps = sorted({int(key.split("/")[0]) for key in state})
        self.evidence = tuple((step, _of_step(state, step)) for step in steps)


def packed(statistics: TailStatistics) -> Packed:
    state = statistics.state()
    cells_K = state["counts"].sum(0).nonzero().flatten()
    state["counts"] = state["counts"][:, cells_K].contiguous()
    state["replicates"] = state["replicates"][:, :, cells_K].contiguous()
    return state | {"cells": cells_K}


def _of_step(state: dict[str, Any], step: int) -> Packed:
    prefix = f"{step}/"
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def _place(each: Packed, from_context_tokens: int) -> int | None:
    """The row of the bin that starts there; None where there is none."""
    places = (each["bins"] * each["settings"][2] == from_context_tokens).nonzero().flatten().tolist()
    return places[0] if places else None


def _pooled(here: list[Packed], from_context_tokens: int) -> TailStatistics:
    """The statistics of one bin over all of these. Only this bin's row can be taken from them; figures over all bins
    are not set."""
    _, cells, bin_tokens, replicates, _ = here[0]["settings"].tolist()
    counts_C = torch.zeros(cells, dtype=torch.int64)
    replicates_RC = torch.zeros(replicates, cells, dtype=torch.int32)
    sums_5 = torch.zeros(5, dtype=torch.int64)
    for each in here:
        place = _place(each, from_context_tokens)
        counts_C[each["cells"]] += each["counts"][place]
        replicates_RC[:, each["cells"]] += each["replicates"][place]
        sums_5 += each["sums"][place]
    one_bin = {"counts": counts_C[None], "replicates": replicates_RC[None], "sums": sums_5[None]}
    return TailStatistics.from_state(here[0] | one_bin | {"bins": torch.tensor([from_context_tokens // bin_tokens])})
