"""The correction's weights and masks as the fields that TRL's loss reads. Functions on tensors; no TRL.

TRL multiplies each token's loss by `importance_sampling_ratio`, outside the clip, sums over `completion_mask * tool_mask`,
and divides by `num_items_in_batch` (loss types dapo and cispo). `tool_mask` is read by the loss alone, so it becomes the
tokens that the correction keeps.
"""

# B rollouts of this process, T completion tokens (right-padded)

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparroll.corrections import Correction
from sparroll.integrations.corrections import correct
from sparroll.types import StepReport

Gather = Callable[[Tensor], Tensor]
"""[B, T] of this process -> the rows of all processes, in order, padded with zeros to one length."""


def correct_batch(
    batch: dict[str, Tensor], made: Correction, gather: Gather, process: int, control: Sequence[bool] = ()
) -> StepReport:
    """Correct the generation batch of all processes, and fill in this process's rows. -> metrics of the whole batch

    batch: what TRL's `_generate_and_score_completions` returns, changed in place.  control: which rows of all processes
    are of the control group; empty for none.
    """
    mask_BT = batch["completion_mask"].bool()
    if "tool_mask" in batch:
        mask_BT = mask_BT & batch["tool_mask"].bool()
    dense_BT, sparse_BT = batch["old_per_token_logps"].float(), batch["sampling_per_token_logps"].float()
    corrected = correct(
        made,
        dense_logp=gather(dense_BT),
        sparse_logp=gather(sparse_BT),
        response_mask=gather(mask_BT.int()),
        control=torch.tensor(control, device=mask_BT.device) if control else None,
    )
    rows, tokens = slice(process * len(mask_BT), (process + 1) * len(mask_BT)), mask_BT.shape[1]
    # A token with dense probability 0 (-inf) counts, and moves nothing: a loss with its ratio would be NaN.
    moves_BT = torch.isfinite(dense_BT)
    kept_BT = corrected.kept_BT[rows, :tokens]
    batch["importance_sampling_ratio"] = corrected.weights_BT[rows, :tokens].to(dense_BT.dtype)
    batch["tool_mask"] = (kept_BT & moves_BT).to(batch["completion_mask"].dtype)
    batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(~moves_BT, 0.0)
    batch["num_items_in_batch"] = torch.tensor(corrected.kept_tokens, device=mask_BT.device)
    advantage_B = gather(batch["advantages"][:, None])[:, 0]
    moved_B = advantage_B != 0
    all_kept_BT, all_mask_BT = corrected.kept_BT, gather(mask_BT.int()).bool()
    return corrected.report | {
        "policy/kept_tokens": float(all_kept_BT.sum()),
        "policy/trained_rollouts": float((all_mask_BT.any(-1) & moved_B).sum()),
        "policy/trained_tokens": float(all_kept_BT[moved_B].sum()),
    }


def leave_uncorrected(batch: dict[str, Tensor]) -> None:
    """Weights of 1 in place of those that TRL computed: dense rollouts need none."""
    batch["importance_sampling_ratio"] = torch.ones_like(batch["old_per_token_logps"])
