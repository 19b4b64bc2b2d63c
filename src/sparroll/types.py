"""The nouns that cross folders: a prompt, a rollout, a batch of scored rollouts, a step's metrics. Data only."""

# B rollouts, S tokens of prompt + response (right-padded), T response tokens (right-padded), K top-k entries

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """A question with a verifiable answer.

    >>> Prompt(prompt_id="synthetic/train/3/17", text="a = 7 ; b = a + 3 ; b ?", answer="0", task="synthetic", level=3)
    """

    prompt_id: str
    text: str
    answer: str
    task: str = ""
    level: int = 0
    messages: tuple[tuple[str, str], ...] = ()
    """(role, content) of each turn where the question is a chat, which a chat template must write; `text` is its words."""


@dataclass
class Rollout:
    """One sampled response, and what the policy that sampled it thought of each token.

    >>> Rollout(prompt_ids=[1, 5, 9], response_ids=[7, 2], sparse_logp=torch.tensor([-0.1, -2.3]), finish_reason="stop",
    ...         prompt_index=0, sample_index=3, seed=11, weight_version=4, schedule_name="qwen3-1.7b-0.86",
    ...         attention="sparse", kv_read_share=0.31, wall_seconds=1.8)
    """

    prompt_ids: list[int]
    response_ids: list[int]
    sparse_logp: Tensor
    """[T] float32, log-probability of each response token under the distribution it was drawn from (after temperature).
    At temperature 0 it is the log-probability at temperature 1."""
    finish_reason: Literal["stop", "length"]
    """stop: ended with a stop id, which is the last response id. length: `max_new_tokens` reached."""
    prompt_index: int = 0
    sample_index: int = 0
    seed: int = 0
    weight_version: int = 0
    schedule_name: str | None = None
    """Name of the schedule in force; None when the engine was asked for dense attention, or for a compression."""
    compression_name: str | None = None
    """Kind and budget of the compression in force."""
    attention: Literal["dense", "sparse", "evicted"] = "dense"
    """What really ran: "sparse" when at least one decode step of a sparse layer read a part of the context, "evicted" when a
    token was dropped from the cache, of the prompt or later."""
    kv_read_share: float = 1.0
    """Tokens attended / tokens in context, mean over this rollout's decode steps and all layers (dense ones included)."""
    wall_seconds: float = 0.0
    top_k_ids: Tensor | None = None
    """[T, K] int64, ids of the K most likely tokens under the sampling distribution, most likely first."""
    top_k_logp: Tensor | None = None
    """[T, K] float32, their log-probabilities."""

    @property
    def context_tokens(self) -> Tensor:
        """[T] context length at which each response token was drawn: prompt + generated, the new token's query included.

        The token at response index t was drawn from the query at position `len(prompt_ids) + t - 1`, whose context
        holds `len(prompt_ids) + t` tokens.
        """
        return len(self.prompt_ids) + torch.arange(len(self.response_ids))


@dataclass
class TokenBatch:
    """Rollouts of one step, padded on the right, with everything the loss reads. Response token t of row b stands at
    `input_ids_BS[b, prompt_tokens_B[b] + t]`.

    >>> batch = TokenBatch.from_rollouts(rollouts, pad_id=0)
    >>> batch.dense_logp_BT = scorer.score(...).logp
    """

    input_ids_BS: Tensor
    prompt_tokens_B: Tensor
    response_tokens_B: Tensor
    sparse_logp_BT: Tensor
    dense_logp_BT: Tensor | None = None
    acceptance_BT: Tensor | None = None
    advantage_B: Tensor | None = None

    @property
    def mask_BT(self) -> Tensor:
        """[B, T] bool, true where a response token exists."""
        steps_T = torch.arange(self.sparse_logp_BT.shape[1], device=self.sparse_logp_BT.device)
        return steps_T < self.response_tokens_B[:, None]

    @property
    def context_tokens_BT(self) -> Tensor:
        """[B, T] context length at which each response token was drawn (see Rollout.context_tokens)."""
        steps_T = torch.arange(self.sparse_logp_BT.shape[1], device=self.sparse_logp_BT.device)
        return self.prompt_tokens_B[:, None] + steps_T

    @staticmethod
    def from_rollouts(rollouts: list[Rollout], pad_id: int, device: torch.device | str = "cpu") -> TokenBatch:
        prompt_tokens_B = torch.tensor([len(r.prompt_ids) for r in rollouts])
        response_tokens_B = torch.tensor([len(r.response_ids) for r in rollouts])
        longest_S = int((prompt_tokens_B + response_tokens_B).max())
        input_ids_BS = torch.full((len(rollouts), longest_S), pad_id, dtype=torch.int64)
        sparse_logp_BT = torch.zeros(len(rollouts), int(response_tokens_B.max()))
        for row, rollout in enumerate(rollouts):
            ids = [*rollout.prompt_ids, *rollout.response_ids]
            input_ids_BS[row, : len(ids)] = torch.tensor(ids)
            sparse_logp_BT[row, : len(rollout.response_ids)] = rollout.sparse_logp
        return TokenBatch(
            input_ids_BS.to(device), prompt_tokens_B.to(device), response_tokens_B.to(device), sparse_logp_BT.to(device)
        )


StepReport = dict[str, float]
"""Flat metrics of one training step; names read without the source.

>>> {"mismatch/acceptance_q05/16k-18k": 0.871, "correction/truncated_share": 0.002, "time/rollout_seconds": 81.2}
"""
