"""What the dense checks of drafts did in a measurement: windows cut, tokens drafted for each that is kept, and how many
tokens are still far from the dense policy. Counts; nothing here runs a model."""

# T response tokens of one rollout

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.draft_check import FAR_NATS
from sparroll.mismatch.table import TailTable
from sparroll.rounding import percent_up, rounded_up
from sparroll.types import Checks, Rollout


@dataclass
class CheckFigures:
    """What the dense checks of drafts did in a measurement, and how many tokens are still far from the dense policy."""

    checks: Checks
    largest_nats: float
    """Largest log q~ - log p of any token."""
    tokens: dict[int, int]
    """Tokens in each bin, by the context length at which it starts."""
    far_tokens: dict[int, int]
    """How many of them are more than FAR_NATS off."""

    @staticmethod
    def of(rollouts: Sequence[Rollout], bin_tokens: int) -> CheckFigures:
        total, tokens, far = Checks(), Counter[int](), Counter[int]()
        largest = -math.inf
        for rollout in rollouts:
            assert rollout.checks is not None and rollout.dense_logp is not None, "the engine checked its drafts"
            total.add(rollout.checks)
            off_T = rollout.sparse_logp - rollout.dense_logp
            starts_T = rollout.context_tokens // bin_tokens * bin_tokens
            tokens.update(starts_T.tolist())
            far.update(starts_T[off_T > FAR_NATS].tolist())
            largest = max(largest, float(off_T.max()))
        return CheckFigures(
            total, largest, dict(sorted(tokens.items())), {start: far[start] for start in sorted(tokens)}
        )

    @staticmethod
    def of_dense(tail: TailTable) -> CheckFigures:
        """Where every draft is dense, so that a check takes nothing back."""
        tokens = {row.from_context_tokens: row.tokens for row in tail.rows}
        return CheckFigures(Checks(), 0.0, tokens, dict.fromkeys(tokens, 0))

    @property
    def far_share(self) -> float:
        """Share of all tokens that are more than FAR_NATS off."""
        return sum(self.far_tokens.values()) / sum(self.tokens.values())

    def far_share_at(self, from_context_tokens: int) -> float:
        """The same in one bin; 0 in one without tokens."""
        tokens = self.tokens.get(from_context_tokens, 0)
        return self.far_tokens[from_context_tokens] / tokens if tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.checks.windows:,} windows, {percent_up(self.checks.cut_share, 1)} cut, "
            f"{rounded_up(self.checks.drafted_per_kept)} drafted per kept, {rounded_up(self.far_share, 5)} of the tokens "
            f"more than {FAR_NATS:g} nats off, at most {rounded_up(self.largest_nats, 2)}"
        )

    def table(self) -> dict[str, Any]:
        """Plain data; `from_table` gives the figures back."""
        bins = [[start, self.tokens[start], self.far_tokens[start]] for start in self.tokens]
        return {
            **self.checks.table(),
            "largest_nats": self.largest_nats,
            "over_2_nats_share": self.far_share,
            "bins_tokens_and_over_2_nats": bins,
        }

    @staticmethod
    def from_table(table: dict[str, Any]) -> CheckFigures:
        bins = table["bins_tokens_and_over_2_nats"]
        return CheckFigures(
            Checks.from_table(table),
            table["largest_nats"],
            {start: tokens for start, tokens, _ in bins},
            {start: far for start, _, far in bins},
        )
