"""The grid as data: which selectors, budgets and dense layers are measured, the most telling ones first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sparroll.attention.selectors import Selector, make_selector
from sparroll.errors import UserError
from sparroll.schedule import Schedule, Step

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens that a sparse layer reads, the first 16 and the last 32 included."""
FEW_BUDGETS = (128, 256, 512, 1024)
FIRST_TOKENS, RECENT_TOKENS = 16, 32
PUBLISHED_DENSE = (0, 1)
UNITS = BITS = (1, 2, 4, 8)
SAME_BYTES = tuple((unit, unit) for unit in UNITS)
"""Units of g tokens with g bits a channel: their index has the bytes of page means of 16 tokens."""
HALF_THE_BYTES = ((4, 2), (2, 1))
"""Units of 4 and of 2 tokens with fewer bits, whose index has about half the bytes."""
EVEN = "even"
HALVES = {"early": (1.5, 0.5), "late": (0.5, 1.5)}
"""Budgets of the first and the second half of the sparse layers, as shares of the cell's budget. Together the same is
read."""
WIDE = {
    "first-4": ((1, 4),),
    "first-2": ((1, 2),),
    "first-4-2": ((1, 4), (1, 2)),
    "first-two-2": ((2, 2),),
    "first-two-4": ((2, 4),),
    "first-8-4": ((1, 8), (1, 4)),
}
"""Groups of the first sparse layers: how many layers, and how many times the cell's budget each of them reads. The others
read that budget."""

REMAINDER = (64, "fp8")
"""Groups of 64 tokens add 1/171 of K and V to the index, those of 16 tokens 1/57."""


@dataclass(frozen=True)
class Rule:
    """How tokens are chosen, at any budget: one curve.

    >>> Rule("quantized_mean", 4, 4).name
    'quantized_mean-4x4'
    """

    kind: str
    unit_tokens: int
    bits: int | None = None
    dense_layers: tuple[int, ...] = PUBLISHED_DENSE
    shape: str = EVEN
    remainder: tuple[int, str] | None = None
    """Tokens of a group and form of its mean value, where what is not read enters the softmax as a summary."""

    @property
    def name(self) -> str:
        parts = [self.kind, str(self.unit_tokens) if self.bits is None else f"{self.unit_tokens}x{self.bits}"]
        if self.remainder is not None:
            parts.append("remainder-{}-{}".format(*self.remainder))
        if self.dense_layers != PUBLISHED_DENSE:
            parts.append(f"dense-{'-'.join(map(str, self.dense_layers)) or 'none'}")
        return "-".join(parts if self.shape == EVEN else [*parts, self.shape])

    def selector(self) -> Selector:
        table = {"kind": self.kind, "page_tokens": self.unit_tokens}
        table |= {"first_tokens": FIRST_TOKENS, "recent_tokens": RECENT_TOKENS}
        if self.remainder is not None:
            # The row of a group that is not complete does not exist, so its tokens are read.
            table["recent_tokens"] = max(RECENT_TOKENS, self.remainder[0])
            table["remainder"] = dict(zip(("group_tokens", "values"), self.remainder, strict=True))
        return make_selector(table if self.bits is None else table | {"bits": self.bits})

    def schedule(self, budget: int, layers: int) -> Schedule:
        """A schedule of this budget at every length, for a model of so many layers."""
        even = Schedule.fixed(budget, self.selector(), self.dense_layers)
        return shaped(dataclasses.replace(even, name=f"{self.name}-{budget}"), self.shape, layers)


