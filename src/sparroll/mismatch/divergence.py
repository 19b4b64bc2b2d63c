"""How far the policy that sampled is from the dense one where the tail is blind: the KL, and the probability of tokens
that the dense policy would practically never say. From top-k lists and a bucket for the rest; nothing here runs a model.

At each token, with q the policy that sampled and p the dense one, over q's list L:

    kl          sum over L of q log(q / p) + q(rest) log(q(rest) / p(rest))      at most the KL of the whole distributions
    over N nats sum over L of q where log q - log p > N, and 1 for a sampled token outside of L that is as far off

The second is an expected value over what could have been sampled, not a count of what was. A share of one in ten thousand
so shows in far fewer tokens than it takes to sample one of them.
"""

# T response tokens of one rollout, K entries of the sampling policy's list, D of the dense one's, N thresholds

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.types import Rollout, TokenScores

NATS = (2, 5, 10, 20)
"""Distances log q - log p beyond which the probability of tokens is added up."""
_LEAST_LOGP = -100.0
"""What a token has that the dense policy excludes, so that means stay finite."""
_LEAST_REST = 1e-6
"""A smaller rest is only the rounding error of the sum."""


@dataclass(frozen=True)
class BinDivergence:
    """Means over the tokens of one bin."""

    tokens: int
    kl: float
    over_nats: tuple[float, ...]
    """Share of the probability that is more than each of NATS off."""

    def over(self, nats: int) -> float:
        """The share that is more than `nats` off, one of NATS."""
        return self.over_nats[NATS.index(nats)]

    def table(self) -> dict[str, Any]:
        """Plain data, by names that read without the source."""
        shares = {f"over_{nats}_nats_share": share for nats, share in zip(NATS, self.over_nats, strict=True)}
        return {"tokens": self.tokens, "kl": self.kl, **shares}


@dataclass
class Divergence:
    """KL and shares per bin of context lengths, from rollouts that are added one by one. Sums; `table` gives plain data
    and `from_table` the sums back."""

    bin_tokens: int
    sums: dict[int, list[float]] = field(default_factory=dict)
    """By the context length at which a bin starts: [tokens, sum of the KL, sum of the shares over each of NATS]."""

    def add(self, rollout: Rollout, dense: TokenScores, *, sampled_it: bool = True) -> None:
        """Count a rollout. dense: the dense policy's scores, with `logp_at_ids` for the rollout's list or with a list of
        its own. sampled_it: whether the policy with the rollout's log-probabilities sampled it; not so in a replay."""
        kl_T, over_TN = token_divergence(rollout, dense, sampled_it=sampled_it)
        starts_T = rollout.context_tokens // self.bin_tokens * self.bin_tokens
        whole_TN = torch.cat([torch.ones_like(kl_T)[:, None], kl_T[:, None], over_TN], dim=1)
        starts, places_T = torch.unique(starts_T, return_inverse=True)
        sums = whole_TN.new_zeros(len(starts), whole_TN.shape[1]).index_add_(0, places_T, whole_TN)
        for start, more in zip(starts.tolist(), sums.tolist(), strict=True):
            before = self.sums.get(start, [0.0] * len(more))
            self.sums[start] = [one + other for one, other in zip(before, more, strict=True)]

    def bins(self) -> dict[int, BinDivergence]:
        """The means of each bin, by the context length at which it starts."""
        return {start: _means(self.sums[start]) for start in sorted(self.sums)}

    def overall(self) -> BinDivergence:
        """The means over all tokens. Raises UserError without any."""
        if not self.sums:
            raise UserError("no token was counted, so there is no divergence", "add a rollout with a token first")
        return _means([math.fsum(column) for column in zip(*self.sums.values(), strict=True)])

    def table(self) -> dict[str, Any]:
        return {
            "nats": list(NATS),
            "bin_tokens": self.bin_tokens,
            "bins": [{"from_context_tokens": start, **each.table()} for start, each in self.bins().items()],
            "overall": self.overall().table(),
            "sums": [[start, *self.sums[start]] for start in sorted(self.sums)],
        }

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> Divergence:
        """What `table` gave. Raises KeyError or TypeError for anything else, also for other NATS."""
        if tuple(table["nats"]) != NATS:
            raise TypeError(f"shares over {table['nats']} nats, not over {list(NATS)}")
        return Divergence(table["bin_tokens"], {int(start): list(sums) for start, *sums in table["sums"]})


