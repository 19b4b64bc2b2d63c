"""Verified rollouts: the dense policy checks a sparse draft window by window, and what it would practically never have
said is taken back. These are the settings and the rule, as pure functions of the two distributions. Who drafts and who
checks is in engines/.

The rule, with q the distribution that drafts, p the dense one at the same position, and a `floor` in (0, 1]: a drafted
token v is kept with probability min(1, p(v) / (floor * q(v))). At the first one that is not kept, a token is drawn from
the residual, which is proportional to max(p - floor * q, 0), and the rest of the window is dropped. The token at a
position then has the distribution

    q~(v) = min(q(v), p(v) / floor) + (1 - A) / S * max(p(v) - floor * q(v), 0)
    A = sum_v min(q(v), p(v) / floor)        S = sum_v max(p(v) - floor * q(v), 0)

At floor 1 this is p itself (speculative sampling, Leviathan et al. 2023, arXiv 2211.17192). Below, S is
1 - floor + floor * (1 - A), so (1 - A) / S is at most 1 / floor, and p(v) / q~(v) >= floor for every token: a token that
is more than log(1 / floor) nats less likely under the dense policy than under the one that sampled it cannot occur.
"""

# N positions, V vocabulary

from __future__ import annotations

import dataclasses
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparroll.errors import UserError, nearest
from sparroll.types import is_real, is_whole

FAR_NATS = 2.0
"""A token whose log q~ is this much above its log p counts as far off in the figures of checks."""
LEAST_WINDOW_TOKENS, MOST_WINDOW_TOKENS = 2, 4096
"""A window's distributions are all held until it is checked."""


