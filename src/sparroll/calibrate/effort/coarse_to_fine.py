"""Which budgets of a grid are measured where not all of them are: a few over all of the grid first, then those between the
largest one that misses and the smallest one that holds. Decides; measures nothing.

A budget whose tail surely holds in a bin says that larger ones need not be measured for it, and one that misses says so of
smaller ones. What is left between the two is narrowed where it costs most: by the tokens in the bin, and by how far apart
the two are. A bin that no measured budget holds comes first. Where the engine samples several budgets together, several are
chosen before any of them is measured: half of all first, and then the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sparroll.calibrate.allocation.wanted import Wanted
from sparroll.calibrate.measure import Study
from sparroll.calibrate.sweep import Sweep, sweep
from sparroll.calibrate.target import level, needed_tokens
from sparroll.errors import UserError
from sparroll.progress import OnProgress, Stages

COARSE = 2
"""How many budgets are measured before any is narrowed down."""
NEAR = 1.25
"""Budgets that lie less than this factor apart are not narrowed further: the fit draws a line between them."""


def spread_over(budgets: Sequence[int], count: int) -> list[int]:
    """`count` of these budgets at even places, the first and the last among them.

    >>> spread_over([512, 768, 1024, 2048, 4096], 3)
    [512, 1024, 4096]
    """
    if count >= len(budgets):
        return list(budgets)
    if count == 1:
        return [budgets[-1]]
    return [budgets[round(place * (len(budgets) - 1) / (count - 1))] for place in range(count)]


def first_budgets(budgets: Sequence[int], most: int, coarse: int = COARSE) -> list[int]:
    """Those to begin with: at even places, none at an end. Budgets in rising order. One is left, for the largest of all
    where no other holds; where there is but one, it is that."""
    if most == 1:
        return [budgets[-1]]
    count = min(coarse, most - 1, len(budgets))
    places = [round((place + 1) * (len(budgets) - 1) / (count + 1)) for place in range(count)]
    return [budgets[place] for place in dict.fromkeys(places)]


def next_budgets(sweep: Sweep, budgets: Sequence[int], wanted: Wanted, left: int, count: int) -> list[int]:
    """The budgets of the grid to measure next, at most `count`, in rising order; none where none is needed. left: how many
    may still be measured."""
    chosen: list[int] = []
    count = min(count, left)
    while len(chosen) < count:
        # The first one is for a bin that nothing holds. With the last ones of all it is the largest.
        following = next_budget(sweep, budgets, wanted, left - count + 1, chosen)
        if following is None:
            break
        chosen.append(following)
    return sorted(chosen)


def next_budget(
    sweep: Sweep, budgets: Sequence[int], wanted: Wanted, left: int, pending: Sequence[int] = ()
) -> int | None:
    """The budget of the grid to measure next; None where none is needed. left: how many may still be measured, without those
    that are `pending`, of which nothing is known yet."""
    unmeasured = [budget for budget in budgets if budget not in (*sweep.budgets, *pending)]
    if left < 1 or not unmeasured:
        return None
    gaps: list[tuple[float, list[int]]] = []
    unheld: list[int] = []
    for tokens, held in _held(sweep, wanted):
        misses = max((budget for budget, holds in held.items() if not holds), default=0)
        holds = min((budget for budget, holds in held.items() if holds and budget > misses), default=None)
        if holds is None:
            unheld.append(misses)
            continue
        # A pending budget parts the gap, and what is looked for lies in one of the parts.
        parts = [misses, *sorted(budget for budget in pending if misses < budget < holds), holds]
        for low, high in pairwise(parts):
            inside = [budget for budget in unmeasured if low < budget < high]
            width = high / (low or budgets[0])
            if inside and width > NEAR:
                gaps.append((tokens * math.log(width) / (len(parts) - 1), inside))
    larger = [budget for budget in unmeasured if budget > max(unheld)] if unheld else []
    if larger and (not gaps or not any(budget > max(unheld) for budget in pending)):
        return larger[-1] if left == 1 and not pending else larger[len(larger) // 2]
    if not gaps:
        return None
    _, inside = max(gaps, key=lambda gap: gap[0])
    return inside[(len(inside) - 1) // 2]


def _held(sweep: Sweep, wanted: Wanted) -> list[tuple[int, dict[int, bool]]]:
    """For each bin with enough data its tokens, and for each measured budget whether it holds what is asked for."""
    least = needed_tokens(wanted.target, wanted.min_tokens), wanted.min_rollouts
    found: dict[int, dict[int, bool]] = {}
    tokens: dict[int, int] = {}
    for measurement, budget in zip(sweep.measurements, sweep.budgets, strict=True):
        for cell in sweep.cells_of(measurement, wanted.target):
            if cell.counts(*least):
                good = cell.low >= level(wanted.target) and not wanted.bounds.broken(
                    measurement, cell.from_context_tokens
                )
                found.setdefault(cell.from_context_tokens, {})[budget] = good
                tokens[cell.from_context_tokens] = cell.tokens
    return [(tokens[start], held) for start, held in sorted(found.items())]


@dataclass(frozen=True)
class Fine:
    """How many budgets of a grid are run, and which."""

    wanted: Wanted
    most: int | None = None
    """None: all of them."""
    narrow: bool = True
    """Whether they are narrowed down to where `wanted` begins to hold; else they are spread over the grid."""

    def __post_init__(self) -> None:
        if self.most is not None and self.most < 1:
            raise UserError(f"most_budgets must be 1 or more, got {self.most}")

    def swept(
        self, study: Study, *, budgets: Sequence[int], on_progress: OnProgress | None = None, **about: Any
    ) -> Sweep:
        """The sweep of the budgets that are run, and of those that hold every context, which are not."""
        run, free = runnable(study, budgets)
        if self.most is None or len(run) <= self.most:
            return sweep(study, budgets=budgets, on_progress=on_progress, **about)
        if not self.narrow:
            return sweep(study, budgets=[*spread_over(run, self.most), *free], on_progress=on_progress, **about)
        stages = Stages(on_progress, self.most)
        done = set[int]()

        def measure(chosen: Sequence[int]) -> Sweep:
            new = len(set(chosen) - done - set(free))
            progress = stages.next("coarse to fine", new)
            done.update(chosen)
            return sweep(study, budgets=chosen, on_progress=progress, **about)

        # Not by how many fit into a batch: on another GPU the same call goes on with the same budgets.
        at_once = -(-self.most // 2) if study.samples_together else 1
        found = narrowed(measure, run, free, self.wanted, self.most, at_once)
        stages.end()
        return found

    def spread(self, study: Study, budgets: Sequence[int]) -> Sequence[int]:
        """Those of the grid that are run at even places, where groups of layers are varied alone."""
        run, free = runnable(study, budgets)
        return budgets if self.most is None or len(run) <= self.most else [*spread_over(run, self.most), *free]


def runnable(study: Study, budgets: Sequence[int]) -> tuple[list[int], list[int]]:
    """(budgets under which a step may be sparse, those that hold every context), in rising order. Known before anything
    is sampled: a response may be as long as the settings allow."""
    grid, longest = sorted(set(budgets)), math.inf
    if not any(isinstance(prompt, str) for prompt in study.prompts):
        longest = max(map(len, study.prompts)) + study.settings.max_new_tokens - 1
    return [budget for budget in grid if budget < longest], [budget for budget in grid if budget >= longest]


def narrowed(
    measure: Callable[[Sequence[int]], Sweep],
    budgets: Sequence[int],
    free: Sequence[int],
    wanted: Wanted,
    most: int,
    at_once: int = 1,
) -> Sweep:
    """Sweep at most so many of the budgets, coarse to fine.

    measure: sweeps the budgets that it is given; those that it has measured before cost nothing.  free: budgets that hold
    every context, and so are not run.  at_once: how many are chosen before any of them is measured.
    """
    chosen = first_budgets(budgets, most, max(COARSE, at_once))
    while True:
        sweep = measure([*chosen, *free])
        following = next_budgets(sweep, budgets, wanted, most - len(chosen), at_once)
        if not following:
            return sweep
        chosen += following
