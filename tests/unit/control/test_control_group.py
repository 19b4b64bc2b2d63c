"""Which rollouts are dense: as many as the share says, spread over prompts, and the same on every process."""

from __future__ import annotations

from collections import Counter

import pytest

from sparroll.control.control_group import ControlGroupSettings, dense_count, dense_flags
from sparroll.errors import UserError


def by_prompt(flags: list[bool], samples: int) -> list[int]:
    return [sum(flags[start : start + samples]) for start in range(0, len(flags), samples)]


def test_the_choice_follows_from_seed_and_step_and_differs_between_them() -> None:
    chosen = {(seed, step): tuple(dense_flags(seed, step, 16, 8, 1 / 8)) for seed in (0, 1) for step in (1, 2, 3)}
    assert len(set(chosen.values())) == 6
    assert all(tuple(dense_flags(*key, 16, 8, 1 / 8)) == flags for key, flags in chosen.items())


def test_the_choice_is_the_same_on_every_machine() -> None:
    """The draws are hashes of seed, step, prompt and sample, and no generator's."""
    assert [place for place, dense in enumerate(dense_flags(7, 3, 4, 4, 1 / 4)) if dense] == [2, 7, 8, 12]


@pytest.mark.parametrize(("prompts", "samples"), [(1, 2), (3, 2), (16, 8), (8, 16), (5, 7), (64, 2)])
@pytest.mark.parametrize("share", [1 / 64, 1 / 32, 0.1, 1 / 4, 0.5])
def test_no_prompt_gets_a_second_dense_rollout_before_every_prompt_has_one(
    prompts: int, samples: int, share: float
) -> None:
    for step in range(1, 30):
        flags = dense_flags(5, step, prompts, samples, share)
        counts = by_prompt(flags, samples)
        assert len(flags) == prompts * samples
        assert max(counts) - min(counts) <= 1
        assert max(counts) < samples, "a prompt without a sparse rollout"
        assert sum(counts) == dense_count(5, step, prompts * samples, share)


@pytest.mark.parametrize(("rollouts", "share"), [(128, 1 / 32), (8, 1 / 32), (10, 0.13), (7, 0.5)])
def test_fractions_of_a_rollout_are_carried_from_step_to_step(rollouts: int, share: float) -> None:
    for seed in range(20):
        counts = [dense_count(seed, step, rollouts, share) for step in range(1, 201)]
        for first in (0, 17, 100):
            for last in (first + 1, first + 10, 200):
                assert abs(sum(counts[first:last]) - (last - first) * rollouts * share) < 1


def test_over_seeds_a_step_has_its_share_also_where_that_is_less_than_one_rollout() -> None:
    counts = [dense_count(seed, 1, 8, 1 / 32) for seed in range(4000)]
    assert set(counts) == {0, 1}
    assert sum(counts) / 4000 == pytest.approx(0.25, abs=0.03)


def test_a_prompt_that_comes_again_has_other_samples_and_no_place_is_preferred() -> None:
    """A fixed order of prompts and samples over 2,000 steps: each of 32 places is dense in about one step of eight."""
    times = Counter(
        place for step in range(1, 2001) for place, dense in enumerate(dense_flags(3, step, 4, 8, 1 / 8)) if dense
    )
    assert sum(times.values()) == 8000
    assert set(times) == set(range(32))
    chi_square = sum((seen - 250) ** 2 / 250 for seen in times.values())
    assert chi_square < 62, "above the 99.9 % quantile of chi-square with 31 degrees of freedom"


def test_a_second_round_of_a_step_draws_for_itself() -> None:
    first, second = dense_flags(0, 1, 8, 8, 1 / 4), dense_flags(0, 1, 8, 8, 1 / 4, first_prompt=8)
    assert sum(first) == sum(second) == 16 and first != second


def test_no_share_is_no_control_group_and_what_cannot_be_paired_is_refused() -> None:
    assert dense_flags(0, 1, 2, 1, 0) == [False, False]
    assert dense_flags(0, 1, 0, 8, 1 / 4) == []
    with pytest.raises(UserError, match="each prompt has a single one"):
        dense_flags(0, 1, 16, 1, 1 / 32)
    with pytest.raises(UserError, match="between 0 and 0.5, got 0.6"):
        dense_flags(0, 1, 16, 8, 0.6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"share": -0.1}, "between 0 and 0.5, got -0.1"),
        ({"share": float("nan")}, "between 0 and 0.5, got nan"),
        ({"share": 0.25, "share_first": 0.1}, r"between its share \(0.25\) and 0.5, got 0.1"),
        ({"window_steps": 0}, "a window of 1 step or more"),
        ({"first_steps": -1}, "0 first steps or more"),
        ({"reward_gap": -0.05}, "must be 0 or more, got -0.05"),
        ({"reward_gap": float("nan")}, "must be 0 or more, got nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        ControlGroupSettings(**wrong)  # type: ignore[arg-type]


def test_without_a_control_group_its_first_share_is_not_looked_at() -> None:
    assert ControlGroupSettings(share=0, share_first=0).share == 0
