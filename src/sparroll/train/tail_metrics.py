"""Measures how far this step's rollouts are from the dense policy, over all processes. The estimator is `top_k_lower`,
but for rollouts whose drafts were checked: the checks have seen both whole distributions, so their acceptance is exact.
The names of the metrics are in mismatch/step_metrics.py, and the definitions in mismatch/."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparroll.control.tail_window import TailWindow
from sparroll.mismatch import TailStatistics, TailTable, acceptance_of
from sparroll.mismatch.bootstrap import LEAST_ROLLOUTS
from sparroll.mismatch.of_rollouts import off_nats_of
from sparroll.mismatch.step_metrics import ESTIMATOR
from sparroll.train.runtime.distributed import Ranks
from sparroll.types import Rollout, TokenScores


def measure_tail(
    rollouts: list[Rollout],
    scores: list[TokenScores],
    bin_tokens: int,
    ranks: Ranks,
    step: int,
    *,
    sampled_them: bool = True,
) -> TailStatistics:
    """Tail statistics of the rollouts of all processes. Rollout ids include the step, so statistics of several steps
    can be merged. Where the scores are those of the engine's checks, the acceptance is theirs, too.

    sampled_them: whether the policy with the rollouts' log-probabilities sampled them. In a replay it did not, and no
    impossible tokens are counted.
    """
    statistics = TailStatistics(bin_tokens=bin_tokens)
    seen = [each.acceptance for each, score in zip(rollouts, scores, strict=True) if each.dense is score]
    found = [each for each in seen if each is not None]
    if len(found) < len(rollouts):
        found = acceptance_of(rollouts, scores, ESTIMATOR)
    for rollout, score, acceptance_T in zip(rollouts, scores, found, strict=True):
        name = f"{step}/{rollout.prompt_index}#{rollout.sample_index}"
        off_T = off_nats_of(rollout, score) if sampled_them else None
        statistics.add(acceptance_T, rollout.context_tokens, name, off_T)
    if ranks.count > 1:
        states = ranks.gather([statistics.packed_state()])
        statistics = TailStatistics.from_state(states[0])
        for state in states[1:]:
            statistics.merge(TailStatistics.from_state(state))
    return statistics


def where(
    rollouts: Sequence[Rollout], scores: Sequence[TokenScores], chosen: Sequence[bool]
) -> tuple[list[Rollout], list[TokenScores]]:
    """Those of the rollouts that are chosen, with their scores."""
    rows = [row for row, one in enumerate(chosen) if one]
    return [rollouts[row] for row in rows], [scores[row] for row in rows]


class ControlCeiling:
    """The dense ceiling as the control group shows it. A step has few dense rollouts, so the newest steps are pooled,
    as few as have `least_rollouts` together."""

    name = "dense_ceiling"
    MOST_STEPS = 50

    def __init__(self, least_rollouts: int):
        self.least_rollouts = max(least_rollouts, LEAST_ROLLOUTS)
        self.window = TailWindow(self.MOST_STEPS)

    def add(self, step: int, dense: TailStatistics) -> TailTable | None:
        """Take in the control group's tail of a step. -> the ceiling now; None where the step says nothing new, because
        none of the rollouts that it trains on is of the control group"""
        if not dense.tokens:
            return None
        self.window.add(step, dense)
        pooled, used = TailStatistics(dense.bin_tokens), 0
        for _, packed in reversed(self.window.evidence):
            pooled.merge(TailStatistics.from_state(packed))
            used += 1
            if pooled.rollouts >= self.least_rollouts:
                break
        self.window.evidence = self.window.evidence[-used:]
        return pooled.table(ESTIMATOR)

    def state(self) -> dict[str, Any]:
        return self.window.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.window.restore(state)
