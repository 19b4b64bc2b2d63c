"""The protocol of watchers. After each step every watcher is shown the same evidence and answers with a decision, which
the loop carries out. Watchers measure nothing, switch nothing and know no engine, so any trainer can use them.

Guard, CheaperSchedules, EmptySteps, UnrewardedSteps and Controller are watchers. Your own needs the properties
and methods of `Watcher`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sparroll.control.paired_prompts import PairedPrompt
from sparroll.mismatch import TailStatistics, TailTable
from sparroll.schedule import Schedule
from sparroll.types import StepReport

Action = Literal["none", "warn", "stop", "switch"]


@dataclass(frozen=True)
class StepEvidence:
    """What one finished step measured, over all processes."""

    step: int
    schedule: Schedule | None
    """The schedule that the rollouts were sampled under; None: dense, or a compression."""
    dense: bool
    """Whether the rollouts read the whole context. Watchers of the tail then have nothing to do."""
    tail: TailStatistics
    report: StepReport
    """The step's metrics."""
    replay: TailTable | None = None
    """The tail of some of the rollouts, read again under the next cheaper schedule; None in a step without a replay."""
    pairs: tuple[PairedPrompt, ...] | None = None
    """Prompts with rollouts of the control group and others, of all processes; None in a run without a control group."""


@dataclass(frozen=True)
class Decision:
    """What to do after a step.

    >>> Decision("stop", ("the correction kept no token for 3 steps: stopped",))
    """

    action: Action = "none"
    """none: go on. warn: write the events and go on. stop: end the run. switch: go on under `schedule`."""
    events: tuple[str, ...] = ()
    """Lines for the log, which say what happens and why."""
    schedule: Schedule | None = None
    """The next schedule, for "switch" only; None is dense."""
    report: StepReport = field(default_factory=dict)
    """Figures for the step's metrics."""


class Stateful(Protocol):
    """What a checkpoint keeps the state of."""

    @property
    def name(self) -> str:
        """The name under which a checkpoint keeps the state."""
        ...

    def state(self) -> dict[str, Any]:
        """What the next step depends on: plain data and tensors, by name. Later steps must not change it in place."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state that `state()` returned."""
        ...


class Watcher(Stateful, Protocol):
    @property
    def may_switch_to(self) -> Sequence[Schedule | None]:
        """Schedules that a decision may switch to, so the engine must be able to run them; empty: it never switches."""
        ...

    def watch(self, step: StepEvidence) -> Decision:
        """Decide what to do after a step. Called once for each step, in order."""
        ...


def described(schedule: Schedule | None) -> str:
    """The schedule in an event about a switch: its name, and the check of its drafts where it has one."""
    if schedule is None:
        return "dense"
    return schedule.name if schedule.check is None else f"{schedule.name} (drafts checked {schedule.check})"


def refuse_two_hands(watchers: Sequence[Watcher]) -> None:
    """Assert that at most one watcher may move the schedule, because two would undo each other's moves. A configuration
    cannot ask for two."""
    moving = [watcher.name for watcher in watchers if watcher.may_switch_to]
    assert len(moving) <= 1, f"{' and '.join(moving)} would both move the schedule"


def states_of(all_of_them: Sequence[Stateful]) -> dict[str, dict[str, Any]]:
    """One table of all states, by their names."""
    return {each.name: each.state() for each in all_of_them}


def restore_all(all_of_them: Sequence[Stateful], states: Mapping[str, dict[str, Any]]) -> None:
    """Restore the states that `states_of` returned, in watchers and others made from the same configuration."""
    for each in all_of_them:
        each.restore(states[each.name])
