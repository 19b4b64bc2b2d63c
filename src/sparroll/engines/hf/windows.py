"""The dense checks of drafted tokens in HFEngine: which rows are due, one dense pass over their windows, and what the rule
lets stand. The rule itself is in draft_check.py.

A window of w tokens has k = w - 1 drafts d_1 .. d_k, which follow the last token y that stands. The pass takes y, d_1 ..
d_k and gives the dense distributions at the positions of all k drafts, and the one behind d_k. K and V of y .. d_(k-1),
which sparse steps wrote, are overwritten with those of the pass; d_k gets its own. Where all drafts stand, the next token
is drawn from the dense distribution behind them. A window that ends the response has no such token, and its pass leaves
d_k out.
"""

# E rows to check, N drafts of one row, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparroll.draft_check import DraftCheck, judge, sampling_logp, tokens_that_stand
from sparroll.engines import sampling
from sparroll.types import Checks, TokenScores, TopK


@dataclass(frozen=True)
class WindowOutcome:
    """What stands of a window's drafts after its check."""

    token_ids: list[int]
    sparse_logp: list[float]
    checks: Checks


@dataclass
class Drafts:
    """One request's drafts since its last check, and what earlier checks said of its response."""

    draws: sampling.CheckDraws
    logp: list[Tensor] = field(default_factory=list)
    """[V] log-probabilities that each unchecked draft was drawn from."""
    dense_logp: list[float] = field(default_factory=list)
    """Of the tokens that stand, like the lists below."""
    draft_acceptance: list[float] = field(default_factory=list)
    acceptance: list[float] = field(default_factory=list)
    top_k: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Of the most likely tokens under q~: ids, log q~ and log p; of those under p: ids and log p. [N, K] each, a tuple
    for each check."""
    checks: Checks = field(default_factory=Checks)
    read_tokens: int = 0
    """Tokens of the cache that the checks read in each layer."""

    def stands_undrafted(self, logp: Tensor, token_logp: float, top_k: int) -> None:
        """A token that a dense distribution [V] gave: the first one, or the one behind a window that stands whole."""
        self.dense_logp.append(token_logp)
        self.draft_acceptance.append(1.0)
        self.acceptance.append(1.0)
        if top_k:
            self._keep_lists(logp[None], logp[None], top_k)

    def settle(
        self,
        check: DraftCheck,
        dense_logp_NV: Tensor,
        token_ids: list[int],
        position: int,
        *,
        greedy: bool,
        top_k: int,
    ) -> WindowOutcome:
        """The rule's verdict on the drafts `token_ids`, the first of which is at response index `position`."""
        device, drafted = dense_logp_NV.device, len(token_ids)
        draft_logp_NV = torch.stack(self.logp)
        self.logp.clear()
        judged = judge(
            dense_logp_NV,
            draft_logp_NV,
            torch.tensor(token_ids, device=device),
            *self.draws.at(slice(position, position + drafted), device),
            check.floor,
            greedy=greedy,
        )
        kept_N = judged.kept_N.cpu()
        stand = tokens_that_stand(kept_N)
        sampling.check_finite(
            judged.dense_logp_N[:stand] + judged.sparse_logp_N[:stand], f"in the check at {position} tokens of response"
        )
        self.dense_logp += judged.dense_logp_N[:stand].tolist()
        self.draft_acceptance += judged.draft_acceptance_N[:stand].tolist()
        self.acceptance += judged.acceptance_N[:stand].tolist()
        if top_k:
            dense_NV, draft_NV = dense_logp_NV[:stand], draft_logp_NV[:stand]
            self._keep_lists(draft_NV if greedy else sampling_logp(dense_NV, draft_NV, check.floor), dense_NV, top_k)
        cut = int(not kept_N[stand - 1])
        checks = Checks(1, cut, drafted, drafted - stand + cut)
        return WindowOutcome(judged.token_ids_N[:stand].tolist(), judged.sparse_logp_N[:stand].tolist(), checks)

    def _keep_lists(self, sampled_logp_NV: Tensor, dense_logp_NV: Tensor, top_k: int) -> None:
        sampled, dense = sampled_logp_NV.topk(top_k, dim=-1), dense_logp_NV.topk(top_k, dim=-1)
        dense_at_sampled = dense_logp_NV.gather(-1, sampled.indices)
        lists = sampled.indices, sampled.values, dense_at_sampled, dense.indices, dense.values
        self.top_k.append(tuple(part.cpu() for part in lists))

    def results(self) -> dict[str, Any]:
        """The fields of the rollout that only checks fill in."""
        sampled, dense, dense_at_sampled = None, None, None
        if self.top_k:
            ids, logp, dense_at_sampled, dense_ids, dense_logp = (
                torch.cat(part) for part in zip(*self.top_k, strict=True)
            )
            sampled, dense = TopK(ids, logp), TopK(dense_ids, dense_logp)
        return {
            "top_k": sampled,
            "dense": TokenScores(torch.tensor(self.dense_logp), dense, dense_at_sampled),
            "draft_acceptance": torch.tensor(self.draft_acceptance),
            "acceptance": torch.tensor(self.acceptance),
            "checks": self.checks,
        }
