"""Dense minus sparse, prompt by prompt: what each prompt with rollouts of both kinds says, and the mean difference with
an interval. Prompts differ far more than the two kinds of rollouts do, so only rollouts of the same prompt are compared.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparroll.control.gap_evidence import log_bets
from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import CONFIDENCE, LEAST_ROLLOUTS, ONE_ROLLOUT

REWARD = "reward"
UNITS = {REWARD: 1.0, "truncated": 1.0}
"""The difference between all and nothing, of figures that are shares."""


@dataclass(frozen=True)
class PairedPrompt:
    """What one prompt of one step says, which has rollouts of both kinds.

    >>> PairedPrompt(step=3, number=11, prompt="9f21c0de", differences={"reward": (0.875, 0.857)}, bets=(0.2, ...))
    """

    step: int
    number: int
    """The prompt's number within the step, over all processes."""
    prompt: str
    """Its name, which is the same whenever it comes again."""
    differences: dict[str, tuple[float, float]]
    """For each figure: (weight, mean of the dense rollouts minus mean of the sparse ones). Of d dense ones among n, the
    weight is d (n - d) / n, in which the variance of such a difference is the same for all prompts (Mantel and
    Haenszel)."""
    bets: tuple[float, ...]
    """gap_evidence.log_bets of its rewards."""

    def table(self) -> list[Any]:
        """Plain data for JSON; `from_table` gives the same prompt back."""
        return [self.step, self.number, self.prompt, {k: list(v) for k, v in self.differences.items()}, list(self.bets)]

    @staticmethod
    def from_table(table: Sequence[Any]) -> PairedPrompt:
        step, number, prompt, differences, bets = table
        return PairedPrompt(step, number, prompt, {k: (v[0], v[1]) for k, v in differences.items()}, tuple(bets))


@dataclass(frozen=True)
class Gap:
    """A figure's mean difference, dense minus sparse."""

    value: float
    low: float | None
    """Ends of the interval. None where all pairs are of one prompt, or of one that outweighs the others."""
    high: float | None
    pairs: int
    """Prompts of all steps, each counted as often as it came."""
    prompts: float
    """How many different prompts of equal weight would say as much: (sum of weights)^2 / sum of their squares."""

    @property
    def counts(self) -> bool:
        """Whether there are enough prompts for a decision."""
        return self.prompts >= LEAST_ROLLOUTS


def prompt_name(prompt_ids: Sequence[int]) -> str:
    """A short name that follows from the prompt's token ids."""
    return hashlib.blake2b(",".join(map(str, prompt_ids)).encode(), digest_size=8).hexdigest()


def paired_prompts(
    step: int, prompts: Mapping[int, str], dense: Sequence[bool], figures: Mapping[str, Sequence[float]]
) -> list[PairedPrompt]:
    """One step's prompts with rollouts of both kinds. Others say nothing here and are left out.

    prompts: their names by their numbers within the step.  dense: whether each rollout was chosen for the control group,
    prompt by prompt, in the order of `prompts`. It is the choice that counts, also where a sparse rollout was so short
    that it read all of its context.  figures: a value for each rollout. One is "reward", in which NaN is a rollout that
    could not be graded; it is left out there. Raises UserError for any other NaN, and for infinite values.
    """
    _check(prompts, dense, figures)
    samples = len(dense) // max(len(prompts), 1)
    found = []
    for place, (number, name) in enumerate(prompts.items()):
        own = slice(place * samples, (place + 1) * samples)
        kinds = {figure: _kinds(values[own], dense[own]) for figure, values in figures.items()}
        differences = {
            figure: (
                len(of_dense) * len(of_sparse) / (len(of_dense) + len(of_sparse)),
                _mean(of_dense) - _mean(of_sparse),
            )
            for figure, (of_dense, of_sparse) in kinds.items()
            if of_dense and of_sparse
        }
        if differences:
            of_dense, of_sparse = kinds[REWARD]
            bets = log_bets([*of_dense, *of_sparse], [True] * len(of_dense) + [False] * len(of_sparse))
            found.append(PairedPrompt(step, number, name, differences, bets))
    return found


def in_order(pairs: Iterable[PairedPrompt]) -> tuple[PairedPrompt, ...]:
    """The pairs of all processes, in the same order whichever process measured which."""
    ordered = sorted(pairs, key=lambda pair: (pair.step, pair.number))
    places = {(pair.step, pair.number) for pair in ordered}
    assert len(places) == len(ordered), "two processes measured the same prompt of a step, or numbered theirs alike"
    return tuple(ordered)


def pooled_gap(pairs: Iterable[PairedPrompt], figure: str, confidence: float = CONFIDENCE) -> Gap | None:
    """The weighted mean of a figure's differences; None where no pair has any.

    The interval is clustered by prompts: it counts all pairs of one prompt as a single observation, because what sparse
    decoding does to a prompt it does again. So it is the cluster-robust one of a weighted mean, with a factor
    n / (n - 1) and Student's t with n - 1 degrees of freedom, where n is Gap.prompts. For a share, half a pair whose
    difference is 1 is added to the variance, because a few pairs without any difference do not show that there is none.
    """
    of_prompt: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for pair in pairs:
        if figure in pair.differences:
            of_prompt[pair.prompt].append(pair.differences[figure])
    if not of_prompt:
        return None
    # math.fsum is exact, so no order of the pairs changes a bit.
    weights = {prompt: math.fsum(weight for weight, _ in own) for prompt, own in of_prompt.items()}
    total = math.fsum(weights.values())
    value = math.fsum(weight * difference for own in of_prompt.values() for weight, difference in own) / total
    prompts = total**2 / math.fsum(weight**2 for weight in weights.values())
    count = sum(map(len, of_prompt.values()))
    if prompts < ONE_ROLLOUT:
        return Gap(value, None, None, count, prompts)
    squares = [
        math.fsum(weight * (difference - value) for weight, difference in own) ** 2 for own in of_prompt.values()
    ]
    of_prompts = math.fsum(squares) / total**2 * prompts / (prompts - 1)
    variance = of_prompts + 0.5 * (UNITS.get(figure, 0.0) / prompts) ** 2
    reach = _student(prompts - 1, confidence) * math.sqrt(variance)
    return Gap(value, value - reach, value + reach, count, prompts)


def _student(freedom: float, confidence: float) -> float:
    from scipy import special

    return float(special.stdtrit(freedom, (1 + confidence) / 2))


def _kinds(values: Sequence[float], dense: Sequence[bool]) -> tuple[list[float], list[float]]:
    """-> (values of dense rollouts, those of sparse ones), without NaN."""
    known = [(float(value), kind) for value, kind in zip(values, dense, strict=True) if not math.isnan(value)]
    return [value for value, kind in known if kind], [value for value, kind in known if not kind]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _check(prompts: Mapping[int, str], dense: Sequence[bool], figures: Mapping[str, Sequence[float]]) -> None:
    if REWARD not in figures:
        raise UserError(f"a control group compares rewards, and the figures are {', '.join(figures) or 'none'}")
    if (prompts and len(dense) % len(prompts)) or (dense and not prompts):
        raise UserError(f"{len(dense)} rollouts of {len(prompts)} prompts: every prompt must have equally many")
    for figure, values in figures.items():
        if len(values) != len(dense):
            raise UserError(f"{figure} has {len(values)} values for {len(dense)} rollouts")
        wrong = [value for value in values if math.isinf(value) or (figure != REWARD and math.isnan(value))]
        if wrong:
            raise UserError(f"{figure} is {wrong[0]} for {len(wrong)} of {len(values)} rollouts; it must be a number")
