"""Counts of impossible tokens with known answers, and that they merge exactly."""

from __future__ import annotations

import pytest
import torch

from sparroll.errors import UserError
from sparroll.mismatch import TailStatistics
from sparroll.mismatch.divergence import NATS
from sparroll.mismatch.impossible import ImpossibleTokens
from sparroll.mismatch.of_rollouts import off_nats_of
from sparroll.mismatch.step_metrics import ceiling_report, tail_report
from sparroll.types import Rollout, TokenScores

BIN = 50


def added(count: int, *, first: int = 0, statistics: TailStatistics | None = None) -> TailStatistics:
    """Rollouts whose tokens are now and then far off, of random lengths over several bins."""
    statistics = statistics or TailStatistics(bin_tokens=BIN, replicates=20)
    for rollout in range(first, first + count):
        generator = torch.Generator().manual_seed(rollout)
        tokens = int(torch.randint(20, 160, (), generator=generator))
        off_T = torch.randn(tokens, generator=generator) ** 3 * 2
        accepted_T = off_T.clamp_min(0).neg().exp()
        statistics.add(accepted_T, 30 + torch.arange(tokens), rollout, off_T)
    return statistics


def same(one: TailStatistics, other: TailStatistics) -> bool:
    states = one.state(), other.state()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][key], states[1][key]) for key in states[0]
    )


@pytest.mark.parametrize("broken", [torch.nan, -torch.inf])
def test_what_no_policy_gives_is_refused_and_not_counted_as_possible(broken: float) -> None:
    counted = ImpossibleTokens(BIN)
    with pytest.raises(UserError, match="holds NaN or -inf"):
        counted.add(torch.tensor([0.0, broken]), torch.arange(2))
    assert counted.tokens == 0


def test_tokens_are_counted_strictly_beyond_each_distance() -> None:
    counted = ImpossibleTokens(BIN)
    counted.add(torch.tensor([-30.0, 2.0, 2.5, 7.0, 10.0, 11.0, torch.inf, 0.0]), torch.arange(8))
    counted.add(torch.zeros(8), torch.arange(8))
    shares = counted.shares()
    assert [each.nats for each in shares] == list(NATS)
    assert [each.events for each in shares] == [5, 4, 2, 1]
    assert [each.value for each in shares] == [5 / 16, 4 / 16, 2 / 16, 1 / 16]
    assert all(each.tokens == 16 and each.low <= each.value <= each.high for each in shares)


def test_any_split_merges_to_the_bits_of_one_pass() -> None:
    whole = added(12)
    for parts in ([5, 7], [1, 4, 7]):
        merged, first = TailStatistics(bin_tokens=BIN, replicates=20), 0
        for count in parts:
            merged.merge(added(count, first=first))
            first += count
        assert same(merged, whole)
        assert merged.table("exact") == whole.table("exact")


def test_a_state_comes_back_and_can_be_added_to() -> None:
    for state in (added(5).state(), added(5).packed_state()):
        back = TailStatistics.from_state(state)
        assert same(added(7, first=5, statistics=back), added(12))


def test_bins_together_are_what_wider_bins_would_have_counted() -> None:
    """Also their design effect, since products between bins are kept."""
    narrow, wide = added(20).impossible, ImpossibleTokens(3 * BIN)
    for rollout in range(20):
        generator = torch.Generator().manual_seed(rollout)
        tokens = int(torch.randint(20, 160, (), generator=generator))
        wide.add(torch.randn(tokens, generator=generator) ** 3 * 2, 30 + torch.arange(tokens))
    assert narrow.only([0, BIN, 2 * BIN]).shares() == wide.only([0]).shares()
    assert narrow.only([3 * BIN]).shares() == wide.only([3 * BIN]).shares()


def test_a_row_has_the_shares_of_its_bin_and_the_last_row_those_of_all() -> None:
    statistics = added(20)
    table = statistics.table("exact")
    assert sum(row.impossible[2].events for row in table.rows) == table.overall.impossible[2].events > 0
    assert table.overall.impossible == statistics.impossible.shares()
    share = table.rows[1].impossible_share(10)
    assert share is not None and share.tokens == table.rows[1].tokens
    pooled = TailStatistics.pooled_row([added(8), added(12, first=8)], BIN)
    assert pooled is not None and pooled.impossible == table.rows[1].impossible


