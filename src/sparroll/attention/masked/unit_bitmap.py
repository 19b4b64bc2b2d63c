"""Which units every position of whole sequences reads, one bit each. This is the selection of a teacher-forced forward,
compact enough to be kept for the backward pass. Only the format is defined here: unit_choice.py makes the words, and
api.py reads them.

words [B, H, P, U] int32: bit p of the word for block P and unit u says that position 32 * P + p reads unit u. A word of
zero means that none of the 32 positions reads the unit. The words take S * U / 8 bytes for each KV head: 64 MB for 8
heads, 32K tokens and units of 16.
"""

# B sequences, S positions, H kv heads, U units, P blocks of 32 positions

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WORD_POSITIONS = 32


def pack(read_BSHU: Tensor) -> Tensor:
    """[B, S, H, U] bool -> words [B, H, P, U]; positions past S are 0."""
    read = F.pad(read_BSHU, (0, 0, 0, 0, 0, -read_BSHU.shape[1] % WORD_POSITIONS)).unflatten(1, (-1, WORD_POSITIONS))
    bit = torch.arange(WORD_POSITIONS, dtype=torch.int32, device=read.device)[:, None, None]
    return (read.int() << bit).sum(2, dtype=torch.int32).transpose(1, 2)


def unpack(words_BHPU: Tensor, begin: int, end: int) -> Tensor:
    """What positions begin..end-1 read: [B, H, end - begin, U] bool."""
    position = torch.arange(begin, end, device=words_BHPU.device)
    words = words_BHPU[:, :, begin // WORD_POSITIONS : -(-end // WORD_POSITIONS)]
    mine = words[:, :, position // WORD_POSITIONS - begin // WORD_POSITIONS]
    return ((mine >> (position % WORD_POSITIONS)[:, None]) & 1).bool()
