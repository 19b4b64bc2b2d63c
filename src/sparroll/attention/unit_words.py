"""Which units every position of whole sequences reads, one bit each: the selection of a teacher-forced forward, compact
enough to be kept for the backward pass. Selection only; who attends reads the words.

words [B, H, P, U] int32: bit p of the word for block P and unit u says that position 32 * P + p reads unit u. So a word
that is zero is a unit that none of 32 positions reads. T * U / 8 bytes for each KV head: 64 MB for 8 heads, 32K tokens and
units of 16.
"""

# B sequences, S positions, A query heads, H kv heads, U units, P blocks of 32 positions, D head dimension

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention import api
from sparroll.attention.reference import NOT_CHOSEN
from sparroll.attention.selectors.base import Selector

WORD_POSITIONS = 32
_SCORED_AT_ONCE = 1 << 25
"""Scores (or what a selector holds for each of them) that exist at one time: about 128 MB in fp32."""


@torch.no_grad()
def chosen_words(
    query_BASD: Tensor,
    keys_BHSD: Tensor,
    dense_BS: Tensor,
    kv_budget_tokens_S: Tensor,
    selector: Selector,
    scale: float,
) -> Tensor:
    """Words of what each position reads: its context's units as `api.select` chooses them, or all where it is dense.

    query and keys after RoPE; position s has s + 1 tokens of context, budgets [S] int are those of these contexts;
    dense_BS bool: positions that read their whole context, whatever their budget. The index is built from the keys
    themselves, so landmarks are those of an engine that wrote the same keys. Deterministic, and the same under autocast.
    """
    batch, heads, tokens, dim = keys_BHSD.shape
    group, unit = query_BASD.shape[1] // heads, selector.unit_tokens
    units = -(-tokens // unit)
    words = torch.zeros(batch, heads, -(-tokens // WORD_POSITIONS), units, dtype=torch.int32, device=query_BASD.device)
    sparse_S = (~dense_BS).any(0).cpu()
    with torch.autocast(query_BASD.device.type, enabled=False):
        padded = F.pad(keys_BHSD, (0, 0, 0, units * unit - tokens))
        index = selector.build_index(padded.unflatten(2, (units, unit)))
        held = batch * query_BASD.shape[1] * units * max(1, index.shape[-1] // dim)
        chunk = max(1, _SCORED_AT_ONCE // (held * WORD_POSITIONS)) * WORD_POSITIONS
        for begin in range(0, tokens, chunk):
            end = min(begin + chunk, tokens)
            seen = -(-end // unit)
            context_Q = torch.arange(begin + 1, end + 1, device=words.device)
            exists_QU = torch.arange(seen, device=words.device) * unit < context_Q[:, None]
            read_BQHU = exists_QU[None, :, None].expand(batch, -1, heads, -1)
            if bool(sparse_S[begin:end].any()):
                part = query_BASD[:, :, begin:end].unflatten(1, (heads, group)).permute(0, 3, 1, 2, 4)
                budgets_BQ = kv_budget_tokens_S[begin:end].expand(batch, -1)
                ids = api.select(part, index[:, :, :seen], context_Q.expand(batch, -1), budgets_BQ, selector, scale)
                read_BQHU = read_BQHU & (_listed(ids, seen) | dense_BS[:, begin:end, None, None])
            blocks = slice(begin // WORD_POSITIONS, -(-end // WORD_POSITIONS))
            words[:, :, blocks, :seen] = pack(read_BQHU)
    return words


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


def _listed(unit_ids_RQHN: Tensor, units: int) -> Tensor:
    """[R, Q, H, U] bool from ids; one column more than there are units is where the unused entries land."""
    read = torch.zeros(*unit_ids_RQHN.shape[:3], units + 1, dtype=torch.bool, device=unit_ids_RQHN.device)
    read.scatter_(3, unit_ids_RQHN.masked_fill(unit_ids_RQHN == NOT_CHOSEN, units), True)
    return read[..., :units]
