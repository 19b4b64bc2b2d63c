"""Sums over tokens as whole numbers, so that adding them in any order gives the same bits. Keeps no tensors."""

# T tokens of one rollout, B bins it touches

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparroll.mismatch.beta import log_shares
from sparroll.mismatch.histogram import NEARLY_ONE_CELL

UNIT = 2**26
"""Sums of acceptances and of logarithms are kept in 1/UNIT. The error per token is at most 7e-9, and none for 0 and
1."""
MOST_CONTEXT_TOKENS = 2**23
_MOMENT_UNIT = 2**23
_SLICE = 2**16


def bin_sums(acceptance_T: Tensor, cells_T: Tensor, place_T: Tensor, tokens_B: Tensor) -> list[list[int]]:
    """What one rollout adds to each bin: [1, its tokens squared, sum of acceptance, of log x, of log(1 - x)]. The last
    three are in 1/UNIT; x is that of beta.log_shares, over values below 0.999. `place_T` says which bin each token is
    in."""
    below_T = cells_T < NEARLY_ONE_CELL
    logs = [torch.where(below_T, log_T, 0.0) for log_T in log_shares(acceptance_T)]
    columns = [torch.ones_like(tokens_B), tokens_B * tokens_B]
    for value_T in (acceptance_T, *logs):
        whole_T = (value_T * UNIT).round().to(torch.int64)
        columns.append(torch.zeros_like(tokens_B).index_add_(0, place_T, whole_T))
    return torch.stack(columns, dim=1).tolist()


def moments(acceptance_T: Tensor, context_T: Tensor) -> list[int]:
    """Sums of a, a*a, x, x*x and a*x over tokens, where a is the acceptance in 1/_MOMENT_UNIT and x the context length.

    Working in slices keeps the products within 63 bits for contexts under MOST_CONTEXT_TOKENS. The sums are Python
    integers.
    """
    sums = [0] * 5
    whole_T = (acceptance_T * _MOMENT_UNIT).round().to(torch.int64)
    for a_T, x_T in zip(whole_T.split(_SLICE), context_T.split(_SLICE), strict=True):
        terms = (a_T, a_T * a_T, x_T, x_T * x_T, a_T * x_T)
        sums = added(sums, [int(term_T.sum()) for term_T in terms])
    return sums


def pearson(tokens: int, sums: list[int]) -> float | None:
    """Pearson correlation from `moments`, without cancellation; None if one side does not vary."""
    a, aa, x, xx, ax = sums
    variance_a, variance_x = tokens * aa - a * a, tokens * xx - x * x
    if variance_a == 0 or variance_x == 0:
        return None
    return (tokens * ax - a * x) / (math.sqrt(variance_a) * math.sqrt(variance_x))


def added(one: list[int], other: list[int]) -> list[int]:
    """Add two lists entry by entry."""
    return [a + b for a, b in zip(one, other, strict=True)]
