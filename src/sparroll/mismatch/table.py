"""The tail of the acceptance by context length, as rows, as plain data and as text. Computes nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.impossible import ImpossibleShare, share_named
from sparroll.rounding import rounded_down


def bin_name(from_context_tokens: int, to_context_tokens: int) -> str:
    """The name of a bin of context lengths in metrics and tables: "16k-18k", "0-2k", "250-500".

    Thousands are written as k if both ends are whole thousands. The end is exclusive.
    """
    ends = (from_context_tokens, to_context_tokens)
    if any(end % 1000 for end in ends):
        return "-".join(str(end) for end in ends)
    return "-".join(f"{end // 1000}k" if end else "0" for end in ends)


def enough(tokens: int, rollouts: int, least_tokens: int, least_rollouts: int = LEAST_ROLLOUTS) -> bool:
    """Whether so much data is enough to decide anything."""
    return tokens >= least_tokens and rollouts >= least_rollouts


class TailFigures:
    """What a row of a table, a cell of a sweep and a point of a plot have in common: the tail of one bin of context
    lengths, its interval, and the amount of data behind it."""

    from_context_tokens: int
    to_context_tokens: int
    """Exclusive."""
    low: float
    high: float
    tokens: int
    rollouts: int

    if TYPE_CHECKING:
        # Some classes have this as a field, others as another name for a field.
        @property
        def value(self) -> float: ...

    @property
    def name(self) -> str:
        """The bin's name, see `bin_name`."""
        return bin_name(self.from_context_tokens, self.to_context_tokens)

    @property
    def middle(self) -> float:
        """The context length in the middle of the bin, where a plot draws its point."""
        return (self.from_context_tokens + self.to_context_tokens) / 2

    def counts(self, least_tokens: int, least_rollouts: int = LEAST_ROLLOUTS) -> bool:
        """Whether there is enough data to decide anything. Guard, controller, calibration and metrics use this."""
        return enough(self.tokens, self.rollouts, least_tokens, least_rollouts)

    def summary(self) -> dict[str, Any]:
        """The figures that a schedule file keeps."""
        figures = {"value": self.value, "low": self.low, "high": self.high}
        rounded = {name: round(value, 6) for name, value in figures.items()}
        return {**rounded, "tokens": self.tokens, "rollouts": self.rollouts}


@dataclass(frozen=True)
class TailRow(TailFigures):
    """Acceptance of the tokens in one bin of context lengths.

    >>> TailRow(from_context_tokens=16000, to_context_tokens=18000, tokens=81234, rollouts=62, mean=0.977, q01=0.71,
    ...         q05=0.868, q10=0.931, quantile_value=0.868, low=0.861, high=0.874, share_above_999=0.73)
    """

    from_context_tokens: int
    to_context_tokens: int
    """Exclusive."""
    tokens: int
    rollouts: int
    """Rollouts with at least one token in the bin. Only different rollouts are independent evidence."""
    mean: float
    q01: float
    q05: float
    q10: float
    quantile_value: float
    """The quantile that the table was made for."""
    low: float
    """Lower end of the 95 % interval of `quantile_value`; 0 if the data cannot tell, as with a single rollout."""
    high: float
    """Upper end of that interval; 1 if the data cannot tell."""
    share_above_999: float
    """Share of tokens whose acceptance is 0.999 or more."""
    cvar01: float | None = None
    """Mean acceptance of the worst 1 % of the tokens, their conditional value at risk. None in a record from before it
    was computed, like the following."""
    cvar05: float | None = None
    """The same of the worst 5 %."""
    skew: float | None = None
    """Skewness of the acceptance over tokens; None where it does not vary, too."""
    impossible: tuple[ImpossibleShare, ...] = ()
    """The share of impossible tokens at each distance; empty where none were counted."""

    def impossible_share(self, nats: int) -> ImpossibleShare | None:
        """The share of sampled tokens that are more than `nats` off; None where it was not measured."""
        return share_named(self.impossible, nats)

    @staticmethod
    def from_table(table: Mapping[str, Any]) -> TailRow:
        """The row that `TailTable.table` wrote, also one of an earlier version."""
        shares = tuple(ImpossibleShare(**each) for each in table.get("impossible", ()))
        return TailRow(**{**table, "impossible": shares})

    @property
    def value(self) -> float:
        """The same as `quantile_value`, under the name that cells and schedule files use."""
        return self.quantile_value


@dataclass(frozen=True)
class TailTable:
    """A row for each bin that has tokens, in rising order, and a row over all of them. `print` shows aligned
    columns."""

    rows: list[TailRow]
    overall: TailRow
    quantile: float
    estimator: str
    """The estimator, one of mismatch.acceptance.ESTIMATORS. Figures of two estimators cannot be compared."""
    length_correlation: float | None
    """Pearson correlation of acceptance with context length over tokens; None if one of them does not vary."""

    def table(self) -> dict[str, Any]:
        """Plain data for a JSON record."""
        return {
            "estimator": self.estimator,
            "quantile": self.quantile,
            "length_correlation": self.length_correlation,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "overall": dataclasses.asdict(self.overall),
        }

    def __str__(self) -> str:
        header = ["context", "tokens", "rollouts", "mean", *_quantile_names(self.quantile), "95 % interval", ">= .999"]
        lines = [header, *(self._cells(row, row.name) for row in self.rows), self._cells(self.overall, "all")]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        text = [_aligned(line, widths) for line in lines]
        rule = "-" * len(text[0])
        title = (
            f"acceptance ({self.estimator}) by context length in tokens; interval of {_quantile_name(self.quantile)}"
        )
        if self.length_correlation is not None:
            title += f"; correlation with length {self.length_correlation:+.3f}"
        return "\n".join([title, text[0], rule, *text[1:-1], rule, text[-1]])

    def beside(self) -> list[str]:
        """Lines of text about what the quantiles do not show, over all tokens: the worst ones, and impossible tokens."""
        row, lines = self.overall, []
        if row.cvar01 is not None and row.cvar05 is not None:
            skew = "" if row.skew is None else f"; skew {row.skew:+.2f}"
            lines.append(
                f"mean of the worst 1 % {rounded_down(row.cvar01)}, of the worst 5 % {rounded_down(row.cvar05)}{skew}"
            )
        if row.impossible:
            shares = [
                f"{each.nats} nats {each.value:.2g} ({each.low:.2g} - {each.high:.2g})" for each in row.impossible
            ]
            lines.append(f"share of sampled tokens more than N nats off, with its 95 % interval: {', '.join(shares)}")
        return lines

    def _cells(self, row: TailRow, name: str) -> list[str]:
        values = {0.01: row.q01, 0.05: row.q05, 0.10: row.q10, self.quantile: row.quantile_value}
        quantiles = [rounded_down(values[level]) for level in sorted(values)]
        interval = f"{rounded_down(row.low)} - {rounded_down(row.high)}"
        counts = [f"{row.tokens:,}", f"{row.rollouts:,}"]
        return [name, *counts, rounded_down(row.mean), *quantiles, interval, f"{100 * row.share_above_999:.1f} %"]


def _quantile_name(level: float) -> str:
    """0.05 -> "q05", 0.125 -> "q12.5"."""
    return "q" + f"{100 * level:.6g}".zfill(2)


def _quantile_names(level: float) -> list[str]:
    return [_quantile_name(each) for each in sorted({0.01, 0.05, 0.10, level})]


def _aligned(line: list[str], widths: list[int]) -> str:
    first = line[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))])
