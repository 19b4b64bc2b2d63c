"""What a step keeps of the tokens that it does not read: one entry of the softmax for each group of tokens. This file has
the settings and the format of a group's row; attention/decode/remainder_reference.py has the arithmetic.

A row is bytes: the mean of V over the group's tokens, in bf16, or in e4m3 up to whole 4 bytes with a little-endian fp32
scale behind; then a bf16 number for each of the group's units, its spread (see Selector.unit_spread); zeros.
"""

# D head dimension, W row width

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from sparroll.attention.row_bytes import SCALE_BYTES, as_bytes, from_fp8, mean_in_order, scale_in, to_fp8
from sparroll.errors import UserError, nearest

LEAST_GROUP_TOKENS, MOST_GROUP_TOKENS = 16, 64
_SPREAD_BYTES = 2
_VALUES = ("bf16", "fp8")


@dataclass(frozen=True)
class Remainder:
    """Groups of tokens whose unread part enters the softmax with an estimated weight and the group's mean value."""

    group_tokens: int = 16
    """Tokens that share one entry, 16 to 64; whole units. The row of a group is written with its last token."""
    values: str = "bf16"
    """How a group's mean value is kept: "bf16", or "fp8" (e4m3 and one fp32 scale)."""

    def __post_init__(self) -> None:
        tokens = self.group_tokens
        whole = isinstance(tokens, int) and not isinstance(tokens, bool)
        if not whole or not LEAST_GROUP_TOKENS <= tokens <= MOST_GROUP_TOKENS:
            raise UserError(
                f"group_tokens of the remainder must lie in {LEAST_GROUP_TOKENS}..{MOST_GROUP_TOKENS}, got {tokens!r}"
            )
        if self.values not in _VALUES:
            raise UserError(f"values of the remainder must be bf16 or fp8, got {self.values!r}")

    @staticmethod
    def from_table(table: object) -> Remainder:
        """The remainder of a selector's table. Unknown keys are errors."""
        if not isinstance(table, dict):
            raise UserError(f"remainder must be a table, got {table!r}", 'e.g. { group_tokens = 16, values = "bf16" }')
        known = [field.name for field in dataclasses.fields(Remainder)]
        for key in table:
            if key not in known:
                raise UserError(f"a remainder has no setting {key!r}", nearest(str(key), known))
        return Remainder(**table)

    def check_fits(self, unit_tokens: int, recent_tokens: int) -> None:
        """Raise UserError where groups do not hold whole units, or where a unit could be unread before the row of its
        group is written. The recent units are always read, so they must cover a group that is not yet complete."""
        group = self.group_tokens
        if group % unit_tokens:
            near = [tokens for tokens in range(LEAST_GROUP_TOKENS, MOST_GROUP_TOKENS + 1) if tokens % unit_tokens == 0]
            raise UserError(
                f"group_tokens of the remainder must be a multiple of the unit ({unit_tokens} tokens), got {group}",
                f"use {min(near, key=lambda tokens: abs(tokens - group))}" if near else "take pages of up to 64 tokens",
            )
        if recent_tokens < group:
            raise UserError(
                f"recent_tokens must be at least group_tokens of the remainder ({group}), got {recent_tokens}",
                f"use recent_tokens = {group}, or smaller groups",
            )

    def row_width(self, head_dim: int, units: int) -> int:
        """Bytes in the row of one group of `units` units and KV head. Rows are padded to what one thread loads at a
        time (16 bytes), and to the group, because some caches spread a row over its tokens."""
        align = math.lcm(16, self.group_tokens)
        return -(-(self.spreads_at(head_dim) + _SPREAD_BYTES * units) // align) * align

    def build_rows(self, values: Tensor, spread: Tensor) -> Tensor:
        """Rows of complete groups, [..., W] bytes: values [..., group_tokens, D], spread [..., units] of the units (see
        Selector.unit_spread). A row does not depend on what writes it."""
        mean = mean_in_order(values)
        if self.values == "bf16":
            parts = [as_bytes(mean.to(torch.bfloat16))]
        else:
            channels, scale = to_fp8(mean)
            channels = F.pad(channels, (0, self.spreads_at(values.shape[-1]) - SCALE_BYTES - channels.shape[-1]))
            parts = [channels, as_bytes(scale)]
        row = torch.cat([*parts, as_bytes(spread.to(torch.bfloat16))], dim=-1)
        return F.pad(row, (0, self.row_width(values.shape[-1], spread.shape[-1]) - row.shape[-1]))

    def means(self, rows: Tensor, head_dim: int) -> Tensor:
        """The mean values that rows [..., W] stand for: [..., D] float32."""
        if self.values == "bf16":
            return rows[..., : 2 * head_dim].contiguous().view(torch.bfloat16).float()
        return from_fp8(rows[..., :head_dim], scale_in(rows, self.spreads_at(head_dim) - SCALE_BYTES))

    def spread(self, rows: Tensor, head_dim: int, units: int) -> Tensor:
        """The units' spreads in rows [..., W]: [..., units] float32."""
        at = self.spreads_at(head_dim)
        return rows[..., at : at + _SPREAD_BYTES * units].contiguous().view(torch.bfloat16).float()

    def spreads_at(self, head_dim: int) -> int:
        """The byte of a row at which the spreads begin."""
        return 2 * head_dim if self.values == "bf16" else -(-head_dim // 4) * 4 + SCALE_BYTES