def shaped(schedule: Schedule, shape: str, layers: int) -> Schedule:
    """The schedule, which has one budget for all sparse layers, with the budgets of a shape for a model of so many layers:
    whole units, and at least as many as the selector needs. Raises UserError for a model with too few sparse layers."""
    if shape == EVEN:
        return schedule
    sparse = tuple(layer for layer in range(layers) if layer not in schedule.dense_layers)
    groups, shares = zip(*_groups_of(shape, sparse), strict=True)
    if not all(groups):
        raise UserError(
            f"budgets of the shape {shape!r} need more sparse layers than {len(sparse)} of {layers}",
            f"the shape {EVEN!r} has one budget for all",
        )
    unit, least = schedule.selector.unit_tokens, schedule.selector.least_budget_tokens
    steps = [
        Step(
            step.from_context_tokens,
            tuple(max(least, round(int(step.kv_budget_tokens) * share) // unit * unit) for share in shares),
        )
        for step in schedule.steps
    ]
    return dataclasses.replace(schedule, steps=tuple(steps), layer_groups=groups)


def _groups_of(shape: str, sparse: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
    """Groups of layers, and what each layer of them reads of a budget."""
    if shape in HALVES:
        # Halves differ by a layer where the number is odd; then they read a little more or less together.
        half = len(sparse) // 2
        return list(zip((sparse[:half], sparse[half:]), HALVES[shape], strict=True))
    groups: list[tuple[tuple[int, ...], float]] = []
    for layers, times in WIDE[shape]:
        groups.append((sparse[:layers], times))
        sparse = sparse[layers:]
    return [*groups, (sparse, 1)]


PUBLISHED = Rule("page_mean", 16)


@dataclass(frozen=True)
class Cell:
    rule: Rule
    budget: int

    @property
    def name(self) -> str:
        return f"{self.rule.name}-{self.budget}"


def grid(longest_tokens: int, remainder: bool = False) -> list[Cell]:
    """All cells whose budget leaves something out of the longest context. remainder: also each rule that can have one
    with a summary of what is not read."""
    four, two = Rule("quantized_mean", 4, 4), Rule("quantized_mean", 2, 2)
    fine = [Rule("quantized_mean", *each) for each in SAME_BYTES]
    others = [Rule("quantized_mean", g, b) for g in UNITS for b in BITS if (g, b) not in SAME_BYTES]

    def layered(dense: tuple[int, ...], shape: str = EVEN) -> list[Rule]:
        return [dataclasses.replace(rule, dense_layers=dense, shape=shape) for rule in (four, two, PUBLISHED)]

    layers = [*layered((0,)), *layered(())]
    two_wide, wide = layered((), "first-two-4"), layered((0,), "first-4")
    very_wide, less_wide = layered((), "first-8-4"), layered((0,), "first-2")
    half_bytes, *fewer_bits = (Rule("quantized_mean", *each, (), "first-two-4") for each in HALF_THE_BYTES)
    less_wide_halves = [
        dataclasses.replace(half_bytes, shape=shape) for shape in ("first-4", "first-4-2", "first-two-2")
    ]
    shapes = [dataclasses.replace(rule, shape=shape) for rule in (PUBLISHED, four) for shape in HALVES]
    rules = [(rule, BUDGETS) for rule in (PUBLISHED, four, two, *two_wide[:2], half_bytes, *wide[:2], *very_wide[:1])]
    if remainder:
        rules += [(summed(rule), BUDGETS) for rule in (four, two, *two_wide[:2], *wide[:2])]
    rules += [
        (rule, FEW_BUDGETS) for rule in (*layers, *two_wide[2:], *fewer_bits, *wide[2:], *less_wide, *very_wide[1:])
    ]
    if remainder:
        rules += [(summed(rule), FEW_BUDGETS) for rule in (half_bytes, *fewer_bits, *layers)]
    rules += [(rule, FEW_BUDGETS) for rule in shapes]
    rules += [(rule, BUDGETS) for rule in (*fine, *less_wide_halves, Rule("oracle_token", 1), Rule("quest", 16))]
    rules += [(rule, FEW_BUDGETS) for rule in (*others, Rule("oracle_page", 16))]
    if remainder:
        rules += [(summed(rule), FEW_BUDGETS) for rule in (PUBLISHED, *fine, *others)]
    cells = dict.fromkeys(Cell(rule, budget) for rule, budgets in rules for budget in budgets)
    return [cell for cell in cells if cell.budget < longest_tokens and _is_possible(cell)]


def summed(rule: Rule) -> Rule:
    """The rule with a summary of what it does not read."""
    return dataclasses.replace(rule, remainder=REMAINDER)


def _is_possible(cell: Cell) -> bool:
    """A budget by layers must leave a unit to choose in the group that has least."""
    least = cell.rule.selector().least_budget_tokens
    return min(HALVES.get(cell.rule.shape, (1.0,))) * cell.budget >= least
