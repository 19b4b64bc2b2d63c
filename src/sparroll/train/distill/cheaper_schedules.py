"""Whether the adapter has become good enough for the next cheaper schedule: some of a step's rollouts are read again under
it, and compared with the dense scores that the step has anyway. Decides; the loop switches."""

from __future__ import annotations

from typing import Any

from sparroll.control.guard import Verdict
from sparroll.engines.scoring import Scorer
from sparroll.mismatch import TailTable
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.rounding import rounded_down
from sparroll.schedule import Schedule
from sparroll.train.config.sections import DistillSection
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.tail_metrics import ESTIMATOR, measure_tail
from sparroll.types import Rollout, StepReport, TokenScores


class Cheaper:
    """The schedules still to come, and how often in a row the next one has held the target."""

    def __init__(
        self, schedules: list[Schedule], at_least: float, settings: DistillSection, scorer: Scorer | None = None
    ):
        self.schedules, self.at_least, self.settings = schedules, at_least, settings
        self.scorer = scorer
        """Of the policy with the adapter."""
        self.held = 0
        """Measurements in a row in which the next schedule held the target."""
        self.switches = 0

    @property
    def following(self) -> Schedule | None:
        """The next cheaper schedule; None after the last one."""
        return self.schedules[self.switches] if self.switches < len(self.schedules) else None

    def due(self, step: int) -> bool:
        return self.following is not None and step % self.settings.cheaper_every_steps == 0

    def measure(
        self,
        rollouts: list[Rollout],
        dense: list[TokenScores],
        temperature: float,
        bin_tokens: int,
        ranks: Ranks,
        step: int,
    ) -> TailTable:
        """The tail of the adapted policy under the next schedule, on the rollouts of the step's first prompts."""
        assert self.scorer is not None, "nothing to measure with"
        assert self.following is not None, "there is no cheaper schedule left"
        first = [place for place, r in enumerate(rollouts) if r.prompt_index < self.settings.cheaper_prompts]
        mine, dense = [rollouts[place] for place in first], [dense[place] for place in first]
        if mine:
            top_k = max(rollout.top_k.k for rollout in mine if rollout.top_k is not None)
            read = self.scorer.sparse(mine, self.following, temperature=temperature, top_k=top_k)
            mine = [rollout.read_by(score) for rollout, score in zip(mine, read, strict=True)]
        return measure_tail(mine, dense, bin_tokens, ranks, step).table(ESTIMATOR)

    def watch(self, table: TailTable, least_tokens: int, schedule: Schedule) -> tuple[Verdict, StepReport]:
        """One measurement. Bins with fewer than `least_tokens` tokens or LEAST_ROLLOUTS rollouts do not count; without any
        other, it neither holds the target nor breaks the row. -> (what to do, metrics)"""
        assert self.following is not None, "there is no cheaper schedule left"
        counted = [row for row in table.rows if row.tokens >= least_tokens and row.rollouts >= LEAST_ROLLOUTS]
        if not counted:
            return Verdict(), {}
        low = min(row.low for row in counted)
        report = {"distill/cheaper_q05_low": low, "distill/cheaper_q05": min(row.q05 for row in counted)}
        self.held = self.held + 1 if low >= self.at_least else 0
        report["distill/cheaper_held"] = float(self.held)
        if self.held < self.settings.cheaper_patience:
            return Verdict(), report
        reason = (
            f"with the adapter, the tail under {self.following.name} (worst bin, lower bound) is {rounded_down(low)}, at "
            f"least {self.at_least:.3f} in {self.held} measurements: {schedule.name} -> {self.following.name}"
        )
        verdict = Verdict("switch", reason, self.following)
        self.held, self.switches = 0, self.switches + 1
        return verdict, report

    def state(self) -> dict[str, Any]:
        return {"held": self.held, "switches": self.switches}

    def restore(self, state: dict[str, Any]) -> None:
        self.held, self.switches = int(state["held"]), int(state["switches"])
