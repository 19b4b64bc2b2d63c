"""Tables against counts by hand; merging in any split and order equals one pass to the last bit; refusals."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics, tail
from sparroll.mismatch.checks import MOST_BINS

Rollouts = list[tuple[Tensor, Tensor, str]]


def rollouts(count: int, tokens: int = 700, seed: int = 0) -> Rollouts:
    """Acceptances that fall with length, with piles at 0 and 1, of rollouts of different level and length."""
    generator = np.random.default_rng(seed)
    made: Rollouts = []
    for each in range(count):
        length = int(generator.integers(1, tokens))
        values = generator.beta(8 + generator.normal(), 1 + np.arange(length) / tokens)
        values = np.where(generator.random(length) < 0.5, 1.0, np.where(generator.random(length) < 0.01, 0.0, values))
        context = torch.arange(length) + int(generator.integers(1, 90))
        made.append((torch.from_numpy(values).float(), context, f"prompt{each // 4}#{each % 4}"))
    return made


def added(statistics: TailStatistics, some: Rollouts) -> TailStatistics:
    for acceptance_T, context_T, name in some:
        statistics.add(acceptance_T, context_T, name)
    return statistics


def flat(some: Rollouts) -> tuple[Tensor, Tensor, list[str]]:
    ids = [name for values, _, name in some for _ in range(len(values))]
    return torch.cat([values for values, _, _ in some]), torch.cat([context for _, context, _ in some]), ids


def same(one: TailStatistics, other: TailStatistics) -> bool:
    first, second = one.state(), other.state()
    return all(torch.equal(first[key], second[key]) for key in first) and one.table("exact") == other.table("exact")


def test_rows_are_what_counting_by_hand_gives() -> None:
    some = rollouts(30)
    values, context, ids = (np.asarray(list(each)) for each in flat(some))
    table = tail(*flat(some), bin_tokens=250)
    assert [row.from_context_tokens for row in table.rows] == sorted({int(c) // 250 * 250 for c in context})
    for row in [*table.rows, table.overall]:
        inside = (context >= row.from_context_tokens) & (context < row.to_context_tokens)
        assert row.tokens == inside.sum()
        assert row.rollouts == len(set(ids[inside]))
        assert row.mean == pytest.approx(values[inside].mean(dtype=np.float64), abs=1e-8)
        assert row.share_above_999 == (values[inside] >= 0.999).mean()
        for level, value in ((0.01, row.q01), (0.05, row.q05), (0.1, row.q10), (0.05, row.quantile_value)):
            assert value == pytest.approx(np.quantile(values[inside], level, method="inverted_cdf"), abs=1 / 2000)
        assert row.low <= row.quantile_value <= row.high
    assert table.length_correlation == pytest.approx(np.corrcoef(values, context)[0, 1], abs=1e-6)


def test_the_order_of_tokens_does_not_matter() -> None:
    values, context, ids = flat(rollouts(12))
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    shuffled = tail(values[order], context[order], [ids[place] for place in order], bin_tokens=250)
    assert shuffled == tail(values, context, ids, bin_tokens=250)


def test_rollout_ids_may_be_a_tensor() -> None:
    values, context, _ = flat(rollouts(1))
    numbers = torch.arange(len(values)) % 5
    assert tail(values, context, numbers) == tail(values, context, numbers.tolist())


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40])
def test_merged_shards_equal_one_pass_to_the_last_bit(shards: int) -> None:
    some = rollouts(40)
    one_pass = added(TailStatistics(bin_tokens=250, seed=5), some)
    random.Random(shards).shuffle(some)
    parts = [added(TailStatistics(bin_tokens=250, seed=5), some[start::shards]) for start in range(shards)]
    merged = TailStatistics(bin_tokens=250, seed=5)
    for part in parts:
        before = part.state()
        merged.merge(part)
        assert all(torch.equal(before[key], value) for key, value in part.state().items())
    assert same(merged, one_pass)


def test_merging_does_not_tie_two_statistics_together() -> None:
    first, second = TailStatistics(), added(TailStatistics(), rollouts(3))
    first.merge(second)
    added(first, rollouts(2, seed=9))
    assert same(second, added(TailStatistics(), rollouts(3)))


@pytest.mark.parametrize(("name", "value"), [("bin_tokens", 500), ("quantile", 0.1), ("replicates", 100), ("seed", 1)])
def test_different_settings_do_not_merge(name: str, value: float) -> None:
    with pytest.raises(UserError, match=f"different {name} cannot be merged"):
        TailStatistics().merge(TailStatistics(**{name: value}))  # type: ignore[arg-type]


def test_a_saved_state_comes_back_and_goes_on(tmp_path: Path) -> None:
    some = rollouts(20)
    statistics = added(TailStatistics(bin_tokens=300, quantile=0.1, replicates=50, seed=2**62), some[:12])
    save_file(statistics.state(), tmp_path / "tail.safetensors")
    back = TailStatistics.from_state(load_file(tmp_path / "tail.safetensors"))
    assert same(back, statistics)
    whole = added(TailStatistics(bin_tokens=300, quantile=0.1, replicates=50, seed=2**62), some)
    assert same(added(back, some[12:]), whole)


@pytest.mark.parametrize(("ones", "dtype"), [(0, torch.uint8), (250, torch.int16), (20_000, torch.int32)])
def test_a_packed_state_comes_back_and_takes_no_room_for_empty_cells(ones: int, dtype: torch.dtype) -> None:
    statistics = added(TailStatistics(bin_tokens=30), rollouts(3, tokens=60))
    statistics.add(torch.ones(ones), torch.zeros(ones, dtype=torch.int64), "equal")
    packed = statistics.packed_state()
    filled = len(packed["cells"])
    assert packed["replicates"].shape[2] == filled == int((statistics.state()["counts"].sum(0) > 0).sum()) < 2002
    assert packed["replicates"].dtype == dtype
    back = TailStatistics.from_state(packed)
    assert same(back, statistics)
    assert same(added(back, rollouts(2, seed=9)), added(statistics, rollouts(2, seed=9)))
    with pytest.raises(UserError, match="counts is"):
        TailStatistics.from_state(packed | {"cells": packed["cells"][1:]})


@pytest.mark.parametrize("packed", [False, True])
def test_an_empty_state_comes_back_empty(packed: bool) -> None:
    empty = TailStatistics(replicates=30)
    back = TailStatistics.from_state(empty.packed_state() if packed else empty.state())
    assert (back.tokens, back.replicates) == (0, 30)
    with pytest.raises(UserError, match="no tokens were measured"):
        back.table("exact")


def test_a_state_of_something_else_is_refused() -> None:
    state = added(TailStatistics(), rollouts(2)).state()
    with pytest.raises(UserError, match="counts missing"):
        TailStatistics.from_state({key: value for key, value in state.items() if key != "counts"})
    with pytest.raises(UserError, match="replicates is"):
        TailStatistics.from_state(state | {"replicates": state["replicates"][:, :5]})
    with pytest.raises(UserError, match="format 7"):
        TailStatistics.from_state(state | {"settings": torch.tensor([7, *state["settings"][1:].tolist()])})


def test_memory_does_not_grow_with_rollouts() -> None:
    statistics = added(TailStatistics(bin_tokens=250), rollouts(3, seed=1))
    added(statistics, rollouts(60))
    size = sum(value.nbytes for value in statistics.state().values())
    added(statistics, [(values, context, f"more{name}") for values, context, name in rollouts(60)])
    assert sum(value.nbytes for value in statistics.state().values()) == size
    assert size < 4 * 1.65e6


def test_a_bin_of_one_rollout_is_not_certain_of_anything() -> None:
    table = tail(torch.rand(3000), torch.arange(3000), ["only"] * 3000, bin_tokens=2000)
    assert [(row.low, row.high) for row in [*table.rows, table.overall]] == [(0.0, 1.0)] * 3


def test_a_rollout_that_outweighs_the_others_counts_as_one() -> None:
    ids = ["long"] * 2000 + [f"short{each}" for each in range(20)]
    row = tail(torch.rand(2020), torch.arange(2020) % 100, ids).overall
    assert (row.rollouts, row.low, row.high) == (21, 0.0, 1.0)


def test_a_policy_that_is_dense_has_a_tail_of_exactly_one() -> None:
    row = tail(torch.ones(1000), torch.arange(1000), torch.arange(1000) // 100).overall
    assert (row.mean, row.q01, row.q05, row.low, row.high, row.share_above_999) == (1, 1, 1, 1, 1, 1)


def test_what_does_not_vary_has_no_correlation() -> None:
    assert tail(torch.ones(100), torch.arange(100), torch.arange(100)).length_correlation is None
    assert tail(torch.rand(100), torch.full((100,), 7), torch.arange(100)).length_correlation is None


@pytest.mark.parametrize("sign", [1, -1])
def test_a_straight_line_correlates_fully(sign: int) -> None:
    context = torch.arange(100_000, 200_000)
    values = 0.5 + sign * (context - 150_000).double() / 200_000
    table = tail(values, context, context // 1000, bin_tokens=50_000)
    assert table.length_correlation == pytest.approx(sign, abs=1e-6)


def test_contexts_of_a_million_tokens_do_not_overflow() -> None:
    context = torch.arange(7_900_000, 8_100_000)
    statistics = TailStatistics(bin_tokens=100_000)
    for rollout in range(3):
        statistics.add(torch.linspace(1, 0, 200_000, dtype=torch.float64), context, rollout)
    assert statistics.length_correlation() == pytest.approx(-1, abs=1e-6)
    assert int(statistics.state()["moments"].min()) >= 0


def test_a_rollout_without_tokens_changes_nothing() -> None:
    statistics = added(TailStatistics(), rollouts(3))
    statistics.add(torch.zeros(0), torch.zeros(0, dtype=torch.int64), "empty")
    assert same(statistics, added(TailStatistics(), rollouts(3)))


def test_bfloat16_acceptances_are_counted_as_they_are() -> None:
    values = torch.tensor([0.5, 0.875, 1.0, 0.0], dtype=torch.bfloat16)
    assert tail(values, torch.arange(4), torch.arange(4)).overall.mean == 2.375 / 4


@pytest.mark.parametrize(
    ("values", "context", "message"),
    [
        ([0.5, math.nan], [1, 2], r"rollout 'r': acceptance must be in \[0, 1\], got nan at token 1"),
        ([0.5, 1.0001], [1, 2], "got 1.0001 at token 1"),
        ([-0.1], [1], "got -0.1 at token 0"),
        ([0.5], [1, 2], "lists of the same length"),
        ([0.5], [-1], r"context_tokens must be in \[0, 8,388,608\), got -1"),
        ([0.5], [1.5], "context_tokens integers"),
        ([[0.5]], [[1]], "lists of the same length"),
    ],
)
def test_what_is_no_rollout_is_refused_and_nothing_is_counted(values: list, context: list, message: str) -> None:
    statistics = added(TailStatistics(), rollouts(2))
    with pytest.raises(UserError, match=message):
        statistics.add(torch.tensor(values), torch.tensor(context), "r")
    assert same(statistics, added(TailStatistics(), rollouts(2)))


def test_bins_too_small_for_memory_are_refused_and_nothing_is_counted() -> None:
    statistics = TailStatistics(bin_tokens=1)
    with pytest.raises(UserError, match="more than 1024 bins of 1 tokens"):
        statistics.add(torch.rand(MOST_BINS + 1), torch.arange(MOST_BINS + 1), "r")
    assert statistics.tokens == 0


@pytest.mark.parametrize(
    "settings", [{"bin_tokens": 0}, {"quantile": 5}, {"quantile": 0.0}, {"replicates": 1}, {"seed": -1}]
)
def test_settings_out_of_range_are_refused(settings: dict) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        TailStatistics(**settings)


def test_an_unknown_estimator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'top_k_lower'"):
        added(TailStatistics(), rollouts(2)).table("topk_lower")


def test_arguments_of_different_length_are_refused() -> None:
    with pytest.raises(UserError, match="one entry per token, got 3, 3 and 2"):
        tail(torch.rand(3), torch.arange(3), [1, 2])


def test_the_fit_of_a_bin_is_the_fit_of_its_values() -> None:
    from sparroll.mismatch import fit_beta

    some = rollouts(40)
    values, context, _ = flat(some)
    statistics = added(TailStatistics(bin_tokens=250), some)
    for start, inside in ((None, context >= 0), (250, (context >= 250) & (context < 500))):
        counted, direct = statistics.beta(start), fit_beta(values[inside])
        assert (counted.a, counted.b) == pytest.approx((direct.a, direct.b), rel=1e-5)
        assert (counted.weight, counted.values) == (direct.weight, direct.values)
        assert direct.ks - 0.01 < counted.ks <= direct.ks + 1e-9


def test_a_fit_of_a_bin_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(UserError, match=r"no bin with tokens starts at 100\nhint: bins start at \[0, 250"):
        added(TailStatistics(bin_tokens=250), rollouts(5)).beta(100)


def test_adding_a_long_rollout_takes_milliseconds() -> None:
    values, context = torch.rand(30_000), torch.arange(30_000)
    statistics = TailStatistics()
    statistics.add(values, context, "first")
    seconds = []
    for name in range(5):
        start = time.perf_counter()
        statistics.add(values, context, name)
        seconds.append(time.perf_counter() - start)
    # About 0.008 on one quiet core.
    assert min(seconds) < 0.1


def test_another_quantile_than_the_fifth_percentile_is_the_one_with_an_interval() -> None:
    statistics = TailStatistics(bin_tokens=100, quantile=0.1)
    for number in range(20):
        statistics.add(torch.linspace(0.5, 0.9, 50) + 0.002 * number, torch.arange(50), str(number))
    row = statistics.table("exact").overall
    assert row.quantile_value == row.q10 == pytest.approx(0.555, abs=1e-3)
    assert (row.low, row.high) == pytest.approx((0.5481, 0.5648), abs=1e-3)
