"""Rollouts that are some steps old, as those of an asynchronous trainer are: the weights of the last steps, which the
engine samples from, and how far apart the sparse, the dense and the newest policy are. Updates nothing."""

# T response tokens of one rollout, N tokens of the whole step

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparroll.engines.scoring import Scorer
from sparroll.mismatch import acceptance_of
from sparroll.mismatch.step_metrics import ESTIMATOR
from sparroll.train.runtime.distributed import Ranks
from sparroll.types import Rollout, StepReport, TokenScores

Weights = dict[str, Tensor]
DenseOf = Literal["now", "sampler"]
Score = Callable[[list[Rollout], Scorer], list[TokenScores]]
"""Dense scores of rollouts under the model of a scorer."""


class PastWeights:
    """The weights of the newest `steps` + 1 versions of a policy, and a second model that holds the oldest of them.

    The first version is the one that the policy has now; until there are enough, the oldest is the first.
    """

    def __init__(self, policy: PreTrainedModel, steps: int, batch_tokens: int = 16_384):
        self.policy, self.steps = policy, steps
        self._model = copy.deepcopy(policy)
        self._model.requires_grad_(False)
        self.scorer = Scorer(self._model, batch_tokens=batch_tokens)
        """Scores with the oldest version, which samples."""
        self._versions: list[Weights] = [self._copy()]

    @property
    def behind(self) -> int:
        """How many steps the version that samples is older than the policy."""
        return len(self._versions) - 1

    def keep(self) -> None:
        """Take in the policy as a further version, after an update."""
        self._versions = [*self._versions, self._copy()][-self.steps - 1 :]
        self._load()

    def merged(self, dtype: torch.dtype | None = None) -> Weights:
        """The state_dict of the version that samples, for an engine."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}

    def scores(
        self, rollouts: list[Rollout], now: list[TokenScores], dense_of: DenseOf, score: Score, ranks: Ranks
    ) -> tuple[list[TokenScores], StepReport]:
        """The dense scores that a step goes on with, those of the policy (`now`) or of the weights that sampled, as
        `dense_of` says; and how far apart sparsity and staleness are."""
        sampler = score(rollouts, self.scorer)
        report = staleness_report(rollouts, sampler, now, self.behind, ranks)
        return (sampler if dense_of == "sampler" else now), report

    def state(self) -> list[Weights]:
        """The versions before the present one, oldest first, for a checkpoint."""
        return self._versions[:-1]

    def restore(self, before: Sequence[Weights]) -> None:
        """Bring back what `state` gave; the policy itself has been loaded already."""
        self._versions = [*before, self._copy()]
        self._load()

    def _copy(self) -> Weights:
        return {name: each.detach().to("cpu", copy=True) for name, each in self.policy.named_parameters()}

    @torch.no_grad()
    def _load(self) -> None:
        for name, each in self._model.named_parameters():
            each.copy_(self._versions[0][name])


def staleness_report(
    rollouts: list[Rollout], sampler: list[TokenScores], now: list[TokenScores], behind: int, ranks: Ranks
) -> StepReport:
    """How far apart three policies are on the step's tokens: sparse, which sampled them; dense, the same weights with full
    attention (`sampler`); and the policy before its update (`now`). The mismatch of sparse and dense is sparsity alone,
    that of dense and now staleness alone, that of sparse and now both.

    Of each pair: the mean and the 5th percentile of the acceptance, and the mean difference of log-probabilities of the
    sampled tokens, where probabilities of 0 are left out.
    """
    dense = [rollout.read_by(scores) for rollout, scores in zip(rollouts, sampler, strict=True)]
    report: StepReport = {"staleness/steps_behind": float(behind)}
    for name, read, scores in (
        ("sparse_to_dense", rollouts, sampler),
        ("dense_to_now", dense, now),
        ("sparse_to_now", rollouts, now),
    ):
        accepted = torch.cat(acceptance_of(read, scores, ESTIMATOR)) if read else torch.zeros(0)
        off = [each.sparse_logp - score.logp for each, score in zip(read, scores, strict=True)]
        everyone = ranks.gather([(accepted.numpy(), torch.cat(off).numpy() if off else np.zeros(0))])
        accepted_N, off_N = (np.concatenate([one[column] for one in everyone]) for column in (0, 1))
        known_N = off_N[np.isfinite(off_N)]
        report |= {
            f"staleness/acceptance_mean_{name}": float(accepted_N.mean()),
            f"staleness/acceptance_q05_{name}": float(np.quantile(accepted_N, 0.05)),
            f"staleness/kl_{name}": float(known_N.mean()) if len(known_N) else 0.0,
        }
    return report
