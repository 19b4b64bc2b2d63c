"""The dense log-probabilities that checks of drafts have computed while sampling, found again for the rows of verl's batch.
With them, verl's pass for the old log-probabilities is not needed. Pure functions; no verl."""

# T response tokens

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparroll.errors import UserError


@dataclass(frozen=True)
class CheckedResponse:
    """What the checks said of one rollout, small enough to be sent."""

    prompt_id: str
    """`digest` of its prompt."""
    response_ids_T: Tensor
    """int32"""
    dense_logp_T: Tensor
    """float32, at the temperature of the rollouts."""


def old_log_probs(
    checked: Iterable[CheckedResponse],
    prompts: Sequence[Tensor],
    responses: Sequence[Tensor],
    padding: Sequence[bool],
) -> list[Tensor]:
    """The dense log-probabilities [T] of each row's response. A row may hold less of a response than was sampled, since
    verl cuts responses off at its own limit. padding: rows that only fill the batch up, which nobody sampled; they get
    zeros, and no loss counts them.

    Raises UserError for a row that no check has seen: no other log-probabilities are put in their place.
    """
    of_prompt: dict[str, list[CheckedResponse]] = defaultdict(list)
    for each in checked:
        of_prompt[each.prompt_id].append(each)
    found = []
    for row, (prompt, response, fills_up) in enumerate(zip(prompts, responses, padding, strict=True)):
        if fills_up:
            found.append(torch.zeros(len(response)))
            continue
        ids, length = response.to("cpu", torch.int32), len(response)
        candidates = of_prompt[digest(prompt.tolist())]
        logp = next((each.dense_logp_T[:length] for each in candidates if _begins_with(each.response_ids_T, ids)), None)
        if logp is None:
            raise UserError(
                f"no check of drafts has seen rollout {row} of this batch, so its dense log-probabilities are not known",
                "verify.dense_logp=trainer lets verl compute them",
            )
        found.append(logp)
    return found


def _begins_with(ids_T: Tensor, start: Tensor) -> bool:
    return len(ids_T) >= len(start) and torch.equal(ids_T[: len(start)], start)


def digest(ids: Sequence[int]) -> str:
    """A short name of a list of token ids."""
    return hashlib.blake2b(torch.tensor(ids, dtype=torch.int64).numpy().tobytes(), digest_size=8).hexdigest()
