"""The statistic that the controller's budgets follow, so that its rules need not know which it is: the 5th percentile of the
acceptance, which is to stay above a target, or the share of impossible tokens, which is to stay under a limit. Decides
nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from sparroll.control.impossible_limit import MARGIN_FACTOR, ImpossibleLimit
from sparroll.mismatch.impossible import ImpossibleShare
from sparroll.mismatch.table import TailRow
from sparroll.rounding import rounded_down

TAIL_EXPONENT = 0.7
"""1 - q05 is about proportional to budget ** -TAIL_EXPONENT. The value is the median over neighbouring published presets of
a model."""
SHARE_EXPONENT = 1.0
"""The same of the share of impossible tokens, on the cautious side: between the budgets of the project's records of checked
rollouts the exponent is .9 to 5."""
LEAST_EXPECTED = 11
"""A bin is judged by its share once it has so many tokens that this many impossible ones are expected at the limit. With
none among them, the upper bound is then under half of the limit, if they are of 8 rollouts of equal length or more."""


class HeldStatistic(Protocol):
    """One row is what a bin's window measured."""

    @property
    def name(self) -> str:
        """As a sentence has it: "a tail"."""
        ...

    @property
    def needed_tokens(self) -> int:
        """How many tokens judge a bin, if they are of LEAST_ROLLOUTS rollouts."""
        ...

    def counts(self, row: TailRow) -> bool:
        """Whether the row has enough data to judge the bin."""
        ...

    def surely_missed(self, row: TailRow) -> bool:
        """Whether the whole interval is on the wrong side."""
        ...

    def missed(self, row: TailRow) -> bool:
        """Whether the figure itself is on the wrong side."""
        ...

    def unsure(self, row: TailRow) -> bool:
        """Whether the interval reaches over to the wrong side."""
        ...

    def held_with_margin(self, row: TailRow) -> bool:
        """Whether even the end of the interval that counts is a margin away from the wrong side."""
        ...

    def factor(self, row: TailRow) -> float:
        """By how much the budget of a bin that misses it would have to grow, by the power law."""
        ...

    def why_missed(self, row: TailRow) -> str: ...

    def why_unsure(self, row: TailRow, steps: int) -> str: ...

    def why_held(self, row: TailRow, steps: int) -> str: ...

    def summary(self, row: TailRow) -> dict[str, Any]:
        """The figures that a schedule file keeps."""
        ...

    def report(self, row: TailRow) -> tuple[str, float]:
        """(Name of the metric, the end of the interval that is held)."""
        ...


@dataclass(frozen=True)
class HeldTail:
    """The 5th percentile, whose lower bound is held at the target."""

    target: float
    margin: float
    least_tokens: int

    @property
    def name(self) -> str:
        return "a tail"

    @property
    def needed_tokens(self) -> int:
        return self.least_tokens

    def counts(self, row: TailRow) -> bool:
        return row.counts(self.least_tokens)

    def surely_missed(self, row: TailRow) -> bool:
        return row.high < self.target

    def missed(self, row: TailRow) -> bool:
        return row.q05 < self.target

    def unsure(self, row: TailRow) -> bool:
        return row.low < self.target

    def held_with_margin(self, row: TailRow) -> bool:
        return row.low >= self.target + self.margin

    def factor(self, row: TailRow) -> float:
        return float(((1 - row.q05) / (1 - self.target)) ** (1 / TAIL_EXPONENT))

    def why_missed(self, row: TailRow) -> str:
        return f"tail {_words(row)} is under {self.target:.3f}"

    def why_unsure(self, row: TailRow, steps: int) -> str:
        return f"lower bound of the tail {_words(row)} is under {self.target:.3f} over {steps} steps"

    def why_held(self, row: TailRow, steps: int) -> str:
        return f"lower bound of the tail {_words(row)} held {self.target + self.margin:.3f} for {steps} steps"

    def summary(self, row: TailRow) -> dict[str, Any]:
        return row.summary()

    def report(self, row: TailRow) -> tuple[str, float]:
        return "tail_low", row.low


@dataclass(frozen=True)
class HeldShare:
    """The share of impossible tokens, whose upper bound is held at the limit."""

    limit: ImpossibleLimit
    least_tokens: int

    def _share(self, row: TailRow) -> ImpossibleShare:
        share = row.impossible_share(self.limit.nats)
        assert share is not None, "the step was checked for impossible tokens"
        return share

    @property
    def name(self) -> str:
        return f"a limit of {self.limit.at_most:g}"

    @property
    def needed_tokens(self) -> int:
        return max(self.least_tokens, math.ceil(LEAST_EXPECTED / self.limit.at_most))

    def counts(self, row: TailRow) -> bool:
        """Few tokens judge a bin only where they show that the limit is surely exceeded."""
        if row.impossible_share(self.limit.nats) is None or not row.counts(self.least_tokens):
            return False
        return self._share(row).tokens >= self.needed_tokens or self.surely_missed(row)

    def surely_missed(self, row: TailRow) -> bool:
        return self._share(row).low > self.limit.at_most

    def missed(self, row: TailRow) -> bool:
        return self._share(row).value > self.limit.at_most

    def unsure(self, row: TailRow) -> bool:
        return self._share(row).high > self.limit.at_most

    def held_with_margin(self, row: TailRow) -> bool:
        return self._share(row).high <= self.limit.at_most / MARGIN_FACTOR

    def factor(self, row: TailRow) -> float:
        return float((self._share(row).value / self.limit.at_most) ** (1 / SHARE_EXPONENT))

    def _words(self, row: TailRow) -> str:
        share = self._share(row)
        return (
            f"more than {share.nats} nats off {share.value:.2g} ({share.low:.2g} to {share.high:.2g}, {share.tokens} tokens "
            f"of {row.rollouts} rollouts)"
        )

    def why_missed(self, row: TailRow) -> str:
        return f"share of tokens {self._words(row)} is over {self.limit.at_most:g}"

    def why_unsure(self, row: TailRow, steps: int) -> str:
        return (
            f"upper bound of the share of tokens {self._words(row)} is over {self.limit.at_most:g} over {steps} steps"
        )

    def why_held(self, row: TailRow, steps: int) -> str:
        most = self.limit.at_most / MARGIN_FACTOR
        return f"upper bound of the share of tokens {self._words(row)} held {most:g} for {steps} steps"

    def summary(self, row: TailRow) -> dict[str, Any]:
        return self._share(row).summary(row.rollouts)

    def report(self, row: TailRow) -> tuple[str, float]:
        return f"impossible_share_{self.limit.nats}_high", self._share(row).high


def _words(row: TailRow) -> str:
    between = f"{rounded_down(row.low)} to {rounded_down(row.high)}"
    return f"{rounded_down(row.q05)} ({between}, {row.tokens} tokens of {row.rollouts} rollouts)"
