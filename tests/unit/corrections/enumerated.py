"""A problem so small that every response can be written down: a table of logits for each prefix, an end token, a reward for
each response. Plain Python over probabilities; it shares nothing with the corrections or the loss."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Prefix = tuple[int, ...]
Gradient = dict[Prefix, list[float]]
"""With respect to the dense logits, prefix by prefix."""
Outcome = tuple[float, list[list[float]], list[list[bool]]]
"""How likely the correction comes out like this, and its weights and what it keeps, row by row."""
Rule = Callable[["Problem", Sequence[Prefix]], Iterator[Outcome]]
"""A batch of responses -> everything that the correction may make of it. One outcome where nothing is drawn."""
END = 0


@dataclass
class Problem:
    dense_logits: dict[Prefix, list[float]]
    sparse_logits: dict[Prefix, list[float]]
    responses: list[Prefix]
    reward: dict[Prefix, float]

    @staticmethod
    def make(noise: float, seed: int = 0, vocabulary: int = 5, horizon: int = 3, impossible: bool = False) -> Problem:
        """Sparse logits are the dense ones with normal noise. `impossible`: dense cannot begin with token 1, and finds 2
        after 3 all but impossible, while sparse may say both."""
        draw = random.Random(seed)
        # END never stands in a prefix.
        prefixes = [p for n in range(horizon) for p in itertools.product(range(1, vocabulary), repeat=n)]
        dense = {p: [draw.gauss(0, 1) for _ in range(vocabulary)] for p in prefixes}
        sparse = {p: [x + noise * draw.gauss(0, 1) for x in dense[p]] for p in prefixes}
        if impossible:
            dense[()][1] = -math.inf
            dense[(3,)][2] -= 15
        ended = [(*p, END) for p in prefixes]
        full = [(*p, v) for p in prefixes if len(p) == horizon - 1 for v in range(1, vocabulary)]
        responses = ended + full
        return Problem(dense, sparse, responses, {y: draw.gauss(0, 1) for y in responses})

    def dense(self, prefix: Prefix) -> list[float]:
        return softmax(self.dense_logits[prefix])

    def sparse(self, prefix: Prefix) -> list[float]:
        return softmax(self.sparse_logits[prefix])

    def sparse_probability(self, response: Prefix) -> float:
        return math.prod(self.sparse(response[:t])[v] for t, v in enumerate(response))

    def dense_probability(self, response: Prefix) -> float:
        return math.prod(self.dense(response[:t])[v] for t, v in enumerate(response))

    def ratios(self, response: Prefix) -> list[float]:
        return [self.dense(response[:t])[v] / self.sparse(response[:t])[v] for t, v in enumerate(response)]

    def zero(self) -> Gradient:
        return {prefix: [0.0] * len(logits) for prefix, logits in self.dense_logits.items()}

    def score(self, into: Gradient, response: Prefix, factors: Sequence[float]) -> None:
        """Add sum_t factor_t * gradient of log p_dense(token t). A token that dense cannot say has none."""
        for t, (token, factor) in enumerate(zip(response, factors, strict=True)):
            prefix = response[:t]
            dense = self.dense(prefix)
            if dense[token] == 0:
                continue
            for v, p in enumerate(dense):
                into[prefix][v] += factor * ((v == token) - p)

    def advantage(self, response: Prefix) -> float:
        """Against the mean reward of what is sampled, as a large group would have it."""
        mean = sum(self.sparse_probability(y) * self.reward[y] for y in self.responses)
        return self.reward[response] - mean

    def dense_gradient(self) -> Gradient:
        """Of the mean reward under the dense policy."""
        total = self.zero()
        for y in self.responses:
            self.score(total, y, [self.dense_probability(y) * self.reward[y]] * len(y))
        return total

    def expectation(self, rule: Rule) -> Gradient:
        """Of one response's summed loss gradient, sampled from the sparse policy."""
        total = self.zero()
        mean = sum(self.sparse_probability(y) * self.reward[y] for y in self.responses)
        for y in self.responses:
            for likely, (weights,), (kept,) in rule(self, [y]):
                scale = likely * self.sparse_probability(y) * (self.reward[y] - mean)
                self.score(total, y, [scale * w if k else 0.0 for w, k in zip(weights, kept, strict=True)])
        return total

    def expectation_of_pairs(self, rule: Rule) -> Gradient:
        """Of the loss gradient of a batch of two responses, with the batch's own denominator and advantages."""
        total = self.zero()
        for pair in itertools.product(self.responses, repeat=2):
            mean = sum(self.reward[y] for y in pair) / 2
            for likely, weights, kept in rule(self, pair):
                scale = likely * math.prod(self.sparse_probability(y) for y in pair) / max(sum(map(sum, kept)), 1)
                for y, ws, ks in zip(pair, weights, kept, strict=True):
                    factor = scale * (self.reward[y] - mean)
                    self.score(total, y, [factor * w if k else 0.0 for w, k in zip(ws, ks, strict=True)])
        return total


