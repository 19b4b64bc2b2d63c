"""Metrics of how far this step's rollouts are from the dense policy: the acceptance, its tail per bin, and the dense
ceiling. All use the estimator `top_k_lower`, but for rollouts whose drafts were checked: the checks have seen both whole
distributions, so their acceptance is exact. The definitions are in mismatch/."""

from __future__ import annotations

from sparroll.mismatch import TailStatistics, TailTable, acceptance_of
from sparroll.train.runtime.distributed import Ranks
from sparroll.types import Rollout, StepReport, TokenScores

ESTIMATOR = "top_k_lower"


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
        states = ranks.gather([statistics.state()])
        statistics = TailStatistics.from_state(states[0])
        for state in states[1:]:
            statistics.merge(TailStatistics.from_state(state))
    return statistics


def tail_report(table: TailTable, least_tokens: int) -> StepReport:
    """Metrics of the sparse rollouts. Only bins with enough tokens and rollouts can be the worst bin."""
    overall = table.overall
    report = {
        "mismatch/acceptance_mean": overall.mean,
        "mismatch/acceptance_q01": overall.q01,
        "mismatch/acceptance_q05": overall.q05,
        "mismatch/acceptance_q05_low": overall.low,
        "mismatch/acceptance_q05_high": overall.high,
        "mismatch/acceptance_q10": overall.q10,
        "mismatch/acceptance_share_above_999": overall.share_above_999,
    }
    report |= {f"mismatch/acceptance_q05/{row.name}": row.q05 for row in table.rows}
    report |= {f"mismatch/tokens/{row.name}": float(row.tokens) for row in table.rows}
    counted = [row.q05 for row in table.rows if row.counts(least_tokens)]
    if counted:
        report["mismatch/acceptance_q05_worst_bin"] = min(counted)
    return report


def ceiling_report(table: TailTable, step: int) -> StepReport:
    """Metrics of dense rollouts, named dense_ceiling, with the step whose weights they were measured with."""
    report = {
        "mismatch/dense_ceiling_mean": table.overall.mean,
        "mismatch/dense_ceiling_q05": table.overall.q05,
        "mismatch/dense_ceiling_step": float(step),
    }
    return report | {f"mismatch/dense_ceiling_q05/{row.name}": row.q05 for row in table.rows}
