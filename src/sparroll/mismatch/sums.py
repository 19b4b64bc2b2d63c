"""Sums over tokens as whole numbers, so that adding them in any order gives the same bits. No tensors are kept here."""

# T tokens of one rollout, B bins it touches

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparroll.mismatch.beta import log_shares
from sparroll.mismatch.histogram import NEARLY_ONE_CELL

UNIT = 2**26
"""Sums of acceptances and of logarithms are kept in 1/UNIT: off by at most 7e-9 a token, and not at all for 0 and 1."""
MOST_CONTEXT_TOKENS = 2**23
_MOMENT_UNIT = 2**23
_SLICE = 2**16


def bin_sums(acceptance_T: Tensor, cells_T: Tensor, place_T: Tensor, tokens_B: Tensor) -> list[list[int]]:
    """What one rollout adds to each bin: [1, its tokens squared, sum of acceptance, of log x, of log(1 - x)], the last three
    in UNIT, x as in beta.log_shares over values below 0.999. `place_T` says which bin a token is in."""
    below_T = cells_T < NEARLY_ONE_CELL
    logs = [torch.where(below_T, log_T, 0.0) for log_T in log_shares(acceptance_T)]
    columns = [torch.ones_like(tokens_B), tokens_B * tokens_B]
    for value_T in (acceptance_T, *logs):
        whole_T = (value_T * UNIT).round().to(torch.int64)
        columns.append(torch.zeros_like(tokens_B).index_add_(0, place_T, whole_T))
    return torch.stack(columns, dim=1).tolist()


def moments(acceptance_T: Tensor, context_T: Tensor) -> list[int]:
    """Sums of a, a*a, x, x*x and a*x over tokens, a the acceptance in units of its own, x the context length.

    Slices keep the products within 63 bits for contexts under MOST_CONTEXT_TOKENS; the sums are Python integers.
    """
    sums = [0] * 5
    whole_T = (acceptance_T * _MOMENT_UNIT).round().to(torch.int64)
    for a_T, x_T in zip(whole_T.split(_SLICE), context_T.split(_SLICE), strict=True):
        terms = (a_T, a_T * a_T, x_T, x_T * x_T, a_T * x_T)
        sums = added(sums, [int(term_T.sum()) for term_T in terms])
    return sums


def pearson(tokens: int, sums: list[int]) -> float | None:
    """Correlation from `moments`, without cancellation; None when one side does not vary."""
    a, aa, x, xx, ax = sums
    variance_a, variance_x = tokens * aa - a * a, tokens * xx - x * x
    if variance_a == 0 or variance_x == 0:
        return None
    return (tokens * ax - a * x) / (math.sqrt(variance_a) * math.sqrt(variance_x))


def added(one: list[int], other: list[int]) -> list[int]:
    """Entry by entry."""
    return [a + b for a, b in zip(one, other, strict=True)]
