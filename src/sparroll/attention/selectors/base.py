"""What a selector is: how the KV cache is cut into units, what is kept about each unit, how a unit is scored.

Three things are separate, so that each can change without the others: the **unit** (the tokens that are read or left
out together), the **index** (the row kept about each complete unit, which is all that scoring reads) and the **score**.
"""

# R requests, Q query positions, H kv heads, G query heads per kv head, U units, D head dimension, W index row width

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

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

    page_tokens: int = 16
    """Tokens per unit of selection, 1 to 128."""
    first_tokens: int = 16
    """Tokens at the start of the context that are always read; whole units."""
    recent_tokens: int = 32
    """Tokens in the last units, which are always read, the incomplete one included; whole units, at least one."""

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

    @property
    def unit_tokens(self) -> int:
        """Tokens that are read or left out together."""
        return self.page_tokens

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
        return context_tokens - self.unit_tokens * unread_units * (unread_units > 0)

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
        """Bytes of index rows that scoring reads, per token of context and KV head: the bytes of a unit's row / its
        tokens."""
        return self.index_row_bytes(head_dim) / self.unit_tokens

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

    def table(self) -> dict[str, Any]:
        """The selector's table in a schedule file."""
        return {"kind": self.kind, **dataclasses.asdict(self)}
