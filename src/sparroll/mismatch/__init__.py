"""How far the sparse policy is from the dense one: per token (acceptance.py), for whole rollouts (of_rollouts.py), as
the lower tail by context length with intervals (tail.py, which uses histogram.py and bootstrap.py; table.py prints it),
and as a Beta fit (beta.py); and how many sampled tokens the dense policy would practically never have said (impossible.py,
rare_share.py). step_metrics.py names the figures that a trainer logs, and threads.py keeps the small tensors of all this
on one thread.

Nothing here runs a model, knows an engine or picks a budget.
"""

from sparroll.mismatch.acceptance import ESTIMATORS, acceptance, acceptance_sampled, acceptance_top_k
from sparroll.mismatch.beta import BetaFit, fit_beta
from sparroll.mismatch.impossible import ImpossibleShare, ImpossibleTokens
from sparroll.mismatch.of_rollouts import acceptance_of
from sparroll.mismatch.table import TailRow, TailTable, bin_name
from sparroll.mismatch.tail import TailStatistics, tail

__all__ = [
    "ESTIMATORS",
    "BetaFit",
    "ImpossibleShare",
    "ImpossibleTokens",
    "TailRow",
    "TailStatistics",
    "TailTable",
    "acceptance",
    "acceptance_of",
    "acceptance_sampled",
    "acceptance_top_k",
    "bin_name",
    "fit_beta",
    "tail",
]
