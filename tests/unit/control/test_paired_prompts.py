"""Dense minus sparse within prompts, against differences and intervals computed by hand and by plain formulas."""

from __future__ import annotations

import json
import math
import random
import statistics

import numpy as np
import pytest

from sparroll.control.control_group import dense_flags
from sparroll.control.paired_prompts import PairedPrompt, in_order, paired_prompts, pooled_gap, prompt_name
from sparroll.errors import UserError

DENSE = [True, False, False, False] + [False, True, True, False] + [False] * 4
NAMES = {0: "a", 1: "b", 2: "c"}


def step_of(
    rewards: list[float], dense: list[bool] = DENSE, names: dict[int, str] = NAMES, step: int = 1
) -> list[PairedPrompt]:
    return paired_prompts(step, names, dense, {"reward": rewards})


def pair(difference: float, prompt: str, *, weight: float = 1.0, step: int = 1, number: int = 0) -> PairedPrompt:
    return PairedPrompt(step, number, prompt, {"reward": (weight, difference)}, (0.0,) * 4)


def test_differences_by_hand() -> None:
    """Prompt a: the dense one is right and one of three sparse ones is: 1 - 1/3, at weight 1 * 3 / 4. Prompt b: one of two
    dense ones and both sparse ones: 1/2 - 1, at weight 2 * 2 / 4. Prompt c has no dense one."""
    found = step_of([1, 1, 0, 0, 1, 1, 0, 1, 1, 0, 1, 0])
    assert [(each.number, each.prompt) for each in found] == [(0, "a"), (1, "b")]
    assert found[0].differences["reward"] == (0.75, pytest.approx(2 / 3))
    assert found[1].differences["reward"] == (1.0, -0.5)
    gap = pooled_gap(found, "reward")
    assert gap is not None
    assert gap.value == pytest.approx((0.75 * 2 / 3 + 1.0 * -0.5) / 1.75)
    assert gap.pairs == 2
    assert gap.prompts == pytest.approx(1.75**2 / (0.75**2 + 1))


def test_the_interval_is_students_for_equal_weights_and_as_many_prompts() -> None:
    """A figure that is no share: mean +- t s / sqrt(n), with t of 4 degrees of freedom."""
    values = [3.0, -1.0, 4.0, 1.5, 0.0]
    pairs = [PairedPrompt(1, n, str(n), {"length": (0.5, value)}, ()) for n, value in enumerate(values)]
    gap = pooled_gap(pairs, "length")
    assert gap is not None and gap.low is not None and gap.high is not None
    reach = 2.7764451 * statistics.stdev(values) / math.sqrt(5)
    assert (gap.value, gap.prompts) == (pytest.approx(1.5), pytest.approx(5))
    assert (gap.low, gap.high) == (pytest.approx(1.5 - reach), pytest.approx(1.5 + reach))


def test_pairs_of_one_prompt_are_a_single_observation() -> None:
    """Ten times the same pairs of the same five prompts say no more than once."""
    values = [3.0, -1.0, 4.0, 1.5, 0.0]
    once, often = (
        pooled_gap(
            [
                PairedPrompt(step, n, str(n), {"length": (0.5, value)}, ())
                for step in range(times)
                for n, value in enumerate(values)
            ],
            "length",
        )
        for times in (1, 10)
    )
    assert once is not None and often is not None
    assert (often.value, often.low, often.high) == pytest.approx((once.value, once.low, once.high))
    assert (once.pairs, often.pairs, often.prompts) == (5, 50, pytest.approx(5))


def test_pairs_without_any_difference_do_not_show_that_there_is_none() -> None:
    """Half a pair with a difference of 1 among four: .5 / 4 ** 2 is the variance, and t of 3 degrees of freedom 3.182."""
    gap = pooled_gap([pair(0.0, str(n)) for n in range(4)], "reward")
    assert gap is not None
    assert gap.value == 0
    assert gap.high == pytest.approx(3.1824463 * math.sqrt(0.5 / 16))
    assert gap.low == pytest.approx(-gap.high)


def test_one_prompt_has_a_difference_and_no_interval() -> None:
    gap = pooled_gap([pair(0.5, "a", step=1), pair(0.25, "a", step=2)], "reward")
    assert gap is not None
    assert (gap.value, gap.low, gap.high, gap.counts) == (0.375, None, None, False)


def test_a_prompt_that_outweighs_the_others_counts_as_if_it_were_alone() -> None:
    gap = pooled_gap([pair(0.5, "a", weight=100.0), pair(0.25, "b")], "reward")
    assert gap is not None and gap.low is None


def test_enough_for_a_decision_are_eight_prompts_however_many_pairs() -> None:
    of_seven = [pair(0.5, str(n % 7), step=n) for n in range(700)]
    of_eight = [pair(0.5, str(n), step=n) for n in range(8)]
    assert [gap and gap.counts for gap in (pooled_gap(of_seven, "reward"), pooled_gap(of_eight, "reward"))] == [
        False,
        True,
    ]


