"""Bins of context lengths with a budget each, the limits of these budgets, and the schedule that they make. Nothing is
decided here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.attention.selectors import Selector
from sparroll.errors import UserError
from sparroll.mismatch.table import bin_name
from sparroll.schedule import Schedule, Step, check_budget

Budget = int | tuple[int, ...]
"""Of a bin, in tokens: one, or one for each group of layers (Step.kv_budget_tokens)."""


@dataclass(frozen=True)
class LengthBins:
    """Bins of one width from 0 to the longest context that a run can reach, and the limits of their budgets.

    >>> LengthBins(2000, 5000, PageMean()).names
    ['0-2k', '2k-4k', '4k-6k']
    """

    bin_tokens: int
    longest_context_tokens: int
    """A longer context takes the budget of the last bin."""
    selector: Selector
    most_budget_tokens: int | None = None
    """No budget is above this; None: budgets may grow to the whole bin, which is dense."""
    least_budget_tokens: int | None = None
    """No budget is below this; None: the selector's least budget."""

    def __post_init__(self) -> None:
        for name in ("most_budget_tokens", "least_budget_tokens"):
            limit = getattr(self, name)
            if limit is not None:
                try:
                    check_budget(limit, self.selector)
                except UserError as error:
                    raise UserError(f"control.{name}: {error.message}", error.hint) from None
        if self.most_budget_tokens is not None and self.least > self.most_budget_tokens:
            raise UserError(
                f"control.least_budget_tokens = {self.least} is more than most_budget_tokens = {self.most_budget_tokens}",
                "give a smaller one",
            )

    @property
    def count(self) -> int:
        return max(1, -(-self.longest_context_tokens // self.bin_tokens))

    @property
    def names(self) -> list[str]:
        return [self.name(place) for place in range(self.count)]

    def name(self, place: int) -> str:
        return bin_name(place * self.bin_tokens, self.end(place))

    def end(self, place: int) -> int:
        """Context length at which a bin ends, exclusive."""
        return (place + 1) * self.bin_tokens

    @property
    def least(self) -> int:
        """Smallest budget of every bin."""
        return self.least_budget_tokens or self.selector.least_budget_tokens

    def most(self, place: int) -> int:
        """Largest budget of a bin: all of its contexts, or the limit that was given."""
        whole = max(self.least, self.units(self.end(place)))
        return whole if self.most_budget_tokens is None else min(whole, self.most_budget_tokens)

    def units(self, tokens: float) -> int:
        """`tokens` rounded up to whole units of the selector."""
        unit = self.selector.unit_tokens
        # The small term absorbs rounding errors: 0.25 * 64.00000000000001 stays one unit.
        return max(1, math.ceil(tokens / unit - 1e-9)) * unit

    def within(self, tokens: float, place: int) -> int:
        """The nearest budget that the bin may have, rounded up to whole units."""
        return min(max(self.units(tokens), self.least), self.most(place))

    def share(self, share: float) -> list[int]:
        """Budgets that read this share of the context at the end of each bin."""
        return [self.within(share * self.end(place), place) for place in range(self.count)]

    def of_schedule(self, schedule: Schedule) -> list[Budget]:
        """A schedule's budgets on these bins: each bin gets the largest budget that the schedule has in it, and no less
        than the bin before; in each group of layers, where the schedule has groups.

        A budget above the whole bin becomes the whole bin, which reads the same. Raises UserError for a budget above
        `most_budget_tokens`.
        """
        groups = [self._of_group(group) for group in schedule.groups]
        return list(groups[0]) if len(groups) == 1 else list(zip(*groups, strict=True))

    def _of_group(self, schedule: Schedule) -> list[int]:
        budgets: list[int] = []
        for place in range(self.count):
            start, end = place * self.bin_tokens, self.end(place)
            inside = [step.budgets[0] for step in schedule.steps if start < step.from_context_tokens < end]
            asked = max([schedule.kv_budget_tokens(start), *inside, *budgets[-1:]])
            if self.most_budget_tokens is not None and min(asked, self.units(end)) > self.most_budget_tokens:
                raise UserError(
                    f"the schedule {schedule.name!r} has {asked} tokens at {self.name(place)}, more than "
                    f"control.most_budget_tokens = {self.most_budget_tokens}",
                    f"--set control.most_budget_tokens={asked}, or none",
                )
            budgets.append(self.within(asked, place))
        return budgets

    def measured_in(self, schedule: Schedule) -> frozenset[int]:
        """The bins that have figures of their own in a schedule: each step that rules in them has been measured."""
        found = []
        for place in range(self.count):
            start, end = place * self.bin_tokens, self.end(place)
            inside = [step for step in schedule.steps if start < step.from_context_tokens < end]
            own = schedule.step_at(start)
            if own.from_context_tokens == start and all(step.measured for step in (own, *inside)):
                found.append(place)
        return frozenset(found)

    def names_of(self, places: Sequence[int]) -> str:
        """Names of bins in words, neighbours joined: "4k-8k and 10k-12k"."""
        joined: list[list[int]] = []
        for place in places:
            if joined and joined[-1][1] == place - 1:
                joined[-1][1] = place
            else:
                joined.append([place, place])
        return " and ".join(bin_name(first * self.bin_tokens, self.end(last)) for first, last in joined)

    def steps(self, budgets: Sequence[Budget], measured: dict[int, dict[str, Any]] | None = None) -> tuple[Step, ...]:
        """The steps of a schedule with these budgets: a step starts wherever a budget changes, and at each bin with a
        measurement."""
        assert len(budgets) == self.count, f"{len(budgets)} budgets for {self.count} bins"
        by_group = zip(*(Step(0, budget).budgets for budget in budgets), strict=True)
        assert all(list(each) == sorted(each) for each in by_group), f"budgets must not fall with length: {budgets}"
        measured = measured or {}
        steps: list[Step] = []
        for place, budget in enumerate(budgets):
            known = measured.get(place)
            if known is not None or not steps or steps[-1].kv_budget_tokens != budget:
                steps.append(Step(place * self.bin_tokens, budget, known))
        return tuple(steps)
