"""A run's rounds of sampling: which one it is, and when the dense ceiling of the next one is due. No TRL, no engine; what
becomes of a round's measurements is in ../watched.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sparroll.integrations.measured import EngineStep, spent_report
from sparroll.integrations.tail import State
from sparroll.integrations.trl.settings import SparseSetup
from sparroll.integrations.watched import WatchedStep, WatchedSteps
from sparroll.types import StepReport


class SamplingRounds(WatchedSteps):
    """The schedule in force and the watchers, over all rounds of a run. A round is one batch of rollouts; TRL takes
    `steps_per_generation * num_iterations / gradient_accumulation_steps` optimizer steps on it, usually one.

    >>> rounds = SamplingRounds(setup)
    >>> watched = rounds.complete(engine_steps, policy_report)      # rounds.schedule is that of the next round
    """

    def __init__(self, setup: SparseSetup):
        super().__init__(setup)
        self.setup = setup
        self.checks_drafts = setup.capacity().check is not None
        """Whether the engine is started with a check of its drafts, so that it cannot re-score."""
        self.done = 0

    @property
    def ceiling_prompts(self) -> int:
        """On how many prompts of the next round the dense ceiling is to be measured. Where drafts are checked there is no
        re-scoring, and their acceptance needs no ceiling: it is exact. A control group shows the ceiling itself."""
        mismatch = self.setup.config.mismatch
        if self.schedule is None or self.checks_drafts or self.control_shows_ceiling:
            return 0
        regular = bool(mismatch.ceiling_every_steps and self.done % mismatch.ceiling_every_steps == 0)
        return mismatch.ceiling_prompts if regular or not self.ceiling else 0

    def evaluated(self, states: Iterable[State]) -> None:
        """Take over the dense ceiling that an evaluation has measured; nothing where it measured none, or where the control
        group shows the ceiling."""
        if not self.control_shows_ceiling:
            self.measured_ceiling(states, self.done)

    def complete(self, steps: Sequence[EngineStep], policy: StepReport) -> WatchedStep:
        """`watch` the next round."""
        self.done += 1
        watched = self.watch(self.done, steps, policy)
        watched.report |= spent_report(steps)
        return watched

    def state(self) -> dict[str, Any]:
        return super().state() | {"rounds": self.done}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.done = int(state["rounds"])
