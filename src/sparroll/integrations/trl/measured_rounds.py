"""What both engines of TRL share, the one in this process (engine.py) and the one behind HTTP (server.py): which round they
sample for, what was measured in it, and the schedule in force."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sparroll.engines.report import EngineReport
from sparroll.engines.vllm.rescoring import Rescorer, RescoringSettings
from sparroll.integrations.measured import CheckSums, EngineStep, SpentSeconds
from sparroll.integrations.tail import State
from sparroll.schedule import Schedule
from sparroll.types import Rollout


class MeasuredRounds(ABC):
    """A round is `begin`, TRL's calls of `generate`, and `take`."""

    weight_version = 0
    """Rollouts are measured inside `generate`, so the weights never change in between."""

    def __init__(self, settings: RescoringSettings, of_control: RescoringSettings):
        self.schedule: Schedule | None = None
        """What the engine samples under, from the first `generate` on."""
        self._begun = False
        self.rescorer = Rescorer(settings)
        self._control = Rescorer(of_control)
        """Measures the dense rollouts of the control group, which show the dense ceiling."""
        self.rollouts: list[Rollout] = []
        """With a control group: what was sampled since `begin`, in the order of the prompts and without lists."""
        self._dense: list[bool] = []
        self._round, self._measures = "", True
        self._wanted: Schedule | None = None
        self._requests = 0
        """How many the round has asked for, where each has a seed of its own."""
        self._ceiling_prompts = 0
        self._ceiling: State | None = None
        self._spent = SpentSeconds()
        self._checked = CheckSums()
        self._ask("sparroll_reset_report")

    @property
    def checks_drafts(self) -> bool:
        """Whether drafts are checked."""
        return False

    def begin(
        self,
        name: str,
        schedule: Schedule | None,
        *,
        ceiling_prompts: int = 0,
        dense: Sequence[bool] = (),
    ) -> None:
        """What the next `generate` calls are for. name: that of the round, which no other round has.  schedule: what they
        sample under; None: dense.  ceiling_prompts: before it samples, measure the dense ceiling on so many of its prompts.
        dense: which of its rollouts are dense under the schedule, as a control group, prompt by prompt; empty for none."""
        self._round, self._wanted = name, schedule
        # An engine that checks drafts measures by its checks, and dense rollouts have none.
        self._measures = schedule is not None or not self.checks_drafts
        self._requests, self._ceiling_prompts = 0, ceiling_prompts
        self._dense, self.rollouts = list(dense), []
        self._ask("sparroll_reset_report")

    def take(self) -> EngineStep:
        """What was measured and counted since `begin`."""
        estimator = self.rescorer.estimator
        state, counts = self.rescorer.take()
        ceiling, self._ceiling = self._ceiling, None
        of_control, cost = self._control.take()
        counts.charge(cost)
        if cost.measured:
            ceiling = of_control
        spent, self._spent = self._spent, SpentSeconds()
        checked, self._checked = self._checked, CheckSums()
        said = self._ask("sparroll_report")
        report = EngineReport.from_table(json.loads(said) if isinstance(said, str) else said)
        return EngineStep(state, counts, estimator, report, checked, ceiling, spent)

    def _measure_ceiling(self, sample: Callable[[str], Any]) -> None:
        """The tail of the few dense rollouts that `sample` makes, which gets their round's name. They are counted
        nowhere."""
        began, measure_seconds, self._ceiling_prompts = time.perf_counter(), self._spent.measure, 0
        kept, self.rescorer = self.rescorer, Rescorer(replace(self.rescorer.settings, probe_rollouts=None))
        try:
            self._set_schedule(None)
            sample(f"{self._round}/dense")
            self._ceiling = self.rescorer.take()[0]
        finally:
            self.rescorer, self._requests = kept, 0
        self._ask("sparroll_reset_report")
        self._spent = SpentSeconds(measure_seconds, self._spent.ceiling + time.perf_counter() - began)

    def _set_schedule(self, schedule: Schedule | None) -> None:
        if schedule == self.schedule and self._begun:
            return
        table, name = (None, "dense") if schedule is None else (schedule.table(), schedule.name)
        # `_follow` tells the scheduler of another window; a server checks no drafts.
        self._ask("sparroll_set_schedule", table, name, True)
        self._follow(schedule)
        self.schedule, self._begun = schedule, True

    @abstractmethod
    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of WorkerExtension on the workers. -> what the first one says"""

    @abstractmethod
    def _follow(self, schedule: Schedule | None) -> None:
        """What a change of the schedule takes beside the workers'. K and V of cached responses are those of the old one,
        so the prefix cache must be emptied."""