def test_the_interval_of_a_row_is_as_sure_as_it_is_asked() -> None:
    statistics = added(20)
    usual, sure = (TailStatistics.pooled_row([statistics], BIN, level) for level in (0.95, 0.999))
    assert usual is not None and sure is not None
    for one, other in zip(usual.impossible[:2], sure.impossible[:2], strict=True):
        assert other.low < one.low < one.value == other.value < one.high < other.high


def test_rollouts_without_log_probabilities_count_for_the_tail_alone() -> None:
    statistics = added(3)
    statistics.add(torch.ones(40), torch.arange(40), "replayed")
    assert statistics.rollouts == 4 and statistics.impossible.tokens == statistics.tokens - 40
    bare = TailStatistics()
    bare.add(torch.ones(40), torch.arange(40), 0)
    assert bare.table("exact").overall.impossible == () and bare.table("exact").overall.impossible_share(10) is None


def test_a_state_of_before_they_were_counted_is_read_as_none() -> None:
    state = {key: value for key, value in added(4).state().items() if not key.startswith("impossible")}
    state["settings"] = torch.tensor([1, *state["settings"][1:].tolist()])
    old = TailStatistics.from_state(state)
    assert old.tokens == added(4).tokens and old.impossible.tokens == 0
    assert same(TailStatistics.from_state(old.state()), old)


@pytest.mark.parametrize("key", ["impossible_bins", "impossible_sums", "impossible_products"])
def test_a_new_state_without_them_is_refused(key: str) -> None:
    state = added(4).state()
    with pytest.raises(UserError, match="not a state of tail statistics"):
        TailStatistics.from_state({name: value for name, value in state.items() if name != key})
    with pytest.raises(UserError, match="not a state of tail statistics"):
        TailStatistics.from_state(state | {key: state[key][1:]})


@pytest.mark.parametrize(
    ("off", "said"),
    [(torch.zeros(3), "one entry for each of the 4 tokens"), (torch.tensor([0, 0, torch.nan, 0]), "nan at token 2")],
)
def test_wrong_distances_are_refused_and_nothing_is_counted(off: torch.Tensor, said: str) -> None:
    statistics = added(2)
    with pytest.raises(UserError, match=said):
        statistics.add(torch.ones(4), torch.arange(4), "wrong", off)
    assert same(statistics, added(2))


def test_an_unknown_distance_is_refused() -> None:
    with pytest.raises(UserError, match="must be one of 2, 5, 10, 20, got 7"):
        added(2).impossible.share(7)


def test_the_distance_of_a_rollout_is_log_q_minus_log_p() -> None:
    rollout = Rollout([1, 2], [3, 4], torch.tensor([-1.0, -0.5]), "stop")
    assert off_nats_of(rollout, TokenScores(torch.tensor([-12.0, -torch.inf]))).tolist() == [11.0, torch.inf]
    with pytest.raises(UserError, match="2 sampled tokens and 1 dense scores"):
        off_nats_of(rollout, TokenScores(torch.tensor([-12.0])))


def test_metrics_name_the_distance_and_leave_out_thin_bins() -> None:
    statistics = added(40)
    table = statistics.table("exact")
    report = tail_report(table, least_tokens=1)
    share = table.overall.impossible_share(10)
    assert share is not None
    assert report["mismatch/impossible_share_10"] == share.value
    assert report["mismatch/impossible_share_10_low"] == share.low
    assert report["mismatch/impossible_share_10_high"] == share.high
    named = {name for name in report if name.startswith("mismatch/impossible_share_10/")}
    full = {row.name for row in table.rows if row.tokens >= 1000}
    assert named == {f"mismatch/impossible_share_10/{name}" for name in full} and 0 < len(full) < len(table.rows)
    assert ceiling_report(table, 3)["mismatch/dense_ceiling_impossible_share_10"] == share.value
