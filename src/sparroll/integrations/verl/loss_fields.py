"""The correction's weights and masks as the fields that verl's loss reads. Pure functions on nested tensors; no verl.

verl's loss sums over `response_mask` and divides by the number of ones in `loss_mask`, so both become the tokens that the
correction keeps. `rollout_is_weights` multiplies the loss of each token, outside the clip.
"""

# B rollouts, T response tokens (right-padded)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparroll.corrections import Correction
from sparroll.integrations.corrections import correct
from sparroll.mismatch.step_metrics import distance_report
from sparroll.types import StepReport

READS = ("old_log_probs", "rollout_log_probs", "response_mask", "advantages")
"""The fields of verl's batch that a correction needs, nested: one row per rollout."""
SPARSE = "mismatch/kl_sparse_to_dense"
PARTS = "sparroll_parts"
"""The entry of a rollout's `extra_fields` that says which weights its tokens were sampled with."""
WRITES = ("rollout_is_weights", "response_mask", "loss_mask")


@dataclass(frozen=True)
class CorrectedFields:
    nested: dict[str, Tensor]
    """By the names of WRITES, and `old_log_probs` where a token has dense probability 0; rows as long as those of the
    batch."""
    report: StepReport
    """`correction/...`, `mismatch/kl_sparse_to_dense` and `policy/...`, by the names of our own loop."""


def corrected_fields(
    made: Correction,
    fields: dict[str, Tensor],
    updates: list[list[int]],
    stale: Sequence[Tensor] | None = None,
    control_B: Tensor | None = None,
) -> CorrectedFields:
    """Correct a step's whole batch. fields: those of READS.

    stale: of each row [T] bool, the tokens that were sampled with older weights than those that `old_log_probs` are of
    (`stale_tokens`). The correction cannot tell staleness from sparsity and corrects both; the metrics keep them apart.

    control_B: bool, rollouts of the control group, which are corrected like the others and left out of the distance to
    the dense policy.

    updates: see `rows_of_updates`. Where the correction drops all tokens of an update, one token stays with weight 0,
    because verl divides by the number of tokens that stay.
    """
    nested_mask: Any = fields["response_mask"]
    lengths_B = nested_mask.offsets().diff()
    padded = {name: fields[name].to_padded_tensor(0.0) for name in READS}
    mask_BT = padded["response_mask"].bool()
    corrected = correct(
        made,
        dense_logp=padded["old_log_probs"].float(),
        sparse_logp=padded["rollout_log_probs"].float(),
        response_mask=mask_BT,
        control=control_B,
    )
    kept_BT = corrected.kept_BT
    trained_B = (kept_BT & (padded["advantages"] != 0)).any(-1)
    report = corrected.report
    if stale is not None:
        stale_BT = torch.nn.utils.rnn.pad_sequence(list(stale), batch_first=True)
        report = {name: value for name, value in report.items() if name != SPARSE} | _apart(padded, mask_BT, stale_BT)
    report |= {
        "policy/kept_tokens": float(kept_BT.sum()),
        "policy/trained_rollouts": float((mask_BT & (padded["advantages"] != 0)).any(-1).sum()),
        "policy/trained_tokens": float(kept_BT[trained_B].sum()),
    }
    counted_BT = never_empty(kept_BT, mask_BT, updates).to(padded["response_mask"].dtype)
    weights_BT = corrected.weights_BT * kept_BT
    # A token with dense probability 0 (-inf) counts, and moves nothing: a loss with its ratio would be NaN.
    moves_BT = torch.isfinite(padded["old_log_probs"])
    columns = {"rollout_is_weights": weights_BT, "response_mask": counted_BT * moves_BT, "loss_mask": counted_BT}
    if not moves_BT.all():
        columns["old_log_probs"] = padded["old_log_probs"].masked_fill(~moves_BT, 0.0)
    return CorrectedFields({name: _nested(column, lengths_B) for name, column in columns.items()}, report)


def _apart(padded: dict[str, Tensor], mask_BT: Tensor, stale_BT: Tensor) -> StepReport:
    """The distance between the policies where the weights are the same, and where they are not, which is both."""
    report: StepReport = {"staleness/token_share": float((mask_BT & stale_BT).sum() / mask_BT.sum().clamp(min=1))}
    for name, chosen_BT in ((SPARSE, mask_BT & ~stale_BT), ("staleness/kl_sampler_to_dense", mask_BT & stale_BT)):
        distance = distance_report(padded["old_log_probs"][chosen_BT], padded["rollout_log_probs"][chosen_BT])
        if distance:
            report[name] = distance[SPARSE]
    return report


def stale_tokens(parts: Sequence[Sequence[int]], tokens: int, version: int) -> Tensor:
    """[T] bool, the tokens of a response that were sampled before the weights had this version. parts: (version, tokens)
    of what it was sampled in, in order. A response may be cut behind its parts.

    >>> stale_tokens([(3, 2), (4, 2)], 3, 4).tolist()
    [True, True, False]
    """
    stale_T = torch.cat([torch.full((count,), its < version) for its, count in parts])
    assert len(stale_T) >= tokens, f"parts of {len(stale_T)} tokens, and the response has {tokens}"
    return stale_T[:tokens]


def rows_of_updates(rollouts: int, mini_batch_rollouts: int, ranks: int) -> list[list[int]]:
    """The rows of the batch that share an update of the optimizer. verl gives each data-parallel rank neighbouring rows,
    and each update takes the next ones of every rank.

    >>> rows_of_updates(8, 4, 2)
    [[0, 1, 4, 5], [2, 3, 6, 7]]
    """
    assert mini_batch_rollouts >= ranks, (
        f"a mini batch of {mini_batch_rollouts} rollouts leaves ranks of {ranks} without one"
    )
    of_rank, at_once = rollouts // ranks, mini_batch_rollouts // ranks
    return [
        [rank * of_rank + row for rank in range(ranks) for row in range(first, min(first + at_once, of_rank))]
        for first in range(0, of_rank, at_once)
    ]


def never_empty(kept_BT: Tensor, mask_BT: Tensor, updates: list[list[int]]) -> Tensor:
    """The kept tokens, and of each update without one its first response token."""
    counted_BT = kept_BT.clone()
    for rows in updates:
        if not kept_BT[rows].any() and mask_BT[rows].any():
            row, token = mask_BT[rows].nonzero()[0].tolist()
            counted_BT[rows[row], token] = True
    return counted_BT


def _nested(padded_BT: Tensor, lengths_B: Tensor) -> Tensor:
    rows = [row[:length] for row, length in zip(padded_BT, lengths_B.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
