"""Some of a step's rollouts, read again under another schedule by the policy with the adapter, and compared with the dense
scores that the step has anyway. Measures; control/cheaper_schedules.py decides."""

from __future__ import annotations

from dataclasses import dataclass

from sparroll.engines.scoring import Scorer
from sparroll.mismatch import TailTable
from sparroll.schedule import Schedule
from sparroll.train.runtime.distributed import Ranks
from sparroll.train.tail_metrics import ESTIMATOR, measure_tail
from sparroll.types import Rollout, TokenScores


@dataclass(frozen=True)
class ScheduleReplay:
    scorer: Scorer
    """Of the policy with the adapter."""
    prompts: int
    """The step's first so many prompts are read again."""
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
        return measure_tail(mine, dense, self.bin_tokens, ranks, step).table(ESTIMATOR)
