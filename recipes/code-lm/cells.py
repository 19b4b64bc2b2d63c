"""The grid as data: which selectors, budgets and dense layers are measured, the most telling ones first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sparroll.attention.selectors import Selector, make_selector
from sparroll.schedule import Schedule, Step

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
"""Tokens that a sparse layer reads, the first 16 and the last 32 included."""
FEW_BUDGETS = (128, 256, 512, 1024)
FIRST_TOKENS, RECENT_TOKENS = 16, 32
PUBLISHED_DENSE = (0, 1)
UNITS = BITS = (1, 2, 4, 8)
SAME_BYTES = tuple((unit, unit) for unit in UNITS)
"""Units of g tokens with g bits a channel: their index has the bytes of page means of 16 tokens."""
SHAPES = {"even": (1.0, 1.0), "early": (1.5, 0.5), "late": (0.5, 1.5)}
"""Budgets of the first and the second half of the sparse layers, as shares of the cell's budget. Together the same is
read."""

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
    shape: str = "even"
    remainder: tuple[int, str] | None = None
    """Tokens of a group and form of its mean value, where what is not read enters the softmax as a summary."""

    @property
    def name(self) -> str:
        parts = [self.kind, str(self.unit_tokens) if self.bits is None else f"{self.unit_tokens}x{self.bits}"]
        if self.remainder is not None:
            parts.append("remainder-{}-{}".format(*self.remainder))
        if self.dense_layers != PUBLISHED_DENSE:
            parts.append(f"dense-{'-'.join(map(str, self.dense_layers)) or 'none'}")
        return "-".join(parts if self.shape == "even" else [*parts, self.shape])

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
        even = dataclasses.replace(
            Schedule.fixed(budget, self.selector(), self.dense_layers), name=f"{self.name}-{budget}"
        )
        if self.shape == "even":
            return even
        sparse = [layer for layer in range(layers) if layer not in self.dense_layers]
        half = len(sparse) // 2
        # The halves differ by a layer where their number is odd; then the shapes read a little more or less.
        budgets = tuple(round(budget * share) for share in SHAPES[self.shape])
        groups = (tuple(sparse[:half]), tuple(sparse[half:]))
        return dataclasses.replace(even, steps=(Step(0, budgets),), layer_groups=groups)


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
    layers = [dataclasses.replace(rule, dense_layers=dense) for dense in ((0,), ()) for rule in (PUBLISHED, four, two)]
    shapes = [dataclasses.replace(rule, shape=shape) for rule in (PUBLISHED, four) for shape in ("early", "late")]
    rules = [(rule, BUDGETS) for rule in (PUBLISHED, four, two)]
    if remainder:
        rules += [(summed(rule), BUDGETS) for rule in (four, two)]
    rules += [(rule, FEW_BUDGETS) for rule in layers]
    if remainder:
        rules += [(summed(rule), FEW_BUDGETS) for rule in layers]
    rules += [(rule, FEW_BUDGETS) for rule in shapes]
    rules += [(rule, BUDGETS) for rule in (*fine, Rule("oracle_token", 1), Rule("quest", 16))]
    rules += [(rule, FEW_BUDGETS) for rule in (*others, Rule("oracle_page", 16))]
    if remainder:
        rules += [(summed(rule), FEW_BUDGETS) for rule in (PUBLISHED, *fine, *others)]
    cells = dict.fromkeys(Cell(rule, budget) for rule, budgets in rules for budget in budgets)
    return [cell for cell in cells if cell.budget < longest_tokens and _is_possible(cell)]


def summed(rule: Rule) -> Rule:
    """The rule with a summary of what it does not read."""
    return dataclasses.replace(rule, remainder=REMAINDER)


def _is_possible(cell: Cell) -> bool:
    """A budget by layers must leave a unit to choose in the half that has less."""
    least = cell.rule.selector().least_budget_tokens
    return min(SHAPES[cell.rule.shape]) * cell.budget >= least if cell.rule.shape != "even" else cell.budget >= least
