"""What optimal budgeted rejection sampling does to a distribution, exactly. Batches hold every token as often as the sparse
policy samples it, with evenly spread draws, so that means over the batch are expectations."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from sparroll.corrections import CorrectionResult, TopKLists, correction
from sparroll.types import TopK

Distribution = list[float]

# In eighths, and ratios that 16 draws a token resolve at scales of 1/2, 1 and 2.
DENSE: Distribution = [2 / 8, 2 / 8, 3 / 8, 1 / 8, 0.0]
SPARSE: Distribution = [4 / 8, 2 / 8, 0.75 / 8, 0.25 / 8, 1 / 8]
MOVED: Distribution = [1 / 8, 3.5 / 8, 2 / 8, 0.5 / 8, 1 / 8]
"""The policy being updated after an update."""
DRAWS = 16


def kl(one: Distribution, other: Distribution) -> float:
    if any(a > 0 and b == 0 for a, b in zip(one, other, strict=True)):
        return math.inf
    return sum(a * math.log(a / b) for a, b in zip(one, other, strict=True) if a > 0)


def variation(one: Distribution, other: Distribution) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2


def after(p: Distribution, q: Distribution, scale: float) -> Distribution:
    """What is kept of q, as a distribution."""
    kept = [min(b, a / scale) for a, b in zip(p, q, strict=True)]
    return [mass / sum(kept) for mass in kept]


def everything(
    scale: float, now: Distribution = DENSE, **settings: float
) -> tuple[list[int], CorrectionResult, Tensor]:
    """-> (token of each row, the correction of them all, what is kept)"""
    tokens = [v for v, q in enumerate(SPARSE) for _ in range(int(q * 32) * DRAWS)]
    spread = [(i % DRAWS + 0.5) / DRAWS for i in range(len(tokens))]
    p, q = (torch.tensor(values, dtype=torch.float64).log() for values in (DENSE, SPARSE))
    ids = torch.arange(len(DENSE)).expand(len(tokens), 1, -1)
    p_list, q_list = (value.expand(ids.shape) for value in (p, q))
    lists = TopKLists(TopK(ids, q_list), TopK(ids, p_list), dense_at_sparse=p_list)
    mask = torch.ones(len(tokens), 1, dtype=torch.bool)
    result = correction("jackpot", scale=scale, **settings)(
        dense_logp=p[tokens][:, None],
        sparse_logp=q[tokens][:, None],
        mask=mask,
        uniforms=torch.tensor(spread, dtype=torch.float64)[:, None],
        top_k=lists,
        now_logp=torch.tensor(now, dtype=torch.float64).log()[tokens][:, None],
    )
    return tokens, result, result.kept(mask)[:, 0]


def kept_of(p: Distribution, q: Distribution, scale: float) -> tuple[Distribution, float]:
    """-> (chance of each token to be kept, the mass that is kept), as the correction has them.

    Each token gets a draw just under the chance that it should have, and one just over: only the first must be kept.
    """
    p_log, q_log = (torch.tensor(values, dtype=torch.float64).log() for values in (p, q))
    chances = [min(1.0, a / (scale * b)) for a, b in zip(p, q, strict=True)]
    draws = torch.tensor([[chance * (1 - 1e-12), chance * (1 + 1e-12)] for chance in chances], dtype=torch.float64)
    below_one = draws[:, 1] < 1
    draws[~below_one, 1] = 0.0
    ids = torch.arange(len(p)).expand(len(p), 2, -1)
    p_list, q_list = (value.expand(ids.shape) for value in (p_log, q_log))
    result = correction("jackpot", scale=scale)(
        dense_logp=p_log[:, None].expand(-1, 2),
        sparse_logp=q_log[:, None].expand(-1, 2),
        mask=torch.ones(len(p), 2, dtype=torch.bool),
        uniforms=draws,
        top_k=TopKLists(TopK(ids, q_list), TopK(ids, p_list), dense_at_sparse=p_list),
    )
    assert result.keep[:, 0].all()
    assert torch.equal(result.keep[:, 1], ~below_one)
    return chances, result.metrics["correction/accepted_mass_mean"]


def left_by_jackpot(p: Distribution, q: Distribution, scale: float) -> Distribution:
    """What the correction keeps of q, as a distribution."""
    chances, mass = kept_of(p, q, scale)
    return [chance * b / mass for chance, b in zip(chances, q, strict=True)]


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_kept_tokens_are_distributed_as_the_smaller_of_q_and_p_over_scale(scale: float) -> None:
    tokens, result, kept = everything(scale)
    mass = sum(min(q, p / scale) for p, q in zip(DENSE, SPARSE, strict=True))
    assert 0.3 < mass < 0.95
    assert float(kept.double().mean()) == pytest.approx(mass, abs=1e-15)
    assert result.metrics["correction/accepted_mass_mean"] == pytest.approx(mass, abs=1e-15)
    assert result.metrics["correction/accepted_mass_calibration"] == pytest.approx(1.0, abs=1e-15)
    shares = torch.bincount(torch.tensor(tokens)[kept], minlength=len(DENSE)).double() / int(kept.sum())
    assert shares.tolist() == pytest.approx(after(DENSE, SPARSE, scale), abs=1e-15)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
def test_untruncated_weights_bring_kept_tokens_to_the_dense_distribution(scale: float) -> None:
    """Over kept tokens, any function has the mean that it has under the dense policy: that of the token ratio over all."""
    tokens, result, kept = everything(scale, weight_max=1e9)
    of_token = torch.tensor([3.0, -1.0, 0.25, 7.0, 11.0], dtype=torch.float64)[tokens]
    weighted = float((result.weights[:, 0] * of_token)[kept].mean())
    under_dense = sum(p * f for p, f in zip(DENSE, [3.0, -1.0, 0.25, 7.0, 11.0], strict=True))
    assert weighted == pytest.approx(under_dense, abs=1e-14)
    ratios = torch.tensor(DENSE, dtype=torch.float64)[tokens] / torch.tensor(SPARSE, dtype=torch.float64)[tokens]
    assert float((ratios * of_token).mean()) == pytest.approx(under_dense, abs=1e-14)
    # Over all tokens, dropped ones as 0, what is missing is the kept share.
    share = float(kept.double().mean())
    assert float((result.weights[:, 0] * of_token).mean()) == pytest.approx(share * under_dense, abs=1e-14)


@pytest.mark.parametrize("scale", [0.25, 0.5, 1.0, 2.0])
def test_at_a_later_update_weights_are_exact_only_where_nothing_is_rejected(scale: float) -> None:
    """A token counts as often as it should where p and p_now are both at least scale * q, and otherwise by a factor."""
    tokens, result, kept = everything(scale, MOVED, weight_max=1e9, drift_max=1e9)
    of_token = [3.0, -1.0, 0.25, 7.0, 11.0]
    weighted = float((result.weights[:, 0] * torch.tensor(of_token, dtype=torch.float64)[tokens])[kept].mean())
    under_dense = sum(p * f for p, f in zip(DENSE, of_token, strict=True))
    expected = 0.0
    for p, q, now, f in zip(DENSE, SPARSE, MOVED, of_token, strict=True):
        low, low_now = p < scale * q, now < scale * q
        factor = p / now if low and low_now else p / (scale * q) if low else scale * q / now if low_now else 1.0
        expected += p * factor * f
    assert weighted == pytest.approx(expected, abs=1e-14)
    if scale == 0.25:
        assert weighted == pytest.approx(under_dense, abs=1e-14)
    else:
        assert abs(weighted / under_dense - 1) > 0.1


def test_without_the_mass_the_weight_has_the_expectation_of_the_ratio_for_each_token() -> None:
    tokens, result, _ = everything(1.0, weight_max=1e9)
    mass = result.metrics["correction/accepted_mass_mean"]
    for token, (p, q) in enumerate(zip(DENSE, SPARSE, strict=True)):
        of_token = result.weights[torch.tensor(tokens) == token, 0]
        assert float(of_token.mean()) / mass == pytest.approx(p / q, abs=1e-14)


@pytest.mark.parametrize("seed", range(20))
def test_rejection_brings_any_distribution_closer_and_more_of_it_closer_still(seed: int) -> None:
    """In both directions of the KL and in total variation, at every scale; at max p/q, where it is plain rejection sampling,
    all the way; under min p/q, where nothing is rejected, not at all."""
    draw = random.Random(seed)
    p, q = ([draw.expovariate(1) ** 2 + 1e-6 for _ in range(6)] for _ in range(2))
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    ratios = [a / b for a, b in zip(p, q, strict=True)]
    least, most = min(ratios), max(ratios)
    scales = [least * (most / least) ** (i / 12) for i in range(13)]
    left = [left_by_jackpot(p, q, scale) for scale in scales]
    assert all(sum(each) == pytest.approx(1.0, abs=1e-12) for each in left)
    for distance in (kl, lambda a, b: kl(b, a), variation):
        distances = [distance(p, each) for each in left]
        assert distances[0] == pytest.approx(distance(p, q), abs=1e-12)
        assert distances[-1] == pytest.approx(0.0, abs=1e-12)
        assert all(later <= earlier + 1e-12 for earlier, later in zip(distances, distances[1:], strict=False))
        assert distances[6] < distances[0]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_rule_with_the_same_kept_share_comes_closer(seed: int) -> None:
    draw = random.Random(100 + seed)
    p, q = ([draw.expovariate(1) + 1e-3 for _ in range(5)] for _ in range(2))
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    chances, budget = kept_of(p, q, 1.0)
    best, tried = kl(p, left_by_jackpot(p, q, 1.0)), 0
    while tried < 200:
        other = [min(1.0, c * math.exp(draw.gauss(0, 0.3))) for c in chances]
        factor = budget / sum(c * b for c, b in zip(other, q, strict=True))
        other = [c * factor for c in other]
        if max(other) <= 1:
            tried += 1
            assert kl(p, [c * b / budget for c, b in zip(other, q, strict=True)]) >= best - 1e-12


def test_a_token_that_dense_cannot_say_is_always_dropped() -> None:
    tokens, result, kept = everything(1.0)
    impossible = torch.tensor(tokens) == 4
    assert not kept[impossible].any()
    assert not result.weights[impossible].any()
