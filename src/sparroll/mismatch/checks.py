"""Checks of what tail statistics get: their settings, the tokens of a rollout, and tensors of a saved state."""

# T tokens of one rollout

from __future__ import annotations

import torch
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch.histogram import CELLS
from sparroll.mismatch.sums import MOST_CONTEXT_TOKENS
from sparroll.types import check_tensors

MOST_REPLICATES = 100_000
_SETTING_HINTS = {
    "bin_tokens": "use 2000 for contexts of tens of thousands of tokens, and 250 for contexts of a thousand",
    "replicates": "200 is enough for a 95 % interval",
    "seed": "use 0; only statistics with the same seed can be merged",
}
_STATE_KEYS = ["settings", "quantile", "bins", "counts", "replicates", "sums", "overall", "moments"]


MOST_BINS = 1024
"""With tokens, of one statistics."""


def check_settings(bin_tokens: int, quantile: float, replicates: int, seed: int) -> None:
    """Raise UserError for the first setting that is out of range."""
    for name, value, least in (("bin_tokens", bin_tokens, 1), ("replicates", replicates, 20), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise UserError(f"{name} must be a whole number of {least} or more, got {value!r}", _SETTING_HINTS[name])
    if replicates > MOST_REPLICATES:
        raise UserError(
            f"replicates must be at most {MOST_REPLICATES:,}, got {replicates:,}", _SETTING_HINTS["replicates"]
        )
    if not 0 < quantile < 1:
        raise UserError(f"quantile must be between 0 and 1, got {quantile!r}", "use 0.05 for the 5th percentile")


def check_bins(bin_tokens: int, new_tokens: int) -> None:
    """Raise UserError where responses of `new_tokens` lie in more bins than statistics have."""
    if -(-new_tokens // bin_tokens) > MOST_BINS:
        raise UserError(
            f"responses of {new_tokens:,} tokens lie in more than {MOST_BINS} bins of {bin_tokens} tokens",
            "use a larger bin_tokens, for example 2000",
        )


def check_state(state: dict[str, Tensor], expected_format: int) -> None:
    """Raise UserError unless the tensors are those that TailStatistics.state or packed_state gives."""
    missing = [key for key in _STATE_KEYS if key not in state]
    if missing:
        raise UserError(f"not a state of tail statistics: {', '.join(missing)} missing", "the file may be incomplete")
    written, cells, _, replicates, _ = state["settings"].tolist()
    if not 1 <= written <= expected_format or cells != CELLS:
        raise UserError(
            f"tail statistics of format {written} with {cells} cells, expected {expected_format} with {CELLS}",
            "another version of sparroll wrote them, so measure again",
        )
    bins, cells = len(state["bins"]), len(state["cells"]) if "cells" in state else CELLS
    shapes = {"counts": (bins, cells), "replicates": (bins, replicates, cells), "sums": (bins, 5), "moments": (5, 2)}
    for key, shape in shapes.items():
        if state[key].shape != shape:
            raise UserError(
                f"not a state of tail statistics: {key} is {list(state[key].shape)}, not {list(shape)}",
                "the file may have been changed by hand",
            )


def checked_rollout(acceptance_T: Tensor, context_T: Tensor, rollout_id: int | str) -> tuple[Tensor, Tensor]:
    """Both tensors on the CPU, in float64 and int64. Raises UserError if they cannot be the tokens of a rollout."""
    check_tensors(acceptance=acceptance_T, context_tokens=context_T)
    acceptance_T, context_T = acceptance_T.detach().cpu(), context_T.detach().cpu()
    where = f"rollout {rollout_id!r}"
    if acceptance_T.ndim != 1 or acceptance_T.shape != context_T.shape:
        raise UserError(
            f"{where}: acceptance and context_tokens must be lists of the same length, got {list(acceptance_T.shape)} and "
            f"{list(context_T.shape)}",
            "add one rollout at a time, without padding",
        )
    if not acceptance_T.is_floating_point() or context_T.is_floating_point() or context_T.dtype == torch.bool:
        raise UserError(
            f"{where}: acceptance must be floating point and context_tokens integers, got {acceptance_T.dtype} and "
            f"{context_T.dtype}",
            "were the two swapped?",
        )
    wrong_T = ~((acceptance_T >= 0) & (acceptance_T <= 1))
    if bool(wrong_T.any()):
        place = int(wrong_T.nonzero()[0, 0])
        raise UserError(
            f"{where}: acceptance must be in [0, 1], got {float(acceptance_T[place]):.6g} at token {place}",
            "pass what mismatch.acceptance returns",
        )
    if len(context_T) and not (int(context_T.min()) >= 0 and int(context_T.max()) < MOST_CONTEXT_TOKENS):
        raise UserError(
            f"{where}: context_tokens must be in [0, {MOST_CONTEXT_TOKENS:,}), got {int(context_T.min())} to "
            f"{int(context_T.max())}",
            "pass Rollout.context_tokens",
        )
    return acceptance_T.to(torch.float64), context_T.to(torch.int64)


def checked_off_nats(off_nats_T: Tensor, tokens: int, rollout_id: int | str) -> Tensor:
    """On the CPU in float64. Raises UserError unless there is one for each token, and none is NaN or -inf."""
    check_tensors(off_nats=off_nats_T)
    off_T = off_nats_T.detach().cpu().to(torch.float64)
    if off_T.shape != (tokens,):
        raise UserError(
            f"rollout {rollout_id!r}: off_nats must have one entry for each of the {tokens} tokens, got "
            f"{list(off_T.shape)}",
            "pass what mismatch.of_rollouts.off_nats_of returns for the same rollout",
        )
    wrong_T = torch.isnan(off_T) | torch.isneginf(off_T)
    if bool(wrong_T.any()):
        place = int(wrong_T.nonzero()[0, 0])
        raise UserError(
            f"rollout {rollout_id!r}: off_nats is {float(off_T[place])} at token {place}",
            "the policy that sampled a token must give it a probability above 0, and no log-probability may be NaN",
        )
    return off_T
