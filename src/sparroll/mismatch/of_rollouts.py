"""The acceptance of whole rollouts. Joins the log-probabilities of the policy that sampled them with those of the dense
policy. The definitions are in acceptance.py; nothing here runs a model or summarises over tokens."""

# T response tokens of one rollout

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparroll.errors import UserError, nearest
from sparroll.mismatch.acceptance import ESTIMATORS, acceptance_sampled, acceptance_top_k
from sparroll.mismatch.threads import one_thread
from sparroll.types import Rollout, TokenScores


@one_thread()
def acceptance_of(rollouts: Sequence[Rollout], scores: Sequence[TokenScores], estimator: str) -> list[Tensor]:
    """Acceptance [T] of each rollout's tokens. scores: the dense policy's, in the rollouts' order.

    estimator: "top_k_lower" or "top_k_upper", which need the top-k lists of both sides, or "sampled". The estimator
    "exact" needs whole distributions: see `Scorer.exact_acceptance`.
    """
    if estimator == "exact":
        raise UserError(
            'the estimator "exact" needs the whole distributions of both policies, and top-k lists hold a part',
            "use Scorer.exact_acceptance, or the estimator top_k_lower",
        )
    if estimator not in ESTIMATORS:
        raise UserError(f"unknown estimator {estimator!r}", nearest(str(estimator), list(ESTIMATORS)))
    return [_acceptance(rollout, score, estimator) for rollout, score in zip(rollouts, scores, strict=True)]


def off_nats_of(rollout: Rollout, dense: TokenScores) -> Tensor:
    """[T] how many nats each sampled token's log-probability under the policy that sampled it lies above its dense one:
    log q - log p, inf where the dense policy excludes the token. `dense`: its scores of the same tokens."""
    if len(rollout.sparse_logp) != len(dense.logp):
        raise UserError(
            f"{len(rollout.sparse_logp)} sampled tokens and {len(dense.logp)} dense scores",
            "score the whole rollout, token by token",
        )
    return rollout.sparse_logp.double().cpu() - dense.logp.double().cpu()


def _acceptance(rollout: Rollout, dense: TokenScores, estimator: str) -> Tensor:
    if estimator == "sampled":
        return acceptance_sampled(dense.logp, rollout.sparse_logp)
    if rollout.top_k is None or dense.top_k is None:
        side = "rollouts" if rollout.top_k is None else "scores"
        raise UserError(
            f"{estimator} needs the top-k lists of both sides, and the {side} have none",
            "generate and score the rollouts with top_k=20",
        )
    lower_T, upper_T = acceptance_top_k(dense.top_k.ids, dense.top_k.logp, rollout.top_k.ids, rollout.top_k.logp)
    return lower_T if estimator == "top_k_lower" else upper_T
