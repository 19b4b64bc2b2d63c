"""Counts values in [0, 1] in fixed cells, and reads quantiles from the counts. Knows neither tokens nor rollouts.

There are 2000 cells of width 1/2000, one cell for exactly 0 and one for exactly 1. 0.999 is the edge of a cell, so the
share at or above it is exact. Quantiles of 0 and of 1 are exact, too.
"""

# C cells (2002), *N any leading dimensions

# ruff: noqa: F722 (jaxtyping)

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int

INNER_CELLS = 2000
CELLS = INNER_CELLS + 2
"""Cell 0 holds the value 0, cell 2001 the value 1, and cell i between them the values from (i - 1)/2000 up to
i/2000."""
NEARLY_ONE = 0.999
"""With at least this acceptance two policies count as agreed on a token (Sparrow, section 3)."""
NEARLY_ONE_CELL = 1 + 1998

EDGES = torch.arange(INNER_CELLS + 1, dtype=torch.float64) / INNER_CELLS
"""[2001] the borders of the inner cells."""


def cells(values: Float[Tensor, "*N"]) -> Int[Tensor, "*N"]:
    """The cell of each value. Values must be in [0, 1]."""
    exact = values.to(torch.float64).contiguous()
    return torch.where(exact == 0, 0, torch.bucketize(exact, EDGES, right=True))


def quantile(counts: Int[Tensor, "*N C"], level: float) -> Float[Tensor, "*N"]:
    """Smallest value that at least the share `level` of the counted values does not exceed; NaN if nothing is counted.

    Values inside a cell are assumed to be evenly spread, so the error is less than a cell, 0.0005. A quantile of
    exactly 0 or exactly 1 is returned exactly.
    """
    cell, rank_inside = _locate(counts, level)
    inside = counts.gather(-1, cell).to(torch.float64)
    value = ((cell - 1).to(torch.float64) + (rank_inside - 0.5) / inside) / INNER_CELLS
    value = torch.where(cell == 0, 0.0, torch.where(cell == CELLS - 1, 1.0, value))
    return torch.where(inside > 0, value, math.nan).squeeze(-1)


def quantile_cell(counts: Int[Tensor, "*N C"], level: float) -> Int[Tensor, "*N"]:
    """The cell in which `quantile` lies."""
    return _locate(counts, level)[0].squeeze(-1)


def share_nearly_one(counts: Int[Tensor, "*N C"]) -> Float[Tensor, "*N"]:
    """Share of values at or above 0.999; NaN if nothing is counted."""
    return counts[..., NEARLY_ONE_CELL:].sum(-1).to(torch.float64) / counts.sum(-1)


def mean_of_lowest(counts: Int[Tensor, " C"], share: float) -> float:
    """Mean of the lowest `share` of the counted values: their conditional value at risk. NaN if nothing is counted.

    Each value counts as the middle of its cell, so the error is at most half a cell, 0.00025.
    """
    left = share * float(counts.sum())
    taken_C = torch.minimum(counts.double(), (left - (counts.cumsum(0) - counts)).clamp_min(0))
    return float((taken_C * _middles()).sum() / taken_C.sum())


def skew(counts: Int[Tensor, " C"]) -> float | None:
    """Third central moment over the cubed standard deviation; below 0 where the lower tail is the longer one. None where
    the values do not vary. Each value counts as the middle of its cell."""
    total = counts.sum().double()
    apart_C = _middles() - (counts * _middles()).sum() / total
    variance, third = (float((counts * apart_C**power).sum() / total) for power in (2, 3))
    # The mean of equal values may be rounded.
    return third / variance**1.5 if variance > 1e-18 else None


def _middles() -> Tensor:
    """[C] the middle of each cell."""
    inner = (EDGES[:-1] + EDGES[1:]) / 2
    return torch.cat([torch.zeros(1, dtype=torch.float64), inner, torch.ones(1, dtype=torch.float64)])


def _locate(counts: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """The quantile's cell, and its rank among the values in that cell, counted from 1. Both keep a last dimension of
    1."""
    below = counts.to(torch.int64).cumsum(-1)
    total = below[..., -1:]
    # The small term keeps 0.07 * 100 = 7.000000000000001 at rank 7.
    rank = (level * total.to(torch.float64) - 1e-9).ceil().clamp_min(1).to(torch.int64)
    cell = torch.searchsorted(below, rank).clamp_max(CELLS - 1)
    return cell, (rank - below.gather(-1, cell) + counts.gather(-1, cell)).to(torch.float64)
