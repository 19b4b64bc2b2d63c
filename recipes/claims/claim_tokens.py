"""How far tokens are from the dense policy, in every statistic that a claim is about, with intervals from a bootstrap over
prompts. Pure functions of per-token figures; nothing here runs a model."""

# N tokens of all rollouts, T tokens of one, R bootstrap replicates

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sparroll.mismatch import acceptance_of
from sparroll.mismatch.bootstrap import poisson_weights
from sparroll.types import Rollout, StepReport, TokenScores

NATS = (2, 5, 10, 20)
NEARLY_ONE = 0.999
REPLICATES = 200
LEAST_LOGP = -100.0
"""What a token has that the dense policy excludes, so that means stay finite."""


@dataclass(frozen=True)
class Tokens:
    """What is known of each sampled token."""

    acceptance_N: np.ndarray
    """In [0, 1], by the estimator top_k_lower."""
    nats_off_N: np.ndarray
    """log q - log p of the sampled token: how much likelier the sampler found it than the dense policy."""
    context_N: np.ndarray
    prompt_N: np.ndarray
    """Number of the prompt; tokens of one prompt are resampled together."""

    @staticmethod
    def of(rollouts: Sequence[Rollout], scores: Sequence[TokenScores]) -> Tokens:
        """scores: the dense policy's, with top-k lists, in the rollouts' order."""
        accepted = acceptance_of(rollouts, scores, "top_k_lower")
        off = [
            rollout.sparse_logp.double() - score.logp.double().clamp_min(LEAST_LOGP)
            for rollout, score in zip(rollouts, scores, strict=True)
        ]
        return Tokens(
            torch.cat(accepted).double().numpy(),
            torch.cat(off).numpy(),
            torch.cat([rollout.context_tokens for rollout in rollouts]).numpy(),
            np.concatenate([np.full(len(rollout.response_ids), rollout.prompt_index) for rollout in rollouts]),
        )

    def where(self, chosen_N: np.ndarray) -> Tokens:
        return Tokens(*(column[chosen_N] for column in vars(self).values()))

    def bins(self, bin_tokens: int) -> dict[int, Tokens]:
        """The tokens of each length bin, by the context length at which it starts."""
        start_N = self.context_N // bin_tokens * bin_tokens
        return {int(start): self.where(start_N == start) for start in np.unique(start_N)}


def statistics(tokens: Tokens) -> dict[str, float]:
    """Every statistic by name. `cvar` is the mean acceptance of the worst 1 or 5 %; `over_N_nats` the share of sampled
    tokens that the dense policy finds more than N nats less likely; `kl` the mean of log q - log p."""
    return _Sorted(tokens).statistics(np.ones(len(tokens.acceptance_N)))


def intervals(tokens: Tokens, seed: int = 0, replicates: int = REPLICATES) -> dict[str, list[float | None]]:
    """[value, low, high] of every statistic: 95 % over resampled prompts. With fewer than 8 prompts there are no ends."""
    ordered, found = _Sorted(tokens), statistics(tokens)
    drawn = replicate_statistics(ordered, seed, replicates)
    few = len(np.unique(tokens.prompt_N)) < 8
    made: dict[str, list[float | None]] = {}
    for name, value in found.items():
        low, high = np.quantile([each[name] for each in drawn], [0.025, 0.975])
        made[name] = [value, *((None, None) if few else (float(low), float(high)))]
    return made


def replicate_statistics(
    tokens: Tokens | _Sorted, seed: int = 0, replicates: int = REPLICATES
) -> list[dict[str, float]]:
    """The statistics of resampled prompts. A prompt's weights depend on the seed and its number alone, so two
    measurements of the same prompts are resampled alike and their differences are paired."""
    ordered = tokens if isinstance(tokens, _Sorted) else _Sorted(tokens)
    prompts, place_N = np.unique(ordered.tokens.prompt_N, return_inverse=True)
    weights_PR = np.stack([poisson_weights(seed, int(prompt), replicates).numpy() for prompt in prompts])
    drawn = []
    for weight_P in weights_PR.T:
        # A replicate without any token says nothing; one without this bin's prompts counts all of them once.
        weight_N = weight_P[place_N].astype(float)
        drawn.append(ordered.statistics(weight_N if weight_N.sum() else np.ones(len(weight_N))))
    return drawn


def paired_difference(one: Tokens, other: Tokens, name: str, seed: int = 0) -> list[float | None]:
    """[value, low, high] of other - one in a statistic, of the same prompts."""
    ends = (replicate_statistics(each, seed) for each in (one, other))
    drawn = [after[name] - before[name] for before, after in zip(*ends, strict=True)]
    value = statistics(other)[name] - statistics(one)[name]
    if len(np.unique(one.prompt_N)) < 8:
        return [value, None, None]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return [value, float(low), float(high)]


class _Sorted:
    """Tokens in rising order of their acceptance."""

    def __init__(self, tokens: Tokens):
        self.tokens = tokens.where(np.argsort(tokens.acceptance_N, kind="stable"))

    def statistics(self, weight_N: np.ndarray) -> dict[str, float]:
        """weight_N: how often each of these tokens counts, in the order in which `tokens` came."""
        value_N, off_N = self.tokens.acceptance_N, self.tokens.nats_off_N
        upto_N, total = np.cumsum(weight_N), float(weight_N.sum())
        mean = float(weight_N @ value_N) / total
        spread = float(weight_N @ (value_N - mean) ** 2) / total
        third = float(weight_N @ (value_N - mean) ** 3) / total
        found = {"mean": mean}
        for level in (0.01, 0.05, 0.1):
            place = int(np.searchsorted(upto_N, level * total))
            found[f"q{100 * level:02.0f}"] = float(value_N[min(place, len(value_N) - 1)])
        for level in (0.01, 0.05):
            part_N = np.diff(np.minimum(upto_N, level * total), prepend=0.0)
            found[f"cvar{100 * level:02.0f}"] = float(part_N @ value_N) / (level * total)
        found |= {f"over_{nats}_nats": float(weight_N @ (off_N > nats)) / total for nats in NATS}
        found["kl"] = float(weight_N @ off_N) / total
        found["nearly_one_share"] = float(weight_N @ (value_N >= NEARLY_ONE)) / total
        found["skew"] = third / spread**1.5 if spread > 1e-12 else 0.0
        return found


def step_statistics(rollouts: list[Rollout], scores: list[TokenScores]) -> StepReport:
    """For `train(also_measure=...)`: the statistics of a step, as metrics claims/NAME."""
    return {f"claims/{name}": value for name, value in statistics(Tokens.of(rollouts, scores)).items()}
