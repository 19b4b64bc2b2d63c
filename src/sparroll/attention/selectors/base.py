"""What a selector is: how the KV cache is cut into units, what is kept about each unit, how a unit is scored.

Three things are separate, so that each can change without the others: the **unit** (the tokens that are read or left
out together), the **index** (the row kept about each complete unit, which is all that scoring reads) and the **score**.
"""

# R requests, Q query positions, H kv heads, G query heads per kv head, U units, D head dimension, W index row width

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparroll.attention.selectors.remainder import Remainder
from sparroll.errors import UserError

Counts = TypeVar("Counts", int, np.ndarray, Tensor)
"""Token counts: an int, or integers of any shape in a numpy array or a tensor. Functions return the kind they are
given."""


@dataclass(frozen=True)
class Selector(ABC):
    """Base of all selectors. Units have `page_tokens` tokens; the first and the most recent ones are always read."""

    kind: ClassVar[str]
    index_dtype: ClassVar[torch.dtype] = torch.bfloat16
    """Dtype in which index rows are stored."""
    rewritable: ClassVar[bool] = True
    """Whether the index rows of units can be built again when their keys change, as a check of drafted tokens does."""

    no_remainder: ClassVar[str] = "it does not say which mean keys its index rows stand for"
    """Why the selector takes no remainder; empty where it takes one, and then `mean_keys` must be written."""

    page_tokens: int = 16
    """Tokens per unit of selection, 1 to 128."""
    first_tokens: int = 16
    """Tokens at the start of the context that are always read; whole units."""
    recent_tokens: int = 32
    """Tokens in the last units, which are always read, the incomplete one included; whole units, at least one."""
    remainder: Remainder | None = field(default=None, kw_only=True)
    """What a step keeps of the tokens that it does not read (remainder.py); None: nothing."""

    def __post_init__(self) -> None:
        for name in ("page_tokens", "first_tokens", "recent_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise UserError(f"{name} must be a whole number of tokens, got {value!r}")
        if not 1 <= self.page_tokens <= 128:
            raise UserError(f"page_tokens must lie in 1..128, got {self.page_tokens}", "the published selector has 16")
        for name, least in (("first_tokens", 0), ("recent_tokens", self.unit_tokens)):
            value = getattr(self, name)
            if value < least or value % self.unit_tokens:
                below = max(least, value // self.unit_tokens * self.unit_tokens)
                raise UserError(
                    f"{name} must be a multiple of the unit ({self.unit_tokens} tokens) and at least {least}, got {value}",
                    f"use {below} or {below + self.unit_tokens}",
                )
        if self.remainder is not None:
            if not isinstance(self.remainder, Remainder):
                raise UserError(f"remainder must be a Remainder, got {self.remainder!r}")
            if self.no_remainder:
                raise UserError(
                    f"the selector {self.kind!r} takes no remainder: {self.no_remainder}",
                    "page_mean and quantized_mean take one",
                )
            self.remainder.check_fits(self.unit_tokens, self.recent_tokens)

    @property
    def unit_tokens(self) -> int:
        """Tokens that are read or left out together."""
        return self.page_tokens

    @property
    def row_tokens(self) -> int:
        """Tokens that share the coarsest row kept about them: a group of the remainder, or else a unit. What holds part of
        a cache (a block, a capacity) holds whole ones."""
        return self.unit_tokens if self.remainder is None else self.remainder.group_tokens

    @property
    def least_budget_tokens(self) -> int:
        """Smallest budget that leaves one unit to choose: first + recent + one unit."""
        return self.first_tokens + self.recent_tokens + self.unit_tokens

    def read_tokens(self, context_tokens: Counts, kv_budget_tokens: Counts) -> Counts:
        """Tokens that one decode step of a sparse layer attends, for contexts [...] and their budgets [...], both in
        tokens.

        A context within its budget is read whole; of a longer one, as many whole units as the budget holds. The last
        unit is always among them and takes a whole unit of the budget (Sparrow, section 3), so where it is incomplete,
        the step attends to as many tokens fewer as the unit lacks. Tensors stay on their device, and the host does not
        wait for them.
        """
        unread_units = -(-context_tokens // self.unit_tokens) - kv_budget_tokens // self.unit_tokens
        beyond = (unread_units > 0) & (context_tokens > kv_budget_tokens)
        return context_tokens - self.unit_tokens * unread_units * beyond

    @abstractmethod
    def index_width(self, head_dim: int) -> int:
        """Numbers kept per unit and KV head."""

    def cut_at(self, head_dim: int) -> int:
        """Where rows are cut in a block of a paged cache: the first parts of the rows of all its units stand before
        their second parts. By default rows stand whole, one after the other."""
        return self.index_width(head_dim)

    def index_row_bytes(self, head_dim: int) -> int:
        """Bytes of the index row of one unit and KV head."""
        return self.index_width(head_dim) * self.index_dtype.itemsize

    def index_bytes_per_token(self, head_dim: int) -> float:
        """Bytes that are kept beside K and V, per token of context and KV head: a unit's index row / its tokens, and with
        a remainder a group's row / its tokens."""
        index = self.index_row_bytes(head_dim) / self.unit_tokens
        kept = self.remainder
        return index if kept is None else index + self.group_width(head_dim) / kept.group_tokens

    def index_read_bytes_per_token(self, head_dim: int) -> float:
        """What a step reads of them. With a remainder it reads index rows twice, to choose units and to weigh those that it
        did not choose, unless it does both at once (`weighed_with_scores`)."""
        twice = self.remainder is not None and not self.weighed_with_scores
        return self.index_bytes_per_token(head_dim) + twice * self.index_row_bytes(head_dim) / self.unit_tokens

    @abstractmethod
    def build_index(self, keys: Tensor) -> Tensor:
        """Index rows of complete units: keys [..., unit_tokens, D] (after RoPE) -> [..., W] in `index_dtype`."""

    @abstractmethod
    def score(self, query: Tensor, index: Tensor, scale: float, candidates: Tensor) -> Tensor:
        """Scores of the units; those with higher scores are read first.

        query [R, Q, H, G, D] after RoPE; index [R, H, U, W]; scale: what the model multiplies q.k with;
        candidates [R, Q, 1, U] bool, the units that compete (complete and not read anyway). Only their scores count.
        Returns [R, Q, H, U] float32.
        """

    # -- what a remainder needs (remainder.py) ---------------------------------------------------------------------------

    def mean_keys(self, index: Tensor, head_dim: int) -> Tensor:
        """The mean keys that index rows [..., W] stand for, [..., D] float32."""
        raise NotImplementedError(f"{self.kind} has no mean keys")

    def estimated_products(self, query: Tensor, index: Tensor) -> Tensor:
        """Each query head's estimated q.m with the mean keys of units: query [R, Q, H, G, D] after RoPE, index
        [R, H, U, W] -> [R, Q, H, G, U] float32."""
        return torch.einsum("rqhgd,rhud->rqhgu", query.float(), self.mean_keys(index, query.shape[-1]))

    @property
    def weighed_with_scores(self) -> bool:
        """Whether what scores units also weighs them for the remainder, and so reads index rows once."""
        return False

    def unit_spread(self, keys: Tensor) -> Tensor:
        """Variance of a unit's keys about their mean, averaged over the channels: keys [..., unit_tokens, D] -> [...]
        float32. It corrects the estimated weight of the unit (decode/remainder_reference.py)."""
        keys = keys.float()
        return (keys - keys.mean(-2, keepdim=True)).square().mean((-2, -1))

    @property
    def units_per_group(self) -> int:
        """Units in a group of the remainder."""
        assert self.remainder is not None, "a selector without a remainder"
        return self.remainder.group_tokens // self.unit_tokens

    def group_width(self, head_dim: int) -> int:
        """Bytes of the remainder's row of one group and KV head."""
        assert self.remainder is not None, "a selector without a remainder"
        return self.remainder.row_width(head_dim, self.units_per_group)

    def build_groups(self, keys: Tensor, values: Tensor) -> Tensor:
        """The remainder's rows of complete groups: keys and values [..., group_tokens, D] -> [..., W] bytes."""
        assert self.remainder is not None, "a selector without a remainder"
        spread = self.unit_spread(keys.unflatten(-2, (self.units_per_group, self.unit_tokens)))
        return self.remainder.build_rows(values, spread)

    def table(self) -> dict[str, Any]:
        """The selector's table in a schedule file. A selector without a remainder does not name it."""
        settings = dataclasses.asdict(self)
        if self.remainder is None:
            del settings["remainder"]
        return {"kind": self.kind, **settings}
