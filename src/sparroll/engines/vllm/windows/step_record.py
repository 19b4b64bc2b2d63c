"""What the checks of a step said, kept with each request and counted over all. A window of a hundred requests has thousands
of tokens, so everything that can be is an array over the requests. vLLM is not imported."""

# R requests of a step, D rows of the longest window, L layers of the model, X counts of a request

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.attention.decode_rows import NOTHING
from sparroll.engines.vllm.attention.state import STATE
from sparroll.engines.vllm.windows.requests import WindowRequest
from sparroll.engines.vllm.windows.settling import Settled, Windows
from sparroll.types import Checks


@dataclass
class WindowCounters:
    """What the checks of all requests did."""

    checks: Checks = field(default_factory=Checks)
    check_read_tokens: int = 0
    taken_back_context_tokens: int = 0
    extra_context_tokens: int = 0
    extra_sparse_L: np.ndarray = field(default_factory=lambda: NOTHING[0])
    """Of each layer of the model."""
    check_seconds: float = 0.0

    def added_to(self, report: EngineReport) -> EngineReport:
        """The report with these counts in it."""
        counts = {name: value for name, value in vars(self).items() if name != "extra_sparse_L"}
        extra_L = np.broadcast_to(self.extra_sparse_L, len(report.layers)).tolist()
        layers = [
            replace(layer, extra_sparse_tokens=extra) for layer, extra in zip(report.layers, extra_L, strict=True)
        ]
        return replace(report, **counts, layers=layers)


def record_step(
    windows: Windows,
    settled: Settled,
    tokens_R: np.ndarray,
    requests: Sequence[WindowRequest],
    counted_R: np.ndarray,
    counters: WindowCounters,
) -> None:
    """Add to what each request has been told, and to the counters.

    tokens_R: tokens of each request before the step.  counted_R: whether the step gave the request a token at all.
    """
    drafted_ids_RD, token_ids_RD, kept_RD, stands_RD = (
        each.cpu().numpy() for each in (windows.draft_ids_RD, settled.token_ids_RD, settled.kept_RD, settled.stands_RD)
    )
    stops_R = [request.stops for request in requests]
    count_R = up_to_stop(token_ids_RD, stands_RD.sum(-1), stops_R) * counted_R
    _tell(settled, requests, counted_R, count_R)

    own_R = counted_R & (windows.drafts_R > 0)
    if not own_R.any():
        return
    drafted_R, place_D = windows.drafts_R, np.arange(int(windows.drafts_R.max()))
    extra_R = np.maximum(0, count_R - drafted_R)
    cut_R = ~np.take_along_axis(kept_RD, np.maximum(count_R - 1, 0)[:, None], -1)[:, 0]
    looked_at_R = up_to_stop(drafted_ids_RD, drafted_R, stops_R)
    taken_back_R = looked_at_R - (count_R - extra_R) + cut_R
    check_read_R = tokens_R - 1 + windows.rows_R
    # Drafts behind a stop id ran as well. Nobody looks at them.
    behind_stop_R = drafted_R - looked_at_R
    context_RD, ran_RD = tokens_R[:, None] + place_D, place_D < drafted_R[:, None]
    context_R = (context_RD * ran_RD).sum(-1)
    which_R = np.array([request.which for request in requests])
    which_RD = np.broadcast_to(which_R[:, None], context_RD.shape)
    unread_R = (STATE.reads.unread_tokens(context_RD, which_RD) * ran_RD).sum(-1)
    counts_RX = np.stack([own_R, cut_R, looked_at_R, taken_back_R, extra_R, behind_stop_R], -1, dtype=np.int64)[own_R]
    read_RX = np.stack([check_read_R, context_R, unread_R], -1, dtype=np.int64)[own_R]
    for row, counts, read in zip(np.flatnonzero(own_R).tolist(), counts_RX.tolist(), read_RX.tolist(), strict=True):
        said = requests[row].said
        said.checks.add(Checks(*counts))
        said.check_read_tokens += read[0]
        said.draft_context_tokens += read[1]
        said.draft_unread_tokens += read[2]
    counters.checks.add(Checks(*counts_RX.sum(0).tolist()))
    counters.check_read_tokens += int(check_read_R[own_R].sum())
    gone_RD = ran_RD & (place_D >= count_R[:, None]) & own_R[:, None]
    counters.taken_back_context_tokens += int(context_RD[gone_RD].sum())
    behind_R = own_R & (extra_R > 0)
    extra_context = (tokens_R + drafted_R)[behind_R]
    counters.extra_context_tokens += int(extra_context.sum())
    counters.extra_sparse_L = (
        counters.extra_sparse_L + STATE.reads.decode_rows(extra_context, which_R[behind_R]).sparse_L
    )


def _tell(settled: Settled, requests: Sequence[WindowRequest], counted_R: np.ndarray, count_R: np.ndarray) -> None:
    """Give each request what was said of its tokens: its part of one tensor with all that stand."""
    inside_RD = np.arange(settled.stands_RD.shape[1]) < count_R[:, None]
    lists = (settled.dense_at_ids_RDK, settled.dense_top_ids_RDK, settled.dense_top_logp_RDK)
    columns = [settled.dense_logp_RD, settled.draft_acceptance_RD, settled.acceptance_RD]
    columns += [each for each in lists if each is not None]
    parts = [torch.from_numpy(each.cpu().numpy()[inside_RD]).split(count_R.tolist()) for each in columns]
    for row in np.flatnonzero(counted_R).tolist():
        said = requests[row].said
        dense_logp, draft_acceptance, acceptance, *of_lists = (part[row] for part in parts)
        said.dense_logp.append(dense_logp)
        said.draft_acceptance.append(draft_acceptance)
        said.acceptance.append(acceptance)
        if of_lists:
            said.lists.append(tuple(of_lists))


def up_to_stop(token_ids_RD: np.ndarray, count_R: np.ndarray, stops_R: Sequence[frozenset[int]]) -> np.ndarray:
    """[R]: how many of the first `count` tokens of each request count: all up to its first stop id."""
    found_R, place_D = count_R.copy(), np.arange(token_ids_RD.shape[1])
    for stops in {*stops_R} - {frozenset()}:
        rows = np.array([row for row, mine in enumerate(stops_R) if mine == stops])
        stopped = np.isin(token_ids_RD[rows], sorted(stops)) & (place_D < count_R[rows, None])
        found_R[rows] = np.where(stopped.any(-1), stopped.argmax(-1) + 1, count_R[rows])
    return found_R
