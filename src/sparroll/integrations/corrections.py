"""A correction on a framework's padded batch: weights to multiply the loss of each token by, and the tokens that the
loss counts. Pure functions on tensors; the formulas are in corrections/."""

# B rollouts, T response tokens (padded on either side)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sparroll.corrections import Correction, CorrectionResult
from sparroll.errors import UserError
from sparroll.mismatch.step_metrics import distance_report
from sparroll.types import StepReport


@dataclass(frozen=True)
class CorrectedBatch:
    """What the loss of a step needs. The framework's mask must be replaced by `kept_BT` wherever it is read, in the
    numerator and in the denominator, or dropped tokens would still count.

    >>> corrected = correct(correction("icepop"), dense_logp=..., sparse_logp=..., response_mask=...)
    >>> loss = (corrected.weights_BT * token_loss_BT)[corrected.kept_BT].sum() / corrected.kept_tokens
    """

    weights_BT: Tensor
    """0 on padding and on everything that is dropped; no gradient."""
    kept_BT: Tensor
    """bool: response tokens that stay in the loss."""
    kept_tokens: int
    """The denominator of the whole step's token mean, over all micro batches and processes; 1 or more."""
    report: StepReport
    """`correction/...` and `mismatch/kl_sparse_to_dense`, by the names of our own loop."""


def check_usable(made: Correction) -> None:
    """Raise UserError for a correction that a framework's batch cannot serve. Call it before anything runs."""
    if made.needs:
        raise UserError(
            f"the correction {type(made).__name__} needs {', '.join(made.needs)} of every token, which no framework's "
            "batch holds",
            "choose tis, seq_tis, mis, geometric, icepop or veto; sparroll's own trainer runs all of them",
        )


def correct(
    made: Correction,
    *,
    dense_logp: Tensor,
    sparse_logp: Tensor,
    response_mask: Tensor,
    left_out: Tensor | None = None,
    control: Tensor | None = None,
) -> CorrectedBatch:
    """Correct a whole step at once, since a correction may normalise over it.

    dense_logp: [B, T] of the trainer before the update.  sparse_logp: [B, T] of the engine that sampled.
    response_mask: [B, T], 1 at tokens that the engine sampled.  left_out: [B] bool, rollouts that stay out of the loss;
    none of their tokens is kept or counted. Values on padding are not read.

    control: [B] bool, rollouts of the control group. They are corrected like the others, but the distance to the dense
    policy is that of the sparse ones.
    """
    check_usable(made)
    mask_BT = response_mask.bool()
    if left_out is not None:
        mask_BT = mask_BT & ~left_out.bool()[:, None]
    call: Callable[..., CorrectionResult] = made
    result = call(dense_logp=dense_logp, sparse_logp=sparse_logp, mask=mask_BT)
    kept_BT = result.kept(mask_BT)
    sampled_BT = response_mask.bool() if control is None else response_mask.bool() & ~control.bool()[:, None]
    report = result.metrics | distance_report(dense_logp.detach()[sampled_BT], sparse_logp.detach()[sampled_BT])
    return CorrectedBatch(result.weights, kept_BT, max(int(kept_BT.sum()), 1), report)