def test_without_both_kinds_there_is_no_pair_and_no_gap() -> None:
    assert step_of([1, 0, 1, 0], [False] * 4, {0: "a"}) == []
    assert step_of([1, 0, 1, 0], [True] * 4, {0: "a"}) == []
    assert paired_prompts(1, {}, [], {"reward": []}) == []
    assert pooled_gap([], "reward") is None


def test_ungraded_rollouts_are_left_out_and_a_kind_without_a_graded_one_is_no_pair() -> None:
    nan = math.nan
    found = paired_prompts(
        1, NAMES, DENSE, {"reward": [nan, 1, 0, 0] + [1, nan, 0, nan] + [1] * 4, "length": [8.0] + [4.0] * 11}
    )
    assert [set(each.differences) for each in found] == [{"length"}, {"reward", "length"}]
    assert found[0].bets == (0.0,) * 4
    assert found[0].differences["length"] == (0.75, 4.0)
    assert found[1].differences["reward"] == (0.5, -1.0)


def test_a_prompt_of_which_nothing_could_be_graded_bets_nothing() -> None:
    found = paired_prompts(1, NAMES, DENSE, {"reward": [math.nan] * 4 + [1.0] * 8, "length": [8.0] + [4.0] * 11})
    assert [(set(each.differences), each.bets) for each in found[:1]] == [({"length"}, (0.0,) * 4)]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"length": [1.0] * 12}, "compares rewards, and the figures are length"),
        ({"reward": [1.0] * 11}, "reward has 11 values for 12 rollouts"),
        ({"reward": [1.0] * 11 + [math.inf]}, "reward is inf for 1 of 12 rollouts"),
        ({"reward": [1.0] * 12, "entropy": [math.nan] * 12}, "entropy is nan for 12 of 12 rollouts"),
    ],
)
def test_figures_that_are_no_numbers_are_refused(figures: dict[str, list[float]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        paired_prompts(1, NAMES, DENSE, figures)


def test_rollouts_that_do_not_divide_among_the_prompts_are_refused() -> None:
    with pytest.raises(UserError, match="12 rollouts of 5 prompts"):
        paired_prompts(1, dict.fromkeys(range(5), "a"), DENSE, {"reward": [1.0] * 12})


def test_shares_of_two_processes_are_those_of_one_to_the_bit() -> None:
    draw = random.Random(0)
    prompts = {number: f"p{number % 5}" for number in range(16)}
    dense, rewards = dense_flags(0, 1, 16, 8, 1 / 4), [draw.random() for _ in range(128)]
    whole = paired_prompts(1, prompts, dense, {"reward": rewards})
    shares = []
    for rank in (1, 0):
        own = [number for number in prompts if number % 2 == rank]
        rows = [place for number in own for place in range(8 * number, 8 * number + 8)]
        shares += paired_prompts(
            1, {n: prompts[n] for n in own}, [dense[p] for p in rows], {"reward": [rewards[p] for p in rows]}
        )
    assert in_order(shares) == tuple(whole)
    draw.shuffle(shares)
    assert pooled_gap(shares, "reward") == pooled_gap(whole, "reward")


def test_two_processes_may_not_measure_the_same_prompt() -> None:
    with pytest.raises(AssertionError, match="measured the same prompt"):
        in_order([pair(0.5, "a"), pair(0.5, "a")])


def test_a_pair_comes_back_from_json_to_the_bit() -> None:
    for each in step_of([1, 1 / 3, 0.1, 0, 1, 1, 0, 1, 1, 0, 1, 0]):
        assert PairedPrompt.from_table(json.loads(json.dumps(each.table()))) == each


def test_a_prompt_is_named_by_its_ids() -> None:
    assert prompt_name([1, 23]) == prompt_name([1, 23]) != prompt_name([12, 3])
    assert len(prompt_name(range(1000))) == 16


@pytest.mark.parametrize(("prompts", "times"), [(8, 1), (16, 1), (60, 1), (12, 8)])
def test_the_interval_covers_the_gap_of_solve_rates_that_differ_by_prompt(prompts: int, times: int) -> None:
    """One dense rollout of eight, prompts of all difficulties. Sparse decoding costs each prompt a share of its own, so
    `times` pairs of a prompt depend on each other."""
    rng, hits = np.random.default_rng(prompts), 0
    for _ in range(600):
        solved = rng.random(prompts)
        kept = rng.choice([0.6, 1.0], prompts)
        # Of a prompt's mean difference over the worlds: E[solved] * E[1 - kept] = .5 * .2.
        of_dense, of_sparse = (
            rng.binomial(1, solved, (times, prompts)),
            rng.binomial(7, solved * kept, (times, prompts)) / 7,
        )
        pairs = [
            pair(float(difference), str(prompt), weight=7 / 8)
            for row in of_dense - of_sparse
            for prompt, difference in enumerate(row)
        ]
        gap = pooled_gap(pairs, "reward")
        assert gap is not None and gap.low is not None and gap.high is not None
        hits += gap.low <= 0.1 <= gap.high
    assert hits / 600 >= 0.93
