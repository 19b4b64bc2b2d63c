"""What a decode step says of its sampled tokens: their log-probabilities and ranks, and the likeliest tokens beside them.
The specification, in plain PyTorch."""

# N rows, V vocabulary, K listed tokens, W = 1 + K columns

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MOST_LISTED = 64
"""Entries of a list that the kernels make. Longer ones, which temperatures other than 1 take, are vLLM's."""


class RowScores(NamedTuple):
    """What vLLM's LogprobsTensors hold."""

    ids_NW: Tensor
    """int64: the sampled token, then the K likeliest, in falling order; of equal ones the lower id first."""
    logp_NW: Tensor
    """float32: their log-probabilities. A row with NaN among its logits is NaN."""
    ranks_N: Tensor
    """int64: how many tokens are at least as likely as the sampled one, itself included."""


def row_scores(logits_NV: Tensor, sampled_N: Tensor, top_k: int) -> RowScores:
    """logits_NV: of any float dtype; -inf is probability 0.  sampled_N: int64.  top_k: K, from 0 to V."""
    logits_NV = logits_NV.float()
    # Adding 0 makes one number of both zeros, and a stable sort keeps equal ones in the order of their ids.
    listed_NK = torch.sort(logits_NV + 0.0, dim=1, descending=True, stable=True).indices[:, :top_k]
    ids_NW = torch.cat([sampled_N[:, None], listed_NK], 1)
    ranks_N = (logits_NV >= logits_NV.gather(1, sampled_N[:, None])).sum(1)
    return RowScores(ids_NW, logits_NV.log_softmax(1).gather(1, ids_NW), ranks_N)