@dataclass(frozen=True)
class DraftCheck:
    """How the drafts of a schedule are checked. Immutable, and checked when made.

    >>> Schedule.fixed(128).checked(window_tokens=64, floor=0.01)
    """

    window_tokens: int = 64
    """Tokens that one dense pass gives at most: all but the last one are drafted, and that one it draws itself where
    every draft stands. A longer window costs fewer passes, and loses more when one of its first tokens is taken back.
    Attention kernels compute tiles of 64 or 128 rows, so powers of 2 are cheapest."""
    floor: float = 0.01
    """Least p / q~ of any token, in (0, 1]. 1 samples from the dense policy exactly and drafts many more tokens than it
    keeps. Towards 0 nearly everything is kept."""

    def __post_init__(self) -> None:
        if not is_whole(self.window_tokens) or not LEAST_WINDOW_TOKENS <= self.window_tokens <= MOST_WINDOW_TOKENS:
            raise UserError(
                f"window_tokens must be a whole number from {LEAST_WINDOW_TOKENS} to {MOST_WINDOW_TOKENS}, got "
                f"{self.window_tokens!r}",
                "windows of 32 to 128 tokens were measured",
            )
        if not is_real(self.floor) or not 0 < self.floor <= 1:
            raise UserError(
                f"floor must be above 0 and at most 1, got {self.floor!r}",
                "0.01 takes back the impossible, 1 samples from the dense policy exactly; to keep every token, leave "
                "the check out",
            )
        # numpy's numbers are no numbers to TOML and JSON.
        object.__setattr__(self, "window_tokens", operator.index(self.window_tokens))
        object.__setattr__(self, "floor", float(self.floor))

    def __str__(self) -> str:
        return f"every {self.window_tokens} tokens at floor {self.floor:g}"

    @property
    def drafts(self) -> int:
        """Tokens that a window drafts, unless the response ends before."""
        return self.window_tokens - 1

    @property
    def most_nats(self) -> float:
        """log(1 / floor): no sampled token is less likely under the dense policy by more than this."""
        return -math.log(self.floor)

    def table(self) -> dict[str, Any]:
        """Its table in a schedule file."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_table(table: dict[str, Any]) -> DraftCheck:
        """The check that `table` wrote. Unknown keys are errors; missing ones have their defaults."""
        known = [each.name for each in dataclasses.fields(DraftCheck)]
        for key in table:
            if key not in known:
                raise UserError(f"unknown key {key!r} in check", nearest(key, known))
        return DraftCheck(**table)


@dataclass(frozen=True)
class JudgedDrafts:
    """What the rule says about N drafted tokens, each on its own. In a window, the positions after the first one that
    is not kept do not count."""

    kept_N: Tensor
    """Bool: whether the drafted token stays."""
    token_ids_N: Tensor
    """The drafted token where it is kept, else the one drawn from the residual."""
    sparse_logp_N: Tensor
    """float32 log q~ of that token. At temperature 0: log q, of the policy that drafts, at temperature 1."""
    dense_logp_N: Tensor
    """float32 log p of that token."""
    draft_acceptance_N: Tensor
    """float32 sum_v min(p, q) at each position: how near the drafting policy is to the dense one."""
    acceptance_N: Tensor
    """float32 sum_v min(p, q~): how near what is sampled is to the dense policy. At temperature 0, as for the drafts."""


def residual(dense_NV: Tensor, draft_NV: Tensor, floor: float) -> Tensor:
    """[N, V] what the token in place of a rejected one is drawn in proportion to. It is all zeros only where nothing
    can be rejected."""
    return (dense_NV - floor * draft_NV).clamp_min(0)


def sampling_probability(dense_NV: Tensor, draft_NV: Tensor, floor: float) -> Tensor:
    """[N, V] q~: the true sampling distribution at each position. Give float64: it is a ratio of small differences."""
    kept_NV = torch.minimum(draft_NV, dense_NV / floor)
    left_NV = residual(dense_NV, draft_NV, floor)
    rejected_N1 = (draft_NV - kept_NV).sum(-1, keepdim=True)
    mass_N1 = left_NV.sum(-1, keepdim=True)
    # Where the two policies are equal at floor 1, nothing is rejected and nothing is left: 0 / 0.
    return kept_NV + torch.where(mass_N1 > 0, rejected_N1 / mass_N1, torch.zeros_like(mass_N1)) * left_NV


def sampling_probability_of_tokens(dense_N: Tensor, draft_N: Tensor, accepted_N: Tensor, floor: float) -> Tensor:
    """[N] q~ of one token each, from its probabilities and A, the mass that the rule keeps at its position. S follows from
    A: it is 1 - floor * A."""
    left_N, mass_N = (dense_N - floor * draft_N).clamp_min(0), 1 - floor * accepted_N
    share_N = torch.where(mass_N > 0, (1 - accepted_N) / mass_N, torch.zeros_like(mass_N))
    return torch.minimum(draft_N, dense_N / floor) + share_N * left_N


def acceptance_of_sampled(dense_NV: Tensor, draft_NV: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """([N] A, the mass that the rule keeps at each position; [N] sum_v min(p, q~), the acceptance of what is sampled).
    Sums and products in the dtype of the probabilities; a few passes over [N, V], and two copies of it."""
    sampled_NV = torch.minimum(draft_NV, dense_NV / floor)
    accepted_N = sampled_NV.sum(-1).clamp_max(1)
    mass_N = 1 - floor * accepted_N
    share_N = torch.where(mass_N > 0, (1 - accepted_N) / mass_N, torch.zeros_like(mass_N))
    left_NV = torch.sub(dense_NV, draft_NV, alpha=floor).clamp_min_(0)
    sampled_NV.addcmul_(left_NV, share_N[:, None])
    return accepted_N, torch.minimum(sampled_NV, dense_NV, out=left_NV).sum(-1).clamp_max(1)


def sampling_logp(dense_logp_NV: Tensor, draft_logp_NV: Tensor, floor: float) -> Tensor:
    """[N, V] float32 log q~, from the log-probabilities of both policies."""
    return sampling_probability(dense_logp_NV.double().exp(), draft_logp_NV.double().exp(), floor).log().float()


def judge(
    dense_logp_NV: Tensor,
    draft_logp_NV: Tensor,
    drafted_ids_N: Tensor,
    keep_uniform_N: Tensor,
    redraw_uniform_N: Tensor,
    floor: float,
    *,
    greedy: bool = False,
) -> JudgedDrafts:
    """Apply the rule at N positions. Nothing waits for the device.

    dense_logp_NV, draft_logp_NV: log-probabilities after temperature and top-p.  keep_uniform_N, redraw_uniform_N:
    float64 draws in [0, 1), for keeping and for the residual.  greedy: temperature 0. A drafted token is then kept if
    p(v) >= floor * max p, and the most likely one under p takes the place of one that is not; at floor 1, what is kept
    is what dense greedy decoding says.
    """
    drafted_N1 = drafted_ids_N[:, None]
    dense_NV, draft_NV = dense_logp_NV.double().exp(), draft_logp_NV.double().exp()
    acceptance_N = torch.minimum(dense_NV, draft_NV).sum(-1)
    dense_N = dense_NV.gather(-1, drafted_N1)[:, 0]
    if greedy:
        # max takes the lowest id of equals, as argmax does when the engine draws.
        best_N, best_ids_N = dense_NV.max(-1)[0], dense_logp_NV.argmax(-1)
        kept_N = (drafted_ids_N == best_ids_N) | ((dense_N >= floor * best_N) & (floor < 1))
        token_ids_N = torch.where(kept_N, drafted_ids_N, best_ids_N)
        sparse_logp_N = draft_logp_NV.gather(-1, token_ids_N[:, None])[:, 0]
        sampled_acceptance_N = acceptance_N
    else:
        drafted_q_N = draft_NV.gather(-1, drafted_N1)[:, 0]
        cumulative_NV = residual(dense_NV, draft_NV, floor).cumsum(-1)
        # Where the policies are equal up to rounding at floor 1, nothing may be left to draw from.
        kept_N = (keep_uniform_N * floor * drafted_q_N < dense_N) | (cumulative_NV[:, -1] <= 0)
        drawn_N = torch.searchsorted(cumulative_NV, redraw_uniform_N[:, None] * cumulative_NV[:, -1:], right=True)[:, 0]
        token_ids_N = torch.where(kept_N, drafted_ids_N, drawn_N.clamp_max(dense_NV.shape[-1] - 1))
        sampled_NV = sampling_probability(dense_NV, draft_NV, floor)
        sparse_logp_N = sampled_NV.gather(-1, token_ids_N[:, None])[:, 0].log()
        sampled_acceptance_N = torch.minimum(dense_NV, sampled_NV).sum(-1)
    dense_logp_N = dense_logp_NV.gather(-1, token_ids_N[:, None])[:, 0]
    floats = (sparse_logp_N, dense_logp_N, acceptance_N.clamp_max(1), sampled_acceptance_N.clamp_max(1))
    return JudgedDrafts(kept_N, token_ids_N, *(each.float() for each in floats))


def tokens_that_stand(kept_N: Tensor) -> int:
    """How many tokens of a window count after its check: those kept before the first one that is not, and the token in
    that one's place. kept_N: [N] bool, on the host."""
    rejected = (~kept_N).nonzero()
    return len(kept_N) if not len(rejected) else int(rejected[0, 0]) + 1
