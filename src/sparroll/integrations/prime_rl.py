"""A loss for prime-rl: the policy gradient under one of our corrections. Its trainer calls it for one response at a time,
and imports it by name:

    [trainer.loss]
    type = "custom"
    import_path = "sparroll.integrations.prime_rl.loss"
    kwargs = { correction = "tis", weight_max = 2.0 }

prime-rl makes no pass with the old weights: log-probabilities of the policy that is updated stand for the dense ones. With
asynchronous rollouts the ratio therefore holds staleness, too.

What it reads of `LossInputs` and writes into `LossOutputs` is that of prime-rl 0.8 at commit 559b447, and
`benchmarks/trainer_prime_rl.py` runs it inside prime-rl's own `compute_loss`.

Not here: how prime-rl's engine is made to sample sparsely, which its `[inference.vllm]` table says (recipes/prime-rl).
"""

# T tokens of one sequence

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparroll.corrections import Correction
from sparroll.corrections import correction as made_of
from sparroll.corrections.sparse_rl_released import SparseRLReleased
from sparroll.errors import UserError
from sparroll.integrations.corrections import check_usable, correct


def loss(inputs: Any, *, correction: str = "tis", **settings: float | str) -> Any:
    """prime-rl's `LossOutputs` for its `LossInputs` of one sequence. settings: those of the correction.

    prime-rl divides the sum over all sequences by the number of tokens in its own mask, so a token that a correction
    drops still counts there. Where a share s of the tokens is kept, the loss is s times that of our own loop.

    Raises UserError for an unknown correction, and for one that prime-rl cannot serve.
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # type: ignore[import-not-found]

    value, metrics = corrected_loss(
        _usable(correction, tuple(sorted(settings.items()))),
        trainer_logp_T=inputs.trainer_logprobs,
        inference_logp_T=inputs.inference_logprobs,
        advantage_T=inputs.advantages,
        mask_T=inputs.loss_mask,
        loss_weight_T=inputs.loss_weights,
    )
    return LossOutputs(loss=value, metrics=metrics)


def corrected_loss(
    made: Correction,
    *,
    trainer_logp_T: Tensor,
    inference_logp_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    loss_weight_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """(The sum of a sequence's token losses, with gradient; metrics by the names of our own loop, each a float32 tensor
    without dimensions, because prime-rl stacks those of all sequences and takes their mean.) mask_T: bool, the tokens that
    count."""
    if not bool(mask_T.any()):
        return trainer_logp_T.sum() * 0.0, {}
    corrected = correct(
        made,
        dense_logp=trainer_logp_T.detach()[None],
        sparse_logp=inference_logp_T[None],
        response_mask=mask_T[None],
    )
    kept_T = corrected.kept_BT[0] & torch.isfinite(trainer_logp_T.detach())
    # exp of nothing: 1, with the gradient of the log-probability.
    moved_T = (trainer_logp_T - trainer_logp_T.detach()).masked_fill(~kept_T, 0.0).exp()
    token_loss_T = -corrected.weights_BT[0].to(moved_T.dtype) * advantage_T * moved_T
    if loss_weight_T is not None:
        token_loss_T = token_loss_T * loss_weight_T
    metrics = {
        name: torch.tensor(value, dtype=torch.float32, device=mask_T.device) for name, value in corrected.report.items()
    }
    return token_loss_T.masked_fill(~kept_T, 0.0).sum(), metrics


@cache
def _usable(name: str, settings: tuple[tuple[str, float | str], ...]) -> Correction:
    made = made_of(name, **dict(settings))
    check_usable(made)
    if isinstance(made, SparseRLReleased):
        raise UserError(
            f"the correction {name} divides by the mean weight of a whole step, and prime-rl's loss sees one response",
            "choose sparse_rl, which is the paper's, or tis",
        )
    return made
