"""Measures how far this step's rollouts are from the dense policy, over all processes. The estimator is `top_k_lower`,
but for rollouts whose drafts were checked: the checks have seen both whole distributions, so their acceptance is exact.
The names of the metrics are in mismatch/step_metrics.py, and the definitions in mismatch/."""

from __future__ import annotations

from sparroll.mismatch import TailStatistics, acceptance_of
from sparroll.mismatch.step_metrics import ESTIMATOR
from sparroll.train.runtime.distributed import Ranks
from sparroll.types import Rollout, TokenScores


def measure_tail(
    rollouts: list[Rollout], scores: list[TokenScores], bin_tokens: int, ranks: Ranks, step: int
) -> TailStatistics:
    """Tail statistics of the rollouts of all processes. Rollout ids include the step, so statistics of several steps
    can be merged. Where the scores are those of the engine's checks, the acceptance is theirs, too."""
    statistics = TailStatistics(bin_tokens=bin_tokens)
    seen = [each.acceptance for each, score in zip(rollouts, scores, strict=True) if each.dense is score]
    found = [each for each in seen if each is not None]
    if len(found) < len(rollouts):
        found = acceptance_of(rollouts, scores, ESTIMATOR)
    for rollout, acceptance_T in zip(rollouts, found, strict=True):
        statistics.add(acceptance_T, rollout.context_tokens, f"{step}/{rollout.prompt_index}#{rollout.sample_index}")
    if ranks.count > 1:
        states = ranks.gather([statistics.packed_state()])
        statistics = TailStatistics.from_state(states[0])
        for state in states[1:]:
            statistics.merge(TailStatistics.from_state(state))
    return statistics
