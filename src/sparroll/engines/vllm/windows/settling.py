"""The rule of draft_check.py for the windows of one step, on the device. Nothing here waits for it, and vLLM is not
imported."""

# R requests of a step, D rows of the longest window, N rows of all windows, V vocabulary, K top-k entries, B blocks

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparroll.draft_check import judge, residual, sampling_logp, sampling_probability_of_tokens
from sparroll.engines.vllm.windows.draws import Tempers, draw, has_kernel
from sparroll.engines.vllm.windows.masses import Masses, masses

KERNEL_ROWS, LEAN_ROWS, EXACT_ROWS = 512, 256, 64
"""Rows whose logits are in memory at the same time, and where no kernel compares them their distributions, in float32 and
in float64."""


@dataclass(frozen=True)
class Windows:
    """The rows of a step whose logits are needed: for each request, those of its window, or its last one."""

    rows_R: np.ndarray
    """How many rows each request has."""
    drafts_R: np.ndarray
    """How many of them have a draft: all of a window, but for the one behind the drafts where the response goes on; none
    otherwise."""
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
    draft_acceptance_RD: Tensor
    acceptance_RD: Tensor
    """Of the drafts, and of what is sampled."""
    top_ids_RDK: Tensor | None
    """The most likely tokens under q~, and what follows from them (see CheckedTokens); None where none were asked for."""
    top_logp_RDK: Tensor | None
    dense_at_ids_RDK: Tensor | None
    dense_top_ids_RDK: Tensor | None
    dense_top_logp_RDK: Tensor | None


@dataclass(frozen=True)
class Policies:
    """Where the logits of both policies come from, a few rows at a time."""

    dense: Callable[[Tensor], Tensor]
    """[n] numbers of rows -> [n, V]."""
    draft_RWV: Tensor
    """What a row behind the drafts has here is meaningless, and nobody reads it."""
    to_device: Callable[[np.ndarray], Tensor]

    def draft(self, request_n: Tensor, place_n: Tensor) -> Tensor:
        """[n, V]."""
        return self.draft_RWV[request_n, place_n.clamp_max(self.draft_RWV.shape[1] - 1)]


@dataclass(frozen=True)
class _Rows:
    """Some of a step's rows, on the host and on the device."""

    request_n: np.ndarray
    drafted_n: np.ndarray
    number: Tensor
    request: Tensor
    place: Tensor


def settle(windows: Windows, policies: Policies, floor: float, top_k: int) -> Settled:
    """Apply the rule to all windows. A row without a draft is drawn from the dense distribution.

    The rule is applied in float64, except that sampled windows without lists, which is what rollouts ask for, take the
    masses of their positions in float32; the tokens in place of rejected ones are drawn in float64 there, too.
    """
    request_N, place_N, to_device = windows.request_N, windows.place_N, policies.to_device
    lean = not top_k and not (windows.tempers.temperature_R == 0).any()
    judge_rows, at_once = (_judge_lean, _lean_rows(windows)) if lean else (_judge_rows, EXACT_ROWS)
    if not windows.drafts_R.any():
        judge_rows = _draw_rows
    parts: list[tuple[Tensor, ...]] = []
    for first in range(0, len(request_N), at_once):
        request_n, place_n = (each[first : first + at_once] for each in (request_N, place_N))
        number_n = np.arange(first, first + len(request_n))
        rows = _Rows(
            request_n,
            place_n < windows.drafts_R[request_n],
            *(to_device(each) for each in (number_n, request_n, place_n)),
        )
        parts.append(judge_rows(windows, rows, policies, floor, top_k))
    requests, longest = len(windows.rows_R), int(windows.rows_R.max())
    at = to_device(request_N * longest + place_N)

    def spread(values: Tensor) -> Tensor:
        out = values.new_zeros(requests * longest, *values.shape[1:])
        return out.index_copy_(0, at, values).unflatten(0, (requests, longest))

    token_ids, kept, sparse_logp, dense_logp, draft_acceptance, acceptance, *lists = (
        spread(torch.cat(part)) for part in zip(*parts, strict=True)
    )
    inside_RD = torch.arange(longest, device=kept.device) < to_device(windows.rows_R)[:, None]
    # A token stands if all before it were kept.
    stands_RD = kept.long().cumprod(-1).roll(1, -1).bool()
    stands_RD[:, 0] = True
    stands_RD &= inside_RD
    if lean and windows.drafts_R.any():
        _redraw(windows, policies, floor, stands_RD, kept, token_ids, sparse_logp, dense_logp)
    none: list[Tensor | None] = [None] * 5
    return Settled(token_ids, stands_RD, kept, sparse_logp, dense_logp, draft_acceptance, acceptance, *(lists or none))


