"""The window of a watcher: which bins are tested together, and that a merged bin is what one wide bin would be."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sparroll.control.tail_window import TailWindow
from sparroll.mismatch import TailRow, TailStatistics

BIN = 100


def statistics(bin_tokens: int, rollouts: dict[str, list[int]], seed: int = 0) -> TailStatistics:
    """rollouts: for each name the tokens that it has in each bin of BIN tokens. The same tokens whatever `bin_tokens` is."""
    made, generator = TailStatistics(bin_tokens, replicates=50), torch.Generator().manual_seed(seed)
    for name, tokens in rollouts.items():
        context = torch.cat([torch.arange(count) + place * BIN for place, count in enumerate(tokens)])
        acceptance_T = torch.rand(len(context), generator=generator)
        made.add(acceptance_T, context, name, -8 * acceptance_T.log())
    return made


def window(*steps: TailStatistics) -> TailWindow:
    made = TailWindow(len(steps))
    for number, each in enumerate(steps, 1):
        made.add(number, each)
    return made


def rows(rollouts: dict[str, list[int]]) -> tuple[TailRow, TailRow]:
    """Two bins merged, and a bin that is as wide as both."""
    merged = window(statistics(BIN, rollouts)).merged_row([0, BIN])
    wide = window(statistics(2 * BIN, rollouts)).row(0)
    assert merged is not None and wide is not None
    return merged, wide


@pytest.mark.parametrize(
    "rollouts",
    [
        {f"r{number}": [10 + number, 2 * (10 + number), 30] for number in range(12)},
        {
            f"r{number}": [0, 0, 9] if number == 3 else [20 * (number % 2), 20 * (1 - number % 2)]
            for number in range(12)
        },
    ],
    ids=["each rollout has the same share of its tokens in each bin", "no rollout has tokens in two bins"],
)
def test_a_merged_bin_is_the_wide_bin(rollouts: dict[str, list[int]]) -> None:
    merged, wide = rows(rollouts)
    found, expected = (dataclasses.asdict(each) for each in (merged, wide))
    # Impossible tokens need no approximation, since products between bins are kept.
    assert found.pop("impossible") == expected.pop("impossible") != ()
    assert found == pytest.approx(expected)
    assert merged.name == "0-200"


def test_a_merged_bin_never_looks_more_certain_than_it_is() -> None:
    merged, wide = rows({f"r{number}": [3 * number, 60 - 2 * number, number] for number in range(20)})
    assert merged.tokens == wide.tokens and merged.q05 == wide.q05
    assert merged.rollouts <= wide.rollouts
    assert merged.low <= wide.low and wide.high <= merged.high


def test_bins_are_merged_from_the_shortest_on_until_they_have_enough() -> None:
    """Tokens by bin: 80, 160, 480, none, 40, 320, 80, from eight rollouts."""
    made = window(statistics(BIN, {f"r{number}": [10, 20, 60, 0, 5, 40, 10] for number in range(8)}))
    assert made.groups(200) == [[0, 100], [200], [400, 500, 600]]
    assert made.groups(20) == [[0], [100], [200], [400], [500], [600]]
    assert made.groups(1160) == [[0, 100, 200, 400, 500, 600]]
    assert made.groups(1161) == []
    assert made.amount([0, 100]) == (240, 8)


def test_seven_rollouts_are_never_enough_and_steps_add_up() -> None:
    few = {f"r{number}": [90, 90] for number in range(7)}
    assert window(statistics(BIN, few)).groups(20) == []
    later = {f"s{number}": [90] for number in range(7)}
    assert window(statistics(BIN, few), statistics(BIN, later)).groups(20) == [[0, 100]]


def test_an_empty_window_has_no_groups() -> None:
    assert TailWindow(3).groups(20) == []
    assert window(TailStatistics(BIN, replicates=50)).groups(20) == []
