"""Chooses budgets for layers, or for KV heads, from what each of them loses at a few budgets. Arithmetic; measures
nothing.

What each place loses alone, while the others keep the even budget, is added up. The lower convex hull of a place's
losses over what it reads is then filled from the smallest budgets on, always where the next tokens remove most: for
losses that add up no other budgets of the same reading are better, up to one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from head_replay import Budgets


@dataclass(frozen=True)
class Places:
    """Groups of KV heads that have one budget each."""

    layers: int
    heads: int
    dense_layers: tuple[int, ...]
    groups: tuple[tuple[tuple[int, int], ...], ...]
    """(layer, head) of each."""

    @staticmethod
    def of(layers: int, heads: int, dense_layers: tuple[int, ...], by: str) -> Places:
        """by: "head", "layer", or "all" heads of all layers."""
        each = [(layer, head) for layer in range(layers) if layer not in dense_layers for head in range(heads)]
        key: Callable[[tuple[int, int]], Any] = {
            "head": lambda at: at, "layer": lambda at: at[0], "all": lambda _: 0
        }[by]  # fmt: skip
        groups: dict[Any, list[tuple[int, int]]] = {}
        for at in each:
            groups.setdefault(key(at), []).append(at)
        return Places(layers, heads, dense_layers, tuple(tuple(group) for group in groups.values()))

    def budgets(self, of_groups: list[int]) -> Budgets:
        at = {place: budget for group, budget in zip(self.groups, of_groups, strict=True) for place in group}
        return tuple(
            None if layer in self.dense_layers else tuple(at[layer, head] for head in range(self.heads))
            for layer in range(self.layers)
        )


@dataclass(frozen=True)
class Curve:
    """What one place loses at each of its measured budgets, and what it reads there.

    >>> Curve(budgets=(128, 256, 512), reading=(128.0, 256.0, 512.0), loss=(0.31, 0.26, 0.24))
    """

    budgets: tuple[int, ...]
    reading: tuple[float, ...]
    """Tokens of a step, which may be fewer than the budget: a context may be shorter. Heads of a place are added up."""
    loss: tuple[float, ...]

    def hull(self) -> list[int]:
        """The places of the points on the lower convex hull, from the least reading to where the loss is least."""
        kept = [0]
        for place in range(1, int(np.argmin(self.loss)) + 1):
            if self.reading[place] <= self.reading[kept[-1]]:
                continue
            while len(kept) > 1 and self.slope(kept[-2], kept[-1]) >= self.slope(kept[-1], place):
                kept.pop()
            kept.append(place)
        return kept

    def slope(self, one: int, other: int) -> float:
        """Change of the loss by a token more that is read."""
        return (self.loss[other] - self.loss[one]) / (self.reading[other] - self.reading[one])


def filled(curves: Sequence[Curve], reading: float, step_tokens: int) -> list[int]:
    """A budget for each curve, a multiple of step_tokens, which together read at most `reading`."""
    budgets = [curve.budgets[0] for curve in curves]
    left = reading - sum(curve.reading[0] for curve in curves)
    steps = []
    for place, curve in enumerate(curves):
        for one, other in pairwise(curve.hull()):
            gain = -curve.slope(one, other)
            each = (
                (curve.reading[other] - curve.reading[one]) * step_tokens / (curve.budgets[other] - curve.budgets[one])
            )
            many = (curve.budgets[other] - curve.budgets[one]) // step_tokens
            steps += [(-gain, place, each)] * many
    # A hull is convex, so a place's own steps stand in their order.
    for _, place, each in sorted(steps):
        if each <= left + 1e-9:
            budgets[place] += step_tokens
            left -= each
    return budgets


def halfway(budgets: Sequence[int], even: int, step_tokens: int) -> list[int]:
    """Budgets half as far from the even one, in whole steps that add up to half of both sums."""
    exact = np.array([(budget + even) / 2 / step_tokens for budget in budgets])
    steps = np.floor(exact).astype(int)
    left = int(exact.sum() - steps.sum() + 1e-9)
    for place in np.argsort(steps - exact, kind="stable")[:left]:
        steps[place] += 1
    return [int(each) * step_tokens for each in steps]
