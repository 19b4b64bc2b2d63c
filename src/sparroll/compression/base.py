"""What a compression policy is: after the prefill and then every `every_tokens` decode steps, it decides which cached
tokens of a request stay, from the keys and the most recent queries. Policies are pure functions of tensors; the engine
calls them and frees the memory.

Eviction is not selection. A selector (attention/selectors/) chooses anew what each step reads, and the cache stays
whole. A policy drops tokens for good.
"""

# R requests, H kv heads, G query heads per kv head, C cache slots, W observed queries, D head dimension, B budget

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparroll.errors import UserError


@dataclass(frozen=True)
class Compression(ABC):
    """Base of all policies. The defaults are Sparse-RL's (arXiv 2601.10079). Prompt tokens count like any others."""

    kind: ClassVar[str]

    budget_tokens: int = 512
    """How many tokens of a request stay, per layer and KV head. A lower budget saves more memory and is further from
    dense."""
    every_tokens: int = 128
    """Decode steps of a request between two compressions, so that it holds at most budget_tokens + every_tokens."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UserError(
                    f"compression {self.kind!r}: {field.name} must be a whole number from 1 on, got {value!r}"
                )
        if self.budget_tokens <= self.always_kept_tokens:
            raise UserError(
                f"compression {self.kind!r}: budget_tokens must be above the {self.always_kept_tokens} tokens that always "
                f"stay, got {self.budget_tokens}",
                f"use {self.always_kept_tokens + 1} or more",
            )
        if self.every_tokens < self.query_tokens:
            # With this rule, after the prefill the observed queries always come from decode steps, never from the
            # prompt.
            raise UserError(
                f"compression {self.kind!r}: every_tokens must be at least window_tokens ({self.query_tokens}), "
                f"got {self.every_tokens}",
                f"use {self.query_tokens} or more; published is 128",
            )

    @property
    def name(self) -> str:
        """Kind and budget, such as "r_kv-512". Rollouts carry this name."""
        return f"{self.kind}-{self.budget_tokens}"

    @property
    def query_tokens(self) -> int:
        """W: `keep` reads the queries of the W most recent tokens; 0: it reads none."""
        return 0

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a request that the cache holds at any time."""
        return self.budget_tokens + self.every_tokens

    @property
    @abstractmethod
    def always_kept_tokens(self) -> int:
        """How many tokens stay whatever their scores are."""

    @abstractmethod
    def keep(self, keys: Tensor, queries: Tensor | None, tokens: Tensor, scale: float) -> Tensor:
        """Slots that stay in one layer, per request and KV head.

        keys [R, H, C, D] after RoPE, in the order of their positions; slots from tokens[r] on hold nothing.
        queries [R, H, G, W, D] after RoPE, those of the last W tokens, oldest first; None where `query_tokens` is 0.
        tokens [R]: filled slots, each more than the budget. scale: what the model multiplies q.k with.
        Returns [R, H, B] int64, ascending.
        """

    def table(self) -> dict[str, Any]:
        """Plain data for a configuration or a record. `make_compression(**table)` makes the same policy again."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class Scored(Compression):
    """Base of policies that keep the last `window_tokens` tokens and, of the others, those with the highest scores. Of
    equal scores, the earliest tokens are kept."""

    window_tokens: int = 8
    """The most recent tokens always stay, and their queries give the scores of the others."""
    pool_tokens: int = 7
    """Width of the pooling over neighbouring tokens, odd; 1 turns it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pool_tokens % 2 == 0:
            raise UserError(f"compression {self.kind!r}: pool_tokens must be odd, got {self.pool_tokens}")

    @property
    def query_tokens(self) -> int:
        return self.window_tokens

    @property
    def always_kept_tokens(self) -> int:
        return self.window_tokens

    def keep(self, keys: Tensor, queries: Tensor | None, tokens: Tensor, scale: float) -> Tensor:
        assert queries is not None, f"{self.kind} reads queries"
        older_R1C = torch.arange(keys.shape[2], device=keys.device) < (tokens - self.window_tokens)[:, None, None]
        score_RHC = self.score(keys.float(), queries.float(), tokens, scale).masked_fill(~older_R1C, -torch.inf)
        # Pooling makes neighbours equal, and topk breaks ties differently on each device.
        ranked_RHC = score_RHC.sort(dim=-1, descending=True, stable=True).indices
        best_RHN = ranked_RHC[..., : self.budget_tokens - self.window_tokens].sort(dim=-1).values
        window_RW = tokens[:, None] - self.window_tokens + torch.arange(self.window_tokens, device=keys.device)
        return torch.cat([best_RHN, window_RW[:, None].expand(-1, keys.shape[1], -1)], dim=-1)

    @abstractmethod
    def score(self, keys: Tensor, queries: Tensor, tokens: Tensor, scale: float) -> Tensor:
        """[R, H, C] float32; tokens with higher scores stay. Scores from the window on do not count. The arguments are
        those of `keep`, in float32."""


def observed_attention(logits: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible slots, 0 elsewhere: logits [R, H, G, W, C], visible broadcastable to it."""
    return torch.softmax(logits.masked_fill(~visible, -torch.inf), dim=-1).masked_fill(~visible, 0.0)
