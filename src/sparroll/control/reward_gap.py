"""What the control group shows: do sparse rollouts get the reward that dense ones would, now, on these prompts? Raises an
alarm where they surely do not. It is the guard's second question (guard.py), beside the tail.

Differences are pooled over the last `window_steps` steps under one schedule (a controller moves its schedule all the
time; that counts as one). There is an alarm where all of this is true:
  - it surely makes a difference how rollouts are decoded (gap_evidence.py): where it makes none, at most 1 % of runs of
    1,000 steps ever get there;
  - the 95 % interval of the reward gap lies beyond the tolerated gap. A gap that is smaller, however sure, is no alarm;
  - the interval of SURE_CONFIDENCE lies above 0. It counts how much the gap differs between prompts, so prompts that
    gain what others lose raise no alarm either.
The intervals are those of the window, or both those of its steps since the evidence has been under way, which show a
gap that began late sooner.
benchmarks/control_group_simulation.py simulates how many runs have a false alarm, and how fast a gap is found.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparroll.control.control_group import ControlGroupSettings
from sparroll.control.gap_evidence import GapEvidence
from sparroll.control.paired_prompts import REWARD, Gap, PairedPrompt, in_order, pooled_gap
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.rounding import rounded_up
from sparroll.types import StepReport

SURE_CONFIDENCE = 0.9998
"""Chosen so that hardly one run in a thousand has an alarm where sparse decoding solves half of 64 prompts .2 more often
and the other half .2 less, while a gap of .1 is found nearly as soon as with any lower confidence."""


class RewardGap:
    """Holds the window's pairs and the evidence for a gap. Shown each step once, in order."""

    def __init__(self, settings: ControlGroupSettings):
        self.settings = settings
        self.evidence = GapEvidence()
        self.pairs: tuple[PairedPrompt, ...] = ()
        """Those of the window, oldest first. It is never changed in place, so a reference to it stays valid."""
        self.schedule: str | None = None
        """Name of the schedule that they were sampled under."""
        self.since_step = 0
        """Step after which this schedule came into force."""
        self.closer_since: int | None = 0
        """Step after which the evidence has been under way to an alarm; None: it is not."""

    def share(self, step: int) -> float:
        """The share of dense rollouts in a step that is about to be sampled."""
        settings = self.settings
        if settings.share == 0:
            return 0.0
        first = step - self.since_step <= settings.first_steps
        unsettled = self.evidence.is_under_way and not self.evidence.is_sure
        return settings.share_first if first or unsettled else settings.share

    def observe(
        self, step: int, schedule: str | None, pairs: Iterable[PairedPrompt], alarms: bool = True
    ) -> tuple[StepReport, str]:
        """Take in a finished step. -> (figures for the step's metrics, why there is an alarm; empty: there is none)

        schedule: name of the schedule that the step's sparse rollouts were sampled under.  pairs: those of all
        processes.  alarms: whether anybody listens. After an alarm window and evidence start anew.
        """
        new = in_order(pairs)
        assert all(pair.step == step for pair in new), f"pairs of other steps than {step}"
        report: StepReport = {"control/share": self.share(step)}
        if schedule != self.schedule:
            if self.schedule is not None:
                self.start_anew(step - 1)
            self.schedule = schedule
        self.pairs = (*(pair for pair in self.pairs if pair.step > step - self.settings.window_steps), *new)
        self.evidence.add(pair.bets for pair in new)
        if not self.evidence.is_under_way:
            self.closer_since = None
        elif self.closer_since is None:
            self.closer_since = step
        report |= _step_report(new) | self._window_report()
        reason = self._alarm(step) if alarms else ""
        if reason:
            # The schedule is still the same one, so its first steps do not begin again. Where the guard answers with
            # another schedule, it does that.
            self.start_anew(self.since_step)
        return report, reason

    def why_no_alarm(self, step: int) -> str:
        """Once in a window: that there would be an alarm if the prompts were more. Empty where that is not so."""
        if self.settings.reward_gap is None or not self.evidence.is_sure or step % self.settings.window_steps:
            return ""
        gap = pooled_gap(self.pairs, REWARD)
        if gap is None or gap.counts:
            return ""
        return (
            f"it surely makes a difference to the reward how rollouts are decoded, and no alarm can be raised: the window's "
            f"comparisons are worth those of {gap.prompts:.1f} different prompts, and {LEAST_ROLLOUTS} are needed; train on "
            "more prompts, or look at control/reward_gap yourself"
        )

    def start_anew(self, since_step: int) -> None:
        """Forget the window and the evidence. since_step: the step after which the schedule in force came."""
        self.pairs, self.since_step, self.closer_since = (), since_step, None
        self.evidence.clear()

    def _window_report(self) -> StepReport:
        report: StepReport = {
            "control/reward_gap_evidence": self.evidence.share,
            "control/pairs": float(len(self.pairs)),
        }
        for figure in _figures(self.pairs):
            gap = pooled_gap(self.pairs, figure)
            if gap is None:
                continue
            report[f"control/{figure}_gap"] = gap.value
            if gap.low is not None and gap.high is not None:
                report |= {f"control/{figure}_gap_low": gap.low, f"control/{figure}_gap_high": gap.high}
        return report

    def _alarm(self, step: int) -> str:
        tolerated = self.settings.reward_gap
        if tolerated is None or not self.evidence.is_sure:
            return ""
        assert self.closer_since is not None, "evidence that is sure is under way"
        since = self.closer_since
        for pairs in (self.pairs, tuple(pair for pair in self.pairs if pair.step > since)):
            gap, sure = pooled_gap(pairs, REWARD), pooled_gap(pairs, REWARD, SURE_CONFIDENCE)
            if gap is None or sure is None or not gap.counts or gap.low is None or sure.low is None:
                continue
            if gap.low > tolerated and sure.low > 0:
                return (
                    f"sparse rollouts get less reward than dense ones of the same prompts: by {_words(gap)}, surely and "
                    f"by more than the tolerated {tolerated:g} ({gap.pairs} comparisons within a prompt in steps "
                    f"{pairs[0].step} to {step})"
                )
        return ""

    def state(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "pairs": [pair.table() for pair in self.pairs],
            "logs": list(self.evidence.logs),
            "schedule": self.schedule,
            "since_step": self.since_step,
            "closer_since": self.closer_since,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.pairs = tuple(PairedPrompt.from_table(each) for each in state["pairs"])
        self.evidence.logs = [float(each) for each in state["logs"]]
        self.schedule, self.since_step = state["schedule"], state["since_step"]
        self.closer_since = state["closer_since"]


def _step_report(pairs: tuple[PairedPrompt, ...]) -> StepReport:
    """The step's own differences, which are far noisier than the window's."""
    gaps = {figure: pooled_gap(pairs, figure) for figure in _figures(pairs)}
    return {f"control/step_{figure}_gap": gap.value for figure, gap in gaps.items() if gap is not None}


def _figures(pairs: Iterable[PairedPrompt]) -> list[str]:
    """Names of all figures that were measured, each once."""
    return list(dict.fromkeys(figure for pair in pairs for figure in pair.differences))


def _words(gap: Gap) -> str:
    return f"{rounded_up(gap.value)} (95 % interval {rounded_up(gap.low)} to {rounded_up(gap.high)})"
