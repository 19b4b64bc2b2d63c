"""What the loss and the measurements need of a step's tokens beside the rollouts themselves: the log-probabilities of the
dense policy, of the initial model, and of the sparse policy where the engine did not give them. Updates nothing."""

# B rollouts, T response tokens, K entries of a list

from __future__ import annotations

from torch import Tensor

from sparroll.engines.scoring import Scorer
from sparroll.schedule import Schedule
from sparroll.train.setup import Parts
from sparroll.train.step_correction import engine_lists
from sparroll.train.update.gradient_step import autocast
from sparroll.types import Rollout, TokenScores, padded


class StepScores:
    """Scores the rollouts of one step after the other."""

    def __init__(self, parts: Parts):
        self.parts = parts

    @property
    def trusts_checks(self) -> bool:
        """Whether dense log-probabilities are those of the engine's checks, where there are any."""
        check = self.parts.config.check
        return check is None or check.dense_logp == "engine"

    @property
    def checks_say_it_all(self) -> bool:
        """Whether the checks of the schedule in force give a step's dense log-probabilities and acceptance."""
        schedule = self.parts.engine.schedule
        return self.trusts_checks and schedule is not None and schedule.check is not None

    def dense(self, rollouts: list[Rollout], scorer: Scorer | None = None) -> list[TokenScores]:
        """Dense log-probabilities, which the loss needs, and top-k lists, which the acceptance needs, in one pass; or what
        the engine's checks of its drafts have seen, which needs no lists for the acceptance. Where the correction
        compares both policies' lists, the dense log-probabilities of the engine's list come with them. scorer: other than
        that of the policy."""
        if not rollouts:
            return []
        seen = [rollout.dense for rollout in rollouts if rollout.dense is not None]
        if len(seen) == len(rollouts) and self.trusts_checks:
            return seen
        sampling = self.parts.sampling
        with autocast(self.parts.config.train.dtype, self.parts.ranks.device):
            return (scorer or self.parts.scorer).dense(
                rollouts,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                at_ids=engine_lists(rollouts) if "top_k" in self.parts.correction.needs else None,
            )

    def union(
        self, rollouts: list[Rollout], scores: list[TokenScores], schedule: Schedule | None
    ) -> list[Tensor] | None:
        """[T, K] of each rollout: the sparse policy's log-probabilities of the dense list; None unless
        `train.whole_union` asks for them. They are the scorer's, in the trainer's precision."""
        if not self.parts.config.train.whole_union or not rollouts:
            return None
        lists = [score.top_k for score in scores if score.top_k is not None]
        if schedule is None:
            return [each.logp for each in lists]
        with autocast(self.parts.config.train.dtype, self.parts.ranks.device):
            temperature, ids = self.parts.sampling.temperature, [each.ids for each in lists]
            read = self.parts.scorer.sparse(rollouts, schedule, temperature=temperature, at_ids=ids)
        return [each.logp_at_ids for each in read if each.logp_at_ids is not None]

    def reference(self, rollouts: list[Rollout]) -> Tensor | None:
        """[B, T] log-probabilities under the model that the run began with; None where the loss has no KL term."""
        if self.parts.reference is None or not rollouts:
            return None
        with autocast(self.parts.config.train.dtype, self.parts.ranks.device):
            scores = self.parts.reference.dense(rollouts, temperature=self.parts.sampling.temperature)
        return padded([score.logp for score in scores])