def _lean_rows(windows: Windows) -> int:
    return KERNEL_ROWS if has_kernel(windows.draft_ids_RD, windows.tempers.top_p_R) else LEAN_ROWS


def _draw_rows(windows: Windows, rows: _Rows, policies: Policies, floor: float, top_k: int) -> tuple[Tensor, ...]:
    """The same of rows without drafts: each token is drawn from the dense distribution, and stands."""
    tempers = windows.tempers
    logp_nV = tempers.log_probs(policies.dense(rows.number), rows.request_n, rows.request)
    draws_n = windows.draws_3RD[0, rows.request, rows.place]
    ids_n = tempers.draw(logp_nV.exp(), draws_n, rows.request_n, rows.request)
    logp_n = logp_nV.gather(-1, ids_n[:, None])[:, 0]
    one_n = torch.ones_like(logp_n)
    return ids_n, one_n.bool(), logp_n, logp_n, one_n, one_n, *(_lists(logp_nV, logp_nV, top_k) if top_k else ())


def _judge_lean(windows: Windows, rows: _Rows, policies: Policies, floor: float, top_k: int) -> tuple[Tensor, ...]:
    """Token, kept, log q~, log p and both acceptances of these rows, as if every draft stood: the few that do not are
    drawn again by `_redraw`. Nobody is greedy."""
    tempers, draws = windows.tempers, windows.draws_3RD[:, rows.request, rows.place]
    dense_logits_nV = policies.dense(rows.number)
    ids_n = windows.draft_ids_RD[rows.request, rows.place]
    without = np.flatnonzero(~rows.drafted_n)
    if len(without):
        at, request_n = policies.to_device(without), rows.request_n[without]
        drawn_n = tempers.draw_of_logits(dense_logits_nV[at], draws[0, at], request_n, rows.request[at])
        ids_n = ids_n.index_copy(0, at, drawn_n)
    found = _masses(tempers, rows, dense_logits_nV, policies, ids_n, floor)
    kept_n = draws[1] * floor * found.draft_N < found.dense_N
    sparse_n = sampling_probability_of_tokens(found.dense_N, found.draft_N, found.accepted_N, floor)
    draft_acceptance_n, acceptance_n = found.draft_acceptance_N, found.acceptance_N
    if len(without):
        has_n = policies.to_device(rows.drafted_n)
        kept_n, sparse_n = kept_n | ~has_n, torch.where(has_n, sparse_n, found.dense_N)
        draft_acceptance_n, acceptance_n = (
            torch.where(has_n, each, torch.ones_like(each)) for each in (draft_acceptance_n, acceptance_n)
        )
    return ids_n, kept_n, sparse_n.log(), found.dense_N.log(), draft_acceptance_n, acceptance_n


def _masses(
    tempers: Tempers, rows: _Rows, dense_logits_nV: Tensor, policies: Policies, ids_n: Tensor, floor: float
) -> Masses:
    if has_kernel(dense_logits_nV, tempers.top_p_R[rows.request_n]):
        from sparroll.engines.vllm.windows.triton_masses import masses_of_logits

        heat_n = tempers.heat_R1[rows.request, 0]
        return masses_of_logits(dense_logits_nV, policies.draft_RWV, rows.request, rows.place, heat_n, ids_n, floor)
    dense_nV = tempers.probabilities(dense_logits_nV, rows.request_n, rows.request)
    draft_nV = tempers.probabilities(policies.draft(rows.request, rows.place), rows.request_n, rows.request)
    return masses(dense_nV, draft_nV, ids_n, floor)


