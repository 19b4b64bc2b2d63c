"""The rule of draft_check.py for the windows of one step, on the device. Nothing here waits for it, and vLLM is not
imported."""

# R requests of a step, D rows of the longest window, N rows of all windows, V vocabulary, K top-k entries, B blocks

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparroll.draft_check import judge, sampling_logp
from sparroll.engines import sampling

ROWS_AT_ONCE = 128
"""Rows whose distributions are in memory at the same time."""
_BLOCK = 512


@dataclass(frozen=True)
class Tempers:
    """How each request of a step turns logits into the distribution that it draws from."""

    temperature_R: np.ndarray
    """0 is greedy."""
    top_p_R: np.ndarray
    heat_R1: Tensor
    """What logits are divided by, on the device; 1 for greedy requests."""
    greedy_R: Tensor

    @staticmethod
    def of(
        temperatures: Sequence[float], top_ps: Sequence[float], to_device: Callable[[np.ndarray], Tensor]
    ) -> Tempers:
        """to_device: copies an array to the device."""
        temperature_R = np.array(temperatures, dtype=np.float64)
        heat_R = np.where(temperature_R == 0, 1.0, temperature_R).astype(np.float32)
        return Tempers(
            temperature_R,
            np.array(top_ps, dtype=np.float64),
            to_device(heat_R)[:, None],
            to_device(temperature_R == 0),
        )

    def log_probs(self, logits_NV: Tensor, request_N: np.ndarray, on_device_N: Tensor) -> Tensor:
        """[N, V] float32 log-probabilities after temperature and top-p. request_N: whose row each is, on the host and on
        the device."""
        logp_NV = torch.log_softmax(logits_NV.float() / self.heat_R1[on_device_N], dim=-1)
        for row in np.flatnonzero(self.top_p_R[request_N] < 1):
            logp_NV[row] = sampling.log_probs(logp_NV[row], 1.0, float(self.top_p_R[request_N[row]]))
        return logp_NV

    def draw(self, logp_NV: Tensor, uniform_N: Tensor, request_N: np.ndarray, on_device_N: Tensor) -> Tensor:
        """[N] int64: a token for each row, drawn at `uniform_N`, or the most likely one."""
        greedy = self.temperature_R[request_N] == 0
        if greedy.all():
            return logp_NV.argmax(-1)
        drawn_N = draw(logp_NV, uniform_N)
        return torch.where(self.greedy_R[on_device_N], logp_NV.argmax(-1), drawn_N) if greedy.any() else drawn_N


