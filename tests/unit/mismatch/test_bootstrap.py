"""The weights are Poisson, repeatable and the same everywhere; intervals never claim what the data cannot tell."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparroll.errors import UserError
from sparroll.mismatch.bootstrap import interval, poisson_weights
from sparroll.mismatch.histogram import CELLS, cells, quantile


def test_weights_are_the_same_on_every_machine() -> None:
    """Frozen: statistics that were saved and shards on other machines rely on these very numbers."""
    assert poisson_weights(0, "aime24/7#3", 12).tolist() == [0, 3, 3, 1, 1, 0, 1, 0, 0, 1, 0, 1]
    assert poisson_weights(0, 7, 12).tolist() == [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]


def test_weights_follow_seed_and_id_and_the_kind_of_id() -> None:
    weights = [poisson_weights(seed, name, 500) for seed, name in ((0, 7), (1, 7), (0, 8), (0, "7"), (0, -7))]
    assert len({tuple(each.tolist()) for each in weights}) == 5


def test_more_replicates_keep_the_first_ones() -> None:
    assert torch.equal(poisson_weights(3, "x", 500)[:100], poisson_weights(3, "x", 100))


def test_numpy_integers_name_the_same_rollout() -> None:
    assert torch.equal(poisson_weights(0, np.int64(7), 50), poisson_weights(0, 7, 50))  # type: ignore[arg-type]


def test_weights_are_poisson_with_mean_one_across_rollouts_and_replicates() -> None:
    weights = torch.stack([poisson_weights(0, rollout, 500) for rollout in range(2000)])
    share = torch.bincount(weights.flatten(), minlength=5)[:5] / weights.numel()
    np.testing.assert_allclose(share, [0.36788, 0.36788, 0.18394, 0.06131, 0.01533], atol=0.0015)
    between = np.corrcoef(weights.numpy().astype(float))
    assert np.abs(between - np.eye(2000)).max() < 0.3
    replicates = np.corrcoef(weights.numpy().astype(float).T)
    assert np.abs(replicates - np.eye(500)).max() < 0.15


@pytest.mark.parametrize("name", [True, 1.5, None])
def test_ids_of_other_kinds_are_refused(name: object) -> None:
    with pytest.raises(UserError, match="rollout_id must be an int or a string"):
        poisson_weights(0, name, 20)  # type: ignore[arg-type]


def histograms(rollouts: list[torch.Tensor], replicates: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    counts = torch.stack([torch.bincount(cells(values), minlength=CELLS) for values in rollouts])
    weights = torch.stack([poisson_weights(0, each, replicates) for each in range(len(rollouts))])
    return counts.sum(0), weights.t().long() @ counts


def test_one_rollout_tells_nothing_about_others() -> None:
    values = torch.rand(5000, dtype=torch.float64)
    assert interval(*histograms([values]), 0.05, effective_rollouts=1.0) == (0.0, 1.0)


def test_an_interval_holds_its_quantile_and_narrows_with_rollouts() -> None:
    generator = torch.Generator().manual_seed(0)
    widths = []
    for rollouts in (2, 4, 16, 64):
        levels = 0.9 + 0.1 * torch.rand(rollouts, 1, generator=generator, dtype=torch.float64)
        values = levels * torch.rand(rollouts, 400, generator=generator, dtype=torch.float64).sqrt()
        counts, replicates = histograms(list(values))
        low, high = interval(counts, replicates, 0.05, effective_rollouts=rollouts)
        assert 0 <= low <= float(quantile(counts, 0.05)) <= high <= 1
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.2 * widths[0]


@pytest.mark.parametrize(("tokens", "known"), [(40, False), (400, True)])
def test_a_handful_of_tokens_cannot_bound_a_5th_percentile_from_below(tokens: int, known: bool) -> None:
    values = torch.linspace(0.5, 1, tokens, dtype=torch.float64)
    counts, replicates = histograms(list(values[:, None]))
    low, _ = interval(counts, replicates, 0.05, effective_rollouts=tokens)
    assert (low > 0) == known


def test_rollouts_that_agree_on_one_give_one() -> None:
    counts, replicates = histograms([torch.ones(500, dtype=torch.float64)] * 10)
    assert interval(counts, replicates, 0.05, effective_rollouts=10) == (1.0, 1.0)


def test_a_quantile_on_a_pile_of_equal_values_is_not_taken_for_certain() -> None:
    """3 % of all tokens are low, all of them in one rollout of twenty; the 5th percentile is on the pile at 1."""
    bad = torch.cat([torch.full((60,), 0.3, dtype=torch.float64), torch.ones(40, dtype=torch.float64)])
    counts, replicates = histograms([bad] + [torch.ones(100, dtype=torch.float64)] * 19)
    low, high = interval(counts, replicates, 0.05, effective_rollouts=20)
    assert float(quantile(counts, 0.05)) == high == 1.0
    assert low < 0.31


def test_a_quantile_on_the_lowest_pile_is_not_certain() -> None:
    """The pile is in 2 of 20 rollouts, which a draw of rollouts may miss altogether."""
    rollouts = [torch.full((100,), 0.3), torch.cat([torch.full((40,), 0.3), torch.ones(60)])]
    rollouts += [torch.ones(100)] * 18
    assert interval(*histograms([each.double() for each in rollouts]), 0.05, 20.0)[1] == 1.0


def test_four_rollouts_have_the_interval_of_four_rollouts() -> None:
    """Frozen: a variance of n where n - 1 belongs would end it at .2914."""
    generator = torch.Generator().manual_seed(0)

    def uniform(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    rollouts = [(0.9 + 0.1 * uniform(1)) * uniform(400).sqrt() for _ in range(4)]
    assert interval(*histograms(rollouts), 0.05, 4.0) == pytest.approx((0.11025, 0.306125), abs=1e-6)