def _redraw(
    windows: Windows,
    policies: Policies,
    floor: float,
    stands_RD: Tensor,
    kept_RD: Tensor,
    token_ids_RD: Tensor,
    sparse_logp_RD: Tensor,
    dense_logp_RD: Tensor,
) -> None:
    """Put the residual's draw in the place of each window's first rejected draft, if there is one. Nobody knows on the
    host where that is, so the last row that stands is looked at in every window."""
    starts_R = np.cumsum(windows.rows_R) - windows.rows_R
    everyone = np.flatnonzero(windows.drafts_R)
    for first in range(0, len(everyone), EXACT_ROWS):
        request_n = everyone[first : first + EXACT_ROWS]
        request = policies.to_device(request_n)
        # A window that stands whole has nothing to draw again; its last draft is looked at.
        place = torch.minimum(stands_RD[request].sum(-1), policies.to_device(windows.drafts_R[request_n])) - 1
        number, tempers = policies.to_device(starts_R[request_n]) + place, windows.tempers
        dense_nV, draft_nV = (
            tempers.log_probs(logits_nV, request_n, request).double().exp_()
            for logits_nV in (policies.dense(number), policies.draft(request, place))
        )
        left_nV = residual(dense_nV, draft_nV, floor)
        kept_nV = torch.minimum(draft_nV, dense_nV / floor)
        rejected_n, mass_n = draft_nV.sum(-1) - kept_nV.sum(-1), left_nV.sum(-1)
        # Where the policies are equal up to rounding, nothing may be left to draw from.
        kept_n = kept_RD[request, place] | (mass_n <= 0)
        drawn_n1 = draw(left_nV, windows.draws_3RD[2, request, place])[:, None]
        dense_n, kept_mass_n, left_n = (each_nV.gather(-1, drawn_n1)[:, 0] for each_nV in (dense_nV, kept_nV, left_nV))
        sparse_n = kept_mass_n + rejected_n / mass_n * left_n
        for values_RD, new_n in (
            (token_ids_RD, drawn_n1[:, 0]),
            (sparse_logp_RD, sparse_n.log().float()),
            (dense_logp_RD, dense_n.log().float()),
        ):
            values_RD[request, place] = torch.where(kept_n, values_RD[request, place], new_n)


def _judge_rows(windows: Windows, rows: _Rows, policies: Policies, floor: float, top_k: int) -> tuple[Tensor, ...]:
    """Token, kept, log q~, log p and both acceptances of these rows; with a top_k, also the lists."""
    tempers, request_n = windows.tempers, rows.request_n
    dense_nV = tempers.log_probs(policies.dense(rows.number), request_n, rows.request)
    ids_n = windows.draft_ids_RD[rows.request, rows.place]
    draft_n, keep_n, redraw_n = windows.draws_3RD[:, rows.request, rows.place]
    draft_nV = dense_nV
    if rows.drafted_n.any():
        draft_nV = tempers.log_probs(policies.draft(rows.request, rows.place), request_n, rows.request)
    if not rows.drafted_n.all():
        has_draft_n = policies.to_device(rows.drafted_n)
        ids_n = torch.where(has_draft_n, ids_n, tempers.draw(dense_nV.exp(), draft_n, request_n, rows.request))
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
            judged.acceptance_N,
        )
        if top_k:
            values += _lists(draft_nV if greedy else sampling_logp(dense_nV, draft_nV, floor), dense_nV, top_k)
        if out is None:
            out = values
        else:
            mine_n = policies.to_device(greedy_n == greedy)
            out = tuple(
                torch.where(mine_n.view(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(values, out, strict=True)
            )
    assert out is not None, "a step without rows"
    return out


def _lists(sampled_nV: Tensor, dense_nV: Tensor, top_k: int) -> tuple[Tensor, ...]:
    sampled, dense = sampled_nV.topk(top_k, dim=-1), dense_nV.topk(top_k, dim=-1)
    return sampled.indices, sampled.values, dense_nV.gather(-1, sampled.indices), dense.indices, dense.values
