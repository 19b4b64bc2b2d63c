"""The steps of a schedule: from which context length on, how many tokens. What a step may say, and which budgets a selector
can spend."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from sparroll.attention.selectors import Selector
from sparroll.errors import UserError
from sparroll.types import is_whole

MOST_TOKENS = 2**30
"""No context is longer than this, and no budget can be larger: lengths are 32-bit numbers on a GPU."""


@dataclass(frozen=True)
class Step:
    """From this context length on (prompt + generated, the current token included), read at most this many tokens."""

    from_context_tokens: int
    kv_budget_tokens: int | tuple[int, ...]
    """One number holds in all sparse layers; several are those of the schedule's layer groups, in their order."""
    measured: dict[str, Any] | None = None
    """The tail measured under this budget: {"value", "low", "high", "tokens"}. None if nobody measured it, as in the
    published presets."""

    def __post_init__(self) -> None:
        # numpy's whole numbers are no numbers to TOML and JSON.
        object.__setattr__(self, "from_context_tokens", _plain(self.from_context_tokens))
        budgets = self.kv_budget_tokens
        plain = tuple(map(_plain, budgets)) if isinstance(budgets, tuple) else _plain(budgets)
        object.__setattr__(self, "kv_budget_tokens", plain)

    @property
    def budgets(self) -> tuple[int, ...]:
        """The budgets as they are written: one, or one for each group."""
        return self.kv_budget_tokens if isinstance(self.kv_budget_tokens, tuple) else (self.kv_budget_tokens,)

    def of_group(self, place: int) -> Step:
        """The step as the layers of one group see it, without the figures, which are those of all groups together."""
        return Step(self.from_context_tokens, self.budgets[place if len(self.budgets) > 1 else 0])


def check_steps(steps: tuple[Step, ...], selector: Selector, groups: int) -> None:
    """Raise UserError for steps that are no schedule of this selector and so many groups of layers; 0: there are none."""
    if not steps:
        raise UserError("a schedule needs at least one step")
    for step in steps:
        if not is_whole(step.from_context_tokens):
            raise UserError(f"steps start at whole numbers of tokens, got {step.from_context_tokens!r}")
    if steps[0].from_context_tokens != 0:
        raise UserError(f"the first step must start at 0 tokens of context, got {steps[0].from_context_tokens}")
    for before, after in zip(steps, steps[1:], strict=False):
        if after.from_context_tokens <= before.from_context_tokens:
            raise UserError(
                "steps must start at strictly rising context lengths, "
                f"got {before.from_context_tokens} then {after.from_context_tokens}"
            )
    for step in steps:
        if isinstance(step.kv_budget_tokens, tuple) and (not groups or len(step.kv_budget_tokens) != groups):
            raise UserError(
                f"the step from {step.from_context_tokens} on has {len(step.kv_budget_tokens)} budgets, the schedule has "
                f"{groups or 'no'} layer_groups",
                "give one for each group, or a single number for all"
                if groups
                else "give a single number, or add groups",
            )
        for budget in step.budgets:
            check_budget(budget, selector)


def check_budget(kv_budget_tokens: int, selector: Selector) -> None:
    """Raise UserError unless the budget is a multiple of the unit and leaves one unit to choose beside those always
    read."""
    unit, least = selector.unit_tokens, selector.least_budget_tokens
    if not is_whole(kv_budget_tokens):
        raise UserError(f"kv_budget_tokens must be a whole number of tokens, got {kv_budget_tokens!r}")
    if kv_budget_tokens > MOST_TOKENS:
        raise UserError(
            f"kv_budget_tokens must be at most {MOST_TOKENS:,}, got {kv_budget_tokens:,}",
            "a budget as large as the context is dense",
        )
    if kv_budget_tokens % unit:
        below = max(least, kv_budget_tokens // unit * unit)
        raise UserError(
            f"kv_budget_tokens must be a multiple of page_tokens ({unit}), got {kv_budget_tokens}",
            f"use {below} or {below + unit}",
        )
    if kv_budget_tokens < least:
        raise UserError(
            f"kv_budget_tokens must be at least {least} (first {selector.first_tokens} + recent "
            f"{selector.recent_tokens} + one unit of {unit}), got {kv_budget_tokens}",
            f"use {least} or more",
        )


def _plain(value: Any) -> Any:
    """A whole number as an int; anything else as it is, for `check_steps` to refuse."""
    return operator.index(value) if is_whole(value) else value


def is_count(value: object) -> bool:
    """Whether this is a plain whole number of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
