"""What each correction does to the expected gradient, exactly: all responses of a tiny problem are enumerated, through the
real corrections and the real loss on one side and through plain Python on the other."""

from __future__ import annotations

import itertools
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sparroll.corrections import Correction, TopKLists, correction, names
from sparroll.train.update.loss import LossSettings, policy_loss
from sparroll.types import TopK

from .enumerated import (
    RULES,
    Gradient,
    Prefix,
    Problem,
    accepted,
    distance,
    draws,
    flat,
    jackpot,
    on_policy,
    relative_bias,
)

NOISES = (0.05, 0.2, 0.7)
WHOLE_BATCH = {"sparse_rl_released", "jackpot"}
"""Normalised over the call: these have no expectation of one response."""
PAGE = Path(__file__).parents[3] / "docs" / "corrections.md"


def made(name: str) -> Correction:
    word, _, level = name.partition(" ")
    return correction(word, level=level) if level else correction(word)


@cache
def problem(noise: float, impossible: bool = False) -> Problem:
    return Problem.make(noise, impossible=impossible)


@cache
def small(noise: float, impossible: bool = False) -> Problem:
    return Problem.make(noise, vocabulary=4, horizon=2, impossible=impossible)


class Tensors:
    """The problem as the trainer sees it: rows of padded log-probabilities that carry gradient to the dense logits."""

    def __init__(self, of: Problem):
        self.of, self.prefixes = of, sorted(of.dense_logits)
        self.logits = torch.tensor([of.dense_logits[p] for p in self.prefixes], dtype=torch.float64, requires_grad=True)
        self.sparse = torch.tensor([of.sparse_logits[p] for p in self.prefixes], dtype=torch.float64).log_softmax(-1)

    def expectation(
        self,
        by: Correction,
        rows: list[Prefix],
        factors: list[float],
        denominator: int | None,
        uniforms: list[list[float]] | None = None,
    ) -> Tensor:
        """Minus the gradient of the loss over these rows, with `factors` for advantages. None: the count of kept tokens.
        uniforms: for a correction that draws, together with lists of the whole vocabulary."""
        steps = max(map(len, rows))
        state = torch.zeros(len(rows), steps, dtype=torch.int64)
        token, mask = torch.zeros_like(state), torch.zeros_like(state, dtype=torch.bool)
        for b, response in enumerate(rows):
            for t, v in enumerate(response):
                state[b, t], token[b, t], mask[b, t] = self.prefixes.index(response[:t]), v, True
        now = self.logits.log_softmax(-1)[state, token]
        more = {} if uniforms is None else {"uniforms": padded(uniforms, steps), "top_k": self.lists(state)}
        result = by(dense_logp=now.detach(), sparse_logp=self.sparse[state, token], mask=mask, **more)
        kept = result.kept(mask)
        count = int(kept.sum()) if denominator is None else denominator
        advantage = torch.tensor(factors, dtype=torch.float64)
        loss, _ = policy_loss(now, now.detach(), advantage, result.weights, kept, count, LossSettings())
        (gradient,) = torch.autograd.grad(loss, self.logits)
        return -gradient

    def lists(self, state: Tensor) -> TopKLists:
        dense, sparse = self.logits.detach().log_softmax(-1)[state], self.sparse[state]
        ids = torch.arange(dense.shape[-1]).expand(dense.shape)
        return TopKLists(TopK(ids, sparse), TopK(ids, dense), dense_at_sparse=dense)

    def as_gradient(self, tensor: Tensor) -> Gradient:
        return dict(zip(self.prefixes, tensor.tolist(), strict=True))


def padded(rows: list[list[float]], steps: int) -> Tensor:
    return torch.tensor([row + [0.0] * (steps - len(row)) for row in rows], dtype=torch.float64)


def through_the_library(of: Problem, name: str) -> Gradient:
    """One call with every response, each with its probability: the expectation of one response's summed loss."""
    tensors = Tensors(of)
    mean = sum(of.sparse_probability(y) * of.reward[y] for y in of.responses)
    factors = [of.sparse_probability(y) * (of.reward[y] - mean) for y in of.responses]
    return tensors.as_gradient(tensors.expectation(made(name), of.responses, factors, denominator=1))


def test_every_correction_has_a_rule_here() -> None:
    assert {name.split()[0] for name in RULES} == set(names())


def test_the_problem_is_whole() -> None:
    for impossible in (False, True):
        of = problem(0.7, impossible)
        assert len(of.responses) == 85
        assert sum(map(of.sparse_probability, of.responses)) == pytest.approx(1.0, abs=1e-12)
        assert sum(map(of.dense_probability, of.responses)) == pytest.approx(1.0, abs=1e-12)
    assert any(of.dense_probability(y) == 0 < of.sparse_probability(y) for y in of.responses)
    assert any(0 < min(of.ratios(y)) < 1e-4 for y in of.responses)


def test_the_dense_gradient_is_autograds() -> None:
    of = problem(0.7)
    tensors = Tensors(of)
    logp = tensors.logits.log_softmax(-1)
    mean_reward = torch.zeros((), dtype=torch.float64)
    for y in of.responses:
        terms = [logp[tensors.prefixes.index(y[:t]), v] for t, v in enumerate(y)]
        mean_reward = mean_reward + of.reward[y] * torch.stack(terms).sum().exp()
    (gradient,) = torch.autograd.grad(mean_reward, tensors.logits)
    assert distance(tensors.as_gradient(gradient), of.dense_gradient()) < 1e-13


