"""The sections [guard] and [control]: the alarm for a low tail, and who may move the schedule. Only one may, so that no two
of them undo each other."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from sparroll.errors import UserError
from sparroll.train.config.base import Section

A_SCHEDULE: tuple[str, ...] = ("schedule", "budget")
"""Kinds of [attention] that have a schedule to move."""


class GuardSection(Section):
    action: Literal["off", "warn", "stop"] = "warn"
    """What happens when the tail stays under the target; with control.by = "guard", when no stricter schedule is left."""
    at_least: float | None = Field(default=None, gt=0, le=1)
    """Target of the worst bin's 5th percentile (estimator top_k_lower); without one, the controller's or the schedule's."""
    window_steps: int = Field(default=10, ge=1)
    """Last steps whose rollouts are judged together. More find smaller shortfalls; a large one is found at once."""
    empty_steps: int = Field(default=3, ge=0)
    """The run stops after so many steps in a row in which the correction left no token to train on, or dynamic sampling
    found no prompt to train on, whatever `action` says; 0: never. Each such step is logged as an event."""


class MoverSection(Section):
    """What all kinds of [control] have."""

    tag = "by"
    moves: ClassVar[tuple[str, ...]]
    """Kinds of [attention] that it can start from."""

    @property
    def following(self) -> tuple[str, ...]:
        """Schedules that the run may go on with."""
        return ()


class NobodySection(MoverSection):
    moves = ("dense", *A_SCHEDULE, "compression")
    by: Literal["nobody"] = "nobody"
    """Who may move the schedule of the rollouts. nobody: it stays as it is. guard: goes on with the next stricter schedule
    at each alarm. controller: moves the budget of each length bin so that the tail stays at a target. cheaper: goes on with
    the next cheaper schedule as soon as the adapter of [distill] holds a target under it."""


class ByGuardSection(MoverSection):
    moves = A_SCHEDULE
    by: Literal["guard"] = "guard"
    """At each alarm of the guard the run goes on with the next stricter schedule."""
    stricter: tuple[str, ...] = Field(min_length=1, examples=[["qwen3-1.7b-0.90", "dense"]])
    """Presets or files to go on with, in this order; "dense" may be the last."""
    force: bool = False
    """Use schedules that were made for another model."""

    @property
    def following(self) -> tuple[str, ...]:
        return self.stricter


class ByControllerSection(MoverSection):
    moves = ("dense", *A_SCHEDULE)
    by: Literal["controller"] = "controller"
    """The budget of each length bin is moved so that the tail stays at the target. With attention.kind = "dense" the
    rollouts become sparse, from `start_share` of the context down."""
    target: float = Field(gt=0, lt=1, examples=[0.86])
    """Lower bound of every bin's 5th percentile (estimator top_k_lower) that budgets are moved to hold."""
    margin: float = Field(default=0.01, gt=0, lt=1)
    """A budget is lowered only while the lower bound is at target + margin or more. Wider is dearer and steadier."""
    patience: int = Field(default=5, ge=1)
    """Steps in a row for which that must be so. After a lowering that did not hold, twice as many, and so on."""
    window_steps: int = Field(default=4, ge=1)
    """Last steps whose rollouts are judged together. More find smaller differences, and later."""
    small_step: float = Field(default=0.05, gt=0, le=0.5)
    """How far one lowering goes, as a share of the budget; at least one page."""
    start_share: float = Field(default=0.5, gt=0, le=1)
    """Share of its context that each bin reads at first with attention.kind = "dense"; 1 is dense. The published schedules
    read half or less of contexts from 4k on at a target of .88."""
    most_budget_tokens: int | None = Field(default=None, ge=1)
    """No budget is raised above this, in tokens; none: up to the whole bin, which is dense."""
    least_budget_tokens: int | None = Field(default=None, ge=1)
    """No budget is lowered below this, in tokens, and none starts below it; none: the selector's least. The tail does not
    see what fewer than five tokens of a hundred lose, so a bin of easy tokens may go lower than is good."""

    @model_validator(mode="after")
    def _can_be_lowered(self) -> Self:
        if self.target + self.margin >= 1:
            raise UserError(
                f"control.target + control.margin must be below 1, got {self.target} + {self.margin}",
                "no lower bound could be above that, so no budget would ever be lowered",
            )
        return self


class ByCheaperSection(MoverSection):
    moves = A_SCHEDULE
    by: Literal["cheaper"] = "cheaper"
    """The run goes on with the next cheaper schedule as soon as the adapter of [distill] holds the target under it."""
    schedules: tuple[str, ...] = Field(min_length=1, examples=[["qwen3-1.7b-0.83", "qwen3-1.7b-0.80"]])
    """Presets or files to go on with, from the dearest to the cheapest."""
    at_least: float | None = Field(default=None, gt=0, le=1)
    """That target, for the lower bound of the worst bin's 5th percentile; without one, the first schedule's own."""
    every_steps: int = Field(default=10, ge=1)
    """How often some of the step's rollouts are replayed under the next cheaper schedule."""
    prompts: int = Field(default=2, ge=1)
    """Prompts whose rollouts are replayed; 8 rollouts or more, since no bin counts with fewer."""
    patience: int = Field(default=3, ge=1)
    """So many measurements in a row must hold the target."""
    force: bool = False
    """Use schedules that were made for another model."""

    @property
    def following(self) -> tuple[str, ...]:
        return self.schedules


ControlSection = NobodySection | ByGuardSection | ByControllerSection | ByCheaperSection
