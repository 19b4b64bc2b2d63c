"""The evidence of the last few steps, bin by bin: what was measured under the budget that a bin has now. Keeps whole
TailStatistics, so that pooled figures are those of one measurement over all of these rollouts. Decides nothing."""

# B bins, C histogram cells, K cells that hold a token, R bootstrap replicates

from __future__ import annotations

import torch
from torch import Tensor

from sparroll.mismatch import TailStatistics
from sparroll.mismatch.table import TailRow

Evidence = tuple[tuple[int, TailStatistics], ...]
"""(step, what it measured), oldest first."""


class TailWindow:
    """The last `steps` steps. Rollout ids must be distinct over steps, or the bootstrap takes two for one."""

    def __init__(self, steps: int):
        self.steps = steps
        self.evidence: Evidence = ()
        """Never changed in place, so that whoever holds it holds the window as it was."""

    def add(self, step: int, statistics: TailStatistics) -> None:
        self.evidence = (*self.evidence, (step, statistics))[-self.steps :]

    def row(self, from_context_tokens: int, after_step: int) -> TailRow | None:
        """One bin's tail over the window's steps behind `after_step`; None where they have no token in it."""
        return TailStatistics.pooled_row(
            [statistics for step, statistics in self.evidence if step > after_step], from_context_tokens
        )


def packed(evidence: Evidence) -> dict[str, Tensor]:
    """As tensors for a checkpoint: of the histograms only the cells that hold a token, usually a few hundred of 2002."""
    tensors: dict[str, Tensor] = {}
    for step, statistics in evidence:
        state = statistics.state()
        cells_K = state["counts"].sum(0).nonzero().flatten()
        state["counts"] = state["counts"][:, cells_K].contiguous()
        state["replicates"] = state["replicates"][:, :, cells_K].contiguous()
        tensors |= {f"{step}/{name}": tensor for name, tensor in state.items()} | {f"{step}/cells": cells_K}
    return tensors


def unpacked(tensors: dict[str, Tensor]) -> Evidence:
    """What `packed` was given."""
    steps = sorted({int(name.split("/")[0]) for name in tensors})
    return tuple((step, _statistics(tensors, step)) for step in steps)


def _statistics(tensors: dict[str, Tensor], step: int) -> TailStatistics:
    prefix = f"{step}/"
    state = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    cells_K, cells = state.pop("cells"), int(state["settings"][1])
    for name in ("counts", "replicates"):
        few = state[name]
        state[name] = torch.zeros(*few.shape[:-1], cells, dtype=few.dtype)
        state[name][..., cells_K] = few
    return TailStatistics.from_state(state)
