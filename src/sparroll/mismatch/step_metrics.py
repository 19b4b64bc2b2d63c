"""A training step's metrics of how far its rollouts are from the dense policy, by the names that every trainer logs them
under (docs/metrics.md). The acceptance's estimator is `top_k_lower`, but "exact" where drafts were checked."""

# N response tokens of all rollouts of the step

from __future__ import annotations

import torch
from torch import Tensor

from sparroll.mismatch.table import TailTable
from sparroll.types import StepReport

ESTIMATOR = "top_k_lower"
LEAST_TOKENS_OF_A_BIN = 1000
"""A bin with fewer tokens has no share of impossible tokens in the metrics: it could not see one in a thousand."""


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
    more = {"cvar01": overall.cvar01, "cvar05": overall.cvar05}
    report |= {f"mismatch/acceptance_{name}": value for name, value in more.items() if value is not None}
    report |= {f"mismatch/acceptance_q05/{row.name}": row.q05 for row in table.rows}
    report |= {f"mismatch/tokens/{row.name}": float(row.tokens) for row in table.rows}
    counted = [row.q05 for row in table.rows if row.counts(least_tokens)]
    if counted:
        report["mismatch/acceptance_q05_worst_bin"] = min(counted)
    return report | _impossible_report(table)


def _impossible_report(table: TailTable) -> StepReport:
    """The share of impossible tokens at each distance with its interval; of a bin only where the bin has tokens enough
    to see one in a thousand."""
    report: StepReport = {}
    for share in table.overall.impossible:
        name = f"mismatch/impossible_share_{share.nats}"
        report |= {name: share.value, f"{name}_low": share.low, f"{name}_high": share.high}
    for row in table.rows:
        for share in row.impossible if row.counts(LEAST_TOKENS_OF_A_BIN) else ():
            report[f"mismatch/impossible_share_{share.nats}/{row.name}"] = share.value
    return report


def ceiling_report(table: TailTable, step: int) -> StepReport:
    """Metrics of dense rollouts, named dense_ceiling, with the step whose weights they were measured with."""
    report = {
        "mismatch/dense_ceiling_mean": table.overall.mean,
        "mismatch/dense_ceiling_q05": table.overall.q05,
        "mismatch/dense_ceiling_step": float(step),
    }
    report |= {
        f"mismatch/dense_ceiling_impossible_share_{share.nats}": share.value for share in table.overall.impossible
    }
    return report | {f"mismatch/dense_ceiling_q05/{row.name}": row.q05 for row in table.rows}


def distance_report(dense_logp_N: Tensor, sparse_logp_N: Tensor) -> StepReport:
    """Mean log p_sparse - log p_dense of the sampled tokens. Tokens that the dense policy gives probability 0 are left
    out, and there is no metric where no other is left."""
    difference_N = sparse_logp_N - dense_logp_N
    finite = difference_N[torch.isfinite(difference_N)]
    return {"mismatch/kl_sparse_to_dense": float(finite.mean())} if len(finite) else {}
