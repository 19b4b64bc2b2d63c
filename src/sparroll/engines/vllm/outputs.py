"""From what vLLM returns to rollouts, and which decode steps a rollout took. Nothing is run here. vLLM is
imported only where something of its own is made."""

# T response tokens, K top-k entries

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from sparroll.engines import sampling
from sparroll.mismatch.threads import one_thread
from sparroll.types import TokenScores, TopK


def decode_contexts(prompt_tokens: int, response_tokens: int) -> np.ndarray:
    """Context length of each decode step. The first token comes from the prefill, so it has none."""
    return np.arange(prompt_tokens + 1, prompt_tokens + response_tokens, dtype=np.int64)


def checked(said: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The fields of a rollout that only checks of drafts fill in, from what a worker kept (CheckedTokens.table)."""
    assert len(said["dense_logp"]) == tokens, f"the checks saw {len(said['dense_logp'])} of {tokens} tokens"
    lists = None if said["dense_ids"] is None else TopK(said["dense_ids"], said["dense_top_logp"])
    return {
        "dense": TokenScores(said["dense_logp"], lists, said["dense_at_ids"]),
        "draft_acceptance": said["draft_acceptance"],
        "acceptance": said["acceptance"],
        "checks": said["checks"],
    }


class SampledOnly(Sequence[Any]):
    """The log-probabilities as vLLM gives them where no lists were asked for: of each position, {token: its Logprob}.
    Each is made when it is looked at. Hundreds of thousands of them at a time would have Python search them for
    garbage again and again."""

    def __init__(self, tokens: list[int], logp: list[float]):
        from vllm.logprobs import Logprob

        self._tokens, self._logp, self._made = tokens, logp, Logprob

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, place: int) -> dict[int, Any]: ...
    @overload
    def __getitem__(self, place: slice) -> SampledOnly: ...
    def __getitem__(self, place: int | slice) -> dict[int, Any] | SampledOnly:
        if isinstance(place, slice):
            return SampledOnly(self._tokens[place], self._logp[place])
        # TRL sorts by the rank.
        return {self._tokens[place]: self._made(self._logp[place], rank=1)}


@one_thread()
def log_probs(flat: Any, tokens: list[int], top_k: int) -> tuple[Tensor, TopK | None]:
    """([T] of the sampled tokens, the most likely tokens) from vLLM's flat lists, whose rows hold the sampled token and
    then the most likely ones."""
    shape, given = (len(tokens), top_k + 1), len(flat.token_ids)
    assert given == shape[0] * shape[1], f"vLLM returned {given} log-probabilities for {shape[0]} rows of {shape[1]}"
    # Their lists are of Python's numbers, which NumPy reads three times as fast as torch does.
    ids_TW = torch.from_numpy(np.array(flat.token_ids, dtype=np.int64)).view(shape)
    logp_TW = torch.from_numpy(np.array(flat.logprobs, dtype=np.float32)).view(shape)
    sampling.check_finite(logp_TW[:, 0], f"in a response of {len(tokens)} tokens")
    assert ids_TW[:, 0].tolist() == tokens, "vLLM's log-probabilities are of other tokens than it returned"
    return logp_TW[:, 0].clone(), TopK(ids_TW[:, 1:].clone(), logp_TW[:, 1:].clone()) if top_k else None