def draw(logp_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """[N] what `sampling.sample` draws, up to the last bits of the sums: first a block of the vocabulary, then a token
    in it. A cumulative sum over the whole vocabulary takes as long as a decode step on a GPU."""
    vocabulary = logp_NV.shape[-1]
    blocks = -(-vocabulary // _BLOCK)
    mass_NBX = torch.nn.functional.pad(logp_NV.exp(), (0, blocks * _BLOCK - vocabulary)).unflatten(-1, (blocks, _BLOCK))
    ends_NB = mass_NBX.sum(-1, dtype=torch.float64).cumsum(-1)
    aim_N1 = uniform_N[:, None] * ends_NB[:, -1:]
    block_N1 = torch.searchsorted(ends_NB, aim_N1, right=True).clamp_max(blocks - 1)
    before_N1 = ends_NB.gather(-1, (block_N1 - 1).clamp_min(0)) * (block_N1 > 0)
    inside_NX = mass_NBX.gather(1, block_N1[:, :, None].expand(-1, 1, _BLOCK))[:, 0].double().cumsum(-1)
    place_N1 = torch.searchsorted(inside_NX, aim_N1 - before_N1, right=True).clamp_max(_BLOCK - 1)
    return (block_N1 * _BLOCK + place_N1)[:, 0].clamp_max(vocabulary - 1)


@dataclass(frozen=True)
class Windows:
    """The rows of a step whose logits are needed: for each request, those of its window, or its last one."""

    rows_R: np.ndarray
    """How many rows each request has."""
    drafts_R: np.ndarray
    """How many of them have a draft: all of a window, none otherwise."""
    draft_ids_RD: Tensor
    """int64, on the device."""
    draws_3RD: Tensor
    """float64 uniforms, on the device: to draft, to keep, and for the residual."""
    tempers: Tempers

    @property
    def request_N(self) -> np.ndarray:
        """Whose each row is."""
        return np.repeat(np.arange(len(self.rows_R)), self.rows_R)

    @property
    def place_N(self) -> np.ndarray:
        """The number of each row among its request's."""
        starts = np.cumsum(self.rows_R) - self.rows_R
        return np.arange(int(self.rows_R.sum())) - np.repeat(starts, self.rows_R)


@dataclass(frozen=True)
class Settled:
    """What stands of a step's windows, on the device. Entries behind a request's last row are meaningless."""

    token_ids_RD: Tensor
    """int64."""
    stands_RD: Tensor
    """Whether the token at that place is part of the response, unless a stop id stands before it."""
    kept_RD: Tensor
    sparse_logp_RD: Tensor
    dense_logp_RD: Tensor
    acceptance_RD: Tensor
    top_ids_RDK: Tensor | None
    """The most likely tokens under q~, and what follows from them (see CheckedTokens); None where none were asked for."""
    top_logp_RDK: Tensor | None
    dense_at_ids_RDK: Tensor | None
    dense_top_ids_RDK: Tensor | None
    dense_top_logp_RDK: Tensor | None


def settle(
    windows: Windows,
    dense_logits: Callable[[np.ndarray], Tensor],
    draft_logits: Callable[[Tensor, Tensor], Tensor],
    floor: float,
    top_k: int,
    to_device: Callable[[np.ndarray], Tensor],
) -> Settled:
    """Apply the rule to all windows. A row without a draft is drawn from the dense distribution.

    dense_logits: [n, V] of these rows, by number.  draft_logits: [n, V] of drafts, by request and place.
    """
    request_N, place_N = windows.request_N, windows.place_N
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, len(request_N), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        parts.append(
            _judge_rows(
                windows, request_N[rows], place_N[rows], first, dense_logits, draft_logits, floor, top_k, to_device
            )
        )
    flat = [torch.cat(part) for part in zip(*parts, strict=True)]
    requests, longest = len(windows.rows_R), int(windows.rows_R.max())
    at = to_device(request_N * longest + place_N)

    def spread(values: Tensor) -> Tensor:
        out = values.new_zeros(requests * longest, *values.shape[1:])
        return out.index_copy_(0, at, values).unflatten(0, (requests, longest))

    token_ids, kept, sparse_logp, dense_logp, acceptance, *lists = map(spread, flat)
    rows_R1 = to_device(windows.rows_R.astype(np.int64))[:, None]
    inside_RD = torch.arange(longest, device=kept.device) < rows_R1
    # A token stands if all before it were kept.
    before_RD = kept.long().cumprod(-1).roll(1, -1).bool()
    before_RD[:, 0] = True
    none: list[Tensor | None] = [None] * 5
    return Settled(token_ids, before_RD & inside_RD, kept, sparse_logp, dense_logp, acceptance, *(lists or none))


def _judge_rows(
    windows: Windows,
    request_n: np.ndarray,
    place_n: np.ndarray,
    first: int,
    dense_logits: Callable[[np.ndarray], Tensor],
    draft_logits: Callable[[Tensor, Tensor], Tensor],
    floor: float,
    top_k: int,
    to_device: Callable[[np.ndarray], Tensor],
) -> tuple[Tensor, ...]:
    """Token, kept, log q~, log p and acceptance of these rows; with a top_k, also the lists."""
    tempers, drafted_n = windows.tempers, place_n < windows.drafts_R[request_n]
    whose_n, where_n = to_device(request_n), to_device(place_n)
    dense_nV = tempers.log_probs(dense_logits(np.arange(first, first + len(request_n))), request_n, whose_n)
    ids_n = windows.draft_ids_RD[whose_n, where_n]
    draft_n, keep_n, redraw_n = windows.draws_3RD[:, whose_n, where_n]
    draft_nV = dense_nV
    if drafted_n.any():
        draft_nV = tempers.log_probs(draft_logits(whose_n, where_n), request_n, whose_n)
    if not drafted_n.all():
        has_draft_n = to_device(drafted_n)
        ids_n = torch.where(has_draft_n, ids_n, tempers.draw(dense_nV, draft_n, request_n, whose_n))
        draft_nV = torch.where(has_draft_n[:, None], draft_nV, dense_nV)
    greedy_n = tempers.temperature_R[request_n] == 0
    out: tuple[Tensor, ...] | None = None
    for greedy in sorted(set(greedy_n.tolist())):
        judged = judge(dense_nV, draft_nV, ids_n, keep_n, redraw_n, floor, greedy=greedy)
        values: tuple[Tensor, ...] = (
            judged.token_ids_N,
            judged.kept_N,
            judged.sparse_logp_N,
            judged.dense_logp_N,
            judged.draft_acceptance_N,
        )
        if top_k:
            values += _lists(draft_nV if greedy else sampling_logp(dense_nV, draft_nV, floor), dense_nV, top_k)
        if out is None:
            out = values
        else:
            mine_n = to_device(greedy_n == greedy)
            out = tuple(
                torch.where(mine_n.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(values, out, strict=True)
            )
    assert out is not None, "a step without rows"
    return out


def _lists(sampled_nV: Tensor, dense_nV: Tensor, top_k: int) -> tuple[Tensor, ...]:
    sampled, dense = sampled_nV.topk(top_k, dim=-1), dense_nV.topk(top_k, dim=-1)
    return sampled.indices, sampled.values, dense_nV.gather(-1, sampled.indices), dense.indices, dense.values
