"""Measures the tail under another schedule: the policy with the adapter reads some of a step's rollouts again, and they
are compared with the dense scores that the step has anyway. control/cheaper_schedules.py decides by the result."""

from __future__ import annotations

from dataclasses import dataclass

from sparroll.engines.scoring import Scorer
from sparroll.mismatch import TailTable
from sparroll.mismatch.step_metrics import ESTIMATOR
from sparroll.schedule import Schedule
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.tail_metrics import measure_tail
from sparroll.types import Rollout, TokenScores


@dataclass(frozen=True)
class ScheduleReplay:
    scorer: Scorer
    """Scores with the policy that has the adapter."""
    prompts: int
    """How many of the step's prompts, from the first on, have their rollouts read again."""
    temperature: float
    bin_tokens: int

    def measure(
        self, schedule: Schedule, rollouts: list[Rollout], dense: list[TokenScores], ranks: Ranks, step: int
    ) -> TailTable:
        """The tail of the adapted policy under `schedule`, over all processes."""
        first = [place for place, rollout in enumerate(rollouts) if rollout.prompt_index < self.prompts]
        mine, dense = [rollouts[place] for place in first], [dense[place] for place in first]
        if mine:
            top_k = max(rollout.top_k.k for rollout in mine if rollout.top_k is not None)
            read = self.scorer.sparse(mine, schedule, temperature=self.temperature, top_k=top_k)
            mine = [rollout.read_by(score) for rollout, score in zip(mine, read, strict=True)]
        return measure_tail(mine, dense, self.bin_tokens, ranks, step, sampled_them=False).table(ESTIMATOR)