@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("noise", NOISES)
def test_the_full_product_reproduces_the_dense_policy_gradient(noise: float, impossible: bool) -> None:
    of = problem(noise, impossible)
    found, exact = through_the_library(of, "importance sequence"), of.dense_gradient()
    assert max(abs(a - b) for a, b in zip(flat(found), flat(exact), strict=True)) < 1e-10
    assert math.hypot(*flat(exact)) > 0.1


@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("name", sorted(set(RULES) - WHOLE_BATCH))
def test_the_expected_gradient_equals_the_enumeration(name: str, noise: float, impossible: bool) -> None:
    of = problem(noise, impossible)
    found, expected = through_the_library(of, name), of.expectation(RULES[name])
    assert max(abs(a - b) for a, b in zip(flat(found), flat(expected), strict=True)) < 1e-10
    bias, exact = relative_bias(expected, of.dense_gradient()), of.dense_gradient()
    assert relative_bias(found, exact) == pytest.approx(bias, abs=1e-10)


@pytest.mark.parametrize(("noise", "impossible"), [(0.2, False), (0.7, False), (0.7, True)])
@pytest.mark.parametrize("name", sorted(set(RULES) - {"jackpot"}))
def test_batches_with_their_own_denominator_equal_the_enumeration(name: str, noise: float, impossible: bool) -> None:
    of = small(noise, impossible)
    tensors, by = Tensors(of), made(name)
    total = torch.zeros_like(tensors.logits)
    for pair in itertools.product(of.responses, repeat=2):
        rewards = [of.reward[y] for y in pair]
        likely = math.prod(of.sparse_probability(y) for y in pair)
        advantages = [reward - sum(rewards) / 2 for reward in rewards]
        total += likely * tensors.expectation(by, list(pair), advantages, denominator=None)
    expected = of.expectation_of_pairs(RULES[name])
    assert max(abs(a - b) for a, b in zip(flat(tensors.as_gradient(total)), flat(expected), strict=True)) < 1e-10
    assert math.hypot(*flat(expected)) > 0.001


@pytest.mark.parametrize(
    ("noise", "impossible", "settings"),
    [(0.2, False, {}), (0.7, False, {"scale": 1.5, "weight_max": 1.2}), (0.7, True, {"scale": 0.6})],
)
def test_jackpots_expected_gradient_over_batches_and_draws_equals_the_enumeration(
    noise: float, impossible: bool, settings: dict[str, float]
) -> None:
    of, scale = small(noise, impossible), settings.get("scale", 1.0)
    tensors, by = Tensors(of), correction("jackpot", **settings)
    total = torch.zeros_like(tensors.logits)
    for pair in itertools.product(of.responses, repeat=2):
        rewards = [of.reward[y] for y in pair]
        likely = math.prod(of.sparse_probability(y) for y in pair)
        advantages = [reward - sum(rewards) / 2 for reward in rewards]
        chances = [accepted(of, y, scale) for y in pair]
        for chance, kept in draws(chances):
            # In the middle of the draws that end like this.
            uniforms = [
                [c / 2 if k else (1 + c) / 2 for c, k in zip(cs, ks, strict=True)]
                for cs, ks in zip(chances, kept, strict=True)
            ]
            total += likely * chance * tensors.expectation(by, list(pair), advantages, None, uniforms)
    expected = of.expectation_of_pairs(jackpot(scale, settings.get("weight_max", 3.0)))
    assert max(abs(a - b) for a, b in zip(flat(tensors.as_gradient(total)), flat(expected), strict=True)) < 1e-10
    assert math.hypot(*flat(expected)) > 0.001


@pytest.mark.parametrize("weight_max", [0.5, 1.0, 1.5, 2.0, 4.0])
def test_the_bias_of_truncation_stays_under_its_bound(weight_max: float) -> None:
    of = problem(0.7)
    tensors = Tensors(of)
    mean = sum(of.sparse_probability(y) * of.reward[y] for y in of.responses)
    factors = [of.sparse_probability(y) * (of.reward[y] - mean) for y in of.responses]
    by = correction("seq_tis", weight_max=weight_max)
    found = tensors.as_gradient(tensors.expectation(by, of.responses, factors, denominator=1))
    bound = 0.0
    for y, factor in zip(of.responses, factors, strict=True):
        score = of.zero()
        of.score(score, y, [1.0] * len(y))
        bound += max(math.prod(of.ratios(y)) - weight_max, 0.0) * abs(factor) * math.hypot(*flat(score))
    assert distance(found, of.dense_gradient()) <= bound + 1e-12


def test_the_documented_biases_are_those_of_the_enumeration() -> None:
    rows = {}
    for line in PAGE.read_text("utf-8").splitlines():
        if found := re.fullmatch(r"\| `([a-z_ ]+)` \|((?: (?:\d\.\d{3}|-) \|){6})", line):
            rows[found[1]] = found[2].strip(" |").split(" | ")
    assert rows.keys() == RULES.keys()
    for name, figures in rows.items():
        assert figures == [bias_of_one(name, noise) for noise in NOISES] + [
            bias_of_two(name, noise) for noise in NOISES
        ]


def bias_of_one(name: str, noise: float) -> str:
    of = problem(noise)
    if name in WHOLE_BATCH:
        return "-"
    return f"{relative_bias(through_the_library(of, name), of.dense_gradient()):.3f}"


def bias_of_two(name: str, noise: float) -> str:
    """Against the same batches of two, sampled from the dense policy and not corrected."""
    exact = on_policy(small(noise)).expectation_of_pairs(RULES["none"])
    return f"{relative_bias(small(noise).expectation_of_pairs(RULES[name]), exact):.3f}"