def _means(sums: Sequence[float]) -> BinDivergence:
    tokens, kl, *over = sums
    return BinDivergence(round(tokens), kl / tokens, tuple(each / tokens for each in over))


@torch.no_grad()
def token_divergence(rollout: Rollout, dense: TokenScores, *, sampled_it: bool = True) -> tuple[Tensor, Tensor]:
    """[T] KL and [T, N] probability of tokens more than each of NATS off, float64. See the head of this file.

    Where `dense.logp_at_ids` does not give p at the rollout's list, p is taken from the dense list; a token that is not on
    it has p of the least entry there, which is the most that it can have, so both figures are then rather too small. They
    are too large where several such tokens share less than that, and where the dense list holds all of the probability
    but for a rounding error: it is then taken to exclude what it does not list.
    """
    assert rollout.top_k is not None, "the KL needs the sampling policy's top-k list"
    ids_TK, log_q_TK = rollout.top_k.ids, rollout.top_k.logp.double()
    log_p_TK = _dense_at(ids_TK, dense).double().clamp_min(_LEAST_LOGP)
    # The sampled token's log-probability is always known.
    is_sampled_TK = ids_TK == torch.tensor(rollout.response_ids)[:, None]
    log_p_TK = torch.where(is_sampled_TK, dense.logp.double().clamp_min(_LEAST_LOGP)[:, None], log_p_TK)
    q_TK = log_q_TK.exp()
    off_TK = torch.where(q_TK > 0, log_q_TK - log_p_TK, 0.0)
    rest_q_T, rest_p_T = (
        (1 - mass_TK.masked_fill(q_TK == 0, 0.0).sum(-1)).clamp_min(_LEAST_REST) for mass_TK in (q_TK, log_p_TK.exp())
    )
    kl_T = ((q_TK * off_TK).sum(-1) + rest_q_T * (rest_q_T.log() - rest_p_T.log())).clamp_min(0)
    limits_N = torch.tensor(NATS, dtype=torch.float64)
    over_TN = (q_TK[..., None] * (off_TK[..., None] > limits_N)).sum(1)
    if sampled_it:
        unlisted_T = ~(is_sampled_TK & (q_TK > 0)).any(1)
        off_T = rollout.sparse_logp.double() - dense.logp.double().clamp_min(_LEAST_LOGP)
        over_TN += (unlisted_T[:, None] & (off_T[:, None] > limits_N)).double()
    return kl_T, over_TN.clamp_max(1)


def _dense_at(ids_TK: Tensor, dense: TokenScores) -> Tensor:
    """[T, K] the dense policy's log-probabilities of these tokens, or the most that they can be."""
    if dense.logp_at_ids is not None:
        return dense.logp_at_ids
    assert dense.top_k is not None, "the KL needs the dense policy's top-k list"
    same_TKD = ids_TK[:, :, None] == dense.top_k.ids[:, None, :]
    # Padding may have any id.
    same_TKD &= ~torch.isneginf(dense.top_k.logp)[:, None, :]
    known_TK = torch.where(same_TKD, dense.top_k.logp[:, None, :], -math.inf).amax(-1)
    listed_TD = torch.where(torch.isneginf(dense.top_k.logp), math.inf, dense.top_k.logp)
    unlisted_T = (1 - dense.top_k.logp.double().exp().sum(-1)).clamp_min(0).log().float()
    most_T = torch.minimum(listed_TD.amin(-1), unlisted_T)
    return torch.where(same_TKD.any(-1), known_TK, most_T[:, None])
