"""What is kept of a measured cell: for each sequence and bin of context lengths, how often each acceptance occurred, and
sums over tokens. From these follow the statistics of any resampling of sequences. One small file a cell, written at
once, so a cut run goes on after its last cell."""

# N sequences, B bins, C histogram cells, K sums, W weightings of the sequences

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from scipy import stats
from torch import Tensor

from sparroll import files
from sparroll.mismatch import histogram

NATS = (2, 5, 10, 20)
"""Thresholds of impossible tokens."""
SUMS = ("tokens", "acceptance", "kl_sparse_to_dense", "kl_dense_to_sparse", *(f"over_{nats}_nats" for nats in NATS))
"""over_20_nats: probability that the sparse policy draws a token which is 20 nats less likely under the dense one."""
QUANTILE = 0.05
REPLICATES = 400
LEAST_SEQUENCES = 8
"""Fewer sequences than these are too few to resample, so nothing measured on them has an interval."""


@dataclass(frozen=True)
class Measured:
    """One cell, measured.

    >>> measured.statistic("q05", torch.ones(1, 8), place=2)
    tensor([0.8523], dtype=torch.float64)
    """

    counts_NBC: Tensor
    sums_NBK: Tensor
    seconds: float

    def statistic(self, name: str, weights_WN: Tensor, place: int) -> Tensor:
        """[W] a statistic of one bin, over sequences that count as often as the weights say: "q05", "tokens", or the
        mean over tokens of one of SUMS."""
        if name == "q05":
            return histogram.quantile((weights_WN.double() @ self.counts_NBC[:, place].double()).long(), QUANTILE)
        sums_WK = weights_WN.double() @ self.sums_NBK[:, place]
        return sums_WK[:, 0] if name == "tokens" else sums_WK[:, SUMS.index(name)] / sums_WK[:, 0]

    def reached(self, place: int) -> int:
        """How many sequences have tokens in a bin."""
        return int((self.counts_NBC[:, place].sum(-1) > 0).sum())

    def rows(self, bins: tuple[int, ...]) -> list[dict[str, Any]]:
        """A row for each bin: every statistic, and the interval of q05 and of both KLs; the raw values of each
        sequence."""
        weights_WN = resamplings(len(self.counts_NBC))
        rows = []
        for place, (begin, end) in enumerate(zip(bins, bins[1:], strict=False)):
            row: dict[str, Any] = {"from_context_tokens": begin, "to_context_tokens": end}
            for name in ("tokens", "q05", *SUMS[1:]):
                value_W = self.statistic(name, weights_WN, place)
                row[name] = int(value_W[0]) if name == "tokens" else round(value_W[0].item(), 9)
                if name == "q05" or name.startswith("kl_"):
                    most = 1.0 if name == "q05" else math.inf
                    row[f"{name}_interval"] = interval(value_W.numpy(), self.reached(place), 0.0, most)
            row["sequences"] = {
                name: [
                    round(value, 9) for value in self.statistic(name, torch.eye(len(self.counts_NBC)), place).tolist()
                ]
                for name in ("q05", "acceptance", "kl_sparse_to_dense", "over_20_nats")
            }
            rows.append(row)
        return rows

    def save(self, path: Path) -> None:
        tensors = {"counts": self.counts_NBC.int(), "sums": self.sums_NBK, "seconds": torch.tensor(self.seconds)}
        files.write_bytes(path, save(tensors))

    @staticmethod
    def load(path: Path) -> Measured:
        held = load_file(path)
        return Measured(held["counts"].long(), held["sums"], held["seconds"].item())


def count(values_KT: dict[str, Tensor], context_T: Tensor, bins: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """[B, C] counts and [B, K] sums of one sequence; tokens outside of all bins are left out."""
    place_T = torch.bucketize(context_T, torch.tensor(bins), right=True) - 1
    inside_T = (place_T >= 0) & (place_T < len(bins) - 1)
    place_T, shape = place_T[inside_T], (len(bins) - 1, histogram.CELLS)
    cells_T = histogram.cells(values_KT["acceptance"][inside_T])
    counts_BC = torch.bincount(place_T * histogram.CELLS + cells_T, minlength=shape[0] * shape[1]).view(shape)
    columns = [counts_BC.sum(1).double()]
    for name in SUMS[1:]:
        columns.append(torch.zeros(shape[0]).double().index_add_(0, place_T, values_KT[name][inside_T].double()))
    return counts_BC, torch.stack(columns, 1)


def resamplings(sequences: int, replicates: int = REPLICATES) -> Tensor:
    """[1 + replicates, N] how often each sequence counts: once, then as drawn with replacement. The same draws for every
    cell, so that differences between cells are paired."""
    drawn = np.random.default_rng(0).integers(sequences, size=(replicates, sequences))
    counted = np.apply_along_axis(np.bincount, 1, drawn, minlength=sequences)
    return torch.from_numpy(np.concatenate([np.ones((1, sequences), dtype=np.int64), counted]))


def interval(
    value_W: np.ndarray, sequences: int, least: float = -math.inf, most: float = math.inf
) -> list[float | None]:
    """The ends of a 95 % interval: those of the middle 95 % of the replicates, moved away from the value by the factor of
    `widening`, but not beyond the least and the most that the value can be. Both are None below LEAST_SEQUENCES.

    value_W: first the value of the data itself, which is no replicate. A replicate may have drawn no sequence that is long
    enough for the bin, and then does not count. sequences: how many of them reach the bin.
    """
    if sequences < LEAST_SEQUENCES:
        return [None, None]
    value, replicates_W = value_W[0], value_W[1:]
    ends = np.quantile(replicates_W[~np.isnan(replicates_W)], (0.025, 0.975))
    outward = np.array([-1, 1]) * (widening(sequences) - 1) * np.abs(ends - value)
    return [round(float(end), 9) for end in np.clip(ends + outward, least, most)]


@cache
def widening(sequences: int) -> float:
    """How many times too near to the value the ends of the middle 95 % are: resampling finds a variance that is too small by
    (n - 1) / n, and takes the quantiles of a normal distribution in place of Student's. 1.29 for 8 sequences, 1.10 for 20.
    """
    student, normal = float(stats.t.ppf(0.975, sequences - 1)), float(stats.norm.ppf(0.975))
    return student / normal * math.sqrt(sequences / (sequences - 1))
