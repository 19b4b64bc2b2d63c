"""The sections [guard] and [control]: the alarm for a low tail or a reward gap, and who may move the schedule. Only one of
guard, controller and cheaper schedules may move it, because two would undo each other's moves."""

from __future__ import annotations

from typing import ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.impossible_limit import ImpossibleLimit
from sparroll.errors import UserError
from sparroll.train.config.base import Section

IMPOSSIBLE_NATS: Final = 10
A_SCHEDULE: tuple[str, ...] = ("schedule", "budget")
"""The kinds of [attention] that have a schedule to move."""


def limit_of(section: GuardSection | ByControllerSection) -> ImpossibleLimit | None:
    """The limit for impossible tokens that a section names; None where it names none."""
    at_most = section.impossible_at_most
    return None if at_most is None else ImpossibleLimit(section.impossible_nats, at_most)


def refuse_nats_alone(section: GuardSection | ByControllerSection, name: str) -> None:
    """Raise UserError for a distance without a limit, which would hold nothing."""
    if section.impossible_at_most is None and section.impossible_nats != IMPOSSIBLE_NATS:
        raise UserError(
            f"{name}.impossible_nats = {section.impossible_nats} does nothing without {name}.impossible_at_most",
            f"--set {name}.impossible_at_most=1e-4, or leave {name}.impossible_nats out",
        )


class GuardSection(Section):
    action: Literal["off", "warn", "stop"] = "warn"
    """What an alarm does, which is raised when the tail is surely under the target, or the control group surely shows a
    reward gap. With control.by = "guard" this applies once no stricter schedule is left."""
    at_least: float | None = Field(default=None, gt=0, le=1)
    """Target for the worst bin's 5th percentile (estimator top_k_lower). Default: the controller's or the schedule's
    target, unless `impossible_at_most` is given."""
    impossible_at_most: float | None = Field(default=None, gt=0, lt=1, examples=[1e-4])
    """Limit for the share of sampled tokens that are more than `impossible_nats` off, alone or beside `at_least`. Default:
    that of the controller or of the schedule, unless `at_least` is given."""
    impossible_nats: Literal[2, 5, 10, 20] = IMPOSSIBLE_NATS
    """How far above its dense log-probability, in nats, a sampled token's log-probability must be for
    `impossible_at_most`. It needs `impossible_at_most`."""
    window_steps: int = Field(default=10, ge=1)
    """How many of the last steps are judged together. More steps find smaller shortfalls; a large one is found at
    once."""
    reward_gap: float | None = Field(default=ControlGroupSettings.reward_gap, ge=0)
    """Largest tolerated mean reward of dense rollouts minus that of sparse ones of the same prompts. There is an alarm
    where the gap is surely there and its interval lies beyond this; "none": never. It needs a control group
    (`rollout.control_share`)."""
    empty_steps: int = Field(default=3, ge=0)
    """The run stops after this many steps in a row in which the correction left no token to train on, or dynamic
    sampling found no prompt to train on, whatever `action` says. 0: it never does. Each such step is logged as an
    event."""

    @model_validator(mode="after")
    def _nats_of_a_limit(self) -> Self:
        refuse_nats_alone(self, "guard")
        return self

    @property
    def impossible(self) -> ImpossibleLimit | None:
        """The limit for impossible tokens that the section names itself."""
        return limit_of(self)


class MoverSection(Section):
    """Base of all kinds of [control]."""

    tag = "by"
    moves: ClassVar[tuple[str, ...]]
    """The kinds of [attention] that a run with this kind of [control] can start from."""

    @property
    def following(self) -> tuple[str, ...]:
        """Names of the schedules that the run may go on with."""
        return ()


class NobodySection(MoverSection):
    moves = ("dense", *A_SCHEDULE, "compression")
    by: Literal["nobody"] = "nobody"
    """Who may move the schedule of the rollouts. nobody: it stays as it is. guard: at each alarm the run goes on with
    the next stricter schedule. controller: the budget of each length bin is moved so that the tail stays at a target.
    cheaper: the run goes on with the next cheaper schedule as soon as the adapter of [distill] holds a target under
    it."""