def on_policy(problem: Problem) -> Problem:
    """The same, sampled from the dense policy."""
    return Problem(problem.dense_logits, problem.dense_logits, problem.responses, problem.reward)


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    raised = [math.exp(x - top) for x in logits]
    return [x / sum(raised) for x in raised]


def flat(gradient: Gradient) -> list[float]:
    return [x for prefix in sorted(gradient) for x in gradient[prefix]]


def distance(one: Gradient, other: Gradient) -> float:
    return math.dist(flat(one), flat(other))


def relative_bias(one: Gradient, exact: Gradient) -> float:
    return distance(one, exact) / math.hypot(*flat(exact))


def per_row(weigh: Callable[[list[float]], tuple[list[float], list[bool]]]) -> Rule:
    def rule(of: Problem, responses: Sequence[Prefix]) -> Iterator[Outcome]:
        made = [weigh(of.ratios(y)) for y in responses]
        yield 1.0, [weights for weights, _ in made], [kept for _, kept in made]

    return rule


def _released(of: Problem, responses: Sequence[Prefix]) -> Iterator[Outcome]:
    rows = [of.ratios(y) for y in responses]
    kept = [[0.5 <= r <= 1.5 and min(row) >= 1e-4 for r in row] for row in rows]
    of_kept = [min(r, 1.5) for row, ks in zip(rows, kept, strict=True) for r, k in zip(row, ks, strict=True) if k]
    mean = sum(of_kept) / len(of_kept) if of_kept else 1.0
    yield 1.0, [[min(r, 1.5) / mean for r in row] for row in rows], kept


def accepted(of: Problem, response: Prefix, scale: float = 1.0) -> list[float]:
    """How likely rejection sampling keeps each token."""
    return [min(1.0, r / scale) for r in of.ratios(response)]


def mass(of: Problem, prefix: Prefix, scale: float = 1.0) -> float:
    return sum(min(q, p / scale) for p, q in zip(of.dense(prefix), of.sparse(prefix), strict=True))


def draws(chances: list[list[float]]) -> Iterator[tuple[float, list[list[bool]]]]:
    """Every way in which tokens with these chances are kept, and how likely it is."""
    places = [(b, t) for b, row in enumerate(chances) for t in range(len(row))]
    choices = [[k for k, c in ((True, chances[b][t]), (False, 1 - chances[b][t])) if c > 0] for b, t in places]
    for drawn in itertools.product(*choices):
        kept = [[False] * len(row) for row in chances]
        likely = 1.0
        for (b, t), k in zip(places, drawn, strict=True):
            kept[b][t] = k
            likely *= chances[b][t] if k else 1 - chances[b][t]
        yield likely, kept


def jackpot(scale: float = 1.0, most: float = 3.0) -> Rule:
    """At the first update, where the policy being updated is the dense one."""

    def rule(of: Problem, responses: Sequence[Prefix]) -> Iterator[Outcome]:
        masses = [[mass(of, y[:t], scale) for t in range(len(y))] for y in responses]
        reach = [[max(scale, r) for r in of.ratios(y)] for y in responses]
        for likely, kept in draws([accepted(of, y, scale) for y in responses]):
            kappa = sum(map(sum, kept)) / sum(map(sum, masses))
            weights = [
                [min(kappa * z * r, most) for z, r in zip(zs, rs, strict=True)]
                for zs, rs in zip(masses, reach, strict=True)
            ]
            yield likely, weights, kept

    return rule


def _root(row: list[float]) -> float:
    return math.prod(row) ** (1 / len(row))


RULES: dict[str, Rule] = {
    "none": per_row(lambda row: ([1.0] * len(row), [True] * len(row))),
    "tis": per_row(lambda row: ([min(r, 2.0) for r in row], [True] * len(row))),
    "seq_tis": per_row(lambda row: ([min(math.prod(row), 2.0)] * len(row), [True] * len(row))),
    "mis": per_row(lambda row: ([math.prod(row)] * len(row), [0.5 <= math.prod(row) <= 2.0] * len(row))),
    "geometric": per_row(lambda row: ([1.0] * len(row), [0.9 <= _root(row) <= 1.1] * len(row))),
    "icepop": per_row(lambda row: (row, [0.5 <= r <= 5.0 for r in row])),
    "veto": per_row(lambda row: ([1.0] * len(row), [min(row) >= 1e-4] * len(row))),
    "sparse_rl": per_row(lambda row: (row, [min(row) >= 1e-4] * len(row))),
    "sparse_rl_released": _released,
    "jackpot": jackpot(),
    "importance token": per_row(lambda row: (row, [True] * len(row))),
    "importance sequence": per_row(lambda row: ([math.prod(row)] * len(row), [True] * len(row))),
    "importance geometric": per_row(lambda row: ([_root(row)] * len(row), [True] * len(row))),
}
"""Every correction at its defaults, from its description; `importance` with the action weight."""
