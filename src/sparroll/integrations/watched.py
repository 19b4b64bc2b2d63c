"""The steps of another trainer's run: what all engines measured becomes one tail, its metrics, and the watchers' decision
about the next schedule. Every process that sees the same decides the same. No framework, no engine; when a dense ceiling is
due, and what a step is, each integration says itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from sparroll.control.controller import Controller
from sparroll.control.guard import Guard
from sparroll.control.watcher import Stateful, StepEvidence, Watcher, refuse_two_hands, restore_all, states_of
from sparroll.errors import UserError
from sparroll.integrations.measured import EngineStep, checked_report, ran_report, rescoring_report
from sparroll.integrations.settings import CommonSettings
from sparroll.integrations.tail import State, dense_ceiling_report, merged, step_report
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.step_metrics import ceiling_report
from sparroll.mismatch.threads import one_thread
from sparroll.schedule import Schedule
from sparroll.train.sampling.control_group import ControlGroup
from sparroll.train.tail_metrics import ControlCeiling
from sparroll.types import StepReport


@dataclass
class WatchedStep:
    """What a step's metrics are, and what the watchers said."""

    report: StepReport
    events: list[str] = field(default_factory=list)
    stopped: str = ""
    """Why the run is to end; empty while it may go on."""


class WatchedSteps:
    """The schedule in force, the watchers and the control group, over all steps of a run."""

    def __init__(self, settings: CommonSettings):
        self.watchers: tuple[Watcher, ...] = settings.watchers()
        refuse_two_hands(self.watchers)
        self.schedule: Schedule | None = settings.first_schedule()
        self.ceiling: StepReport = {}
        self.stopped = ""
        """Why the run is to end; empty while it may go on."""
        self._settings = settings
        self._unmeasured_steps = 0
        """Sparse steps since the last one in which a token was measured."""
        config = settings.config
        self._group: ControlGroup | None = None
        self._group_ceiling = ControlCeiling(config.mismatch.ceiling_prompts)
        for each in self.watchers:
            if isinstance(each, Guard) and each.reward_gap is not None:
                samples = config.rollout.samples_per_prompt
                # verl compares on its driver, and each process of TRL compares the rollouts of all of them.
                self._group = ControlGroup(each.reward_gap, config.train.seed, samples, list)

    @property
    def control_group(self) -> ControlGroup | None:
        """The control group; None in a run without one, and while all rollouts are dense."""
        return None if self.schedule is None else self._group

    @property
    def control_shows_ceiling(self) -> bool:
        """Whether the dense ceiling is measured on the control group. Where drafts are checked nothing is re-scored, so
        that the ceiling is measured as without one."""
        return self.control_group is not None and self.schedule is not None and self.schedule.check is None

    def measured_ceiling(self, states: Iterable[State], step: int) -> None:
        """Keep the dense ceiling that was measured in this step; the next steps report it. Without a measured token, the
        one before stays."""
        self.ceiling = dense_ceiling_report(merged(states), step) or self.ceiling

    @property
    def reported_ceiling(self) -> StepReport:
        """The dense ceiling that a step reports beside its tail."""
        return self.ceiling

    @one_thread()
    def watch(self, number: int, steps: Sequence[EngineStep], policy: StepReport) -> WatchedStep:
        """Merge what the engines measured in step `number`, show it to the watchers, and take the next schedule. The
        control group has compared the step's rollouts.

        policy: the metrics of the corrected batch.
        """
        mismatch = self._settings.config.mismatch
        estimators = {each.estimator for each in steps if each.counts.measured}
        assert len(estimators) <= 1, f"engines measured by {estimators}, which makes no common tail"
        tail = merged(each.state for each in steps)
        self._take_ceiling(number, [each.ceiling for each in steps if each.ceiling is not None])
        report = policy | step_report(tail, mismatch.least_tokens, *estimators) | self.reported_ceiling
        report |= rescoring_report(steps) | ran_report(steps) | checked_report(steps, self.schedule)
        report |= self._control_report(number, steps)
        nothing = TailStatistics(bin_tokens=mismatch.bin_tokens)
        pairs = None if self.control_group is None else self.control_group.pairs()
        dense = self.schedule is None
        evidence = StepEvidence(number, self.schedule, dense, tail or nothing, dict(report), pairs=pairs)
        watched = WatchedStep(report, self._say_blind(report, measured=dense or tail is not None))
        for watcher in self.watchers:
            sees = watcher.name == "empty_steps" or (watcher.name == "guard" and pairs is not None)
            if tail is None and not sees:
                # Nothing was measured, so there is nothing to decide by.
                continue
            decision = watcher.watch(evidence)
            watched.report |= decision.report
            said = [self._settings.in_their_words(line) for line in decision.events]
            watched.events += said
            if decision.action == "stop":
                self.stopped = "; ".join(filter(None, [self.stopped, *said]))
            elif decision.action == "switch":
                self.schedule = decision.schedule
        watched.stopped = self.stopped
        return watched

    def _say_blind(self, report: StepReport, measured: bool) -> list[str]:
        """Say, once in each window of steps in which nothing was measured, that the watchers of the tail decide nothing.
        measured: whether this step's tail was, or needed not to be, since its rollouts were dense."""
        self._unmeasured_steps = 0 if measured else self._unmeasured_steps + 1
        waiting = [each for each in self.watchers if isinstance(each, Controller) or _tests_tail(each)]
        window = min((each.window.steps for each in waiting), default=0)
        if measured or not window or self._unmeasured_steps % window:
            return []
        names = ("held", "aborted", "not_chosen", "weights_changed", "schedule_changed")
        held, aborted, not_chosen, *changed = (int(report[f"rescoring/{name}"]) for name in names)
        who = " and ".join(f"the {each.name}" for each in waiting)
        return [
            f"{who} had nothing to decide by in the last {self._unmeasured_steps} steps, because no rollout was measured: "
            f"of the {held} that ended in this one, {aborted} were aborted, {not_chosen} were not chosen, and around "
            f"{sum(changed)} the weights or the schedule changed"
        ]

    def _take_ceiling(self, number: int, states: list[State]) -> None:
        """The dense ceiling that came with a step: of the control group, pooled with that of steps before where it is
        small, or of dense rollouts that were sampled for it."""
        if not self.control_shows_ceiling:
            self.measured_ceiling(states, number - 1)
            return
        measured = merged(states)
        table = None if measured is None else self._group_ceiling.add(number, measured)
        if table is not None:
            self.ceiling = ceiling_report(table, number - 1)

    def _control_report(self, number: int, steps: Sequence[EngineStep]) -> StepReport:
        """What the engines decoded for the control group. Raises RuntimeError where it is less than its rollouts took,
        since the comparison would then be one of sparse rollouts with sparse ones."""
        if self.control_group is None:
            return {}
        assert self.control_group.step == number, "the control group was not begun with the step"
        ran = sum(each.ran.dense_request_steps for each in steps)
        more = sum(each.ran.resumed_tokens + each.ran.checks.extra_tokens for each in steps)
        needed = self.control_group.decode_steps()
        if ran + more < needed:
            raise RuntimeError(
                f"the engines decoded {ran} steps of dense requests, and the control group took {needed}: they did not "
                "know which requests are dense, and read a part of their context"
            )
        return self.control_group.report() | {"control/dense_steps": float(ran)}

    @property
    def _stateful(self) -> tuple[Stateful, ...]:
        return self.watchers if self._group is None else (*self.watchers, self._group_ceiling)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: plain data, and tensors under "watchers"."""
        return {
            "schedule": None if self.schedule is None else self.schedule.inline(),
            "ceiling": dict(self.ceiling),
            "stopped": self.stopped,
            "unmeasured_steps": self._unmeasured_steps,
            "watchers": states_of(self._stateful),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state()` returned. Raises UserError where the run has a control group, and the one
        that wrote the state had none."""
        if self._group is not None and self._group_ceiling.name not in state["watchers"]:
            raise UserError(
                "this run has a control group, and the checkpoint is of a run without one",
                "leave the control group out, or start a new run from the checkpoint's weights",
            )
        inline = state["schedule"]
        # It was checked, or forced, when the run began.
        self.schedule = None if inline is None else Schedule.load(inline, force=True)
        self.ceiling, self.stopped = dict(state["ceiling"]), str(state["stopped"])
        self._unmeasured_steps = int(state.get("unmeasured_steps", 0))
        restore_all(self._stateful, state["watchers"])


def _tests_tail(watcher: Watcher) -> TypeGuard[Guard]:
    return isinstance(watcher, Guard) and watcher.action != "off" and watcher.has_target