class ByGuardSection(MoverSection):
    moves = A_SCHEDULE
    by: Literal["guard"] = "guard"
    """At each alarm of the guard the run goes on with the next stricter schedule."""
    stricter: tuple[str, ...] = Field(min_length=1, examples=[["qwen3-1.7b-0.90", "dense"]])
    """Presets or files of the schedules to go on with, in this order; "dense" may be the last."""
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
    target: float | None = Field(default=None, gt=0, lt=1, examples=[0.86])
    """Budgets are moved so that the lower bound of every bin's 5th percentile (estimator top_k_lower) stays at this
    value. Either this or `impossible_at_most` must be given."""
    impossible_at_most: float | None = Field(default=None, gt=0, lt=1, examples=[1e-4])
    """In place of `target`: budgets are moved so that the upper bound of every bin's share of sampled tokens that are more
    than `impossible_nats` off stays at this value."""
    impossible_nats: Literal[2, 5, 10, 20] = IMPOSSIBLE_NATS
    """How far above its dense log-probability, in nats, a sampled token's log-probability must be for
    `impossible_at_most`. It needs `impossible_at_most`."""
    margin: float = Field(default=0.01, gt=0, lt=1)
    """A budget is lowered only while the lower bound is at target + margin or more. A wider margin reads more and is
    steadier. With `impossible_at_most` it plays no part: a budget is lowered while the upper bound is half of the limit
    or less."""
    patience: int = Field(default=5, ge=1)
    """For how many steps in a row that must be so. Each time a lowered budget does not hold, the next attempt waits
    twice as long."""
    window_steps: int = Field(default=4, ge=1)
    """How many of the last steps are judged together. More steps find smaller differences, but later."""
    small_step: float = Field(default=0.05, gt=0, le=0.5)
    """How far one lowering goes, as a share of the budget; at least one page."""
    start_share: float = Field(default=0.5, gt=0, le=1)
    """Share of its context that each bin reads at first with attention.kind = "dense"; 1 is dense. At a target of .88,
    the published schedules read half or less of contexts from 4k on."""
    most_budget_tokens: int | None = Field(default=None, ge=1)
    """No budget is raised above this, in tokens; "none": budgets may grow to the whole bin, which is dense."""
    least_budget_tokens: int | None = Field(default=None, ge=1)
    """No budget starts or is lowered below this, in tokens; "none": the selector's least budget. The 5th percentile
    does not see what fewer than five tokens of a hundred lose, so a bin of easy tokens may go lower than is good."""

    @model_validator(mode="after")
    def _can_be_lowered(self) -> Self:
        refuse_nats_alone(self, "control")
        if self.target is None and self.impossible_at_most is None:
            raise UserError(
                'control.target is missing, which control.by = "controller" needs',
                "for example control.target = 0.86, or control.impossible_at_most = 1e-4 in its place",
            )
        if self.target is None:
            return self
        if self.impossible_at_most is not None:
            raise UserError(
                f"control.target = {self.target} and control.impossible_at_most = {self.impossible_at_most:g} exclude each "
                "other: budgets follow one statistic",
                "give one of them to the controller; the guard can watch the other, guard.at_least or "
                "guard.impossible_at_most",
            )
        if self.target + self.margin >= 1:
            raise UserError(
                f"control.target + control.margin must be below 1, got {self.target} + {self.margin}",
                "lower one of them: no lower bound reaches 1, so no budget would ever be lowered",
            )
        return self

    @property
    def impossible(self) -> ImpossibleLimit | None:
        """The limit for impossible tokens that the budgets follow; None where they follow the tail."""
        return limit_of(self)


class ByCheaperSection(MoverSection):
    moves = A_SCHEDULE
    by: Literal["cheaper"] = "cheaper"
    """The run goes on with the next cheaper schedule as soon as the adapter of [distill] holds the target under it."""
    schedules: tuple[str, ...] = Field(min_length=1, examples=[["qwen3-1.7b-0.83", "qwen3-1.7b-0.80"]])
    """Presets or files of the schedules to go on with, from the dearest to the cheapest."""
    at_least: float | None = Field(default=None, gt=0, le=1)
    """The target for the lower bound of the worst bin's 5th percentile. Default: the target of the schedule in
    attention.name."""
    every_steps: int = Field(default=10, ge=1)
    """Every this many steps, some of the step's rollouts are replayed under the next cheaper schedule."""
    prompts: int = Field(default=2, ge=1)
    """How many prompts have their rollouts replayed. They need 8 rollouts or more, since no bin counts with fewer."""
    patience: int = Field(default=3, ge=1)
    """How many measurements in a row must hold the target."""
    force: bool = False
    """Use schedules that were made for another model."""

    @property
    def following(self) -> tuple[str, ...]:
        return self.schedules


ControlSection = NobodySection | ByGuardSection | ByControllerSection | ByCheaperSection
